"""Tests registered memory: valid ranges, deregistration, the end of agents."""

import numpy as np
import pytest

from endpoint import BACKEND, DISCONNECTED, DONE, rows, scattered

MIB = 1 << 20
PAGE = 4096


def register_table(endpoint, offsets, lengths):
    """Registers several ranges in one call."""
    table = rows([endpoint.base + offset for offset in offsets], lengths)
    return endpoint.agent.register_memory(table, mem_type="DRAM", backends=[BACKEND])


@pytest.mark.parametrize(
    "address, length", [(2**64 - PAGE, 2 * PAGE), (0, PAGE), (None, 0)], ids=["wraps", "null", "empty"]
)
def test_one_bad_range_undoes_the_others(endpoint, address, length):
    one = endpoint("alone", 4 * PAGE)
    one.deregister()
    described = lambda: one.base.to_bytes(8, "little") in one.metadata()
    good = [one.base, one.base + PAGE]
    table = rows([*good, one.base if address is None else address], [PAGE, PAGE, length])
    with pytest.raises(Exception, match="NIXL_ERR_BACKEND"):
        one.agent.register_memory(table, mem_type="DRAM", backends=[BACKEND])
    assert not described()
    with pytest.raises(Exception, match="NIXL_ERR_NOT_FOUND"):
        one.request("WRITE", ("alone", one.base), [(0, PAGE, PAGE)])
    # No trace of it is left.
    one.registrations = [one.agent.register_memory(table[:2], mem_type="DRAM", backends=[BACKEND])]
    assert described()
    handle = one.request("WRITE", ("alone", one.base), [(0, PAGE, PAGE)])
    assert one.outcome(handle) == DONE
    one.release(handle)


def test_device_memory_is_refused(endpoint):
    one = endpoint("alone", PAGE)
    with pytest.raises(Exception, match="NIXL_ERR_BACKEND|NIXL_ERR_NOT_SUPPORTED"):
        one.agent.register_memory(rows([one.base], PAGE), mem_type="VRAM", backends=[BACKEND])


def register_again(endpoint):
    endpoint.registrations.append(endpoint.register(0, endpoint.size))


def deregister_one(endpoint):
    endpoint.agent.deregister_memory(endpoint.registrations.pop())


def test_the_same_range_twice(pair, op):
    """Two registrations of one range: the memory stays usable until the second ends."""
    pair = pair()
    register_again(pair.local)
    pair.remote.run(register_again)
    pair.local.load(pair.remote.metadata())
    pair.transfer(op, scattered(100, MIB, seed=1), b"registered twice")
    deregister_one(pair.local)
    pair.remote.run(deregister_one)
    pair.transfer(op, scattered(100, MIB, seed=2), b"registered once")


def register_overlapping(endpoint):
    endpoint.deregister()
    half, quarter = MIB // 2, MIB // 4
    endpoint.registrations = [register_table(endpoint, [0, quarter, half], [half, half, half])]


def test_overlapping_ranges(pair, op):
    pair = pair()
    register_overlapping(pair.local)
    pair.remote.run(register_overlapping)
    pair.local.forget("target")
    pair.local.load(pair.remote.metadata())
    # In the first only, in the second only (it crosses the end of the first), in the last only.
    segments = [(0, 17, 1000), (MIB // 2 - 500, MIB // 2 - 600, 1000), (MIB - 1000, MIB - 1000, 1000)]
    pair.transfer(op, segments, b"overlapping")


def renew(endpoint):
    before = endpoint.metadata()
    endpoint.deregister()
    endpoint.registrations = [endpoint.register(0, endpoint.size)]
    return before == endpoint.metadata()


def test_registered_again(pair, op):
    """A range that is registered again has the same description: peers that loaded it continue,
    prepared requests too."""
    pair = pair()
    segments = scattered(100, MIB, seed=3)
    handle = pair.request(op, segments, b"prepared before")
    assert pair.remote.run(renew)
    pair.check(op, segments, lambda: pair.local.outcome(handle))
    pair.local.release(handle)
    assert pair.remote.notifications(1) == [("initiator", b"prepared before")]
    assert pair.local.load(pair.remote.metadata()) == "target"
    pair.transfer(op, scattered(100, MIB, seed=4), b"registered again")


def test_deregistered_at_the_target(pair, op):
    """Nothing of the memory moves any more; the peer's agent itself stays reachable."""
    pair = pair()
    handle = pair.request(op, [(0, 0, MIB)], b"too late")
    assert pair.local.outcome(handle) == DONE
    assert pair.remote.notifications(1) == [("initiator", b"too late")]
    pair.local.fill(5)
    pair.remote.deregister()
    mine, theirs = pair.local.contents(), pair.remote.contents()
    assert pair.local.outcome(handle) == DISCONNECTED
    assert np.array_equal(pair.local.contents(), mine)
    assert np.array_equal(pair.remote.contents(), theirs)
    pair.local.release(handle)
    assert pair.remote.no_notifications() == {}


def test_deregistered_here(pair, op):
    """Requests on it are refused; the target's memory is unchanged."""
    pair = pair()
    handle = pair.request(op, [(0, 0, MIB)])
    assert pair.local.outcome(handle) == DONE
    pair.local.fill(6)
    mine, theirs = pair.local.contents(), pair.remote.contents()
    pair.local.deregister()
    with pytest.raises(Exception, match="NIXL_ERR_NOT_FOUND"):
        pair.request(op, [(0, 0, PAGE)])
    assert pair.local.outcome(handle) != DONE
    assert np.array_equal(pair.local.contents(), mine)
    assert np.array_equal(pair.remote.contents(), theirs)
    pair.local.release(handle)


def register_more(endpoint, count):
    length = endpoint.size // count
    offsets = [i * length for i in range(count)]
    endpoint.registrations.append(register_table(endpoint, offsets, length))


def test_regions_that_come_later(endpoint, peer, op):
    """Metadata is loaded again when there is more memory: known memory stays valid, new memory
    works."""
    local, remote = endpoint("initiator", MIB), peer("target", MIB)
    remote.deregister()
    remote.run(register_more, 1)
    local.load(remote.metadata())
    known = len(remote.metadata())
    place = ("target", remote.address())
    first = local.request(op, place, [(0, 0, MIB)])
    assert local.outcome(first) == DONE
    remote.run(register_more, 2000)
    metadata = remote.metadata()
    # It contains the description of every region, which should be small.
    assert (len(metadata) - known) / 2000 < 150
    assert local.load(metadata) == "target"
    second = local.request(op, place, [(0, 524 * i, 524) for i in range(0, 2000, 7)])
    assert local.outcome(second) == DONE and local.outcome(first) == DONE
    local.release(first)
    local.release(second)


def leave_everything(endpoint, place):
    """Ends an agent with registrations, prepared lists, and requests in every state."""
    agent = endpoint.agent
    mine = agent.prep_xfer_dlist("NIXL_INIT_AGENT", endpoint.descriptors(endpoint.base, [0], endpoint.size))
    handles = [endpoint.request(op, place, [(0, 0, endpoint.size)]) for op in ("READ", "WRITE", "READ")]
    assert endpoint.outcome(handles[0]) == DONE
    assert endpoint.post(handles[1]) in ("PROC", DONE)
    for handle in (mine, *handles):
        # As if the application had lost them.
        handle._released = True
    endpoint.close()


def test_an_agent_leaves_everything_behind(pair):
    pair = pair(size=4 * MIB)
    pair.introduce()
    pair.remote.run(leave_everything, ("initiator", pair.local.base))
    # The process continues after its agent is gone, and its peer too.
    assert pair.remote.run(str) is not None
    other = pair.local.request("WRITE", ("initiator", pair.local.base), [(0, MIB, MIB)])
    assert pair.local.outcome(other) == DONE
    pair.local.release(other)


def test_a_region_takes_few_bytes_of_metadata(endpoint):
    """NIXL's own part is 33 bytes a region; applications ship thousands of regions."""
    one = endpoint("alone", 200 * PAGE)
    one.deregister()
    sizes = []
    for first in (0, 100):
        offsets = range(first * PAGE, (first + 100) * PAGE, PAGE)
        one.registrations.append(register_table(one, offsets, [PAGE // 2] * 100))
        sizes.append(len(one.metadata()))
    assert (sizes[1] - sizes[0]) / 100 <= 48
