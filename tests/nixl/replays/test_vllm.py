"""vLLM's NixlConnector: a decode worker pulls blocks from a prefill worker, or that pushes them.

Follows vllm/distributed/kv_transfer/kv_connector/v1/nixl/{base,pull,push}_worker.py, August 2026
(0.27 development): one region a layer, registered from tuples; one descriptor for each block of
each layer, as arrays; requests by indices; heartbeats and registrations as notifications; telemetry
after each transfer, whose absence would fail the request.
"""

import uuid

import numpy as np
import pytest
from endpoint import BACKEND, DISCONNECTED, DONE
from nixl._api import nixl_agent, nixl_agent_config

from .replay import SOON, Application, Expectation, Freed

LAYERS = 4
BLOCKS = 32
BLOCK = 16 << 10
# Layers are separate allocations; this is the gap between them here.
GAP = 4 << 10
STRIDE = BLOCKS * BLOCK + GAP
SIZE = LAYERS * STRIDE

READY = b"PUSH_REG:"


class Worker(Application):
    def make_agent(self):
        config = nixl_agent_config(backends=[BACKEND], capture_telemetry=True)
        return nixl_agent(str(uuid.uuid4()), config)

    def set_up(self):
        self.layers = [self.base + layer * STRIDE for layer in range(LAYERS)]
        caches = [(address, BLOCKS * BLOCK, 0, "") for address in self.layers]
        self.registered = self.agent.get_reg_descs(caches, self.memory)
        self.agent.register_memory(self.registered, backends=[BACKEND])
        self.local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self.blocks(self.layers))
        self.engines = {}
        self.under_way = {}

    def blocks(self, layers):
        """Returns descriptors of all blocks: those of the first layer, then of the next."""
        addresses = np.array(layers, dtype=np.uint64)[:, None] + np.arange(BLOCKS, dtype=np.uint64) * BLOCK
        table = np.empty((LAYERS * BLOCKS, 3), dtype=np.uint64)
        table[:, 0] = addresses.ravel()
        table[:, 1] = BLOCK
        table[:, 2] = 0
        return self.agent.get_xfer_descs(table, self.memory)

    def handshake(self):
        """Returns a worker's metadata for its side channel."""
        return self.agent.get_agent_metadata(), self.layers

    def add_engine(self, engine, handshake):
        metadata, layers = handshake
        # The name stays bytes, as NIXL returns it.
        name = self.agent.add_remote_agent(metadata)
        self.engines[engine] = (name, self.agent.prep_xfer_dlist(name, self.blocks(layers)))

    def add_engine_for_notifications(self, engine, metadata):
        self.engines[engine] = (self.agent.add_remote_agent(metadata), None)

    def start(self, op, request, engine, mine, theirs):
        """Moves blocks of all layers: READ in a decode worker, WRITE in a prefill worker."""
        indices = lambda blocks: (np.arange(LAYERS)[:, None] * BLOCKS + np.asarray(blocks)).ravel()
        handle = self.agent.make_prepped_xfer(
            op,
            self.local,
            indices(mine),
            self.engines[engine][1],
            indices(theirs),
            notif_msg=f"{request}:1".encode(),
        )
        self.agent.transfer(handle)
        self.under_way[request] = handle

    def finish(self, request, timeout=SOON):
        """Polls as the engine does; returns the bytes that telemetry counts, or NIXL's error."""
        handle = self.under_way.pop(request)
        if (state := self.wait(handle, timeout)) == DONE:
            measured = self.agent.get_xfer_telemetry(handle)
            state = measured.totalBytes
            assert measured.descCount > 0
            # In microseconds: posting may take less than one.
            assert measured.xferDuration >= measured.postDuration >= 0
            assert measured.startTime > 0
        self.agent.release_xfer_handle(handle)
        return state

    def notify(self, engine, message):
        self.agent.send_notif(self.engines[engine][0], notif_msg=message)

    def remove_engine(self, engine):
        name, blocks = self.engines.pop(engine)
        if blocks is not None:
            self.agent.release_dlist_handle(blocks)
        self.forget(name)

    def shut_down(self):
        for handle in self.under_way.values():
            self.agent.release_xfer_handle(handle)
        self.agent.release_dlist_handle(self.local)
        for engine in list(self.engines):
            self.remove_engine(engine)
        self.agent.deregister_memory(self.registered)


def places(source, target):
    """Returns segments that move the blocks `source` to the blocks `target`, in all layers."""
    return [
        (layer * STRIDE + a * BLOCK, layer * STRIDE + b * BLOCK, BLOCK)
        for layer in range(LAYERS)
        for a, b in zip(source, target)
    ]


# Some are adjacent on both sides, and merged by NIXL; others are not.
FIRST = (list(range(4, 12)), list(range(20, 28)))
SECOND = ([1, 3, 2, 31, 17], [9, 0, 30, 3, 12])


def messages(worker, count):
    return sorted(message for _, message in worker.notifications(count))


def test_pull(here, there, memory):
    prefill, decode = there(Worker, "prefill", memory, SIZE, 2), here(Worker, "decode", memory, SIZE)
    decode.add_engine("p", prefill.handshake())
    expected = Expectation(prefill, decode)
    decode.notify("p", b"HB:request-0,request-1")
    for number, (theirs, mine) in enumerate((FIRST, SECOND)):
        decode.start("READ", f"request-{number}", "p", mine, theirs)
        expected.moved(prefill, decode, places(theirs, mine))
    assert decode.finish("request-0") == LAYERS * 8 * BLOCK
    assert decode.finish("request-1") == LAYERS * 5 * BLOCK
    expected.check()
    # All blocks were cached: the prefill worker is told, nothing moves.
    decode.notify("p", b"request-2:1")
    told = [b"HB:request-0,request-1", b"request-0:1", b"request-1:1", b"request-2:1"]
    assert prefill.run(messages, 4) == told
    decode.shut_down()
    prefill.shut_down()


def test_push(here, there, memory):
    prefill, decode = here(Worker, "prefill", memory, SIZE), there(Worker, "decode", memory, SIZE, 2)
    decode.add_engine_for_notifications("p", prefill.agent.get_agent_metadata())
    decode.notify("p", READY + b"request-0")
    assert [message for _, message in prefill.notifications(1)] == [READY + b"request-0"]
    prefill.add_engine("d", decode.handshake())
    expected = Expectation(prefill, decode)
    for number, (mine, theirs) in enumerate((FIRST, SECOND)):
        prefill.start("WRITE", f"request-{number}", "d", mine, theirs)
        expected.moved(prefill, decode, places(mine, theirs))
    assert decode.run(messages, 2) == [b"request-0:1", b"request-1:1"]
    # The notification means that the blocks have arrived, whatever the prefill worker has seen so
    # far.
    expected.check()
    assert prefill.finish("request-0") == LAYERS * 8 * BLOCK
    assert prefill.finish("request-1") == LAYERS * 5 * BLOCK
    prefill.shut_down()
    decode.shut_down()


@pytest.mark.parametrize("op", ["READ", "WRITE"], ids=["pull", "push"])
def test_peer_dies(here, there, memory, op):
    survivor, peer = here(Worker, "survivor", memory, SIZE), there(Worker, "dying", memory, SIZE, 2)
    freed = Freed()
    survivor.add_engine("first", peer.handshake())
    blocks = list(range(BLOCKS))
    survivor.start(op, "connects", "first", [0], [0])
    assert survivor.finish("connects") == LAYERS * BLOCK
    assert freed.in_use()
    peer.freeze()
    survivor.start(op, "never", "first", blocks, blocks)
    assert survivor.agent.check_xfer_state(survivor.under_way["never"]) == "PROC"
    peer.kill()
    assert survivor.finish("never") == DISCONNECTED
    survivor.remove_engine("first")
    freed.check()

    peer = there(Worker, "next", memory, SIZE, 3)
    survivor.add_engine("second", peer.handshake())
    expected = Expectation(survivor, peer)
    survivor.start(op, "request", "second", *FIRST)
    if op == "READ":
        expected.moved(peer, survivor, places(FIRST[1], FIRST[0]))
    else:
        expected.moved(survivor, peer, places(*FIRST))
    assert survivor.finish("request") == LAYERS * 8 * BLOCK
    assert peer.run(messages, 1) == [b"request:1"]
    expected.check()
    survivor.shut_down()
