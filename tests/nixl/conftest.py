"""Tests of the TCPX backend with a real NIXL: agents in this process and in others, on loopback.

`scripts/test-nixl` runs them with the oldest and the newest NIXL. NIXL_PLUGIN_DIR is the folder with the plugin
to test, TCPX the command; both default to what `make dist` makes.
Bytes travel on lanes, as between machines, unless TCPX_SAME_HOST says otherwise.
"""

import faulthandler
import importlib.metadata
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
os.environ.setdefault("NIXL_PLUGIN_DIR", str(ROOT / "dist" / "nixl"))
os.environ["TCPX_INTERFACES"] = "lo"
os.environ.setdefault("TCPX_SAME_HOST", "off")
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import pytest

from endpoint import DONE, Endpoint, moved
from peer import Peer

NIXL = tuple(int(part) for part in importlib.metadata.version("nixl").split(".")[:3])

PLUGIN = pathlib.Path(os.environ["NIXL_PLUGIN_DIR"]) / "libplugin_TCPX.so"
CLI = os.environ.get("TCPX", str(ROOT / "dist" / "bin" / "tcpx"))

# A test that is still running then hangs in a call that no Python timeout ends.
TEST_TIMEOUT = 120


def pytest_configure(config):
    # Before pytest captures stderr.
    config.watchdog_output = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")


def pytest_sessionstart(session):
    for built in (PLUGIN, pathlib.Path(CLI)):
        if not built.is_file():
            pytest.exit(f"{built} does not exist: `make dist` builds it", returncode=2)


def pytest_report_header(config):
    return f"NIXL {'.'.join(map(str, NIXL))}, backend {PLUGIN}"


@pytest.fixture(autouse=True)
def watchdog(request):
    faulthandler.dump_traceback_later(TEST_TIMEOUT, exit=True, file=request.config.watchdog_output)
    yield
    faulthandler.cancel_dump_traceback_later()


def documented(test):
    """Returns the code in the documents that names a test of test_docs.py."""
    command = [ROOT / "scripts" / "docs", "--block", f"tests/nixl/test_docs.py::{test}"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture
def block(request):
    """Returns the code in the documents that names this test."""
    return documented(request.node.originalname)


@pytest.fixture
def endpoint():
    """Creates endpoints in this process."""
    made = []

    def make(*args, **kwargs):
        made.append(Endpoint(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def peer():
    """Creates endpoints in other processes. Those that the test did not kill must exit
    successfully."""
    made = []

    def make(*args, **kwargs):
        made.append(Peer(*args, **kwargs))
        return made[-1]

    yield make
    exits = [(one.name, one.stop()) for one in made if not one.killed]
    assert not any(code for _, code in exits), f"exit codes: {exits}"


@pytest.fixture
def lanes(monkeypatch):
    """Restricts the agents of a test to lanes: a stopped peer stops its transfers."""
    monkeypatch.setenv("TCPX_SAME_HOST", "off")


class Pair:
    """Returns an initiator here and a target in another process; the initiator has the target's
    metadata."""

    def __init__(self, local, remote):
        self.local = local
        self.remote = remote
        self.local.load(remote.metadata())
        self.place = (remote.name, remote.address())

    def introduce(self):
        """Gives the initiator's metadata to the target too."""
        self.remote.load(self.local.metadata())

    def request(self, op, segments, message=b""):
        return self.local.request(op, self.place, segments, message)

    def check(self, op, segments, post):
        """Fills both sides, calls `post`, and compares every byte of both sides afterwards."""
        self.local.fill(101)
        self.remote.fill(202)
        mine, theirs = moved(op, self.local.contents(), self.remote.contents(), segments)
        assert post() == DONE
        assert np.array_equal(self.local.contents(), mine)
        assert np.array_equal(self.remote.contents(), theirs)

    def transfer(self, op, segments, message=b""):
        """Performs one whole transfer, checked."""
        handle = self.request(op, segments, message)
        self.check(op, segments, lambda: self.local.outcome(handle))
        if message:
            assert self.remote.notifications(1) == [(self.local.name, message)]
        self.local.release(handle)


@pytest.fixture
def pair(endpoint, peer):
    """Creates a Pair; the arguments apply to both endpoints."""

    def make(size=1 << 20, **kwargs):
        return Pair(endpoint("initiator", size, **kwargs), peer("target", size, **kwargs))

    return make


@pytest.fixture(params=["WRITE", "READ"])
def op(request):
    return request.param
