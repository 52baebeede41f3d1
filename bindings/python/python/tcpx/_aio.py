"""Waiting in asyncio, for `await transfer` and `async for note in session.notifications()`.

Each event loop has an `Events` of its own, whose descriptor it watches from the first wait to its
end: only the loop's thread uses anything here. Loops need `add_reader`, which asyncio (on Linux)
and uvloop have.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from typing import TYPE_CHECKING

from tcpx._tcpx import Events
from tcpx.errors import ClosedError

if TYPE_CHECKING:
    from tcpx._tcpx import Notification, Session, Transfer

_ENDED = frozenset(("prepared", "done", "failed", "aborted"))

# Turns of the loop for which a short transfer is polled before its task sleeps.
_TURNS = 4


class _Hub:
    """The events of one event loop, and the futures that wait for them."""

    def __init__(self) -> None:
        self.events = Events()
        self.keys = itertools.count()
        # Keyed by the number that the transfer was armed with.
        self.waiters: dict[int, asyncio.Future[None]] = {}
        self.listeners: set[asyncio.Future[None]] = set()

    def ready(self) -> None:
        """Wakes the tasks whose events have happened; called by the loop."""
        happened = self.events.take()
        for key in happened.ended:
            _wake(self.waiters.pop(key, None))
        if happened.notified or happened.closed:
            listeners, self.listeners = self.listeners, set()
            for listener in listeners:
                _wake(listener)


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


_hubs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Hub] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _hub_of(loop: asyncio.AbstractEventLoop) -> _Hub:
    hub = _hubs.get(loop)
    if hub is None:
        hub = _Hub()
        # From here on the loop holds the hub, so the descriptor stays open while it is watched.
        loop.add_reader(hub.events.fileno(), hub.ready)
        with _making:
            for other in list(_hubs):
                if other.is_closed():
                    del _hubs[other]
            _hubs[loop] = hub
    return hub


async def wait(transfer: Transfer, shortly: bool) -> None:
    """Waits until a transfer has ended; raises its error if it failed. Polls it first with
    `shortly`.

    If cancelled, aborts the transfer and waits for that: afterwards nothing of it is in flight. If
    cancelled again, stops waiting.
    """
    loop = asyncio.get_running_loop()
    try:
        if not (shortly and await _ends_shortly(loop, transfer)):
            await _until_ended(loop, transfer)
    except asyncio.CancelledError:
        transfer.abort()
        await _until_ended(loop, transfer)
        raise
    transfer.done()


async def _ends_shortly(loop: asyncio.AbstractEventLoop, transfer: Transfer) -> bool:
    """Polls a transfer between the turns of other tasks, which costs less than being woken.

    Returns whether it has ended. Other tasks may post transfers of their own meanwhile.
    """
    ready = getattr(loop, "_ready", None)
    for _ in range(_TURNS):
        await asyncio.sleep(0)
        alone = not ready
        ended = transfer._poll_shortly(alone)
        if ended:
            return True
        if alone or ended is None:
            return False
    return False


async def _until_ended(loop: asyncio.AbstractEventLoop, transfer: Transfer) -> None:
    hub = _hub_of(loop)
    key = next(hub.keys)
    hub.waiters[key] = waiter = loop.create_future()
    try:
        if transfer.arm(hub.events, key) not in _ENDED:
            await waiter
    finally:
        hub.waiters.pop(key, None)


class Arriving:
    """Notifications as they arrive; each goes to one of the waiting tasks."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __aiter__(self) -> Arriving:
        return self

    async def __anext__(self) -> Notification:
        loop = asyncio.get_running_loop()
        hub = _hub_of(loop)
        while True:
            note = self._session._take_notification()
            if note is None:
                try:
                    self._session.subscribe(hub.events)
                except ClosedError:
                    raise StopAsyncIteration from None
                # One may have arrived before the subscription.
                note = self._session._take_notification()
            if note is not None:
                return note
            listener = loop.create_future()
            hub.listeners.add(listener)
            try:
                await listener
            finally:
                hub.listeners.discard(listener)
