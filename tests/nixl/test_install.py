"""Tests `tcpx nixl`: installs the backend beside those of NIXL, for programs started without any
variable."""

import json
import os
import pathlib
import subprocess
import sys
import venv

import pytest

from conftest import CLI, NIXL
from endpoint import TIMEOUT, on_free_ports

# The UCX of old versions does not use the loopback interface, and no other one is used here: it is
# only listed.
UCX_ON_LOOPBACK = NIXL >= (1, 5)

# Two agents with the backends in one process; prints which backends exist, then what each one
# moved.
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
    """Returns the exit code, stdout and stderr."""
    ran = subprocess.run([CLI, "nixl", *args], capture_output=True, text=True, timeout=TIMEOUT)
    return ran.returncode, ran.stdout, ran.stderr


def state():
    row = status()
    assert pathlib.Path(row["plugin"]).is_file() == row["state"].startswith("installed")
    return row["state"]


def status():
    """Returns the status of this NIXL from `tcpx nixl status`."""
    _, answer, _ = tcpx("status", "--json", "--python", sys.executable)
    (row,) = json.loads(answer)["nixl"]
    assert row["version"] == ".".join(map(str, NIXL))
    return row


def use(*backends, **variables):
    """Runs the program without NIXL_PLUGIN_DIR."""
    environment = {k: v for k, v in os.environ.items() if k != "NIXL_PLUGIN_DIR"}
    environment.update(UCX_TLS="tcp", UCX_NET_DEVICES="lo", NIXL_LOG_LEVEL="ERROR", **variables)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *backends],
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT,
    )
    assert ran.returncode == 0, ran.stderr
    return [line for line in ran.stdout.splitlines() if "NIXL" not in line]


@pytest.fixture
def folder(tmp_path):
    """Returns what `tcpx nixl path` prints."""

    def make(*args):
        environment = dict(os.environ, XDG_CACHE_HOME=str(tmp_path))
        command = [CLI, "nixl", "path", "--python", sys.executable, *args]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()

    return make


def test_path(folder):
    """NIXL finds its other plugins, and their libraries."""
    both = ("TCPX", "UCX") if UCX_ON_LOOPBACK else ("TCPX",)
    assert use(*both, NIXL_PLUGIN_DIR=folder()) == ["TCPX UCX", *(f"{name} DONE True" for name in both)]


def test_path_with_the_prometheus_exporter(folder):
    """It is one of NIXL's plugins: the agent fails if it is requested and not found."""
    exporter = dict(
        NIXL_TELEMETRY_ENABLE="y",
        NIXL_TELEMETRY_EXPORTER="prometheus",
        NIXL_TELEMETRY_PROMETHEUS_LOCAL="y",
    )

    def run(port):
        # Two agents would share the port: one is created.
        made = "from nixl._api import *; nixl_agent('me', nixl_agent_config(backends=['TCPX'])); print('made')"
        variables = dict(os.environ, **exporter, NIXL_PLUGIN_DIR=folder())
        variables["NIXL_TELEMETRY_PROMETHEUS_PORT"] = str(port)
        ran = subprocess.run(
            [sys.executable, "-c", made], env=variables, capture_output=True, text=True, timeout=TIMEOUT
        )
        assert ran.returncode == 0 and "made" in ran.stdout, ran.stderr

    on_free_ports(1, run)


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


def test_versions_that_are_not_supported(tmp_path, monkeypatch):
    """Nothing is installed beside a NIXL that would crash, and the remedy is named."""
    plugins = tmp_path / ".nixl_cu12.mesonpy.libs" / "plugins"
    plugins.mkdir(parents=True)
    (tmp_path / "nixl_cu12").mkdir()
    (tmp_path / "nixl_cu12" / "__init__.py").touch()
    about = tmp_path / "nixl_cu12-0.10.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: nixl-cu12\nVersion: 0.10.1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for action in ("install", "path"):
        code, _, complaint = tcpx(action, "--python", sys.executable)
        assert code != 0 and "0.10.1" in complaint and "pip install" in complaint, complaint
    assert not list(plugins.iterdir())
    code, said, _ = tcpx("status", "--python", sys.executable)
    assert code != 0 and "not supported" in said


def test_install_as_ucx():
    """UCX is TCPX until it is undone; NIXL's own is kept, and restored unchanged."""
    arguments = ("--python", sys.executable)
    tcpx("uninstall", *arguments)
    own = pathlib.Path(status()["plugin"]).with_name("libplugin_UCX.so")
    before = own.read_bytes()
    # Properties of TCPX only: a parameter of the backend, and the default backend of an agent.
    program = (
        "from nixl._api import *; a = nixl_agent('me', nixl_agent_config(num_threads=2)); "
        "print(a.get_backend_params('UCX')['workers'])"
    )
    try:
        code, said, complaint = tcpx("install", "--as", "UCX", *arguments)
        assert code == 0 and "UCX IS TCPX" in said, complaint
        row = status()
        assert row["stands_in_for"] == "UCX" and pathlib.Path(row["kept"]).read_bytes() == before
        assert "UCX IS TCPX" in tcpx("status", *arguments)[1]
        assert use("UCX", "TCPX") == ["TCPX UCX", "UCX DONE True", "TCPX DONE True"]
        environment = {k: v for k, v in os.environ.items() if k != "NIXL_PLUGIN_DIR"}
        ran = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
        assert ran.stdout.splitlines()[-1:] == ["2"], ran.stderr
    finally:
        code, _, complaint = tcpx("uninstall", *arguments)
    assert code == 0, complaint
    row = status()
    assert row["stands_in_for"] is None and row["kept"] is None and row["state"] == "not installed"
    assert own.read_bytes() == before
    assert not [path.name for path in own.parent.iterdir() if "tcpx" in path.name.lower()]
