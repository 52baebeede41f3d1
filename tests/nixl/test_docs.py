"""What docs/nixl.md says is true."""

import re
import subprocess
import sys

from nixl._api import nixl_agent, nixl_agent_config

from conftest import ROOT
from endpoint import BACKEND, TIMEOUT, until
from peer import die_with_parent

TEXT = (ROOT / "docs" / "nixl.md").read_text()


class Program:
    """A process whose output goes to a file, so that it can be shown whatever happens."""

    def __init__(self, command, output):
        self.output = output
        with open(output, "w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
            )

    def said(self):
        return self.output.read_text()

    def port(self):
        """The port it listens on, once it says so."""

        def found():
            line = re.search(r"listening on port (\d+)\n", self.said())
            assert line or self.process.poll() is None, "it has ended"
            return line

        try:
            return until(found, "listening")[1]
        except AssertionError as error:
            raise AssertionError(f"{error}; it said:\n{self.said()}") from None

    def end(self):
        """Waits for its end, and kills it where that does not come."""
        try:
            return self.process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return f"no end within {TIMEOUT} s"


def test_the_program(tmp_path):
    """The first Python block, in two processes, as it stands."""
    file = tmp_path / "blocks.py"
    file.write_text(re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1])

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
    """The parameters are the settings of the table that docs/nixl.md refers to, but for the name."""
    assert "(operations.md#settings)" in TEXT
    settings = (ROOT / "docs" / "operations.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| `(TCPX_\w+)`", settings, re.MULTILINE)
    agent = nixl_agent("alone", nixl_agent_config(backends=[]))
    assert {key for key, _ in table} - {"name"} == set(agent.get_plugin_params(BACKEND))
    assert all(variable == f"TCPX_{key.upper()}" for key, variable in table)
