"""The documents about NIXL are true: their code runs, their facts hold."""

import json
import os
import re
import subprocess
import sys

import pytest
from nixl._api import nixl_agent, nixl_agent_config

from conftest import CLI, NIXL, ROOT
from endpoint import BACKEND, TIMEOUT, until
from peer import die_with_parent

TEXT = (ROOT / "docs" / "nixl.md").read_text()


class Program:
    """A process whose output goes to a file, so that it can always be shown."""

    def __init__(self, command, output):
        self.output = output
        with open(output, "w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
            )

    def said(self):
        return self.output.read_text()

    def port(self):
        """Returns the port it listens on, once it is printed."""

        def found():
            line = re.search(r"listening on port (\d+)\n", self.said())
            assert line or self.process.poll() is None, "it has ended"
            return line

        try:
            return until(found, "listening")[1]
        except AssertionError as error:
            raise AssertionError(f"{error}; it said:\n{self.said()}") from None

    def end(self):
        """Waits for its end, and kills it if it does not end."""
        try:
            return self.process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return f"no end within {TIMEOUT} s"


@pytest.fixture
def shell(tmp_path):
    """Runs commands as a user does, with `tcpx` and `python` in PATH; returns their output."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "tcpx").symlink_to(os.path.abspath(CLI))
    path = [str(commands), os.path.dirname(sys.executable), os.environ["PATH"]]
    environment = {k: v for k, v in os.environ.items() if k != "NIXL_PLUGIN_DIR"}
    environment.update(PATH=":".join(path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    if stubs := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.path.abspath(stubs)

    def run(script, cwd=tmp_path, **variables):
        command = ["bash", "-euo", "pipefail", "-c", script]
        ran = subprocess.run(
            command, cwd=cwd, env=environment | variables, capture_output=True, text=True, timeout=2 * TIMEOUT
        )
        assert ran.returncode == 0, f"{script}\n{ran.stdout}{ran.stderr}"
        return ran.stdout

    yield run
    run("tcpx nixl uninstall")


APP = """
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("me", nixl_agent_config(backends=[]))
print("lanes of UCX:", agent.get_plugin_params("UCX").get("lanes"))
print("lanes of TCPX:", agent.get_plugin_params("TCPX").get("lanes"))
"""


def test_install(block, shell):
    said = shell(block.replace("/opt/app/bin/python", sys.executable))
    # Each of the first three prints a line of NIXL's state; the last one removes the backend.
    assert len(re.findall(r"^nixl\S+ +\S+ +installed ", said, re.MULTILINE)) == 3, said
    assert "not installed" in shell("tcpx nixl status || true")


def test_install_in_the_readme(block, shell):
    assert block == "tcpx nixl install\n"
    assert "installed" in shell(block)
    (row,) = json.loads(shell("tcpx nixl status --json"))["nixl"]
    assert row["state"] == "installed"


def test_path(block, shell, tmp_path):
    (tmp_path / "app.py").write_text(APP)
    said = shell(block)
    assert re.search(r"^lanes of TCPX: \d+$", said, re.MULTILINE), said
    assert "lanes of UCX: None" in said, said


def test_stand_in(block, shell, tmp_path):
    (tmp_path / "app.py").write_text(APP)
    said = shell(block)
    assert re.search(r"^lanes of UCX: \d+$", said, re.MULTILINE), said
    assert "UCX IS TCPX" in said, said
    assert "UCX IS TCPX" not in shell("tcpx nixl status || true")


def test_getting_started(block, shell):
    # The environment is the one that runs this test.
    made, *rest = block.replace(".venv/nixl/bin/python", sys.executable).splitlines()
    assert made == f"scripts/nixl-venv {listed_versions()[-1]} .venv/nixl"
    said = shell(little("\n".join(rest)), cwd=ROOT)
    assert measured(said, "TCPX") == [("lat4k", "read"), ("lat4k", "write")]


def little(script):
    """Returns a script that measures little: that its commands run is of interest."""
    assert "--cases one64m,kv16k" in script
    return script.replace("--cases one64m,kv16k", "--cases lat4k --duration 0.05")


def measured(said, backend):
    """Returns the cases and operations that bench-nixl has measured."""
    result = json.loads(said[said.index('{"backend"') :])
    assert result["backend"] == backend
    assert all(case["gb_per_s"] > 0 and case["cpu_s_per_gb"] > 0 for case in result["cases"])
    return [(case["name"], case["op"]) for case in result["cases"]]


def test_measuring_against_ucx(block, shell):
    tcpx, ucx = little(block).splitlines()
    folder = shell("tcpx nixl path").strip()
    assert measured(shell(tcpx, cwd=ROOT, NIXL_PLUGIN_DIR=folder), "TCPX") == [("lat4k", "read"), ("lat4k", "write")]
    # The UCX of old versions does not use the loopback interface, and no other one is used here.
    if NIXL >= (1, 5):
        said = shell(ucx, cwd=ROOT, UCX_NET_DEVICES="lo")
        assert measured(said, "UCX") == [("lat4k", "read"), ("lat4k", "write")]


def test_parameters_of_create_backend(block, shell, tmp_path):
    (tmp_path / "app.py").write_text(block.replace("eth1,eth2", "lo") + 'print("created")\n')
    assert "created" in shell("NIXL_PLUGIN_DIR=$(tcpx nixl path) python app.py")


def test_the_program(block, tmp_path):
    """Runs in two processes as it stands."""
    file = tmp_path / "blocks.py"
    file.write_text(block)

    def start(role, port):
        return Program([sys.executable, file, role, "127.0.0.1", port], tmp_path / role)

    target = start("target", "0")
    try:
        initiator = start("initiator", target.port())
        ends = {"initiator": initiator.end(), "target": target.end()}
    finally:
        target.process.kill()
    said = f"{ends}\ntarget:\n{target.said()}\ninitiator:\n{initiator.said()}"
    assert ends == {"initiator": 0, "target": 0}, said
    assert "target: every second block has arrived" in target.said(), said
    assert "initiator: DONE" in initiator.said(), said


def test_the_parameters():
    """The parameters are the settings of the table that docs/nixl.md refers to, except the name."""
    assert "(operations.md#settings)" in TEXT
    settings = (ROOT / "docs" / "operations.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| `(TCPX_\w+)`", settings, re.MULTILINE)
    agent = nixl_agent("alone", nixl_agent_config(backends=[]))
    assert {key for key, _ in table} - {"name"} == set(agent.get_plugin_params(BACKEND))
    assert all(variable == f"TCPX_{key.upper()}" for key, variable in table)


def listed_versions():
    lines = (ROOT / "plugins" / "nixl" / "versions").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_the_versions():
    """The document names the ends of the one list, and no others."""
    listed = listed_versions()
    assert re.search(r"\) (\d+\.\d+\.\d+) to (\d+\.\d+\.\d+)\n", TEXT).groups() == (listed[0], listed[-1])


def test_whether_it_works(block, shell):
    """Says so with the backend, and only then."""
    folder = shell("tcpx nixl path").strip()
    assert "works" in shell(block, NIXL_PLUGIN_DIR=folder)
    os.unlink(os.path.join(folder, "libplugin_TCPX.so"))
    with pytest.raises(AssertionError):
        shell(block, NIXL_PLUGIN_DIR=folder)
