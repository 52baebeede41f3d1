"""Tests `from uccl import p2p`: it works if enabled, and only then."""

import os
import socket
import subprocess
import sys

import pytest
import tcpx.uccl
from tcpx.uccl import utils


def python(code, *, path=None, **variables):
    environment = {k: v for k, v in os.environ.items() if k not in ("TCPX_AS_UCCL", "PYTHONPATH")} | variables
    if path:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=path or "/")
    return done.stdout + done.stderr


WHICH = "import uccl; from uccl import p2p; print(getattr(uccl, '__tcpx__', False), p2p.__name__)"


def test_off_by_default():
    assert "No module named 'uccl'" in python(WHICH)
    assert "No module named 'uccl'" in python(WHICH, TCPX_AS_UCCL="0")


def test_on_by_variable():
    assert python(WHICH, TCPX_AS_UCCL="1") == "True tcpx.p2p\n"
    assert python("import uccl.p2p, uccl.utils; print(uccl.p2p.Endpoint)", TCPX_AS_UCCL="1").startswith("<class 'tcpx.p2p")
    assert "not understood" in python("pass", TCPX_AS_UCCL="perhaps")
    assert python("import sys; print('tcpx' in sys.modules)", TCPX_AS_UCCL="1") == "False\n"


def test_on_by_call():
    assert python(f"import tcpx.uccl; tcpx.uccl.enable(); {WHICH}") == "True tcpx.p2p\n"
    assert "False" in python("import tcpx.uccl; print(tcpx.uccl.enabled())")
    assert "No module" in python("import tcpx.uccl as u; u.enable(); u.disable(); import uccl")


def test_a_real_one_comes_first(tmp_path):
    (tmp_path / "uccl").mkdir()
    # A folder alone is no package.
    assert python(WHICH, path=tmp_path, TCPX_AS_UCCL="1") == "True tcpx.p2p\n"
    (tmp_path / "uccl" / "__init__.py").write_text("from . import p2p\n")
    (tmp_path / "uccl" / "p2p.py").write_text("")
    assert python(WHICH, path=tmp_path) == "False uccl.p2p\n"
    assert python(WHICH, path=tmp_path, TCPX_AS_UCCL="1") == "False uccl.p2p\n"
    assert python(WHICH, path=tmp_path, TCPX_AS_UCCL="replace") == "True tcpx.p2p\n"
    assert "another uccl is installed" in python("import tcpx.uccl; tcpx.uccl.enable()", path=tmp_path)
    assert python(f"import tcpx.uccl; tcpx.uccl.enable(replace=True); {WHICH}", path=tmp_path) == "True tcpx.p2p\n"
    assert "imported already" in python("import uccl, tcpx.uccl; tcpx.uccl.enable(replace=True)", path=tmp_path)


def test_package_attributes():
    code = "import uccl; print(uccl.is_efa, uccl.has_efa(), uccl.__version__.startswith('0.1.1+tcpx')); uccl.nccl_plugin_path()"
    said = python(code, TCPX_AS_UCCL="1")
    assert said.startswith("False False True") and "FileNotFoundError" in said
    assert tcpx.uccl.enabled() is False


def test_objects_over_a_socket():
    here, there = socket.socketpair()
    with here, there:
        utils.send_obj(here, {"a": [1, b"x"]})
        utils.send_obj(here, "y" * 100000)
        assert utils.recv_obj(there) == {"a": [1, b"x"]} and utils.recv_obj(there) == "y" * 100000
        here.close()
        with pytest.raises(ConnectionError):
            utils.recv_obj(there)
    with socket.create_server(("127.0.0.1", 0)) as server:
        utils.create_socket_and_connect(*server.getsockname()).close()
        port = server.getsockname()[1]
    with pytest.raises(OSError):
        utils.create_socket_and_connect("127.0.0.1", port, max_retries=1, initial_delay=0.01)


def test_intervals():
    tree = utils.ClosedIntervalTree()
    for start, end, data in [(0, 10, "a"), (5, 15, "b"), (5, 15, "c"), (20, 30, "d")]:
        tree.add(start, end, data)
    assert tree.query_containing(6, 9) == [(0, 10, "a"), (5, 15, "b"), (5, 15, "c")]
    assert tree.query_overlap(15, 20) == [(5, 15, "b"), (5, 15, "c"), (20, 30, "d")]
    assert tree.query_exact_match(5, 15, "c") == [(5, 15, "c")]
    assert tree.remove(5, 15, "b") == 1 and tree.remove(5, 15, "b") == 0 and len(tree) == 3
    assert list(tree) == [(0, 10, "a"), (5, 15, "c"), (20, 30, "d")]
    tree.clear()
    assert list(tree) == []
