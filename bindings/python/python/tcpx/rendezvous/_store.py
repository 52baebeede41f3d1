"""The interface of every store: values by folder and rank."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

# Folders that are no exchange: the members, those that failed with the reason, those that left.
MEMBERS, FAILED, LEFT = "members", "failed", "left"

# The reason no values come any more from a member that has left.
HAS_LEFT = b"it has left"

# Maximum bytes of one value. etcd refuses requests above 1.5 MiB, and base64 adds a third.
MAX_VALUE = 1 << 20

# The first and the longest pause between two polls of a store that cannot wait by itself.
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.5


@dataclass
class Gathered:
    """The result of `Store.gather`: the values of all ranks, or why some are missing."""

    values: dict[int, bytes]
    failed: dict[int, bytes] = field(default_factory=dict)
    members: dict[int, bytes] = field(default_factory=dict)


class Store(ABC):
    """Keeps the values of one run.

    A process claims its rank first, then gathers any number of times, and leaves once. Calls raise
    RendezvousError if the store cannot be reached.
    """

    @abstractmethod
    def claim(self, rank: int, value: bytes) -> bytes | None:
        """Adds a member. Returns the value of the member that already has the rank, if any."""

    @abstractmethod
    def members(self) -> dict[int, bytes]:
        """Returns the current members."""

    @abstractmethod
    def gather(self, folder: str, rank: int, value: bytes, size: int, deadline: float) -> Gathered:
        """Stores a value and waits until every rank's is there, a member fails, or the time is
        up."""

    @abstractmethod
    def leave(self, rank: int, size: int, failure: str | None) -> None:
        """Records that a member has left, or why it failed. Removes the run after the last one."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connections of this process."""


class PolledStore(Store):
    """A store without notifications: waits by polling."""

    @abstractmethod
    def put(self, folder: str, rank: int, value: bytes) -> None:
        """Stores a value, atomically."""

    @abstractmethod
    def ranks(self, folder: str) -> set[int]:
        """Returns the ranks that have a value."""

    @abstractmethod
    def values(self, folder: str) -> dict[int, bytes]:
        """Returns the values."""

    @abstractmethod
    def clear(self) -> None:
        """Removes everything of the run."""

    def members(self) -> dict[int, bytes]:
        return self.values(MEMBERS)

    def gather(self, folder: str, rank: int, value: bytes, size: int, deadline: float) -> Gathered:
        self.put(folder, rank, value)
        pause = FIRST_PAUSE
        while True:
            # Departures are read before values: a member that has left or failed by then stores
            # nothing more, so a value missing afterwards never comes.
            gone = self.ranks(LEFT)
            failed = self.ranks(FAILED)
            here = self.ranks(folder)
            if len(here) >= size:
                return Gathered(self.values(folder))
            remaining = deadline - time.monotonic()
            if failed or gone - here or remaining <= 0:
                why = dict.fromkeys(gone - here, HAS_LEFT) | self.values(FAILED)
                return Gathered(self.values(folder), why, self.members())
            time.sleep(min(pause, remaining))
            pause = min(pause * 2, LONGEST_PAUSE)

    def leave(self, rank: int, size: int, failure: str | None) -> None:
        self.put(LEFT if failure is None else FAILED, rank, (failure or "").encode()[:MAX_VALUE])
        # When all have left nobody reads any more: the last one, or several at once, clean up.
        if len(self.ranks(LEFT) | self.ranks(FAILED)) >= size:
            self.clear()
