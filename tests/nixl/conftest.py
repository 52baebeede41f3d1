"""Tests of the TCPX backend with a real NIXL: agents in this process and in others, never more than loopback.

`scripts/test-nixl` runs them with the oldest and the newest NIXL. NIXL_PLUGIN_DIR is the folder with the plugin
to test, TCPX the command; both default to what `make dist` makes.
Bytes travel on lanes, as between machines, unless TCPX_SAME_HOST says otherwise.
"""

import faulthandler
import importlib.metadata
import os
import pathlib
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

NIXL = tuple(int(part) for part in importlib.metadata.version("nixl-cu12").split(".")[:3])

PLUGIN = pathlib.Path(os.environ["NIXL_PLUGIN_DIR"]) / "libplugin_TCPX.so"
CLI = os.environ.get("TCPX", str(ROOT / "dist" / "bin" / "tcpx"))

# A test that is still running then has hung, in a call that no timeout of Python's ends.
TEST_TIMEOUT = 120


def pytest_configure(config):
    # Before pytest takes stderr away.
    config.watchdog_output = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")


def pytest_sessionstart(session):
    for built in (PLUGIN, pathlib.Path(CLI)):
        if not built.is_file():
            pytest.exit(f"{built} is not there: `make dist` builds it", returncode=2)


def pytest_report_header(config):
    return f"NIXL {'.'.join(map(str, NIXL))}, backend {PLUGIN}"


@pytest.fixture(autouse=True)
def watchdog(request):
    faulthandler.dump_traceback_later(TEST_TIMEOUT, exit=True, file=request.config.watchdog_output)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def endpoint():
    """Makes endpoints in this process."""
    made = []

    def make(*args, **kwargs):
        made.append(Endpoint(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def peer():
    """Makes endpoints in other processes. Those that the test did not kill must end well."""
    made = []

    def make(*args, **kwargs):
        made.append(Peer(*args, **kwargs))
        return made[-1]

    yield make
    exits = [(one.name, one.stop()) for one in made if not one.killed]
    assert not any(code for _, code in exits), f"exit codes: {exits}"


@pytest.fixture
def lanes(monkeypatch):
    """Keeps the agents of a test on lanes: a peer that is stopped stops its transfers."""
    monkeypatch.setenv("TCPX_SAME_HOST", "off")


class Pair:
    """An initiator here and a target in another process; the initiator has the target's metadata."""

    def __init__(self, local, remote):
        self.local = local
        self.remote = remote
        self.local.load(remote.metadata())
        self.place = (remote.name, remote.address())

    def introduce(self):
        """The target gets the initiator's metadata too."""
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
        """One whole transfer, checked."""
        handle = self.request(op, segments, message)
        self.check(op, segments, lambda: self.local.outcome(handle))
        if message:
            assert self.remote.notifications(1) == [(self.local.name, message)]
        self.local.release(handle)


@pytest.fixture
def pair(endpoint, peer):
    """Makes a Pair; arguments are those of both endpoints."""

    def make(size=1 << 20, **kwargs):
        return Pair(endpoint("initiator", size, **kwargs), peer("target", size, **kwargs))

    return make


@pytest.fixture(params=["WRITE", "READ"])
def op(request):
    return request.param
