"""Tests many agents, many threads, and agents that come and go."""

import gc
import os
import threading

import numpy as np
import pytest

from conftest import NIXL
from endpoint import DONE, Endpoint, pattern, scattered, until

MIB = 1 << 20
SLOT = 64 << 10


def exchange_with_all(endpoint, own, others):
    """Writes its outbox into all inboxes, waits for the others, reads their outboxes; compares all bytes.

    `others` are (number, name, address, metadata). Memory: an inbox slot for each agent, an outbox slot for each.
    """
    count = len(others) + 1
    block = lambda seed: pattern(seed, len(endpoint.block))[Endpoint.GUARD :]
    slot = lambda data, i: data[i * SLOT : (i + 1) * SLOT]
    for _, _, _, metadata in others:
        endpoint.load(metadata)
    requests = [
        endpoint.request("WRITE", (name, address), [((count + i) * SLOT, own * SLOT, SLOT)], b"from %d" % own)
        for i, name, address, _ in others
    ]
    for request in requests:
        assert endpoint.post(request) in ("PROC", DONE)
    assert {endpoint.wait(request) for request in requests} == {DONE}
    got = endpoint.notifications(len(others))
    assert sorted(got) == sorted((name, b"from %d" % i) for i, name, _, _ in others)
    memory = endpoint.block[Endpoint.GUARD :]
    for i, name, address, _ in others:
        theirs = block(i)
        assert np.array_equal(slot(memory, i), slot(theirs, count + own)), f"inbox of {i} in {own}"
        handle = endpoint.request("READ", (name, address), [(own * SLOT, (count + i) * SLOT, SLOT)])
        assert endpoint.outcome(handle) == DONE
        assert np.array_equal(slot(memory, own), slot(theirs, count + i)), f"outbox of {i} in {own}"
        endpoint.release(handle)
    for request in requests:
        endpoint.release(request)
    return True


def introductions(endpoints):
    known = [(i, one.name, one.address(), one.metadata()) for i, one in enumerate(endpoints)]
    return [(i, known[:i] + known[i + 1 :]) for i in range(len(known))]


def test_eight_processes(peer):
    """All agents transfer with each other at once."""
    agents = [peer(f"agent {i}", 16 * SLOT, seed=i) for i in range(8)]
    for agent, introduction in zip(agents, introductions(agents)):
        agent.start(exchange_with_all, *introduction)
    assert all(agent.result() for agent in agents)


def test_five_agents_in_one_process(endpoint):
    agents = [endpoint(f"agent {i}", 10 * SLOT, seed=i) for i in range(5)]
    results = [None] * 5

    def work(i, introduction):
        results[i] = exchange_with_all(agents[i], *introduction)

    threads = [
        threading.Thread(target=work, args=(i, introduction))
        for i, introduction in enumerate(introductions(agents))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 5


def test_two_of_one_name(endpoint, peer):
    """Agents of the same name write to one target; it then reads from one after the other."""
    target = endpoint("target", MIB)
    twins = [peer("twin", MIB, seed=seed) for seed in (11, 12)]
    for i, twin in enumerate(twins):
        twin.load(target.metadata())
        twin.run(write_slot, ("target", target.base), i)
    assert sorted(target.notifications(2)) == [("twin", b"0"), ("twin", b"1")]
    inside = lambda block: block[Endpoint.GUARD :][:MIB]
    for i, twin in enumerate(twins):
        theirs = inside(twin.contents())
        assert np.array_equal(inside(target.block)[i * SLOT :][:SLOT], theirs[:SLOT])
        target.load(twin.metadata())
        handle = target.request("READ", ("twin", twin.address()), [(0, 0, MIB)], b"%d" % i)
        assert target.outcome(handle) == DONE
        assert np.array_equal(inside(target.block), theirs)
        assert twin.notifications(1) == [("target", b"%d" % i)]
        target.release(handle)
        target.forget("twin")
        inside(target.block)[SLOT : 2 * SLOT] = inside(twins[1].contents())[:SLOT]


def write_slot(endpoint, place, slot):
    handle = endpoint.request("WRITE", place, [(0, slot * SLOT, SLOT)], b"%d" % slot)
    assert endpoint.outcome(handle) == DONE
    endpoint.release(handle)


def sync_modes():
    if NIXL < (1, 5):
        return [{}]
    from nixl._api import nixl_thread_sync_t

    return [{"sync_mode": mode} for mode in nixl_thread_sync_t]


@pytest.mark.parametrize("mode", sync_modes(), ids=lambda m: getattr(m.get("sync_mode"), "name", "default"))
def test_four_threads(endpoint, peer, mode):
    """Each thread creates, posts, reposts and releases its own requests on its own part of the
    memory."""
    local, remote = endpoint("initiator", 4 * MIB, **mode), peer("target", 4 * MIB)
    local.load(remote.metadata())
    place = ("target", remote.address())
    before = remote.contents()
    ends = []

    def work(part):
        segments = scattered(64, MIB // 2, seed=part) + [part * MIB, part * MIB, 0]
        back = segments + [MIB // 2, 0, 0]
        for _ in range(10):
            for op, where in (("WRITE", segments), ("READ", back)):
                handle = local.request(op, place, where, b"%d" % part)
                ends.extend((local.outcome(handle), local.outcome(handle)))
                local.release(handle)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [DONE] * 160
    messages = [message for _, message in remote.notifications(160)]
    assert sorted(messages) == sorted(b"%d" % part for part in range(4) for _ in range(40))
    # The bytes written and read back are the original ones.
    block, after = local.block[Endpoint.GUARD :], remote.contents()
    for part in range(4):
        for own, theirs, length in scattered(64, MIB // 2, seed=part) + [part * MIB, part * MIB, 0]:
            there = after[Endpoint.GUARD + theirs :][:length]
            assert np.array_equal(block[own : own + length], there)
            assert np.array_equal(block[own + MIB // 2 : own + MIB // 2 + length], there)
    changed = np.flatnonzero(after != before) - Endpoint.GUARD
    assert ((changed % MIB) < MIB // 2).all() and changed.min() >= 0 and changed.max() < 4 * MIB


def resources():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_nothing_is_left_behind(endpoint):
    """Agents that came and went leave no thread and no file open."""

    def life():
        one, two = endpoint("one", MIB), endpoint("two", MIB)
        one.load(two.metadata())
        handle = one.request("WRITE", ("two", two.base), [(0, 0, MIB)], b"hello")
        assert one.outcome(handle) == DONE
        one.release(handle)
        del handle
        one.close()
        two.close()

    life()
    before = resources()
    for _ in range(10):
        life()
    until(lambda: all(now <= then for now, then in zip(resources(), before)), f"threads and files as before: {before}")
