"""Tests peers that end, die, hang and return: one clear error, in bounded time, and no crash.

NIXL up to 1.4 drops a peer whose transfer ended with REMOTE_DISCONNECT; later ones leave that to the application.
"""

import os
import select
import signal
import socket
import time
import warnings

import numpy as np
import pytest

from conftest import NIXL, Pair
from endpoint import DISCONNECTED, DONE, ERRORS, NOT_ALLOWED, NOT_FOUND, Endpoint

MIB = 1 << 20

DROPS_DEAD_PEERS = NIXL < (1, 5)

# A lost peer is noticed at once; this limit is for a busy machine.
SOON = 20


def forget(endpoint, name):
    """Removes a peer that may already have been dropped."""
    try:
        endpoint.forget(name)
    except ERRORS as error:
        assert type(error).__name__ == NOT_FOUND


def check_gone(endpoint, handle):
    """Posts to a lost peer: exactly one result is right."""
    start = time.monotonic()
    assert endpoint.outcome(handle) == DISCONNECTED
    assert time.monotonic() - start < SOON


# The peer's process is killed.


def test_killed_before_the_first_post(pair, op):
    pair = pair()
    handle = pair.request(op, [(0, 0, MIB)], b"never")
    pair.remote.kill()
    check_gone(pair.local, handle)
    pair.local.release(handle)
    forget(pair.local, "target")


def test_killed_after_a_good_transfer(pair, op):
    pair = pair()
    handle = pair.request(op, [(0, 0, MIB)], b"first")
    assert pair.local.outcome(handle) == DONE
    pair.remote.kill()
    if DROPS_DEAD_PEERS:
        check_gone(pair.local, handle)
        with pytest.raises(Exception, match="NIXL_ERR_NOT_FOUND"):
            pair.request(op, [(0, 0, MIB)])
    else:
        # Posts repeatedly, by old requests and by new ones.
        for _ in range(3):
            check_gone(pair.local, handle)
        other = pair.request(op, [(0, 0, 4096)])
        check_gone(pair.local, other)
        pair.local.release(other)
    pair.local.release(handle)
    forget(pair.local, "target")


@pytest.mark.usefixtures("lanes")
def test_killed_during_a_transfer(pair, op):
    """Deterministic: the peer is frozen when the transfer begins, so that it cannot end."""
    pair = pair(size=16 * MIB)
    first = pair.request(op, [(0, 0, 4096)])
    assert pair.local.outcome(first) == DONE
    handle = pair.request(op, [(0, 0, 16 * MIB)], b"never")
    pair.remote.freeze()
    assert pair.local.post(handle) == "PROC"
    assert pair.local.state(handle) == "PROC"
    pair.remote.kill()
    assert pair.local.wait(handle, SOON) == DISCONNECTED
    pair.local.release(handle)
    pair.local.release(first)
    forget(pair.local, "target")


@pytest.mark.parametrize("delay", [0, 0.002, 0.01])
def test_killed_at_any_moment(pair, op, delay):
    pair = pair(size=32 * MIB)
    handle = pair.request(op, [(0, 0, 32 * MIB)], b"perhaps")
    assert pair.local.post(handle) in ("PROC", DONE)
    time.sleep(delay)
    pair.remote.kill()
    assert pair.local.wait(handle, SOON) in (DISCONNECTED, DONE)
    pair.local.release(handle)


@pytest.mark.usefixtures("lanes")
def test_killed_beside_others(endpoint, peer, op):
    """One of two targets dies: the other one's transfers are not affected."""
    local = endpoint("initiator", 8 * MIB)
    dying, living = (peer(name, 8 * MIB) for name in ("dying", "living"))
    handles = {}
    for one in (dying, living):
        local.load(one.metadata())
        handles[one.name] = local.request(op, (one.name, one.address()), [(0, 0, 8 * MIB)])
        assert local.outcome(handles[one.name]) == DONE
    dying.freeze()
    assert local.post(handles["dying"]) == "PROC"
    assert local.post(handles["living"]) in ("PROC", DONE)
    dying.kill()
    assert local.wait(handles["dying"], SOON) == DISCONNECTED
    assert local.wait(handles["living"]) == DONE
    assert local.outcome(handles["living"]) == DONE
    for handle in handles.values():
        local.release(handle)


def test_the_initiator_is_killed(pair, peer, op):
    """Its target continues to serve: the next initiator of that name, too."""
    target = pair().remote
    place = ("target", target.address())
    for _ in range(2):
        dying = peer("second", 16 * MIB)
        dying.load(target.metadata())
        dying.run(post_and_stay, op, place)
        dying.kill()
    next_one = peer("second", MIB)
    next_one.load(target.metadata())
    next_one.run(transfer_once, op, place, b"still there")
    assert target.notifications(1) == [("second", b"still there")]


@pytest.mark.usefixtures("lanes")
def test_the_initiator_of_the_connection_is_killed(pair):
    """The accepting side probes again for a peer whose listener ends after its streams.

    A process that is killed closes one socket after the other. Here another one holds those that
    listen until the first question whether the peer exists has come, and then ends, too.
    """
    pair = pair(size=4 * MIB, params={"peer_timeout": "1h"})
    pair.introduce()
    pair.remote.notify("initiator", b"connect")
    pair.local.notifications(1)
    handle = pair.request("READ", [(0, 0, 4 * MIB)])
    pair.remote.run(leave_listeners_behind)
    pair.remote.freeze()
    assert pair.local.post(handle) == "PROC"
    pair.remote.kill()
    assert pair.local.wait(handle) == DISCONNECTED
    pair.local.release(handle)


def leave_listeners_behind(_endpoint):
    """Forks a process that holds the listening sockets until a client connects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later Pythons warn of forking with threads
        if os.fork():
            return
    signal.alarm(60)  # nobody connects
    listening = []
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket
            continue
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listening.append(one)
        else:
            one.detach()
    kept = {one.fileno() for one in listening}
    for fd in set(map(int, os.listdir("/proc/self/fd"))) - kept:
        try:
            os.close(fd)
        except OSError:  # the listing
            pass
    select.select(listening, [], [])
    os._exit(0)


def post_and_stay(endpoint, op, place):
    endpoint.kept = [endpoint.request(op, place, [(i * MIB, 0, MIB)]) for i in range(16)]
    for handle in endpoint.kept:
        assert endpoint.post(handle) in ("PROC", DONE)


def transfer_once(endpoint, op, place, message=b""):
    handle = endpoint.request(op, place, [(0, 0, MIB)], message)
    assert endpoint.outcome(handle) == DONE
    endpoint.release(handle)


@pytest.mark.usefixtures("lanes")
def test_hangs(pair, op):
    """An unresponsive peer times out after peer_timeout."""
    pair = pair(size=16 * MIB, params={"peer_timeout": "3s"})
    handle = pair.request(op, [(0, 0, 16 * MIB)])
    assert pair.local.outcome(handle) == DONE
    pair.remote.freeze()
    start = time.monotonic()
    assert pair.local.outcome(handle, timeout=SOON) == DISCONNECTED
    assert 0.5 < time.monotonic() - start
    pair.local.release(handle)
    pair.remote.kill()


def test_connecting_to_the_dead(pair):
    pair = pair()
    pair.remote.kill()
    start = time.monotonic()
    with pytest.raises(Exception, match="NIXL_ERR_REMOTE_DISCONNECT"):
        pair.local.agent.make_connection("target")
    assert time.monotonic() - start < SOON
    with pytest.raises(Exception, match="NIXL_ERR_NOT_FOUND"):
        pair.local.agent.make_connection("nobody")


def test_notifications_to_the_dead(pair):
    """Sent or refused, but neither blocking nor crashing."""
    pair = pair()
    pair.local.notify("target", b"hello")
    pair.remote.notifications(1)
    pair.remote.kill()
    for _ in range(20):
        try:
            pair.local.notify("target", b"anybody?")
        except ERRORS:
            pass
        time.sleep(0.01)
    forget(pair.local, "target")


def test_returns_under_its_name(pair, peer, op):
    """A new process with the old name works once its metadata is loaded."""
    pair = pair()
    for _ in range(2):
        pair.transfer(op, [(0, 0, MIB)], b"before")
        handle = pair.request(op, [(0, 0, MIB)], b"stale")
        pair.remote.kill()
        check_gone(pair.local, handle)
        pair.local.release(handle)
        successor = peer("target", MIB)
        if not DROPS_DEAD_PEERS:
            with pytest.raises(Exception, match="NIXL_ERR_NOT_ALLOWED"):
                pair.local.load(successor.metadata())
            pair.local.forget("target")
        pair = Pair(pair.local, successor)
        pair.transfer(op, [(0, 0, MIB)], b"after")
        # It may initiate transfers, too.
        pair.introduce()
        pair.remote.notify("initiator", b"I am back")
        assert pair.local.notifications(1) == [("target", b"I am back")]
        pair.remote.forget("initiator")


# As in NIXL's own error_handling tests: two agents in one process, the target is destroyed
# properly.


class Two:
    def __init__(self, endpoint, progress):
        self.make = lambda name: endpoint(name, 256, enable_prog_thread=progress)
        self.initiator, self.target = self.make("initiator"), self.make("target")
        self.exchange()

    def exchange(self):
        self.initiator.load(self.target.metadata())
        self.target.load(self.initiator.metadata())

    def destroy_target(self):
        self.target.deregister()
        forget(self.target, "initiator")
        self.target.close()

    def request(self, op):
        return self.initiator.request(op, ("target", self.target.base), [(0, 0, 256)], b"notification")

    def good(self, op, seed):
        self.initiator.fill(seed)
        handle = self.request(op)
        assert self.initiator.outcome(handle) == DONE
        inside = slice(Endpoint.GUARD, -Endpoint.GUARD)
        assert np.array_equal(self.initiator.block[inside], self.target.block[inside])
        assert self.target.notifications(1) == [("initiator", b"notification")]
        assert self.target.no_notifications(0.02) == {}
        self.initiator.release(handle)

    def fails(self, handle):
        check_gone(self.initiator, handle)
        self.initiator.release(handle)


@pytest.fixture(params=[True, False], ids=["progress-thread", "no-progress-thread"])
def two(request, endpoint):
    return Two(endpoint, request.param)


def test_destroyed_before_the_first_post(two, op):
    handle = two.request(op)
    two.destroy_target()
    two.fails(handle)


def test_destroyed_after_a_good_transfer(two, op):
    two.good(op, seed=1)
    handle = two.request(op)
    two.destroy_target()
    two.fails(handle)
    two.initiator.deregister()
    forget(two.initiator, "target")


def test_destroyed_and_restored(two, op):
    two.good(op, seed=2)
    handle = two.request(op)
    two.destroy_target()
    two.fails(handle)
    two.target = two.make("target")
    if not DROPS_DEAD_PEERS:
        two.initiator.forget("target")
    two.exchange()
    two.good(op, seed=3)


def test_destroyed_after_the_post(two, op):
    two.good(op, seed=4)
    handle = two.request(op)
    state = two.initiator.post(handle)
    two.destroy_target()
    if state == "PROC":
        state = two.initiator.wait(handle, SOON)
    assert state in (DISCONNECTED, DONE)
    two.initiator.release(handle)


def test_a_request_from_before(two, op):
    """After the peer was removed and loaded again, earlier requests are refused, by newer NIXL
    itself, else by the backend."""
    handle = two.request(op)
    two.initiator.forget("target")
    assert two.initiator.outcome(handle) == NOT_FOUND
    two.initiator.load(two.target.metadata())
    assert two.initiator.outcome(handle) == NOT_FOUND
    two.initiator.release(handle)
    two.good(op, seed=5)


# The agent's process forks.


def test_a_forked_child_leaves_the_agent_of_its_parent_alone(pair, op):
    pair = pair(size=16 * MIB)
    pair.introduce()
    handle = pair.request(op, [(0, 0, 16 * MIB)], b"whole")
    assert pair.local.post(handle) in ("PROC", DONE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later Pythons warn of forking with threads
        child = os.fork()
    if child == 0:
        signal.alarm(60)  # a call that hangs
        code = 1
        try:
            assert pair.local.state(handle) == NOT_ALLOWED
            for call in (
                lambda: pair.local.notify("target", b"never"),
                lambda: pair.local.agent.get_new_notifs(),
                lambda: pair.request(op, [(0, 0, 8)]),
                lambda: pair.local.register(0, 8),
            ):
                with pytest.raises(Exception, match="NIXL_ERR"):
                    call()
            pair.local.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert pair.local.wait(handle) == DONE
    assert pair.remote.notifications(1) == [("initiator", b"whole")]
    pair.transfer(op, [(0, 0, 16 * MIB)])
    pair.local.release(handle)
