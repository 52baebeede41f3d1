"""The result of `Session.notifications`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from tcpx._tcpx import Notification, Session


class Notifications(list["Notification"]):
    """Notifications that have arrived, oldest first.

    `async for` yields these and then each one that arrives, until the session is closed.
    """

    def __init__(self, session: Session, arrived: Iterable[Notification] = ()) -> None:
        """Creates a list of notifications that were taken from `session`."""
        super().__init__(arrived)
        self._session = session

    def __aiter__(self) -> AsyncIterator[Notification]:
        # Imported here, so that programs without asyncio need not load it.
        from tcpx._aio import Arriving

        # Taken one at a time: those that the loop does not reach stay with the session.
        self._session._give_back(self)
        self.clear()
        return Arriving(self._session)
