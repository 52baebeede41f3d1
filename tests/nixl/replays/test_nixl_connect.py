"""Dynamo's nixl_connect: one side offers memory, the other reads or writes it, one by one.

Follows lib/bindings/python/src/dynamo/nixl_connect/__init__.py (ai-dynamo-runtime 1.6.1), where the
agent has NIXL's default backend: each descriptor is registered with the name of the memory as its
meta info; the agent's metadata travels compressed with each offer; the active side names all
arguments, gives its key at the creation and at the post, and removes the peer after the last
operation with it; the passive side looks for the key in `update_notifs`, which keeps what was read.
"""

import uuid
import zlib

import pytest
from endpoint import DISCONNECTED, DONE, until

from .replay import SOON, Application, Expectation, Freed

KIB = 1 << 10
SIZE = 4 << 20


class Worker(Application):
    def set_up(self):
        self.offers = {}
        self.references = {}

    def register(self, parts):
        """Registers descriptors of (offset, length), one by one."""
        return [
            self.agent.register_memory([(self.base + offset, length, 0, self.memory)], self.memory)
            for offset, length in parts
        ]

    def deregister(self, registered):
        for one in registered:
            self.agent.deregister_memory(one)

    def tuples(self, parts):
        return [(self.base + offset, length, 0) for offset, length in parts]

    # Passive

    def offer(self, parts):
        """Returns the metadata with which the other side reads or writes these parts."""
        key = str(uuid.uuid4())
        self.offers[key] = self.register(parts)
        metadata = zlib.compress(self.agent.get_agent_metadata(), level=6).hex()
        return key, metadata, self.tuples(parts), self.memory

    def is_complete(self, key):
        """Polls as the status of an operation does."""
        messages = [message for many in self.agent.update_notifs().values() for message in many]
        return key in (message.decode("utf-8") for message in messages)

    def wait_for_the_other(self, key):
        until(lambda: self.is_complete(key), "the key of an operation", SOON)
        self.deregister(self.offers.pop(key))

    # Active

    def begin(self, op, offer, parts):
        key, metadata, theirs, their_memory = offer
        name = self.agent.add_remote_agent(zlib.decompress(bytes.fromhex(metadata))).decode("utf-8")
        self.references[name] = self.references.get(name, 0) + 1
        registered = self.register(parts)
        handle = self.agent.initialize_xfer(
            operation=op,
            local_descs=self.agent.get_xfer_descs(descs=self.tuples(parts), mem_type=self.memory),
            remote_descs=self.agent.get_xfer_descs(descs=theirs, mem_type=their_memory),
            remote_agent=name,
            notif_msg=key.encode("utf-8"),
        )
        state = self.agent.transfer(handle, key.encode("utf-8"))
        assert state in ("PROC", DONE)
        return handle, name, registered

    def end(self, operation):
        """Waits for the operation and releases all its resources."""
        state = self.wait(operation[0], SOON)
        self.release(operation)
        return state

    def release(self, operation):
        handle, name, registered = operation
        self.agent.release_xfer_handle(handle)
        self.references[name] -= 1
        if not self.references[name]:
            del self.references[name]
            self.forget(name)
        self.deregister(registered)


MINE = [(0, 100 * KIB), (200 * KIB, 1000), (1024 * KIB + 1, 512 * KIB)]
THEIRS = [(2048 * KIB, 100 * KIB), (7, 1000), (3072 * KIB, 512 * KIB)]


def moves(source, target):
    return [(a, b, length) for (a, length), (b, _) in zip(source, target)]


def operate(active, passive, op, expected):
    """Moves the blocks that `passive` offers, to its end on both sides; compares every byte."""
    offer = passive.offer(THEIRS)
    assert active.end(active.begin(op, offer, MINE)) == DONE
    passive.wait_for_the_other(offer[0])
    if op == "READ":
        expected.moved(passive, active, moves(THEIRS, MINE))
    else:
        expected.moved(active, passive, moves(MINE, THEIRS))
    expected.check()


@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_operations(here, there, memory, op):
    """The same memory is registered again for each operation."""
    active, passive = here(Worker, "active-1", memory, SIZE), there(Worker, "passive-1", memory, SIZE, 2)
    expected = Expectation(active, passive)
    for _ in range(3):
        operate(active, passive, op, expected)
    assert not active.references


def test_operations_at_once(here, there, memory):
    """A READ and a WRITE with the same peer: the peer is removed after the second one."""
    active, passive = here(Worker, "active-1", memory, SIZE), there(Worker, "passive-1", memory, SIZE, 2)
    expected = Expectation(active, passive)
    first, second = passive.offer([(0, KIB)]), passive.offer([(8 * KIB, KIB)])
    reading = active.begin("READ", first, [(16 * KIB, KIB)])
    writing = active.begin("WRITE", second, [(32 * KIB, KIB)])
    assert active.end(reading) == DONE and active.end(writing) == DONE
    # The keys arrive in any order, and both may arrive together.
    passive.wait_for_the_other(second[0])
    passive.wait_for_the_other(first[0])
    expected.moved(passive, active, [(0, 16 * KIB, KIB)])
    expected.moved(active, passive, [(32 * KIB, 8 * KIB, KIB)])
    expected.check()


def test_cancel(here, there, memory):
    """A cancelled READ is released in flight; its key never arrives, and the next one works."""
    active, passive = here(Worker, "active-1", memory, SIZE), there(Worker, "passive-1", memory, SIZE, 2)
    small, large = passive.offer([(0, 64)]), passive.offer([(KIB, SIZE - KIB)])
    assert active.end(active.begin("READ", small, [(0, 64)])) == DONE
    expected = Expectation(active, passive)
    passive.freeze()
    operation = active.begin("READ", large, [(KIB, SIZE - KIB)])
    assert active.agent.check_xfer_state(operation[0]) == "PROC"
    active.release(operation)
    passive.thaw()
    offer = passive.offer(THEIRS)
    assert active.end(active.begin("WRITE", offer, MINE)) == DONE
    passive.wait_for_the_other(offer[0])
    assert not passive.is_complete(large[0])
    expected.moved(active, passive, moves(MINE, THEIRS))
    expected.check()


@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_peer_dies(here, there, memory, op):
    active = here(Worker, "active-1", memory, SIZE)
    freed = Freed()
    passive = there(Worker, "passive-1", memory, SIZE, 2)
    offer, large = passive.offer([(0, 64)]), passive.offer([(0, SIZE)])
    operation = active.begin(op, offer, [(0, 64)])
    assert active.wait(operation[0]) == DONE
    assert freed.in_use()
    passive.freeze()
    second = active.begin(op, large, [(0, SIZE)])
    assert active.agent.check_xfer_state(second[0]) == "PROC"
    passive.kill()
    assert active.end(second) == DISCONNECTED
    active.release(operation)
    assert not active.references
    freed.check()

    # Its successor, with the same name.
    passive = there(Worker, "passive-1", memory, SIZE, 3)
    operate(active, passive, op, Expectation(active, passive))
