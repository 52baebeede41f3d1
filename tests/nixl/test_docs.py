"""What docs/nixl.md says is true."""

import re
import subprocess
import sys

from nixl._api import nixl_agent, nixl_agent_config

from conftest import ROOT
from endpoint import BACKEND, TIMEOUT, free_port
from peer import die_with_parent

TEXT = (ROOT / "docs" / "nixl.md").read_text()


def test_the_program(tmp_path):
    """The first Python block, in two processes, as it stands."""
    program = tmp_path / "blocks.py"
    program.write_text(re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1])
    port = str(free_port())
    processes = {
        role: subprocess.Popen(
            [sys.executable, program, role, "127.0.0.1", port],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=die_with_parent,
        )
        for role in ("target", "initiator")
    }
    try:
        said = {role: process.communicate(timeout=TIMEOUT)[0] for role, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    assert "target: every second block has arrived" in said["target"], said
    assert "initiator: DONE" in said["initiator"], said
    assert [process.returncode for process in processes.values()] == [0, 0], said


def test_the_parameters():
    """The parameters are the settings of the table that docs/nixl.md refers to, but for the name."""
    assert "(operations.md#settings)" in TEXT
    settings = (ROOT / "docs" / "operations.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| `(TCPX_\w+)`", settings, re.MULTILINE)
    agent = nixl_agent("alone", nixl_agent_config(backends=[]))
    assert {key for key, _ in table} - {"name"} == set(agent.get_plugin_params(BACKEND))
    assert all(variable == f"TCPX_{key.upper()}" for key, variable in table)
