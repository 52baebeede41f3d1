"""A store that rank 0 serves.

A frame is its length and then items, each with its length before it; lengths are four bytes, big
endian. A request is an operation with its arguments, a reply a word and then triples: a kind (`value`,
`failed`, `member`), a rank, a value. A connection has one request in flight at a time. The Rust
example uses the same protocol.

| request | replies |
|---|---|
| `join` RUN RANK VALUE | `ok`; `taken` VALUE; `other` RUN |
| `members` | `ok` with triples |
| `gather` FOLDER VALUE SIZE MILLISECONDS | `ok` with triples: all values, or those present and why |
| `leave` REASON (empty: success) | `ok` |
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import struct
import threading
import time
from collections import defaultdict

from tcpx.rendezvous._errors import MissingError, RendezvousError
from tcpx.rendezvous._store import HAS_LEFT, MAX_VALUE, Gathered, Store

# Maximum bytes of a request: a value and names.
MAX_REQUEST = MAX_VALUE + 4096

# Time limits for a connection to identify itself, and for the server to end, in seconds.
HELLO_TIMEOUT, CLOSE_TIMEOUT = 10.0, 5.0

# How long the server of a run that has failed waits for members that have not been told, in seconds.
LINGER = 2.0

# How much later than requested a reply of the server may come, in seconds.
GRACE = 30.0

Ranked = dict[int, bytes]


class TcpStore(Store):
    """Client of rank 0's server; in rank 0 it has the server too."""

    def __init__(self, host: str, port: int, run: str, rank: int, deadline: float) -> None:
        self.server = Server(host, port, run) if rank == 0 else None
        self.run = run
        try:
            address = self.server.address if self.server else (host, port)
            self.stream = _connect(address, deadline)
        except BaseException:
            if self.server:
                self.server.close()
            raise

    def claim(self, rank: int, value: bytes) -> bytes | None:
        reply = self._ask([b"join", self.run.encode(), str(rank).encode(), value], GRACE)
        if reply[0] == b"other":
            other = reply[1].decode(errors="replace")
            raise RendezvousError(
                f"the store at this address is that of another run ({other!r}, this is {self.run!r}): use another port"
            )
        return reply[1] if reply[0] == b"taken" else None

    def members(self) -> Ranked:
        return _sorted(self._ask([b"members"], GRACE)).members

    def gather(self, folder: str, rank: int, value: bytes, size: int, deadline: float) -> Gathered:
        remaining = max(deadline - time.monotonic(), 0)
        request = [b"gather", folder.encode(), value, str(size).encode(), str(int(remaining * 1000)).encode()]
        return _sorted(self._ask(request, remaining + GRACE))

    def leave(self, rank: int, size: int, failure: str | None) -> None:
        # If rank 0 has already left, nobody is left to tell.
        with contextlib.suppress(RendezvousError):
            self._ask([b"leave", (failure or "").encode()[:MAX_VALUE]], GRACE)

    def close(self) -> None:
        self.stream.close()
        if self.server:
            self.server.close()

    def _ask(self, request: list[bytes], timeout: float) -> list[bytes]:
        try:
            self.stream.settimeout(timeout)
            _send(self.stream, request)
            return _receive(self.stream, 1 << 32)
        except OSError as error:
            why = str(error) or type(error).__name__
            raise RendezvousError(f"rank 0, which serves the store, does not answer any more: {why}") from error


class Server:
    """Serves the values of one run, with a thread per connection."""

    def __init__(self, host: str, port: int, run: str) -> None:
        self.run = run
        self.changed = threading.Condition()
        self.members: Ranked = {}
        self.failed: Ranked = {}
        self.left: set[int] = set()
        self.folders: dict[str, Ranked] = defaultdict(dict)
        self.served: dict[str, int] = defaultdict(int)
        self.streams: dict[socket.socket, threading.Thread] = {}
        # True once a member has been told that others failed or left.
        self.broken = False
        self.closing = False
        self.listener = _listen(host, port)
        bound = self.listener.getsockname()
        local = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(bound[0], bound[0])
        self.address: tuple[str, int] = (local, bound[1])
        self.acceptor = threading.Thread(target=self._accept, name="tcpx-rendezvous", daemon=True)
        self.acceptor.start()

    def close(self) -> None:
        """Ends the server. Sends pending replies first.

        Rank 0 often is the first to learn that another member has failed, and ends. The others are
        told when they ask next, unless that takes longer than LINGER.
        """
        with self.changed:
            if self.failed or self.broken:
                self.changed.wait_for(lambda: self.members.keys() <= self.left | self.failed.keys(), LINGER)
            self.closing = True
            self.changed.notify_all()
            streams = dict(self.streams)
        # Wakes the accepting thread.
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.acceptor.join()
        for stream in streams:
            # Ends the wait for the next request, but no reply.
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RD)
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for thread in streams.values():
            thread.join(max(deadline - time.monotonic(), 0))

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self.listener.accept()
            except OSError as error:
                if self.closing:
                    return
                # Out of descriptors, for instance: other connections may end.
                time.sleep(0.1 if error.errno in (errno.EMFILE, errno.ENFILE) else 0)
                continue
            thread = threading.Thread(target=self._serve, args=(stream,), name="tcpx-rendezvous", daemon=True)
            with self.changed:
                if self.closing:
                    stream.close()
                    return
                self.streams[stream] = thread
            thread.start()

    def _serve(self, stream: socket.socket) -> None:
        rank = None
        try:
            stream.settimeout(HELLO_TIMEOUT)
            rank, reply = self._join(_receive(stream, MAX_REQUEST))
            _send(stream, reply)
            stream.settimeout(None)
            while rank is not None:
                _send(stream, self._answer(rank, _receive(stream, MAX_REQUEST)))
        except (OSError, ValueError, IndexError):
            # The other side has ended, or is no member.
            pass
        finally:
            stream.close()
            with self.changed:
                del self.streams[stream]
                if rank is not None and rank not in self.left and not self.closing:
                    self.failed.setdefault(rank, b"its connection to the store ended")
                    self.changed.notify_all()

    def _join(self, request: list[bytes]) -> tuple[int | None, list[bytes]]:
        operation, run, rank_text, value = request
        if operation != b"join":
            raise ValueError(operation)
        rank = int(rank_text)
        with self.changed:
            if run != self.run.encode():
                return None, [b"other", self.run.encode()]
            if rank in self.members:
                return None, [b"taken", self.members[rank]]
            self.members[rank] = value
            return rank, [b"ok"]

    def _answer(self, rank: int, request: list[bytes]) -> list[bytes]:
        operation, *arguments = request
        with self.changed:
            if operation == b"members":
                return [b"ok", *_triples(b"member", self.members)]
            if operation == b"gather":
                folder, value, size, milliseconds = arguments
                return self._gather(folder.decode(), rank, value, int(size), int(milliseconds) / 1000)
            if operation == b"leave":
                self.left.add(rank)
                if arguments[0]:
                    self.failed[rank] = arguments[0]
                self.changed.notify_all()
                return [b"ok"]
        raise ValueError(operation)

    def _gather(self, name: str, rank: int, value: bytes, size: int, timeout: float) -> list[bytes]:
        folder = self.folders[name]
        folder[rank] = value
        if len(folder) >= size:
            self.changed.notify_all()
        self.changed.wait_for(
            lambda: len(folder) >= size or self.failed or self.left - folder.keys() or self.closing, timeout
        )
        if len(folder) < size:
            gone = dict.fromkeys(self.left - folder.keys(), HAS_LEFT) | self.failed
            self.broken = self.broken or bool(gone)
            why = _triples(b"failed", gone) + _triples(b"member", self.members)
            return [b"ok", *_triples(b"value", folder), *why]
        self.served[name] += 1
        if self.served[name] == size:
            del self.folders[name], self.served[name]
        return [b"ok", *_triples(b"value", folder)]


def _listen(host: str, port: int) -> socket.socket:
    """Listens on one address if it is given as such, and on all addresses for a name.

    A machine's own name often resolves to loopback, which others cannot reach.
    """
    try:
        if host == "localhost":
            host = "127.0.0.1"
        try:
            version = ipaddress.ip_address(host.split("%")[0]).version
        except ValueError:
            return _listen_everywhere(port)
        family = socket.AF_INET6 if version == 6 else socket.AF_INET
        try:
            return socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            # Not an address of this machine: probably that of a gateway which forwards here.
            return _listen_everywhere(port)
    except OSError as error:
        raise RendezvousError(
            f"rank 0 cannot serve the store at port {port}: {error.strerror or error}. Where another program has the"
            f" port, name another one for all processes: TCPX_RENDEZVOUS=tcp://{host}:PORT"
        ) from error


def _listen_everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            # IPv6 is disabled.
    return socket.create_server(("", port), backlog=1024)


def _connect(address: tuple[str, int], deadline: float) -> socket.socket:
    """Connects to rank 0, which may still be starting, and whose name may not resolve yet."""
    while True:
        remaining = deadline - time.monotonic()
        try:
            stream = socket.create_connection(address, timeout=max(min(remaining, 5), 0.1))
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return stream
        except OSError as error:
            if remaining <= 0:
                raise MissingError(
                    f"rank 0, which serves the store, was not found at {address[0]}:{address[1]} in time ({error}):"
                    " is it running there, and does a firewall allow the port?",
                    [0],
                ) from error
        time.sleep(min(0.1, max(remaining, 0)))


def _triples(kind: bytes, values: Ranked) -> list[bytes]:
    return [item for rank, value in values.items() for item in (kind, str(rank).encode(), value)]


def _sorted(reply: list[bytes]) -> Gathered:
    gathered = Gathered({})
    kinds = {b"value": gathered.values, b"failed": gathered.failed, b"member": gathered.members}
    for kind, rank, value in zip(reply[1::3], reply[2::3], reply[3::3], strict=True):
        kinds[kind][int(rank)] = value
    return gathered


def _send(stream: socket.socket, items: list[bytes]) -> None:
    body = b"".join(struct.pack("!I", len(item)) + item for item in items)
    stream.sendall(struct.pack("!I", len(body)) + body)


def _receive(stream: socket.socket, limit: int) -> list[bytes]:
    (length,) = struct.unpack("!I", _exactly(stream, 4))
    if length > limit:
        raise ConnectionError("a frame is too long: no process of a run is there")
    body = _exactly(stream, length)
    items, at = [], 0
    while at < length:
        end = at + 4 + int.from_bytes(body[at : at + 4], "big")
        if end > length:
            raise ConnectionError("a frame is cut short: no process of a run is there")
        items.append(body[at + 4 : end])
        at = end
    return items


def _exactly(stream: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = stream.recv(min(length - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("the connection has ended")
        parts += part
    return bytes(parts)
