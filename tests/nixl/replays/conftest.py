"""Fixtures of the replays: memory of each kind, and the processes of an application.

REPLAY_MEMORY=DRAM or VRAM selects one kind; otherwise each replay runs with both, and is skipped
with VRAM where there is no GPU.

Bytes travel on lanes here, as between machines: a process that is stopped stops its transfers.
"""

import os

import pytest
from .memory import missing_gpu
from peer import Peer

GPU = pytest.mark.skipif(missing_gpu() is not None, reason=f"VRAM: {missing_gpu()}")
MEMORIES = {"DRAM": "DRAM", "VRAM": pytest.param("VRAM", marks=GPU)}
SELECTED = os.environ.get("REPLAY_MEMORY")


@pytest.fixture(params=[MEMORIES[SELECTED]] if SELECTED else list(MEMORIES.values()))
def memory(request):
    return request.param


@pytest.fixture(autouse=True)
def on_lanes(monkeypatch):
    monkeypatch.setenv("TCPX_SAME_HOST", "off")


@pytest.fixture
def here():
    """Creates sides of an application in this process: here(Kind, name, ...)."""
    made = []

    def make(kind, *args, **kwargs):
        made.append(kind(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def there():
    """Creates sides in processes of their own. Those that the test did not kill must exit
    successfully."""
    made = []

    def make(kind, *args, **kwargs):
        made.append(Peer(*args, kind=kind, **kwargs))
        return made[-1]

    yield make
    exits = [(one.name, one.stop()) for one in made if not one.killed]
    assert not any(code for _, code in exits), f"exit codes: {exits}"
