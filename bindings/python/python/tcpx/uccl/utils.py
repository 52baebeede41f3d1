"""The interface of `uccl.utils`."""

from __future__ import annotations

import bisect
import pickle
import resource
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("!Q")


def set_files_limit() -> None:
    """Raises the limit on open files to the maximum for this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def create_socket_and_connect(
    host: str,
    port: int,
    max_retries: int | None = None,
    initial_delay: float = 0.5,
    backoff: float = 2,
    max_delay: float = 10,
    timeout: float | None = None,
) -> socket.socket:
    """Connects, and retries while nobody listens: `max_retries` times, for ever without it."""
    delay, attempt = initial_delay, 0
    while True:
        try:
            return socket.create_connection((host, port), timeout=timeout)
        except OSError:
            attempt += 1
            if max_retries is not None and attempt > max_retries:
                raise
            time.sleep(delay)
            delay = min(delay * backoff, max_delay)


def send_obj(sock: socket.socket, obj: Any, *, protocol: int = pickle.HIGHEST_PROTOCOL) -> None:
    """Sends an object: its length in eight bytes, then its pickle."""
    payload = pickle.dumps(obj, protocol=protocol)
    sock.sendall(_LENGTH.pack(len(payload)) + payload)


def recv_obj(sock: socket.socket) -> Any:
    """Receives an object. Unpickling runs code that the sender chooses: only for trusted peers."""
    (length,) = _LENGTH.unpack(_receive(sock, _LENGTH.size))
    return pickle.loads(_receive(sock, length))


def _receive(sock: socket.socket, length: int) -> bytes:
    parts = []
    while length > 0:
        part = sock.recv(min(length, 1 << 20))
        if not part:
            raise ConnectionError("the connection ended in the middle of an object")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


class ClosedIntervalTree:
    """Closed intervals, each with data; found by what they contain or overlap."""

    def __init__(self) -> None:
        # In order of start, then end; data of any kind is not compared.
        self._keys: list[tuple[Any, Any]] = []
        self._data: list[Any] = []

    def add(self, start: Any, end: Any, data: Any = None) -> None:
        """Adds an interval; the same one may be present more than once."""
        if start > end:
            raise ValueError(f"start {start} is after end {end}")
        at = bisect.bisect_right(self._keys, (start, end))
        self._keys.insert(at, (start, end))
        self._data.insert(at, data)

    def remove(self, start: Any, end: Any, data: Any = None) -> int:
        """Removes an interval, all entries or those with that data; returns how many there were."""
        keep = [not (key == (start, end) and (data is None or item == data)) for key, item in zip(self._keys, self._data)]
        removed = keep.count(False)
        self._keys = [key for key, stays in zip(self._keys, keep) if stays]
        self._data = [item for item, stays in zip(self._data, keep) if stays]
        return removed

    def query_containing(self, start: Any, end: Any) -> list[tuple[Any, Any, Any]]:
        """Returns the intervals that contain this one."""
        return [row for row in self if row[0] <= start and row[1] >= end]

    def query_overlap(self, start: Any, end: Any) -> list[tuple[Any, Any, Any]]:
        """Returns the intervals that share at least a point with this one."""
        return [row for row in self if row[0] <= end and row[1] >= start]

    def query_exact_match(self, start: Any, end: Any, data: Any = None) -> list[tuple[Any, Any, Any]]:
        """Returns this interval, all entries or those with that data."""
        return [row for row in self if row[:2] == (start, end) and (data is None or row[2] == data)]

    def clear(self) -> None:
        """Removes everything."""
        self._keys.clear()
        self._data.clear()

    def __iter__(self) -> Iterator[tuple[Any, Any, Any]]:
        return iter([(*key, item) for key, item in zip(self._keys, self._data)])

    def __len__(self) -> int:
        return len(self._keys)
