"""What NIXL's telemetry and the backend's own metrics say of the same transfers, and what NIXL does not ask for."""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import time

import pytest

from conftest import CLI, PLUGIN, ROOT
from endpoint import DISCONNECTED, DONE, NOT_FOUND, TIMEOUT, on_free_ports

# An agent that moves 5 blocks out of its own memory and back, then prints what both exporters serve.
PROGRAM = """
import sys, time, urllib.request
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

backend, exporter, own = sys.argv[1:]
agent = nixl_agent("me", nixl_agent_config(backends=[], capture_telemetry=True))
agent.create_backend(backend, {"metrics": own} if backend == "TCPX" else {})
memory = np.zeros(1 << 16, np.uint8)
blocks = lambda rows: np.array([[memory.ctypes.data + offset, length, 0] for offset, length in rows], np.uint64)
agent.register_memory(blocks([(0, memory.nbytes)]), mem_type="DRAM", backends=[backend])
ends = [agent.get_xfer_descs(blocks([(offset, 1000), (offset + 2000, 500)]), mem_type="DRAM") for offset in (0, 8192)]
for op in ["WRITE"] * 3 + ["READ"] * 2:
    handle = agent.initialize_xfer(op, *ends, "me", backends=[backend])
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    assert state == "DONE"
    assert agent.get_xfer_telemetry(handle).totalBytes == 1500
    agent.release_xfer_handle(handle)

def serves(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return answer.read().decode()

def counted(name):
    lines = [line for line in serves(exporter).splitlines() if line.startswith(name)]
    return sum(float(line.split()[-1]) for line in lines)

# NIXL exports once in a while: before that its counters are not there, or 0.
deadline = time.monotonic() + 30
while (counted("agent_tx_bytes"), counted("agent_rx_bytes")) != (4500, 3000) and time.monotonic() < deadline:
    time.sleep(0.05)
print(serves(exporter))
if backend == "TCPX":
    print(serves(own))
"""


@pytest.fixture
def run(tmp_path):
    """Runs the program with NIXL's exporter for Prometheus; returns what it printed and logged."""

    def run(backend, *plugins):
        environment = dict(os.environ, XDG_CACHE_HOME=str(tmp_path), NIXL_LOG_LEVEL="ERROR", TCPX_LOG="warn")
        command = [CLI, "nixl", "path", "--plugin", PLUGIN, "--python", sys.executable]
        folder = pathlib.Path(subprocess.check_output(command, env=environment, text=True).strip())
        for plugin in plugins:
            (folder / plugin.name).symlink_to(plugin)
        environment.update(
            NIXL_PLUGIN_DIR=str(folder),
            NIXL_TELEMETRY_ENABLE="y",
            NIXL_TELEMETRY_EXPORTER="prometheus",
            NIXL_TELEMETRY_PROMETHEUS_LOCAL="y",
            NIXL_TELEMETRY_RUN_INTERVAL="20",
        )

        def with_ports(exporter, own):
            environment["NIXL_TELEMETRY_PROMETHEUS_PORT"] = str(exporter)
            ran = subprocess.run(
                [sys.executable, "-c", PROGRAM, backend, str(exporter), str(own)],
                env=environment, capture_output=True, text=True, timeout=2 * TIMEOUT,
            )
            assert ran.returncode == 0, ran.stderr
            return ran.stdout, ran.stderr

        return on_free_ports(2, with_ports)

    return run


def value(text, name, **labels):
    """The sum of a metric's samples."""
    found = re.findall(rf"(?m)^{name}(?:_total)?(?:\{{(.*)\}})? (\S+)$", text)
    has = lambda have: all(f'{key}="{want}"' in have for key, want in labels.items())
    return sum(float(number) for have, number in found if has(have))


def test_nixl_and_the_backend_count_the_same(run):
    served, _ = run("TCPX")
    assert value(served, "agent_tx_bytes") == 4500 and value(served, "agent_rx_bytes") == 3000
    assert value(served, "agent_tx_requests_num") == 3 and value(served, "agent_rx_requests_num") == 2
    # The backend says besides which path carried them.
    labels = dict(session="me", peer="me", path="local")
    assert value(served, "tcpx_bytes", direction="sent", **labels) == 4500
    assert value(served, "tcpx_bytes", direction="received", **labels) == 3000
    assert value(served, "tcpx_transfers_completed", kind="write") == 3


def test_no_agent_takes_the_events_of_a_backend(run, tmp_path):
    """NIXL has a queue of events in each backend, and nothing reads it: this backend leaves it empty.

    Where this fails, this NIXL does read them: then docs/nixl.md is to be changed, and the backend has
    to offer its counters there, in the shape that this version wants.
    """
    plugin = tmp_path / "libplugin_EVENTS.so"
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    source = ROOT / "tests" / "nixl" / "events.cpp"
    command = [*compiler, "-std=c++20", "-fPIC", "-shared", "-I", ROOT / "plugins" / "nixl", source, "-o", plugin]
    subprocess.run(command, check=True, timeout=120)
    served, logged = run("EVENTS", plugin)
    assert value(served, "agent_tx_bytes") == 4500, "the exporter ran"
    assert "EVENTS LEFT 100 OF 100" in logged


def test_transfers_that_fail_again_and_again_log_little(pair, capfd):
    """Ten lines at once, then one a second."""
    both = pair()
    handle = both.request("WRITE", [(0, 0, 4096)])
    assert both.local.outcome(handle) == DONE
    both.remote.kill()
    start = time.monotonic()
    for _ in range(60):
        assert both.local.outcome(handle) in (DISCONNECTED, NOT_FOUND)
    lines = [line for line in capfd.readouterr().err.splitlines() if "a transfer failed" in line]
    assert len(lines) <= 11 + time.monotonic() - start, lines
    both.local.release(handle)
