"""Pairs of sessions and endpoints. In one process here; test_processes.py has two."""

import pathlib
import subprocess

import numpy as np
import pytest
import tcpx
from tcpx import p2p

WAIT = 20
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def block(request):
    """Returns the code in the documents that names this test."""
    test = f"tests/python/{request.path.name}::{request.node.originalname}"
    ran = subprocess.run([ROOT / "scripts" / "docs", "--block", test], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture
def pair():
    """Returns Alice, Bob, and Alice's handle of Bob."""
    with tcpx.Session("alice") as alice, tcpx.Session("bob") as bob:
        peer = alice.add_peer(bob.connection_info)
        peer.connect(WAIT)
        yield alice, bob, peer


class Ends:
    """Returns two endpoints, the first connected to the second."""

    def __init__(self):
        self.here, self.there = p2p.Endpoint(0), p2p.Endpoint(0)
        ok, self.conn = self.here.add_remote_endpoint(self.there.get_metadata())
        assert ok is True

    def region(self, endpoint, array):
        ok, mr = endpoint.reg(array.ctypes.data, array.nbytes)
        assert ok is True
        return mr

    def blob(self, array):
        mr = self.region(self.there, array)
        ok, blob = self.there.advertise(mr, array.ctypes.data, array.nbytes)
        assert ok is True and type(blob) is bytes and len(blob) == 64
        return blob

    def finish(self, started):
        ok, transfer = started
        assert ok is True
        while True:
            ok, done = self.here.poll_async(transfer)
            if done or not ok:
                return ok


@pytest.fixture
def ends():
    return Ends()


def pattern(size, seed):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
