"""Transfers and notifications in asyncio, and the descriptor for other event loops."""

import asyncio
import gc
import select
import threading
import time
import weakref

import numpy as np
import pytest
import tcpx
from conftest import WAIT, pattern
from tcpx.errors import AbortedError, ClosedError, NotAllowedError, RefusedError

SMALL, LARGE = 4096, 4 << 20


def run(main, limit=3 * WAIT):
    """Runs a coroutine in a loop of its own; fails if it hangs."""

    async def limited():
        return await asyncio.wait_for(main, limit)

    return asyncio.run(limited())


class Copy:
    """Returns memory of Alice's, and memory of Bob's that it is written to."""

    def __init__(self, pair, size=SMALL, seed=1):
        self.alice, self.bob, self.peer = pair
        self.source, self.target = pattern(size, seed), np.zeros(size, np.uint8)
        self.local, self.served = self.alice.register(self.source), self.bob.register(self.target)
        remote = tcpx.RemoteRegion(self.served.descriptor)
        self.segments = [(self.local, 0, remote, 0, size)]

    def write(self, notify=None):
        return self.alice.write(self.peer, self.segments, notify=notify)

    def arrived(self):
        return (self.source == self.target).all()


@pytest.fixture(params=["auto", "off"])
def any_pair(request):
    """Like `pair`: memory is copied directly, or goes over lanes."""
    with tcpx.Session("alice", same_host=request.param) as alice, tcpx.Session("bob") as bob:
        peer = alice.add_peer(bob.connection_info)
        peer.connect(WAIT)
        yield alice, bob, peer


def never_sent(session, peer, tag=7):
    """Returns a receive whose message does not come."""
    return session.recv(peer, session.register(bytearray(64)), tag)


async def asleep(awaitable):
    """Starts a task that awaits, and lets it come to its wait."""
    task = asyncio.ensure_future(awaitable)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    return task


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_transfer_is_awaited_and_again_after_another_posting(any_pair, size):
    copy = Copy(any_pair, size)

    async def main():
        transfer = copy.write()
        assert await transfer is None
        assert copy.arrived()
        for seed in range(3):
            copy.source[:] = pattern(size, seed)
            transfer.post()
            await transfer
            assert copy.arrived()
        # An ended transfer is awaited at once.
        await transfer

    run(main())


def test_many_are_awaited_together(any_pair):
    copies = [Copy(any_pair, size, seed) for seed, size in enumerate([SMALL, LARGE] * 10)]

    async def main():
        await asyncio.gather(*(copy.write() for copy in copies))

    run(main())
    assert all(copy.arrived() for copy in copies)


def test_other_tasks_run_meanwhile(pair):
    alice, bob, peer = pair

    async def main():
        waiting = await asleep(never_sent(alice, peer))
        # The loop is free, and so is the interpreter.
        copy = Copy(pair, LARGE)
        await copy.write()
        assert copy.arrived() and not waiting.done()
        bob.send(bob.accept(WAIT), bob.register(bytearray(b"at last")), 7)
        await waiting

    run(main())


def test_two_tasks_may_await_one_transfer(pair):
    alice, bob, peer = pair

    async def main():
        transfer = never_sent(alice, peer)
        tasks = [await asleep(transfer) for _ in range(3)]
        bob.send(bob.accept(WAIT), bob.register(bytearray(b"at last")), 7)
        await asyncio.gather(*tasks)
        assert transfer.received == 7

    run(main())


def test_failures_are_raised(pair):
    copy = Copy(pair)

    async def main():
        with pytest.raises(NotAllowedError):
            await copy.alice.prepare("write", copy.peer, copy.segments)
        copy.served.deregister()
        with pytest.raises(RefusedError):
            await copy.write()
        waiting = await asleep(never_sent(copy.alice, copy.peer))
        copy.peer.disconnect()
        with pytest.raises(tcpx.Error):
            await waiting

    run(main())


def test_a_cancelled_task_aborts_its_transfer_and_waits_for_the_end(pair):
    alice, _, peer = pair

    async def main():
        transfer = never_sent(alice, peer)
        task = await asleep(transfer)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert transfer.poll() == "aborted"
        with pytest.raises(AbortedError):
            await transfer
        # By a time limit as well.
        transfer = never_sent(alice, peer)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(transfer, 0.01)
        assert transfer.poll() == "aborted"

    run(main())


def test_the_memory_of_a_cancelled_transfer_is_free_afterwards(any_pair):
    copy = Copy(any_pair, LARGE)

    async def main():
        for _ in range(20):
            transfer = copy.write()
            task = asyncio.ensure_future(transfer)
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert transfer.poll() in ("done", "aborted")
            # Nothing is in flight: bytes written here now stay.
            copy.target[:] = 3
            assert (copy.target == 3).all()

    run(main())


def test_a_second_cancellation_stops_the_wait(pair):
    alice, _, peer = pair

    async def main():
        transfer = never_sent(alice, peer)
        task = await asleep(transfer)
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


def test_a_session_that_is_closed_ends_the_waits(pair):
    alice, _, peer = pair

    async def listen():
        return [note async for note in alice.notifications()]

    async def main():
        listening = await asleep(listen())
        waiting = await asleep(never_sent(alice, peer))
        await asyncio.to_thread(alice.close)
        with pytest.raises(ClosedError):
            await waiting
        assert await listening == []
        assert await listen() == []

    run(main())


def test_transfers_keep_their_memory_alive_while_they_are_awaited(pair):
    alice, bob, peer = pair

    async def main():
        target = np.zeros(SMALL, np.uint8)
        kept = weakref.ref(target)
        receive = alice.recv(peer, alice.register(target), 7)
        del target
        waiting = await asleep(receive)
        del receive
        gc.collect()
        assert kept() is not None
        bob.send(bob.accept(WAIT), bob.register(bytearray(b"\x05" * SMALL)), 7)
        await waiting
        del waiting
        gc.collect()
        await asyncio.sleep(0)
        assert kept() is None or (kept() == 5).all()

    run(main())


def test_each_thread_has_a_loop_of_its_own(any_pair):
    copies = [Copy(any_pair, SMALL if n % 2 else LARGE, n) for n in range(4)]
    failed = []

    def work(copy):
        async def main():
            for _ in range(50 if len(copy.source) == SMALL else 5):
                await copy.write()

        try:
            # And a second one after it.
            run(main())
            run(main())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert all(copy.arrived() for copy in copies)


def test_a_loop_that_was_closed_in_between_leaves_nothing_behind(pair):
    from tcpx import _aio

    alice, bob, peer = pair
    transfer = never_sent(alice, peer)
    loop = asyncio.new_event_loop()

    async def waits():
        await transfer

    task = loop.create_task(waits())
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    # Neither the loop nor the task exists any more when it ends.
    task._log_destroy_pending = False
    del task, loop

    async def main():
        waiting = await asleep(transfer)
        bob.send(bob.accept(WAIT), bob.register(bytearray(b"late")), 7)
        await waiting
        # Creating this loop's hub has removed the closed one's.
        assert [known.is_closed() for known in list(_aio._hubs)] == [False]

    run(main())


def test_notifications_are_iterated_over_as_they_arrive(pair):
    alice, bob, peer = pair
    count = 200

    async def listen():
        got = []
        async for note in bob.notifications():
            got.append(note.message)
            if note.message == b"last":
                return got

    async def send():
        for number in range(count):
            alice.notify(peer, b"%d" % number)
            if number % 10 == 0:
                await asyncio.sleep(0)
        copy = Copy(pair)
        await copy.write(notify=b"with a transfer")
        alice.notify(peer, b"last")

    async def main():
        # Some have arrived before.
        alice.notify(peer, b"first")
        got, _ = await asyncio.gather(listen(), send())
        assert got[0] == b"first" and got[-1] == b"last"
        numbers = [message for message in got if message.isdigit()]
        assert numbers == [b"%d" % number for number in range(count)]
        assert b"with a transfer" in got

    run(main())


def test_what_the_iteration_does_not_come_to_is_not_lost(pair):
    alice, bob, peer = pair
    for number in range(5):
        alice.notify(peer, b"%d" % number)

    async def main():
        async for note in bob.notifications():
            if note.message == b"1":
                break
        assert bob.wait_notification(WAIT).message == b"2"
        async for note in bob.notifications():
            assert note.message == b"3"
            break
        assert bob.wait_notification(WAIT).message == b"4"
        assert bob.notifications() == []

    run(main())


def test_notifications_are_a_list(pair):
    alice, bob, peer = pair
    assert bob.notifications() == [] and isinstance(bob.notifications(), list)
    alice.notify(peer, b"one")
    deadline = time.monotonic() + WAIT
    while not (got := bob.notifications()) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [note.message for note in got] == [b"one"]


def test_a_cancelled_iteration_takes_nothing(pair):
    alice, bob, peer = pair

    async def first():
        async for note in bob.notifications():
            return note.message

    async def main():
        task = await asleep(first())
        task.cancel()
        await asyncio.wait([task])
        alice.notify(peer, b"one")
        assert await first() == b"one"

    run(main())


def readable(descriptor):
    return select.select([descriptor], [], [], WAIT)[0] == [descriptor]


def test_the_descriptor_serves_other_loops(pair):
    alice, bob, peer = pair
    # Objects with `fileno` may be waited for themselves.
    assert bob.fileno() == bob.events.fileno()
    assert select.select([bob], [], [], 0)[0] == []
    alice.notify(peer, b"one")
    assert readable(bob)
    happened = bob.events.take()
    assert happened.notified and not happened.closed and happened.ended == []
    assert select.select([bob], [], [], 0)[0] == []
    assert [note.message for note in bob.notifications()] == [b"one"]

    transfers = [never_sent(alice, peer, tag) for tag in (7, 8)]
    for key, transfer in enumerate(transfers):
        assert transfer.arm(alice.events, key) == "in progress"
    transfers[1].abort()
    assert readable(alice)
    assert alice.events.take().ended == [1]
    assert transfers[1].arm(alice.events, 1) == "aborted"
    transfers[0].abort()
    alice.close()
    assert readable(alice.events)
    happened = alice.events.take()
    assert happened.ended == [0] and happened.closed and not happened.more
    with pytest.raises(ClosedError):
        alice.subscribe(tcpx.Events())


def test_ends_are_taken_in_parts():
    with tcpx.Session("alone") as session:
        events = tcpx.Events()
        transfers = [never_sent(session, session.own_peer, tag) for tag in range(5)]
        for key, transfer in enumerate(transfers):
            transfer.arm(events, key)
            transfer.abort()
        first = events.take(3)
        assert first.ended == [0, 1, 2] and first.more
        assert select.select([events], [], [], 0)[0] == [events]
        assert events.take().ended == [3, 4]
        assert select.select([events], [], [], 0)[0] == []


def test_programs_without_asyncio_do_not_load_it():
    import subprocess
    import sys

    code = "import sys, tcpx; sys.exit('asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_uvloop(pair):
    uvloop = pytest.importorskip("uvloop")
    copy = Copy(pair, LARGE)

    async def main():
        await asyncio.gather(*(copy.write() for _ in range(5)))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(never_sent(copy.alice, copy.peer), 0.01)

    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(main(), 3 * WAIT))
    finally:
        loop.close()
    assert copy.arrived()
