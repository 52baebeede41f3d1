"""Code of the documents runs as a reader would run it.

A block names its test, `<!-- test: tests/python/test_guides.py::NAME -->`; the fixture `block` is
its text. Commands measure little here: only that they run is of interest.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tcpx

from conftest import ROOT, WAIT

# A command that still runs then has hung.
TIMEOUT = 120
BUILT = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
EMULATORS = [
    BUILT / "debug" / "deps" / "libnccl_net_tcpx_emu.so",
    ROOT / "dist" / "plugins" / "libnccl-net-tcpx-emu.so",
]

# Bounds what `tcpx bench` measures.
LITTLE = "--case lat4k --iterations 5 --warmup 1 --no-floor"


@pytest.fixture
def environment():
    """Returns an environment in which `tcpx` and `python` are those of the package."""
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    # Two processes print to one pipe: each writes its lines whole.
    return dict(os.environ, PATH=path, PYTHONWARNINGS="", PYTHONUNBUFFERED="")


@pytest.fixture
def shell(tmp_path, environment):
    """Runs commands; returns their output."""

    def run(script, **variables):
        command = ["bash", "-euo", "pipefail", "-c", script]
        ran = subprocess.run(
            command, cwd=tmp_path, env=environment | variables, capture_output=True, text=True, timeout=TIMEOUT
        )
        assert ran.returncode == 0, f"{script}\n{ran.stdout}{ran.stderr}"
        return ran.stdout

    return run


@pytest.fixture
def program(tmp_path, shell):
    """Runs a Python program from a file; returns its output."""

    def run(text):
        (tmp_path / "program.py").write_text(text)
        return shell("python program.py")

    return run


def lines(block):
    """Returns the commands of a block, without their comments."""
    return [line.partition("  #")[0].strip() for line in block.splitlines() if line.strip()]


def as_pair(server, client, shell, environment):
    """Runs `server` on a free port, then `client` with it in the place of HOST."""
    started = subprocess.Popen(
        ["bash", "-c", f"exec {server} --bind 127.0.0.1 --port 0"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said = ""
        while not (found := re.search(r"127\.0\.0\.1:(\d+)", said)):
            line = started.stdout.readline()
            assert line, f"{server} has ended: {said}"
            said += line
        assert " HOST" in client
        return shell(client.replace("HOST", f"127.0.0.1:{found[1]}"))
    finally:
        started.kill()
        started.communicate()


def test_first_transfer_in_the_readme(block, program):
    assert "8388608 bytes; layer 0 has arrived" in program(block)


def test_readme_of_the_package(block, pair):
    _, bob, _ = pair
    cache = bytearray(1 << 20)
    region = bob.register(cache)
    exec(block, {"info": bob.connection_info, "descriptor": region.descriptor})
    assert bob.wait_notification(WAIT).message == b"got it"


def test_looking_at_a_machine(block, shell):
    assert lines(block) == ["tcpx doctor", "tcpx devices", "tcpx config"]
    said = shell(block)
    assert "transfer.loopback" in said and "TCPX_LANES" in said and "lo" in said


def test_checking_a_connection(block, shell, environment):
    assert "every byte as it should be" in as_pair(*lines(block), shell, environment)


def test_measuring_between_machines(block, shell, environment):
    commands = lines(block)
    while commands:
        server, client, *commands = commands
        said = as_pair(server, client.replace("--quick", f"{LITTLE} --json"), shell, environment)
        assert [case["name"] for case in json.loads(said)["cases"]] == ["lat4k", "lat4k"]


def test_measuring_a_machine(block, shell, tmp_path):
    lanes, same_host, gpu, report = lines(block)
    assert json.loads(shell(f"{lanes.replace('--quick', LITTLE)} --json"))["path"] == "lanes"
    assert "--mem vram:0" in gpu  # needs a GPU: scripts/gpu-check
    shell(f"{report} {LITTLE}")
    assert "lat4k" in (tmp_path / "bench.html").read_text()
    # Comes last: not every machine lets processes read each other's memory.
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and scope.read_text().strip() != "0" and os.geteuid() != 0:
        pytest.skip("--path same-host: needs root where Yama restricts ptrace")
    assert json.loads(shell(f"{same_host.replace('--quick', LITTLE)} --json"))["path"] == "same-host"


def test_a_session_of_your_own(block, program):
    said = program(block)
    assert "decode says b'got it'" in said and "read 65536 bytes" in said


def test_asyncio(block, pair):
    alice, bob, peer = pair
    printed = asyncio.Queue()
    guide = {"print": lambda *words: printed.put_nowait(words)}
    exec(block, guide)
    mine, served = alice.register(bytearray(65536)), bob.register(bytearray(b"x" * 70000))

    async def both():
        serving = asyncio.create_task(guide["serve"](bob))
        await asyncio.sleep(0)  # it waits before anything has arrived
        await guide["fetch"](alice, peer, mine, tcpx.RemoteRegion(served.descriptor))
        assert await asyncio.wait_for(printed.get(), WAIT) == ("alice", b"got it")
        # Ends the loop over notifications.
        await asyncio.to_thread(bob.close)
        await asyncio.wait_for(serving, WAIT)

    asyncio.run(both())


def test_other_event_loops(block, pair, capsys):
    alice, bob, peer = pair
    size = 64 << 20
    mine, served = alice.register(bytearray(size)), bob.register(bytearray(size))
    transfer = alice.prepare("read", peer, [(mine, 0, tcpx.RemoteRegion(served.descriptor), 0, size)])
    exec(block, {"session": alice, "transfer": transfer})
    assert transfer.poll() == "done"
    # Nothing is printed where the transfer had ended before it was armed.
    assert capsys.readouterr().out in ("ended: 42\n", "")


def test_a_program_for_uccl(block, shell, tmp_path):
    (tmp_path / "app.py").write_text("from uccl import p2p\nprint(p2p.Endpoint.__module__)\n")
    assert "tcpx" in shell(block)


def test_enabling_uccl(block, program):
    assert "tcpx" in program(block + "from uccl import p2p\nprint(p2p.Endpoint.__module__)\n")


@pytest.fixture
def emulator():
    """Returns the plugin that stands in for a vendor's."""
    for path in EMULATORS:
        if path.is_file():
            return str(path)
    pytest.skip("the emulated net plugin is not built: `make test-build` builds it")


def test_choosing_a_plugin(block, shell, emulator):
    said = shell(block.replace("/path/to/libnccl-net.so", emulator).replace("tcpx bench", f"tcpx bench {LITTLE}"))
    assert "lat4k" in said and emulator in said


def test_the_emulator(block, shell, emulator):
    said = shell(block.replace("dist/plugins/libnccl-net-tcpx-emu.so", emulator).replace("tcpx bench", f"tcpx bench {LITTLE}"))
    assert "lat4k" in said
