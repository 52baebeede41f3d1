"""LMCache's NixlChannel: pages of one large buffer, written and read by index.

Follows lmcache/v1/transfer_channel/nixl_channel.py of 0.5.6: the tensor-parallel rank as the device
of every descriptor, also where the process sees a single GPU, and for host memory; metadata first
and serialized descriptors after that, both ways; indices as lists of int; no notification; handles
are left to the garbage collector; memory is deregistered before the prepared lists are released.
"""

import uuid

import numpy as np
import pytest
from endpoint import BACKEND, DISCONNECTED, DONE
from nixl._api import nixl_agent, nixl_agent_config

from .replay import SOON, Application, Expectation, Freed

PAGE = 8 << 10
PAGES = 256
SIZE = PAGES * PAGE
RANK = 3


class Channel(Application):
    def make_agent(self):
        return nixl_agent(str(uuid.uuid4()), nixl_agent_config(backends=[BACKEND]))

    def set_up(self):
        mem_type = "cpu" if self.memory == "DRAM" else "VRAM"
        self.registered = self.agent.get_reg_descs([(self.base, SIZE, RANK, "")], mem_type=mem_type)
        self.agent.register_memory(self.registered)
        pages = [(self.base + offset, PAGE, RANK) for offset in range(0, SIZE, PAGE)]
        self.descriptors = self.agent.get_xfer_descs(pages, mem_type=mem_type)
        self.local = self.agent.prep_xfer_dlist("", self.descriptors, mem_type=mem_type)
        self.remote = {}

    def metadata(self, of_the_other=None):
        """Answers the first request of a peer, which contains its metadata."""
        if of_the_other is not None:
            self.other = self.agent.add_remote_agent(of_the_other)
        return self.agent.get_agent_metadata()

    def pages(self, receiver, of_the_other=None):
        """Answers the second request of a peer, which contains its descriptors."""
        if of_the_other is not None:
            self.add_pages(receiver, of_the_other)
        return self.agent.get_serialized_descs(self.descriptors)

    def add_pages(self, receiver, serialized):
        pages = self.agent.deserialize_descs(serialized)
        self.remote[receiver] = self.agent.prep_xfer_dlist(self.other, pages)

    def connect(self, receiver, channel):
        """Connects to another channel, which learns of this one too."""
        self.other = self.agent.add_remote_agent(channel.metadata(self.agent.get_agent_metadata()))
        serialized = channel.pages(self.name, self.agent.get_serialized_descs(self.descriptors))
        self.add_pages(receiver, serialized)

    def move(self, op, receiver, mine, theirs):
        self.start(op, receiver, mine, theirs)
        return self.wait(self.handle)

    def start(self, op, receiver, mine, theirs):
        self.handle = self.agent.make_prepped_xfer(op, self.local, mine, self.remote[receiver], theirs)
        self.agent.transfer(self.handle)

    def end(self):
        self.handle = None
        self.agent.deregister_memory(self.registered)
        self.agent.release_dlist_handle(self.local)
        for pages in self.remote.values():
            self.agent.release_dlist_handle(pages)


def indices(seed, count=100):
    rng = np.random.default_rng(seed)
    return [int(page) for page in rng.permutation(PAGES)[:count]]


def places(source, target):
    return [(a * PAGE, b * PAGE, PAGE) for a, b in zip(source, target)]


def test_both_ways(here, there, memory):
    """Each side writes to the other and reads from it, after one of them has connected."""
    one, two = here(Channel, "one", memory, SIZE), there(Channel, "two", memory, SIZE, 2)
    one.connect("two", two)
    expected = Expectation(one, two)
    mine, theirs = indices(1), indices(2)
    assert one.move("WRITE", "two", mine, theirs) == DONE
    expected.moved(one, two, places(mine, theirs))
    expected.check()
    assert one.move("READ", "two", theirs, mine) == DONE
    expected.moved(two, one, places(mine, theirs))
    expected.check()
    mine, theirs = indices(3), indices(4)
    assert two.move("WRITE", "one", mine, theirs) == DONE
    expected.moved(two, one, places(mine, theirs))
    assert two.move("READ", "one", mine, theirs) == DONE
    expected.moved(one, two, places(theirs, mine))
    expected.check()
    one.end()
    two.end()


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_peer_dies(here, there, memory, op):
    survivor = here(Channel, "survivor", memory, SIZE)
    freed = Freed()
    peer = there(Channel, "dying", memory, SIZE, 2)
    survivor.connect("dying", peer)
    assert survivor.move(op, "dying", [0], [0]) == DONE
    assert freed.in_use()
    peer.freeze()
    everything = list(range(PAGES))
    survivor.start(op, "dying", everything, everything)
    assert survivor.agent.check_xfer_state(survivor.handle) == "PROC"
    peer.kill()
    assert survivor.wait(survivor.handle, SOON) == DISCONNECTED
    survivor.handle = None
    freed.check()

    peer = there(Channel, "next", memory, SIZE, 3)
    survivor.connect("next", peer)
    expected = Expectation(survivor, peer)
    mine, theirs = indices(5), indices(6)
    assert survivor.move(op, "next", mine, theirs) == DONE
    if op == "WRITE":
        expected.moved(survivor, peer, places(mine, theirs))
    else:
        expected.moved(peer, survivor, places(theirs, mine))
    expected.check()
    survivor.end()
