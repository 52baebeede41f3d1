"""Tests READ and WRITE: every byte that should move does, and no other."""

import time

import numpy as np
import pytest

from conftest import NIXL
from endpoint import BACKEND, DONE, Endpoint, moved, rows, scattered

MIB = 1 << 20


@pytest.mark.parametrize("message", [b"", b"it is there"], ids=["silent", "notified"])
@pytest.mark.parametrize("length", [1, 4096, 999_999])
def test_one_block(pair, op, length, message):
    pair().transfer(op, [(0, 48_577, length)], message)


def test_large(pair, op):
    pair(size=32 * MIB).transfer(op, [(0, 0, 32 * MIB)], b"large")


def test_thousands_of_descriptors(pair, op):
    size = 12 * MIB
    pair(size).transfer(op, scattered(12_000, size, seed=3), b"scattered")


def test_one_source_for_many_places(pair):
    pair = pair()
    pair.transfer("WRITE", [(5000, 8192 * i, 4096) for i in range(100)], b"copies")
    pair.transfer("READ", [(8192 * i, 5000, 4096) for i in range(100)], b"copies")


def test_with_other_settings(pair, op):
    """Many lanes, chunks smaller than the blocks, a window of one."""
    params = {"lanes": "4", "workers": "2", "chunk_bytes": "16K", "window": "1"}
    pair(params=params).transfer(op, scattered(50, MIB, seed=4), b"small chunks")


def register_in_parts(endpoint, parts):
    length = endpoint.size // parts
    endpoint.deregister()
    table = rows([endpoint.base + i * length for i in range(parts)], length)
    endpoint.registrations = [endpoint.agent.register_memory(table, mem_type="DRAM", backends=[BACKEND])]


def test_descriptors_in_many_regions(pair, op):
    pair = pair()
    register_in_parts(pair.local, 16)
    pair.remote.run(register_in_parts, 8)
    pair.local.forget("target")
    pair.local.load(pair.remote.metadata())
    # Slots of 1 KiB: none crosses from one region into the next.
    pair.transfer(op, scattered(1024, MIB, seed=5), b"regions")


@pytest.mark.parametrize(
    "indices", [list, lambda some: np.array(some, dtype=np.int32)], ids=["list", "array"]
)
@pytest.mark.parametrize("merge", [True, False], ids=["merged", "as-given"])
def test_prepared_lists(pair, op, indices, merge):
    pair, count, block = pair(), 256, 4096
    offsets = np.arange(count) * block
    agent = pair.local.agent
    mine = agent.prep_xfer_dlist("NIXL_INIT_AGENT", pair.local.descriptors(pair.local.base, offsets, block))
    theirs = agent.prep_xfer_dlist("target", pair.local.descriptors(pair.place[1], offsets, block))
    rng = np.random.default_rng(6)
    # Adjacent on both sides, then adjacent on one side, then not adjacent.
    own = [*range(64), *range(64, 96), *rng.permutation(range(96, 128))]
    remote = [*range(100, 164), *rng.permutation(range(200, 232)), *rng.permutation(range(0, 32))]
    handle = agent.make_prepped_xfer(
        op, mine, indices(own), theirs, indices(remote), b"by index", skip_desc_merge=not merge
    )
    segments = [(a * block, b * block, block) for a, b in zip(own, remote)]
    for _ in range(2):
        pair.check(op, segments, lambda: pair.local.outcome(handle))
        assert pair.remote.notifications(1) == [("initiator", b"by index")]
    pair.local.release(handle)
    agent.release_dlist_handle(mine)
    agent.release_dlist_handle(theirs)


@pytest.mark.skipif(NIXL < (1, 5), reason="Python has strided lists from NIXL 1.5 on")
def test_strided_lists(pair, op):
    pair, count, block, stride = pair(), 200, 512, 5000
    agent = pair.local.agent
    table = lambda base: np.array([[base, block, 0, stride, count]], dtype=np.uint64)
    mine = agent.prep_xfer_dlist("NIXL_INIT_AGENT", table(pair.local.base), mem_type="DRAM")
    theirs = agent.prep_xfer_dlist("target", table(pair.place[1]), mem_type="DRAM")
    order = np.random.default_rng(7).permutation(count)
    handle = agent.make_prepped_xfer(op, mine, list(range(count)), theirs, order.tolist(), b"strided")
    segments = [(i * stride, j * stride, block) for i, j in enumerate(order)]
    pair.check(op, segments, lambda: pair.local.outcome(handle))
    pair.local.release(handle)


def test_repost(pair, op):
    """Posts one request many times: each time with the current bytes, and its notification, or
    another one."""
    pair = pair()
    segments = scattered(300, MIB, seed=8)
    handle = pair.request(op, segments, b"first words")
    for message, expected in [
        (b"", b"first words"),
        (b"", b"first words"),
        (b"other words", b"other words"),
        (b"", b"other words"),
    ]:
        pair.check(op, segments, lambda: pair.local.outcome(handle, message))
        assert pair.remote.notifications(1) == [("initiator", expected)]
    assert pair.remote.no_notifications() == {}
    pair.local.release(handle)


@pytest.mark.usefixtures("lanes")
def test_repost_while_active(pair, op):
    pair = pair(size=32 * MIB)
    pair.local.notify("target", b"connect")
    pair.remote.notifications(1)
    segments = [(0, 0, 32 * MIB)]
    handle = pair.request(op, segments, b"once")

    def post():
        pair.remote.freeze()
        assert pair.local.post(handle) == "PROC"
        assert pair.local.post(handle) == "nixlRepostActiveError"
        pair.remote.thaw()
        return pair.local.wait(handle)

    pair.check(op, segments, post)
    assert pair.remote.notifications(1) == [("initiator", b"once")]
    assert pair.remote.no_notifications() == {}
    pair.local.release(handle)


def test_many_requests_at_once(pair, op):
    pair = pair(size=4 * MIB)
    segments = scattered(64, 4 * MIB, seed=9)
    handles = [pair.request(op, [segment], b"%d" % i) for i, segment in enumerate(segments)]

    def post():
        for handle in handles:
            assert pair.local.post(handle) in ("PROC", DONE)
        ends = {pair.local.wait(handle) for handle in handles}
        return ends.pop() if len(ends) == 1 else ends

    pair.check(op, segments, post)
    got = pair.remote.notifications(64)
    assert sorted(got) == sorted(("initiator", b"%d" % i) for i in range(64))
    for handle in handles:
        pair.local.release(handle)


def asleep(_endpoint, alarm):
    while not alarm.exists():
        time.sleep(0.1)


def test_the_target_does_nothing(pair, op, tmp_path):
    """The target serves reads and writes while its application sleeps."""
    pair = pair()
    mine, theirs = moved(op, pair.local.contents(), pair.remote.contents(), [(0, 0, MIB)])
    handle = pair.request(op, [(0, 0, MIB)], b"nobody looked")
    pair.remote.start(asleep, tmp_path / "alarm")
    assert pair.local.outcome(handle) == DONE
    (tmp_path / "alarm").touch()
    pair.remote.result()
    assert np.array_equal(pair.local.contents(), mine)
    assert np.array_equal(pair.remote.contents(), theirs)
    assert pair.remote.notifications(1) == [("initiator", b"nobody looked")]
    pair.local.release(handle)


def write_often(endpoint, place, offset, length, times):
    handle = endpoint.request("WRITE", place, [(offset, offset, length)], b"from " + endpoint.name.encode())
    ends = [endpoint.outcome(handle) for _ in range(times)]
    endpoint.release(handle)
    return ends


def test_both_sides_at_once(pair):
    """Each writes its half into the other's memory; the first transfers connect from both sides."""
    pair, half = pair(size=4 * MIB), 2 * MIB
    pair.introduce()
    mine, theirs = moved("WRITE", pair.local.contents(), pair.remote.contents(), [(0, 0, half)])
    mine, theirs = moved("READ", mine, theirs, [(half, half, half)])
    pair.remote.start(write_often, ("initiator", pair.local.base), half, half, 20)
    assert write_often(pair.local, pair.place, 0, half, 20) == [DONE] * 20
    assert pair.remote.result() == [DONE] * 20
    assert np.array_equal(pair.local.contents(), mine)
    assert np.array_equal(pair.remote.contents(), theirs)
    assert pair.remote.notifications(20) == [("initiator", b"from initiator")] * 20
    assert pair.local.notifications(20) == [("target", b"from target")] * 20


@pytest.mark.parametrize("prepared", [False, True], ids=["given", "prepared"])
def test_to_itself(endpoint, op, prepared):
    one = endpoint("alone", MIB)
    half = MIB // 2
    before = one.contents()
    segments = scattered(100, half, seed=10) + [0, half, 0]
    if prepared:
        own, remote, lengths = segments.T
        mine = one.agent.prep_xfer_dlist("NIXL_INIT_AGENT", one.descriptors(one.base, own, lengths))
        theirs = one.agent.prep_xfer_dlist("alone", one.descriptors(one.base, remote, lengths))
        every = list(range(len(segments)))
        handle = one.agent.make_prepped_xfer(op, mine, every, theirs, every, b"to myself")
    else:
        handle = one.request(op, ("alone", one.base), segments, b"to myself")
    assert one.outcome(handle) == DONE
    # The two halves are one block here: the written half comes from the other side's result.
    lower, upper = moved(op, before, before, segments)
    middle = Endpoint.GUARD + half
    assert np.array_equal(one.contents(), np.concatenate([lower[:middle], upper[middle:]]))
    assert one.notifications(1) == [("alone", b"to myself")]
    assert one.outcome(handle) == DONE
    assert one.notifications(1) == [("alone", b"to myself")]
    one.release(handle)


def test_explicit_connection(pair, op):
    pair = pair()
    pair.local.agent.make_connection("target")
    pair.transfer(op, [(0, 0, MIB)], b"connected before")


@pytest.mark.usefixtures("lanes")
def test_release_in_flight(pair, op):
    """Releasing ends the transfer without the peer's help: no byte moves afterwards, and its
    notification does not come."""
    pair = pair(size=16 * MIB, params={"peer_timeout": "1h"})
    pair.transfer(op, [(0, 0, 4096)], b"connected")
    for _ in range(3):
        pair.local.fill(11)
        pair.remote.fill(12)
        mine, theirs = pair.local.contents(), pair.remote.contents()
        handle = pair.request(op, [(0, 0, 16 * MIB)], b"released")
        pair.remote.freeze()
        assert pair.local.post(handle) == "PROC"
        pair.local.release(handle)
        # The memory may be reused: new bytes are neither sent nor overwritten.
        ours = ~mine
        pair.local.block[:] = ours
        pair.remote.thaw()
        time.sleep(0.1)
        assert np.array_equal(pair.local.contents(), ours)
        after = pair.remote.contents()
        changed = after != theirs
        assert not changed.any() if op == "READ" else (after == mine)[changed].all()
    pair.transfer(op, [(0, 0, 16 * MIB)], b"the next one works")
    assert pair.remote.no_notifications() == {}


def test_estimated_cost(pair, op):
    pair = pair(size=32 * MIB)
    small, large = (pair.request(op, [(0, 0, n)]) for n in (4096, 32 * MIB))
    for _ in range(3):
        costs = [pair.local.agent.estimate_xfer_cost(handle)[:2] for handle in (small, large)]
        assert all(duration > 0 and margin >= 0 for duration, margin in costs)
        assert costs[0][0] < costs[1][0]
        assert {pair.local.outcome(handle) for handle in (small, large)} == {DONE}
    assert pair.local.agent.query_xfer_backend(large) == BACKEND
    for handle in (small, large):
        pair.local.release(handle)
