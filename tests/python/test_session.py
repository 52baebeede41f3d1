"""Tests the package's own classes."""

import os
import threading
import time

import numpy as np
import pytest
import tcpx
from conftest import WAIT, pattern
from tcpx import p2p


def test_write_with_notification_lands_every_byte(pair):
    alice, bob, peer = pair
    source, target = pattern(1 << 20, 1), np.zeros(1 << 20, np.uint8)
    mine, theirs = alice.register(source), bob.register(target)
    remote = tcpx.RemoteRegion(theirs.descriptor)
    assert (remote.address, remote.nbytes, remote.memory) == (target.ctypes.data, 1 << 20, "host")
    assert (mine.address, mine.nbytes, mine.memory) == (source.ctypes.data, 1 << 20, "host")
    transfer = alice.write(peer, [(mine, 100, remote, 5, (1 << 20) - 100)], notify=b"a\0b")
    transfer.wait(WAIT)
    assert transfer.done() and transfer.poll() == "done" and transfer.nbytes == (1 << 20) - 100
    note = bob.wait_notification(WAIT)
    assert (note.sender, note.message) == ("alice", b"a\0b")
    assert (target[5:-95] == source[100:]).all() and not target[:5].any() and not target[-95:].any()


def test_blocks_are_scattered_and_posted_again(pair):
    alice, bob, peer = pair
    block, count = 4096, 300
    source, target = pattern(block * count, 2), np.zeros(block * count, np.uint8)
    mine, theirs = alice.register(target), tcpx.RemoteRegion((kept := bob.register(source)).descriptor)
    order = np.arange(count) * 7 % count
    transfer = alice.prepare_blocks("read", peer, mine, np.arange(count) * block, theirs, order * block, block)
    assert transfer.poll() == "prepared"
    for seed in (3, 4):
        source[:] = pattern(block * count, seed)
        transfer.post()
        transfer.wait(WAIT)
        assert (target.reshape(count, block) == source.reshape(count, block)[order]).all()
    seconds, margin = transfer.estimate()
    assert seconds > 0 and margin >= 0
    assert kept.nbytes == block * count


def test_tagged_messages(pair):
    alice, bob, to_bob = pair
    to_alice = bob.accept(WAIT)
    assert to_alice.name == "alice" and bob.peer("alice").name == "alice" and bob.peer("nobody") is None
    small, large, received = bytearray(b"Hello"), pattern(3 << 20, 5), np.zeros(4 << 20, np.uint8)
    target = bob.register(received)
    for message in (small, large):
        send = alice.send(to_bob, alice.register(message), 99)
        receive = bob.recv(to_alice, target, 99)
        receive.wait(WAIT)
        send.wait(WAIT)
        assert receive.received == len(message)
        assert bytes(received[: len(message)]) == bytes(message)
    too_small = bob.recv(to_alice, target, 1, nbytes=2)
    send = alice.send(to_bob, alice.register(small), 1)
    with pytest.raises(tcpx.errors.TruncatedError):
        too_small.wait(WAIT)
    with pytest.raises(tcpx.errors.TruncatedError):
        send.wait(WAIT)


def test_notifications_come_in_order(pair):
    alice, bob, peer = pair
    for i in range(100):
        alice.notify(peer, b"%d" % i)
    got = []
    while len(got) < 100:
        got += [note.message for note in bob.notifications()]
    assert got == [b"%d" % i for i in range(100)]
    alice.notify(peer, b"")
    assert bob.wait_notification(WAIT).message == b""


def test_errors_say_who_must_act(pair):
    alice, bob, peer = pair
    memory = bytearray(64)
    mine, theirs = alice.register(memory), bob.register(bytearray(64))
    remote = tcpx.RemoteRegion(theirs.descriptor)
    with pytest.raises(ValueError, match="segment 1"):
        alice.read(peer, [(mine, 0, remote, 0, 1), (mine, 60, remote, 0, 5)])
    with pytest.raises(ValueError, match='"reed"'):
        alice.prepare("reed", peer, [])
    with pytest.raises(ValueError, match="local_offsets has 2 items and remote_offsets 1"):
        alice.prepare_blocks("read", peer, mine, [0, 1], remote, [0], 1)
    with pytest.raises(tcpx.Error):
        alice.add_peer(b"junk")
    with pytest.raises(ValueError):
        tcpx.RemoteRegion(b"junk")
    with pytest.raises(ValueError, match="no setting"):
        tcpx.Session(lane=3)
    with pytest.raises(TimeoutError):
        alice.wait_notification(0.01)
    with pytest.raises(ValueError, match="timeout"):
        alice.wait_notification(-1)
    read = alice.prepare("read", peer, [(mine, 0, remote, 0, 64)])
    theirs.deregister()
    read.post()
    with pytest.raises(tcpx.errors.RegionGoneError):
        read.wait(WAIT)
    with pytest.raises(tcpx.errors.RefusedError):
        read.done()
    bob.close()
    with pytest.raises(ConnectionError):
        alice.read(peer, [(mine, 0, remote, 0, 64)]).wait(WAIT)
    alice.remove_peer(peer)
    with pytest.raises(LookupError):
        alice.read(peer, [(mine, 0, remote, 0, 64)])
    alice.close()
    with pytest.raises(tcpx.errors.ClosedError):
        alice.register(bytearray(1))


def test_transfers_keep_their_memory(pair):
    alice, bob, peer = pair
    target = np.zeros(1 << 16, np.uint8)
    remote = tcpx.RemoteRegion((kept := bob.register(target)).descriptor)
    transfer = alice.prepare("write", peer, [(alice.register(pattern(1 << 16, 9)), 0, remote, 0, 1 << 16)])
    transfer.post()
    transfer.wait(WAIT)
    assert (target == pattern(1 << 16, 9)).all() and kept.id > 0


def ports(session):
    return {int(address.rpartition(":")[2]) for address in session.addresses}


def test_sessions_share_a_range_of_ports():
    def share(first):
        both = f"{first}-{first + 1}"
        with tcpx.Session("one", listen_port=both) as one, tcpx.Session("two", listen_port=both) as two:
            assert ports(one) | ports(two) == {first, first + 1} and not ports(one) & ports(two)
            with pytest.raises(OSError, match=f"{both}.*widen the range"):
                tcpx.Session("three", listen_port=both)
            peer = one.add_peer(two.connection_info)
            peer.connect(WAIT)

    # Other programs may take one of the two, but hardly every time.
    for first in range(20011, 20811, 100):
        try:
            return share(first)
        except OSError as error:
            taken = error
    raise taken


def test_what_peers_are_told_to_connect_to():
    """Publishes a name instead of the addresses, which the other side resolves."""
    with tcpx.Session("alice") as alice, tcpx.Session("bob", advertise="localhost") as bob:
        assert b"localhost" in bob.connection_info
        alice.add_peer(bob.connection_info).connect(WAIT)
    with pytest.raises(ValueError, match="advertise"):
        tcpx.Session(advertise="0.0.0.0")


def test_within_one_session():
    with tcpx.Session() as session:
        memory = np.concatenate([pattern(4096, 6), np.zeros(4096, np.uint8)])
        region = session.register(memory)
        session.write(session.own_peer, [(region, 0, tcpx.RemoteRegion(region.descriptor), 4096, 4096)]).wait(WAIT)
        assert (memory[:4096] == memory[4096:]).all()


def test_what_was_never_posted_cannot_be_waited_for():
    with tcpx.Session() as session:
        region = session.register(bytearray(64))
        transfer = session.prepare("write", session.own_peer, [(region, 0, tcpx.RemoteRegion(region.descriptor), 0, 64)])
        with pytest.raises(tcpx.Error, match="never posted"):
            transfer.wait()


def test_waiting_leaves_python_running(pair):
    alice, bob, to_bob = pair
    heard = []
    waiter = threading.Thread(target=lambda: heard.append(bob.wait_notification(WAIT)))
    waiter.start()
    for _ in range(10):
        time.sleep(0.01)
    assert not heard
    # If Python were blocked until the wait ends, nothing could send what it waits for.
    alice.notify(to_bob, b"wake up")
    waiter.join()
    assert heard[0].message == b"wake up"


def test_abort(pair):
    alice, bob, _ = pair
    to_alice = bob.accept(WAIT)
    never = bob.recv(to_alice, bob.register(bytearray(64)), 12345)
    assert never.poll() == "in progress" and not never.done()
    never.abort()
    with pytest.raises(tcpx.errors.AbortedError):
        never.wait(WAIT)


def test_machine():
    assert "lo" in [interface.name for interface in tcpx.interfaces()]
    rows = {row.key: row for row in tcpx.settings()}
    assert rows["interfaces"].value == "lo" and rows["interfaces"].variable == "TCPX_INTERFACES"
    with tcpx.Session(lanes=3) as session:
        assert {row.key: row.value for row in session.settings}["lanes"] == "3"
        assert all(address.startswith(("127.", "[::1]")) for address in session.addresses)
    assert tcpx.__version__.count(".") == 2


@pytest.mark.parametrize(
    ("variable", "start"),
    [("TCPX_LOG", tcpx.Session), ("TCPX_LOG", p2p.Endpoint), ("UCCL_SOCKET_IFNAME", p2p.Endpoint)],
)
def test_a_variable_that_is_no_text_is_named(monkeypatch, variable, start):
    monkeypatch.setitem(os.environb, variable.encode(), b"lo\xff")
    with pytest.raises((ValueError, RuntimeError), match=f"{variable}.*UTF-8"):
        start()
