"""SGLang's disaggregation: a prefill worker writes pages into a decode worker, which only polls.

Follows python/sglang/srt/disaggregation/nixl/conn.py, August 2026 (0.5.23): an agent without
backends, to which one is added; K and V of each layer registered from tuples by the name of the
memory; lists prepared from arrays, the own side as agent ""; pages by index, or, where the decode
side has another number of ranks, one head group of each token of each page; auxiliary data in host
memory; no handle is released by a call. From NIXL 1.5 on the lists are tried as strided ones too.
"""

import uuid

import numpy as np
import pytest
from conftest import NIXL
from endpoint import BACKEND, DISCONNECTED, DONE
from nixl._api import nixl_agent, nixl_agent_config

from .memory import Block
from .replay import SOON, Application, Expectation, Freed

LAYERS = 4  # K and V of two
SLOTS = 16
TOKENS = 8  # a page
PAGE = 16 << 10
GROUPS = 2  # head groups in a token of the prefill side: one for each decode rank
TOKEN = PAGE // TOKENS
HEADS = TOKEN // GROUPS
GAP = 4 << 10
STRIDE = SLOTS * PAGE + GAP
SIZE = LAYERS * STRIDE
AUX = 512
AUX_SLOTS = 8


def agent_config(**config):
    if NIXL >= (1, 5):
        from nixl._api import nixl_thread_sync_t

        config["sync_mode"] = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    return nixl_agent_config(backends=[], **config)


class Worker(Application):
    def make_agent(self):
        agent = nixl_agent(str(uuid.uuid4()), agent_config(num_threads=8))
        agent.create_backend(BACKEND, {})
        assert BACKEND in agent.get_plugin_list()
        return agent

    def set_up(self):
        self.layers = [self.base + layer * STRIDE for layer in range(LAYERS)]
        kv = [(address, SLOTS * PAGE, 0, "") for address in self.layers]
        assert self.agent.register_memory(kv, self.memory)
        self.aux = Block("DRAM", AUX * AUX_SLOTS, len(self.name))
        assert self.agent.register_memory([(self.aux.base, AUX * AUX_SLOTS, 0, "")], "DRAM")
        self.prepared = {}

    def aux_contents(self):
        return self.aux.read()

    def introduction(self):
        """Returns the metadata that a decode worker sends to the prefill worker."""
        return self.agent.name, self.agent.get_agent_metadata(), self.layers, self.aux.base

    # Prefill

    def add_peer(self, introduction):
        self.peer, metadata, layers, self.peer_aux = introduction
        self.agent.add_remote_agent(metadata)
        for name, addresses in (("", self.layers), (self.peer, layers)):
            self.prepared[name] = self.pages(name, addresses)
        self.peer_layers = layers

    def pages(self, name, layers):
        """Prepares all pages: those of the first layer, then of the next."""
        addresses = np.array(layers, dtype=np.uint64)[:, None] + np.arange(SLOTS, dtype=np.uint64) * PAGE
        return self.prepare(name, addresses.ravel(), PAGE)

    def slices(self, name, layers, token, groups):
        """Prepares one descriptor for each layer, page, token and head group, in this order."""
        steps = [(SLOTS, TOKENS * token), (TOKENS, token), (groups, HEADS)]
        addresses = np.array(layers, dtype=np.uint64)
        for count, step in steps:
            addresses = addresses[..., None] + np.arange(count, dtype=np.uint64) * np.uint64(step)
        return self.prepare(name, addresses.ravel(), HEADS)

    def prepare(self, name, addresses, length):
        full = lambda value: np.full(len(addresses), value, dtype=np.uint64)
        table = np.column_stack([addresses, full(length), full(0)])
        return self.agent.prep_xfer_dlist(name, table, self.memory)

    def strided(self, name, layers):
        """Prepares the same with one row per layer: address, length, device, stride, count."""
        table = np.array([[address, PAGE, 0, PAGE, SLOTS] for address in layers], dtype=np.uint64)
        return self.agent.prep_xfer_dlist(name, table, self.memory)

    def post(self, handle):
        assert handle
        assert self.agent.transfer(handle) in ("PROC", DONE)
        return handle

    def send_pages(self, mine, theirs, message, prepared=None):
        prepared = prepared or self.prepared
        repeated = lambda pages: (np.arange(LAYERS, dtype=np.int32)[:, None] * SLOTS + pages).ravel()
        return self.post(
            self.agent.make_prepped_xfer(
                "WRITE",
                prepared[""],
                repeated(np.array(mine, dtype=np.int32)),
                prepared[self.peer],
                repeated(np.array(theirs, dtype=np.int32)),
                message.encode("ascii"),
            )
        )

    def send_slices(self, mine, theirs, group, message):
        """Sends one head group of each token of the pages."""
        source = self.slices("", self.layers, TOKEN, GROUPS)
        target = self.slices(self.peer, self.peer_layers, HEADS, 1)
        layers, tokens = np.arange(LAYERS), np.arange(TOKENS)
        slots = lambda pages: layers[:, None, None] * SLOTS + np.array(pages)[:, None]
        at = lambda pages: (slots(pages) * TOKENS + tokens).ravel()
        return self.post(
            self.agent.make_prepped_xfer(
                "WRITE",
                source,
                (at(mine) * GROUPS + group).astype(np.int32),
                target,
                at(theirs).astype(np.int32),
                message.encode("ascii"),
            )
        )

    def send_aux(self, mine, theirs, message):
        source = [(self.aux.base + mine * AUX, AUX, 0)]
        target = [(self.peer_aux + theirs * AUX, AUX, 0)]
        return self.post(
            self.agent.initialize_xfer(
                "WRITE",
                self.agent.get_xfer_descs(source, "DRAM"),
                self.agent.get_xfer_descs(target, "DRAM"),
                self.peer,
                message.encode("ascii"),
            )
        )


MINE, THEIRS = [2, 3, 4, 9, 0], [7, 8, 9, 1, 15]


def pages(mine, theirs):
    return [
        (layer * STRIDE + a * PAGE, layer * STRIDE + b * PAGE, PAGE)
        for layer in range(LAYERS)
        for a, b in zip(mine, theirs)
    ]


def slices(mine, theirs, group):
    return [
        (
            layer * STRIDE + (a * TOKENS + token) * TOKEN + group * HEADS,
            layer * STRIDE + (b * TOKENS + token) * HEADS,
            HEADS,
        )
        for layer in range(LAYERS)
        for a, b in zip(mine, theirs)
        for token in range(TOKENS)
    ]


def pair(here, there, memory):
    prefill, decode = here(Worker, "prefill", memory, SIZE), there(Worker, "decode", memory, SIZE, 2)
    prefill.add_peer(decode.introduction())
    return prefill, decode


def arrived(worker, count):
    return sorted(message for _, message in worker.notifications(count))


def test_pages_and_aux(here, there, memory):
    prefill, decode = pair(here, there, memory)
    expected, aux = Expectation(prefill, decode), decode.aux_contents()
    handles = [
        prefill.send_pages(MINE[:2], THEIRS[:2], "7_kv_0_0_0"),
        prefill.send_pages(MINE[2:], THEIRS[2:], "7_kv_1_1_0"),
        prefill.send_aux(1, 5, "7_aux"),
    ]
    assert decode.run(arrived, 3) == [b"7_aux", b"7_kv_0_0_0", b"7_kv_1_1_0"]
    assert [prefill.wait(handle) for handle in handles] == [DONE] * 3
    expected.moved(prefill, decode, pages(MINE, THEIRS))
    expected.check()
    at = lambda slot: slice(4096 + slot * AUX, 4096 + (slot + 1) * AUX)
    aux[at(5)] = prefill.aux_contents()[at(1)]
    assert np.array_equal(decode.aux_contents(), aux)


@pytest.mark.parametrize("group", range(GROUPS))
def test_head_groups(here, there, memory, group):
    prefill, decode = pair(here, there, memory)
    expected = Expectation(prefill, decode)
    handle = prefill.send_slices(MINE, THEIRS, group, "8_kv_0_1_0")
    assert prefill.wait(handle) == DONE
    assert decode.run(arrived, 1) == [b"8_kv_0_1_0"]
    expected.moved(prefill, decode, slices(MINE, THEIRS, group))
    expected.check()


@pytest.mark.skipif(NIXL < (1, 5), reason="Python has strided lists from NIXL 1.5 on")
def test_strided_lists(here, there, memory):
    prefill, decode = pair(here, there, memory)
    prepared = {
        "": prefill.strided("", prefill.layers),
        prefill.peer: prefill.strided(prefill.peer, prefill.peer_layers),
    }
    expected = Expectation(prefill, decode)
    assert prefill.wait(prefill.send_pages(MINE, THEIRS, "9_kv_0_1_0", prepared)) == DONE
    assert decode.run(arrived, 1) == [b"9_kv_0_1_0"]
    expected.moved(prefill, decode, pages(MINE, THEIRS))
    expected.check()


def test_decode_dies(here, there, memory):
    """The prefill worker drops its handles; it never removes a peer."""
    prefill = here(Worker, "prefill", memory, SIZE)
    freed = Freed()
    decode = there(Worker, "dying", memory, SIZE, 2)
    prefill.add_peer(decode.introduction())
    assert prefill.wait(prefill.send_pages([0], [0], "1_kv_0_1_0")) == DONE
    assert freed.in_use()
    decode.freeze()
    everything = list(range(SLOTS))
    handles = [prefill.send_pages(everything, everything, "2_kv_0_1_0"), prefill.send_aux(0, 0, "2_aux")]
    assert [prefill.agent.check_xfer_state(handle) for handle in handles] == ["PROC"] * 2
    decode.kill()
    assert prefill.wait(handles[0], SOON) == DISCONNECTED
    # NIXL up to 1.4 has dropped the peer by now.
    assert prefill.wait(handles[1], SOON) in (DISCONNECTED, "nixlNotFoundError")
    del handles
    freed.check()

    decode = there(Worker, "next", memory, SIZE, 3)
    prefill.add_peer(decode.introduction())
    expected = Expectation(prefill, decode)
    handle = prefill.send_pages(MINE, THEIRS, "3_kv_0_1_0")
    assert decode.run(arrived, 1) == [b"3_kv_0_1_0"]
    expected.moved(prefill, decode, pages(MINE, THEIRS))
    expected.check()
    assert prefill.wait(handle) == DONE


def test_prefill_dies(here, there, memory):
    """The decode worker, which only polls, gets nothing more from it, and serves the next one."""
    decode = here(Worker, "decode", memory, SIZE)
    freed = Freed()
    prefill = there(Worker, "dying", memory, SIZE, 2)
    prefill.add_peer(decode.introduction())
    prefill.run(send_and_stay, "1_kv_0_0_0")
    assert arrived(decode, 1) == [b"1_kv_0_0_0"]
    assert freed.in_use()
    prefill.kill()
    freed.check()
    assert decode.agent.get_new_notifs() == {}

    prefill = there(Worker, "next", memory, SIZE, 3)
    prefill.add_peer(decode.introduction())
    expected = Expectation(prefill, decode)
    prefill.run(send_and_stay, "2_kv_0_1_0")
    assert arrived(decode, 1) == [b"2_kv_0_1_0"]
    expected.moved(prefill, decode, pages(MINE, THEIRS))
    expected.check()


def send_and_stay(worker, message):
    worker.kept = worker.send_pages(MINE, THEIRS, message)
