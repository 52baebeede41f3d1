"""`tcpx nixl`: the backend beside those of an installed NIXL, for whoever starts a program without any variable."""

import json
import os
import pathlib
import subprocess
import sys
import venv

from conftest import CLI, NIXL
from endpoint import TIMEOUT

# The UCX of old versions does not use the loopback interface, and no other one is touched here: it is only looked at.
UCX_ON_LOOPBACK = NIXL >= (1, 5)

# Two agents with the backends in one process; prints which are there, then what each one moved.
PROGRAM = """
import os
import sys
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

names = sys.argv[1:]
one, two = (nixl_agent(name, nixl_agent_config(backends=names)) for name in ("one", "two"))
print(*(name for name in ("TCPX", "UCX") if name in one.get_plugin_list() and one.get_plugin_mem_types(name)))
source, target = np.full(65536, 7, np.uint8), np.zeros(65536, np.uint8)
descriptors = lambda a: np.array([[a.ctypes.data, a.nbytes, 0]], dtype=np.uint64)
one.register_memory(descriptors(source), mem_type="DRAM")
two.register_memory(descriptors(target), mem_type="DRAM")
one.add_remote_agent(two.get_agent_metadata())
for name in names:
    target[:] = 0
    sides = [one.get_xfer_descs(descriptors(a), mem_type="DRAM") for a in (source, target)]
    handle = one.initialize_xfer("WRITE", *sides, "two", b"hello", backends=[name])
    state = one.transfer(handle)
    while state == "PROC":
        state = one.check_xfer_state(handle)
    while not two.check_remote_xfer_done("one", b"hello"):
        pass
    print(one.query_xfer_backend(handle), state, (source == target).all())
    one.release_xfer_handle(handle)
if "UCX" in names:
    # The UCX of NIXL's wheels crashes as the process ends where the system has libibverbs.
    sys.stdout.flush()
    os._exit(0)
"""


def tcpx(*args):
    """Exit code, what was printed, what was complained."""
    ran = subprocess.run([CLI, "nixl", *args], capture_output=True, text=True, timeout=TIMEOUT)
    return ran.returncode, ran.stdout, ran.stderr


def state():
    _, answer, _ = tcpx("status", "--json", "--python", sys.executable)
    (row,) = json.loads(answer)["nixl"]
    assert row["version"] == ".".join(map(str, NIXL))
    assert pathlib.Path(row["plugin"]).is_file() == row["state"].startswith("installed")
    return row["state"]


def use(*backends):
    """Runs the program without NIXL_PLUGIN_DIR."""
    environment = {k: v for k, v in os.environ.items() if k != "NIXL_PLUGIN_DIR"}
    environment.update(UCX_TLS="tcp", UCX_NET_DEVICES="lo", NIXL_LOG_LEVEL="ERROR")
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *backends],
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT,
    )
    assert ran.returncode == 0, ran.stderr
    return [line for line in ran.stdout.splitlines() if "NIXL" not in line]


def test_path():
    code, folder, _ = tcpx("path")
    assert code == 0
    assert pathlib.Path(folder.strip()).samefile(pathlib.Path(CLI).parent / "../nixl")


def test_install_and_uninstall():
    arguments = ("--python", sys.executable)
    tcpx("uninstall", *arguments)
    try:
        assert state() == "not installed"
        code, said, _ = tcpx("install", *arguments)
        assert code == 0 and "installed" in said
        assert state() == "installed"
        # Installing again replaces it.
        assert tcpx("install", *arguments)[0] == 0
        assert use("TCPX") == ["TCPX UCX", "TCPX DONE True"]
        if UCX_ON_LOOPBACK:
            assert use("UCX", "TCPX") == ["TCPX UCX", "UCX DONE True", "TCPX DONE True"]
    finally:
        code, said, _ = tcpx("uninstall", *arguments)
    assert code == 0 and "removed" in said
    assert state() == "not installed"
    assert "was not installed" in tcpx("uninstall", *arguments)[1]


def test_a_python_without_nixl(tmp_path):
    venv.create(tmp_path, symlinks=True)
    code, _, complaint = tcpx("install", "--python", tmp_path / "bin" / "python")
    assert code != 0 and "has no NIXL" in complaint


def test_no_such_python():
    code, _, complaint = tcpx("status", "--python", "/no/such/python")
    assert code != 0 and "/no/such/python" in complaint and "--python" in complaint
