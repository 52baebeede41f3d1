"""What the replays share: a process of an application, what memory must hold, what must be free.

A replay is the sequence of NIXL calls that an application makes, with the argument forms that it
passes, in our own words. The head of each test file names the application, its version and the file
that it follows. Differences are noted there: backends by name where the application says UCX.
"""

import gc
import os
import time

import numpy as np
from endpoint import BACKEND, ERRORS, NOT_FOUND, TIMEOUT, until
from .memory import GUARD, Block
from nixl._api import nixl_agent, nixl_agent_config

# A lost peer is noticed at once; this limit is for a busy machine.
SOON = 20


class Application:
    """One process of an application: its agent and one block of memory, registered in its way."""

    def __init__(self, name, memory="DRAM", size=1 << 20, seed=1):
        self.name = name
        self.memory = memory
        self.block = Block(memory, size, seed)
        self.base = self.block.base
        self.agent = self.make_agent()
        self.set_up()

    def make_agent(self):
        """Creates the agent as most applications do."""
        return nixl_agent(self.name, nixl_agent_config(backends=[BACKEND]))

    def set_up(self):
        """Registers memory, and does everything else before the first peer."""

    def close(self):
        """Ends the agent with everything that it still has."""
        self.__dict__ = {"name": self.name, "block": self.block}
        gc.collect()

    def contents(self):
        return self.block.read()

    def fill(self, content):
        self.block.write(content)

    def wait(self, handle, timeout=TIMEOUT):
        """Polls until a request is no longer in progress: returns DONE, or the name of NIXL's
        error."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                state = self.agent.check_xfer_state(handle)
            except ERRORS as error:
                return type(error).__name__
            if state != "PROC":
                return state
            assert time.monotonic() < deadline, f"in progress for {timeout} s"
            time.sleep(0.0001)

    def notifications(self, count, timeout=TIMEOUT):
        """Polls until `count` notifications have arrived: returns (sender, message)."""
        got = []

        def enough():
            for sender, messages in self.agent.get_new_notifs().items():
                got.extend((sender, message) for message in messages)
            return len(got) >= count

        until(enough, f"{count} notifications", timeout)
        return got

    def forget(self, name):
        """Removes a peer. NIXL up to 1.4 has already dropped a lost one."""
        try:
            self.agent.remove_remote_agent(name)
        except ERRORS as error:
            assert type(error).__name__ == NOT_FOUND, error


class Expectation:
    """The expected content of the blocks of all sides: the transfers are repeated on copies.

    >>> expected = Expectation(prefill, decode)
    >>> expected.moved(prefill, decode, [(0, 4096, 512)])
    >>> expected.check()
    """

    def __init__(self, *sides):
        self.contents = {side.name: (side, side.contents()) for side in sides}

    def moved(self, source, target, segments):
        """Copies segments of (offset at the source, offset at the target, length)."""
        here, there = (self.contents[side.name][1] for side in (source, target))
        for start, end, length in np.asarray(segments, dtype=np.int64) + [GUARD, GUARD, 0]:
            there[end : end + length] = here[start : start + length]

    def check(self):
        """Compares every byte of every side."""
        for name, (side, expected) in self.contents.items():
            wrong = np.flatnonzero(side.contents() != expected)
            assert not len(wrong), f"{name}: {len(wrong)} bytes are wrong, from {wrong[0] - GUARD} on"


def tcp_sockets(ignored_port):
    """Counts the open TCP sockets of this process, except those of a local port."""
    gc.collect()
    inodes = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if os.path.exists(table):
            with open(table) as rows:
                for _, local, *_, inode in (row.split()[:10] for row in list(rows)[1:]):
                    if int(local.rpartition(":")[2], 16) != ignored_port:
                        inodes.add(f"socket:[{inode}]")
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}") in inodes
        except OSError:  # it was the listing itself, or is closed by now
            pass
    return count


class Freed:
    """Reports whether the sockets that a peer has opened since are closed again.

    `ignored_port` is that of NIXL's own listener, if there is one.
    """

    def __init__(self, ignored_port=None):
        self.count = lambda: tcp_sockets(ignored_port)
        self.before = self.count()

    def in_use(self):
        """Returns whether there are such sockets: without any, `check` would prove nothing."""
        return self.count() > self.before

    def check(self):
        until(lambda: self.count() <= self.before, f"at most {self.before} TCP sockets")
