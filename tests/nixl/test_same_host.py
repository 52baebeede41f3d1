"""Agents on one host: memory is copied directly, or the transfer fails where that is required."""

import numpy as np
import pytest

from endpoint import DONE, moved, scattered

MIB = 1 << 20


@pytest.fixture
def direct(monkeypatch):
    """Forbids lanes to the agents of a test."""
    monkeypatch.setenv("TCPX_SAME_HOST", "require")


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("message", [b"", b"it is there"], ids=["silent", "notified"])
def test_thousands_of_descriptors(pair, op, message):
    pair = pair(size=12 * MIB)
    assert pair.local.agent.get_backend_params("TCPX")["same_host"] == "require"
    pair.transfer(op, scattered(12_000, 12 * MIB, seed=21), message)


@pytest.mark.usefixtures("direct")
def test_the_target_is_stopped(pair, op):
    """Its process takes no part once its memory is known: no lane carries anything."""
    pair = pair(size=4 * MIB)
    segments = scattered(1000, 4 * MIB, seed=22)
    handle = pair.request(op, segments)
    pair.check(op, segments, lambda: pair.local.outcome(handle))
    pair.local.fill(103)
    mine, theirs = moved(op, pair.local.contents(), pair.remote.contents(), segments)
    pair.remote.freeze()
    try:
        assert pair.local.outcome(handle) == DONE
        assert np.array_equal(pair.local.contents(), mine)
    finally:
        pair.remote.thaw()
    assert np.array_equal(pair.remote.contents(), theirs)
    pair.local.release(handle)


@pytest.mark.usefixtures("direct")
def test_both_sides(pair):
    """Each side reads and writes the other's memory."""
    pair = pair()
    pair.introduce()
    pair.transfer("WRITE", scattered(100, MIB, seed=23))
    mine, theirs = pair.local.contents(), pair.remote.contents()
    theirs, mine = moved("WRITE", theirs, mine, [(0, 0, MIB // 2)])
    assert pair.remote.run(whole_half, "WRITE", ("initiator", pair.local.base), 0) == DONE
    theirs, mine = moved("READ", theirs, mine, [(MIB // 2, MIB // 2, MIB // 2)])
    assert pair.remote.run(whole_half, "READ", ("initiator", pair.local.base), MIB // 2) == DONE
    assert np.array_equal(pair.local.contents(), mine)
    assert np.array_equal(pair.remote.contents(), theirs)


def whole_half(endpoint, op, place, offset):
    handle = endpoint.request(op, place, [(offset, offset, MIB // 2)])
    end = endpoint.outcome(handle)
    endpoint.release(handle)
    return end


def test_what_is_required_of_a_peer_that_does_not_offer_it_fails(endpoint, peer, op):
    local = endpoint("initiator", params={"same_host": "require"})
    remote = peer("target", params={"same_host": "off"})
    local.load(remote.metadata())
    before = local.contents(), remote.contents()
    handle = local.request(op, ("target", remote.address()), [(0, 0, MIB)])
    assert local.outcome(handle) == "nixlNotSupportedError"
    assert np.array_equal(local.contents(), before[0])
    assert np.array_equal(remote.contents(), before[1])
    local.release(handle)
