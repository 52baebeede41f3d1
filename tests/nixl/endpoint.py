"""One end of a transfer: a NIXL agent with the TCPX backend and a block of memory.

The same class serves both sides: in the test's own process, and behind `peer.Peer` in another one.
"""

import gc
import socket
import time

import nixl._bindings as bindings
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

BACKEND = "TCPX"

# Time limit of any wait in a test. Long, because it is reached only when something is wrong.
TIMEOUT = 30.0

DONE = "DONE"
DISCONNECTED = "nixlRemoteDisconnectError"
NOT_ALLOWED = "nixlNotAllowedError"
NOT_FOUND = "nixlNotFoundError"

# The exceptions of NIXL, one class for each of its negative statuses.
ERRORS = tuple(e for n, e in vars(bindings).items() if n.startswith("nixl") and n.endswith("Error"))


def pattern(seed, size):
    """Returns bytes that are unique to the seed."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def until(condition, what, timeout=TIMEOUT):
    """Returns the first true result of `condition`."""
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout} s"
        time.sleep(0.001)
    return answer


def bound(port=0):
    """Returns a socket that holds a port of every address, without listening there."""
    holder = socket.socket()
    try:
        holder.bind(("", port))
    except OSError:
        holder.close()
        raise
    return holder


def is_taken(port):
    try:
        bound(port).close()
    except OSError:
        return True
    return False


def on_free_ports(count, make):
    """Returns the result of `make` for `count` free ports, for programs that cannot choose a port.

    All are held at the same moment and released right before the call. Another process may take one
    even so: where the call fails and one is taken, everything starts over with other ports.
    """
    for attempt in range(10):
        holders = [bound() for _ in range(count)]
        ports = [holder.getsockname()[1] for holder in holders]
        for holder in holders:
            holder.close()
        try:
            return make(*ports)
        except Exception:
            if attempt == 9 or not any(map(is_taken, ports)):
                raise


def rows(addresses, lengths):
    """Returns NIXL's descriptors as an array: address, length, device."""
    table = np.zeros((len(addresses), 3), dtype=np.uint64)
    table[:, 0] = addresses
    table[:, 1] = lengths
    return table


class Endpoint:
    """An agent with `size` bytes of registered memory, between guards that must not change."""

    GUARD = 4096

    def __init__(self, name, size=1 << 20, seed=1, params=None, **config):
        self.name = name
        self.size = size
        self.agent = nixl_agent(name, nixl_agent_config(backends=[], **config))
        self.agent.create_backend(BACKEND, params or {})
        self.block = pattern(seed, size + 2 * self.GUARD)
        self.base = self.block.ctypes.data + self.GUARD
        self.registrations = [self.register(0, size)] if size else []

    def close(self):
        """Ends the agent with everything that it still has."""
        self.registrations = self.agent = None
        gc.collect()

    # Memory

    def fill(self, seed):
        self.block[:] = pattern(seed, len(self.block))

    def contents(self):
        """Returns all bytes, including the guards."""
        return self.block.copy()

    def address(self):
        return self.base

    def register(self, offset, length):
        return self.agent.register_memory(
            rows([self.base + offset], length), mem_type="DRAM", backends=[BACKEND]
        )

    def deregister(self):
        for registration in self.registrations:
            self.agent.deregister_memory(registration)
        self.registrations = []

    # Metadata

    def metadata(self):
        return self.agent.get_agent_metadata()

    def load(self, metadata):
        """Loads metadata; returns the name of its agent."""
        return self.agent.add_remote_agent(metadata).decode()

    def forget(self, name):
        self.agent.remove_remote_agent(name)

    # Requests

    def descriptors(self, base, offsets, lengths):
        addresses = np.uint64(base) + np.asarray(offsets, dtype=np.uint64)
        return self.agent.get_xfer_descs(rows(addresses, lengths), mem_type="DRAM")

    def request(self, op, remote, segments, message=b""):
        """Creates a request for `segments` of (own offset, remote offset, length); `remote` is
        (agent, address)."""
        agent, base = remote
        mine, theirs, lengths = np.asarray(segments).T
        return self.agent.initialize_xfer(
            op,
            self.descriptors(self.base, mine, lengths),
            self.descriptors(base, theirs, lengths),
            agent,
            message,
        )

    def post(self, handle, message=b""):
        """Posts: returns DONE, PROC, or the name of NIXL's error."""
        try:
            return self.agent.transfer(handle, message)
        except ERRORS as error:
            return type(error).__name__

    def state(self, handle):
        """Returns DONE, PROC, or the name of NIXL's error."""
        try:
            return self.agent.check_xfer_state(handle)
        except ERRORS as error:
            return type(error).__name__

    def wait(self, handle, timeout=TIMEOUT):
        """Returns the final state of a posted request."""
        deadline = time.monotonic() + timeout
        while (state := self.state(handle)) == "PROC":
            assert time.monotonic() < deadline, f"in progress for {timeout} s"
        return state

    def outcome(self, handle, message=b"", timeout=TIMEOUT):
        """Posts and waits: returns DONE, or the name of NIXL's error."""
        state = self.post(handle, message)
        return self.wait(handle, timeout) if state == "PROC" else state

    def release(self, handle):
        self.agent.release_xfer_handle(handle)

    # Notifications

    def notify(self, name, message):
        self.agent.send_notif(name, message)

    def notifications(self, count, timeout=TIMEOUT):
        """Waits for `count` notifications; returns (sender, message) in the order of arrival at
        each sender's queue."""
        got = []
        deadline = time.monotonic() + timeout
        while len(got) < count:
            assert time.monotonic() < deadline, f"{len(got)} of {count} notifications: {got[:5]}"
            for sender, messages in self.agent.get_new_notifs().items():
                got += [(sender, message) for message in messages]
        return got

    def no_notifications(self, seconds=0.1):
        """Returns everything that arrives within a short while."""
        time.sleep(seconds)
        return self.agent.get_new_notifs()


def scattered(count, size, seed):
    """Returns `count` segments of random lengths at random positions of both sides, in random
    orders, with gaps between them."""
    rng = np.random.default_rng(seed)
    slot = size // count
    lengths = rng.integers(1, slot + 1, count)
    places = [rng.permutation(count) * slot + rng.integers(0, slot - lengths + 1) for _ in "ab"]
    return np.stack([*places, lengths], axis=1)


def moved(op, mine, theirs, segments):
    """Returns the content of both blocks after a transfer of `segments` between them."""
    mine, theirs = mine.copy(), theirs.copy()
    source, target = (mine, theirs) if op == "WRITE" else (theirs, mine)
    for own, remote, length in np.asarray(segments) + [Endpoint.GUARD, Endpoint.GUARD, 0]:
        start, end = (own, remote) if op == "WRITE" else (remote, own)
        target[end : end + length] = source[start : start + length]
    return mine, theirs
