"""Tests TCPX under the name UCX, and beside NIXL's real UCX, and NIXLs that call backends in
another way."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from conftest import CLI, PLUGIN, ROOT, documented
from endpoint import TIMEOUT
from test_docs import Program

# A NIXL without network settings: UCX connects to itself through memory.
UCX_ALONE = dict(UCX_TLS="sm,self", NIXL_LOG_LEVEL="ERROR")

# Creates an agent with UCX, prints its metadata, and loads metadata from stdin.
PEER = """
import os, sys, time
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent(sys.argv[1], nixl_agent_config(backends=[]))
agent.create_backend("UCX", {"ucx_error_handling_mode": "none"})
memory = np.zeros(65536, np.uint8)
whole = np.array([[memory.ctypes.data, memory.nbytes, 0]], np.uint64)
agent.register_memory(whole, mem_type="DRAM", backends=["UCX"])
print("METADATA", agent.get_agent_metadata().hex(), flush=True)
try:
    agent.add_remote_agent(bytes.fromhex(sys.stdin.readline()))
    print("LOADING", "worked")
except Exception as error:
    print("LOADING", type(error).__name__)
sys.stdout.flush()
sys.stdin.read()
if sys.argv[1] == "real":
    os._exit(0)  # the UCX of NIXL's wheels crashes as a process ends where the system has libibverbs
"""


@pytest.fixture
def as_ucx(tmp_path, monkeypatch):
    """Makes programs that the test starts find TCPX under the name UCX; returns the folder."""
    environment = dict(os.environ, XDG_CACHE_HOME=str(tmp_path / "cache"))
    command = [CLI, "nixl", "path", "--as", "UCX", "--plugin", PLUGIN, "--python", sys.executable]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert made.returncode == 0, made.stderr
    monkeypatch.setenv("NIXL_PLUGIN_DIR", made.stdout.strip())
    return made.stdout.strip()


def run(program, **variables):
    """Runs a Python program; returns its output and its log."""
    environment = dict(os.environ, NIXL_LOG_LEVEL="ERROR", **variables)
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=2 * TIMEOUT
    )
    assert ran.returncode == 0, ran.stderr
    return [line for line in ran.stdout.splitlines() if "NIXL" not in line], ran.stderr


def test_a_program_that_knows_ucx_alone(as_ucx, tmp_path):
    """The program of docs/nixl.md with the other name, in two processes."""
    program = documented("test_the_program")
    file = tmp_path / "blocks.py"
    file.write_text(program.replace('"TCPX"', '"UCX"'))

    def start(role, port):
        return Program([sys.executable, file, role, "127.0.0.1", port], tmp_path / role)

    target = start("target", "0")
    try:
        initiator = start("initiator", target.port())
        ends = initiator.end(), target.end()
    finally:
        target.process.kill()
    assert ends == (0, 0), initiator.said() + target.said()
    assert "every second block has arrived" in target.said()


def test_parameters_of_ucx(as_ucx):
    """Parameters are applied if they have a meaning, otherwise named once; unknown ones are
    refused."""
    printed, logged = run("""
from nixl._api import nixl_agent, nixl_agent_config
def agent(name, params):
    made = nixl_agent(name, nixl_agent_config(backends=[]))
    made.create_backend("UCX", params)
    return made.get_backend_params("UCX")
used = agent("used", {"num_threads": "3", "device_list": "lo"})
print(used["workers"], used["interfaces"])
other = {"num_workers": "4", "engine_config": "TLS=tcp", "ucx_error_handling_mode": "none"}
for name in ("one", "two"):
    agent(name, other)
listed = nixl_agent("listed", nixl_agent_config(backends=[])).get_plugin_params("UCX")
print(listed["num_workers"], listed["ucx_error_handling_mode"], "lanes" in listed)
agent("defaults", listed)
for wrong in ({"num_thread": "1"}, {"num_threads": "many"}):
    try:
        agent("wrong", wrong)
    except Exception as error:
        print(type(error).__name__)
""", TCPX_INTERFACES="")
    assert printed == ["3 =lo", "1 peer True", "nixlBackendError", "nixlBackendError"], logged
    named = [line for line in logged.splitlines() if "have no effect" in line]
    assert len(named) == 1, logged
    assert all(key in named[0] for key in ("num_workers=4", "engine_config=TLS=tcp", "mode=none"))
    assert "num_threads" not in named[0]
    assert '"num_thread"' in logged and "num_threads=many" in logged


def test_what_the_operator_sets_wins_over_parameters_of_ucx(as_ucx):
    printed, logged = run("""
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("me", nixl_agent_config(num_threads=3))
print(agent.get_backend_params("UCX")["workers"])
""", TCPX_WORKERS="2")
    assert printed == ["2"], logged


def test_tcpx_itself_does_not_take_parameters_of_ucx():
    _, logged = run("""
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("me", nixl_agent_config(backends=[]))
assert "num_workers" not in agent.get_plugin_params("TCPX")
try:
    agent.create_backend("TCPX", {"num_workers": "1"})
except Exception:
    pass
else:
    raise SystemExit("taken")
""")
    assert '"num_workers"' in logged


def test_a_real_ucx_and_the_stand_in_refuse_each_other(as_ucx, tmp_path):
    """The log has the remedy, and neither crashes: UCX aborts on most foreign bytes."""

    def start(role, **variables):
        environment = {k: v for k, v in os.environ.items() if k != "NIXL_PLUGIN_DIR"}
        with open(tmp_path / role, "w") as log:
            return subprocess.Popen(
                [sys.executable, "-c", PEER, role],
                env=environment | UCX_ALONE | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def answer(process, word):
        for line in process.stdout:
            if line.startswith(word):
                return line.split()[1]
        raise AssertionError("".join((tmp_path / role).read_text() for role in ("real", "ours")))

    real, ours = start("real"), start("ours", NIXL_PLUGIN_DIR=as_ucx)
    try:
        metadata = [answer(one, "METADATA") for one in (real, ours)]
        for one, other in zip((real, ours), reversed(metadata)):
            one.stdin.write(other + "\n")
            one.stdin.flush()
        assert answer(real, "LOADING") == "nixlBackendError"
        assert answer(ours, "LOADING") == "nixlMismatchError"
        for one in (real, ours):
            one.stdin.close()
            assert one.wait(TIMEOUT) == 0
    finally:
        real.kill()
        ours.kill()
    assert "tcpx nixl install --as UCX" in (tmp_path / "ours").read_text()


# The functions of NIXL's engines, in their order.
KNOWN = re.findall(r'^"(.*)",$', (ROOT / "plugins" / "nixl" / "slots.inc").read_text(), re.MULTILINE)
DOORBELL = "11getDoorbellEPv"


def library(functions):
    """Returns the assembler of a backend: tables of NIXL's engine class, with pure virtual
    functions 2 to 14, and of a derived class."""
    base, heir = "17nixlBackendEngine", "13nixlUcxEngine"
    open_or = lambda place, name: "__cxa_pure_virtual" if 2 <= place <= 14 else name
    tables = {
        base: [open_or(place, f"_ZN{base}{function}") for place, function in enumerate(functions)],
        heir: [f"_ZN{heir}{function}" for function in functions],
    }
    text, data = [".text"], ['.section .data.rel.ro,"aw"', ".balign 8"]
    for name, table in tables.items():
        data += [f".globl _ZTV{name}", f".type _ZTV{name}, @object", f".size _ZTV{name}, {16 + 8 * len(table)}"]
        data += [f"_ZTV{name}: .quad 0, 0", *(f".quad {function}" for function in table)]
        for function in set(table) - {"__cxa_pure_virtual"}:
            text += [f".globl {function}", f".type {function}, @function", f"{function}: nop"]
    return "\n".join([*text, *data, '.section .note.GNU-stack,"",@progbits', ""])


@pytest.mark.parametrize(
    "functions, difference",
    [
        (KNOWN, None),
        ([*KNOWN[:18], DOORBELL, *KNOWN[18:]], "function 18 is getDoorbell, not getPublicData"),
        ([*KNOWN, DOORBELL], "28 functions, not 27"),
        ([*KNOWN[:13], "9checkXferEP15nixlBackendReqHi", *KNOWN[14:]], "function 13 is checkXfer, not checkXfer"),
        ([*KNOWN[:8], KNOWN[9], KNOWN[8], *KNOWN[10:]], "function 8 is disconnect, not connect"),
    ],
    ids=["same", "inserted", "appended", "another-signature", "swapped"],
)
def test_a_nixl_of_another_abi(tmp_path, functions, difference):
    """The backend is not loaded, and reports why; the agent continues without it."""
    compiler = shutil.which(os.environ.get("CC", "cc").split()[0])
    if not compiler:
        pytest.skip("no C compiler")
    # This NIXL, with other backends beside its library, from which its version is derived.
    import nixl_cu12

    site = pathlib.Path(nixl_cu12.__file__).parent.parent
    libs = tmp_path / ".nixl_cu12.mesonpy.libs"
    (libs / "plugins").mkdir(parents=True)
    for entry in (site / libs.name).iterdir():
        if entry.name != "plugins":
            (libs / entry.name).symlink_to(entry)
    (tmp_path / "nixl_cu12.libs").symlink_to(site / "nixl_cu12.libs")
    shutil.copytree(site / "nixl_cu12", tmp_path / "nixl_cu12")
    source = tmp_path / "table.s"
    source.write_text(library(functions))
    table = libs / "plugins" / "libplugin_UCX.so"
    subprocess.run([compiler, "-shared", "-nostdlib", source, "-o", table], check=True)
    shutil.copy(PLUGIN, libs / "plugins" / PLUGIN.name)

    variables = dict(os.environ, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", NIXL_LOG_LEVEL="ERROR")
    del variables["NIXL_PLUGIN_DIR"]
    program = """
from nixl_cu12._api import nixl_agent, nixl_agent_config
agent = nixl_agent("me", nixl_agent_config(backends=[]))
try:
    agent.create_backend("TCPX", {})
    print("created")
except Exception as error:
    print(type(error).__name__)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=TIMEOUT
    )
    if difference is None:
        assert (ran.returncode, ran.stdout.split()[-1:]) == (0, ["created"]), ran.stderr
    else:
        # The oldest NIXL exits with a message if none of its plugins can be used.
        assert ran.returncode in (0, 1) and "created" not in ran.stdout, ran.stderr
        said = [line for line in ran.stderr.splitlines() if line.startswith("TCPX: ")]
        assert said and difference in said[0] and "is supported" in said[0], ran.stderr
