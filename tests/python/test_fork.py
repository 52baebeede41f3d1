"""Tests forks: children do not use inherited objects, and create sessions of their own."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import tcpx
from conftest import WAIT
from tcpx import p2p
from tcpx.errors import ForkedError

SIZE = 4 << 20

BOB = """
    import sys
    import numpy as np
    import tcpx
    with tcpx.Session("bob") as bob:
        memory = np.zeros(int(sys.argv[1]), np.uint8)
        region = bob.register(memory)
        print(bob.connection_info.hex(), region.descriptor.hex(), flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def bob():
    """Returns connection info and memory of a session in a process of its own."""
    code = [sys.executable, "-c", textwrap.dedent(BOB), str(SIZE)]
    with subprocess.Popen(code, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        info, descriptor = (bytes.fromhex(word) for word in process.stdout.readline().split())
        yield info, tcpx.RemoteRegion(descriptor)
        process.stdin.close()


@contextmanager
def child(body, lives=False):
    """Runs `body` in a forked child, which must succeed, and ends it; `lives` keeps it until the
    block ends."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later Pythons warn of forking with threads
        number = os.fork()
    if number == 0:
        try:
            os.close(read)
            signal.alarm(120)  # whatever becomes of the parent
            try:
                body()
                said = "fine"
            except BaseException as error:
                said = repr(error)
            os.write(write, said.encode())
            os.close(write)
            while lives:
                signal.pause()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as words:
        said = words.read()
    try:
        assert said == "fine"
        yield number
    finally:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)


def refuses(*calls):
    for call in calls:
        with pytest.raises(ForkedError, match="process .* which forked: create a session in this process"):
            call()


def test_children_cannot_use_what_they_inherit(bob):
    info, theirs = bob
    with tcpx.Session("alice") as alice:
        peer = alice.add_peer(info)
        memory, back = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
        here, there = alice.register(memory), alice.register(back)
        read = alice.prepare("read", peer, [(there, 0, theirs, 0, SIZE)])
        events = alice.events

        def body():
            segment = [(here, 0, theirs, 0, 8)]
            refuses(
                write.poll, write.done, write.wait, write.abort, write.estimate, read.post,
                lambda: alice.notify(peer, b"never"), alice.notifications, lambda: alice.accept(1),
                lambda: alice.wait_notification(1), lambda: alice.add_peer(info), lambda: alice.peer("bob"),
                lambda: alice.peers, lambda: alice.own_peer, lambda: alice.remove_peer(peer),
                lambda: alice.register(bytearray(8)), lambda: alice.write(peer, segment),
                lambda: alice.send(peer, here, 1), lambda: alice.recv(peer, here, 1),
                peer.connect, peer.disconnect, lambda: peer.connected, lambda: peer.lanes, lambda: peer.same_host,
                here.deregister,
                write.__await__, lambda: write.arm(events), events.take, events.fileno, alice.fileno,
                lambda: alice.events, lambda: alice.subscribe(events),
            )  # fmt: skip
            assert (alice.name, here.nbytes, peer.name) == ("alice", SIZE, "bob")
            assert all(repr(thing) for thing in (alice, peer, here, write, events))
            alice.close()
            with tcpx.Session("child") as own:
                # Objects of two processes are refused before anything is done.
                refuses(lambda: own.notify(peer, b"never"))
                mine = own.register(bytearray(8))
                own.write(own.own_peer, [(mine, 0, tcpx.RemoteRegion(mine.descriptor), 4, 4)]).wait(WAIT)

        for number in range(20):
            memory[:] = number + 1
            write = alice.write(peer, [(here, 0, theirs, 0, SIZE)])
            with child(body):
                write.wait(WAIT)
                read.post()
                read.wait(WAIT)
            assert (back == number + 1).all()


def test_a_child_that_drops_everything_disturbs_nobody(bob):
    info, theirs = bob
    for number in range(20):
        alice = tcpx.Session("alice")
        peer = alice.add_peer(info)
        memory = np.full(SIZE, number + 1, np.uint8)
        region = alice.register(memory)
        write = alice.write(peer, [(region, 0, theirs, 0, SIZE)])

        def body():
            nonlocal alice, peer, region, write
            del write, region, peer, alice

        with child(body):
            write.wait(WAIT)
        alice.close()


def _write_to(info, descriptor, pipe):
    with tcpx.Session(f"child-{os.getpid()}") as own:
        mine = own.register(bytearray(b"child" * 20))
        peer = own.add_peer(info)
        own.write(peer, [(mine, 0, tcpx.RemoteRegion(descriptor), 0, 100)], notify=b"there").wait(WAIT)
    pipe.send(os.getpid())


def test_children_of_multiprocessing_transfer_to_their_parent():
    context = multiprocessing.get_context("fork")
    with tcpx.Session("parent") as parent:
        for _ in range(20):
            memory = bytearray(100)
            region = parent.register(memory)
            ours, theirs = context.Pipe()
            arguments = (parent.connection_info, region.descriptor, theirs)
            process = context.Process(target=_write_to, args=arguments)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                process.start()
            notification = parent.wait_notification(WAIT)
            assert (notification.sender, notification.message) == (f"child-{process.pid}", b"there")
            assert memory == b"child" * 20
            assert ours.poll(WAIT) and ours.recv() == process.pid
            process.join(WAIT)
            assert process.exitcode == 0


def test_an_endpoint_refuses_children():
    here, there = p2p.Endpoint(0), p2p.Endpoint(0)
    _, conn = here.add_remote_endpoint(there.get_metadata())
    memory = np.zeros(64, np.uint8)
    at = memory.ctypes.data
    _, mr = here.reg(at, 64)
    _, blob = here.advertise(mr, at, 64)

    def body():
        refuses(
            lambda: here.reg(at, 64), lambda: here.dereg(mr), lambda: here.regv([at], [64]),
            lambda: here.add_remote_endpoint(there.get_metadata()), lambda: here.remove_remote_endpoint(conn),
            here.accept, here.start_passive_accept, lambda: here.advertise(mr, at, 64),
            lambda: here.write(conn, mr, at, 64, blob), lambda: here.read_async(conn, mr, at, 64, blob),
            lambda: here.poll_async(0), lambda: here.send(conn, mr, at, 64), lambda: here.recv_async(conn, mr, at, 64),
            lambda: here.advertise_ipc(conn, at, 64), lambda: here.send_ipc_async(conn, at, 64),
        )  # fmt: skip
        assert "of another process" in repr(here)
        own = p2p.Endpoint(0)
        assert own.add_remote_endpoint(there.get_metadata())[0] is True

    for _ in range(5):
        with child(body):
            assert here.send_async(conn, mr, at, 64)[0] is True


def test_a_port_is_free_while_a_child_lives():
    def is_free():
        first = tcpx.Session("first")
        address = first.addresses[0]
        with child(lambda: None, lives=True):
            first.close()
            with tcpx.Session("second", listen_port=address.rpartition(":")[2]) as second:
                return address in second.addresses

    # Another program may take the port in between, but hardly every time.
    assert any(is_free() for _ in range(5))
