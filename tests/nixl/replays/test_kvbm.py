"""Dynamo's block manager (KVBM): blocks between two workers, whole or layer by layer.

Follows lib/memory/src/nixl/agent.rs and lib/kvbm-physical/src/transfer/executor/nixl.rs of August
2026 (1.4 development), which call NIXL's C API through its Rust bindings; here Python calls the same
functions of libnixl_capi. The backend gets the plugin's own default parameters back; memory is
registered without naming a backend; requests carry no notification; a transfer is polled with
its status alone.
"""

import ctypes
import functools
import pathlib

import nixl._bindings
import pytest
from endpoint import BACKEND, until

from .replay import SOON, Application, Expectation, Freed

BLOCKS = 32
LAYERS = 4
OUTER = 2  # K and V
PART = 8 << 10
BLOCK = LAYERS * OUTER * PART
SIZE = BLOCKS * BLOCK

SUCCESS, IN_PROGRESS, BACKEND_ERROR = 0, 1, -2
MEMORIES = {"DRAM": 0, "VRAM": 1}
OPS = {"READ": 0, "WRITE": 1}


@functools.cache
def load():
    """Loads the C API that belongs to the NIXL in use."""
    packages = pathlib.Path(nixl._bindings.__file__).parents[1]
    return ctypes.CDLL(next(packages.glob(".nixl_cu*.mesonpy.libs/libnixl_capi.so")))


def call(name, *args):
    """Calls a function that must succeed."""
    status = getattr(load(), f"nixl_capi_{name}")(*args)
    assert status == SUCCESS, f"{name}: {status}"


def made(name, *args):
    """Calls a function whose last argument receives a handle."""
    handle = ctypes.c_void_p()
    call(name, *args, ctypes.byref(handle))
    return handle


size_t = ctypes.c_size_t
u64 = ctypes.c_uint64


class Worker(Application):
    def make_agent(self):
        agent = made("create_agent", self.name.encode())
        memories, parameters = ctypes.c_void_p(), ctypes.c_void_p()
        out = ctypes.byref(memories), ctypes.byref(parameters)
        call("get_plugin_params", agent, BACKEND.encode(), *out)
        self.backend = made("create_backend", agent, BACKEND.encode(), parameters)
        call("destroy_mem_list", memories)
        call("destroy_params", parameters)
        return agent

    def set_up(self):
        self.kind = MEMORIES[self.memory]
        self.list = made("create_reg_dlist", self.kind)
        call("reg_dlist_add_desc", self.list, u64(self.base), size_t(SIZE), u64(0), None, size_t(0))
        call("register_mem", self.agent, self.list, None)

    def close(self):
        """Ends in the order of the bindings' destructors: memory first, then the agent."""
        call("deregister_mem", self.agent, self.list, None)
        call("destroy_reg_dlist", self.list)
        call("destroy_backend", self.backend)
        call("destroy_agent", self.agent)

    def layout(self):
        """Returns a worker's export: its metadata and the position of its blocks."""
        data, length = ctypes.c_void_p(), size_t()
        call("get_local_md", self.agent, ctypes.byref(data), ctypes.byref(length))
        metadata = ctypes.string_at(data, length.value)
        ctypes.CDLL(None).free(data)
        return self.name, metadata, self.base

    def load_layout(self, layout):
        self.remote, metadata, self.remote_base = layout
        name = made("load_remote_md", self.agent, metadata, size_t(len(metadata)))
        assert ctypes.string_at(name).decode() == self.remote
        ctypes.CDLL(None).free(name)

    def knows_its_memory(self, blocks):
        descriptors = self.descriptors(self.remote_base, [(block * BLOCK, BLOCK) for block in blocks])
        status = load().nixl_capi_check_remote_md(self.agent, self.remote.encode(), descriptors)
        call("destroy_xfer_dlist", descriptors)
        return status == SUCCESS

    def descriptors(self, base, parts):
        result = made("create_xfer_dlist", self.kind)
        for offset, length in parts:
            call("xfer_dlist_add_desc", result, u64(base + offset), size_t(length), u64(0))
        return result

    def start(self, op, mine, theirs):
        """Posts a request for parts of (offset, length); returns whether it is still pending."""
        lists = self.descriptors(self.base, mine), self.descriptors(self.remote_base, theirs)
        self.request = ctypes.c_void_p()
        remote = self.remote.encode()
        call("create_xfer_req", self.agent, OPS[op], *lists, remote, ctypes.byref(self.request), None)
        for one in lists:
            call("destroy_xfer_dlist", one)
        status = load().nixl_capi_post_xfer_req(self.agent, self.request, None)
        assert status in (SUCCESS, IN_PROGRESS)
        return status == IN_PROGRESS

    def status(self):
        return load().nixl_capi_get_xfer_status(self.agent, self.request)

    def finish(self):
        until(lambda: self.status() != IN_PROGRESS, "the end of a transfer", SOON)
        status = self.status()
        self.drop()
        return status

    def drop(self):
        call("release_xfer_req", self.agent, self.request)
        call("destroy_xfer_req", self.request)
        self.request = None

    def forget(self):
        """Ignores the result: NIXL up to 1.4 has already dropped a lost peer."""
        load().nixl_capi_invalidate_remote_md(self.agent, self.remote.encode())


def whole(blocks):
    return [(block * BLOCK, BLOCK) for block in blocks]


def layer_wise(blocks, layers):
    return [
        (block * BLOCK + (layer * OUTER + outer) * PART, PART)
        for block in blocks
        for layer in layers
        for outer in range(OUTER)
    ]


def moves(source, target):
    return [(a, b, length) for (a, length), (b, _) in zip(source, target)]


MINE, THEIRS = [0, 1, 2, 9, 31, 4], [7, 8, 30, 0, 2, 17]


@pytest.mark.parametrize("op", ["READ", "WRITE"], ids=["onboard", "offload"])
def test_blocks(here, there, memory, op):
    local, remote = here(Worker, "worker-0", memory, SIZE), there(Worker, "worker-1", memory, SIZE, 2)
    local.load_layout(remote.layout())
    assert local.knows_its_memory(range(BLOCKS))
    assert not local.knows_its_memory([BLOCKS])
    expected = Expectation(local, remote)
    for parts in (whole, lambda blocks: layer_wise(blocks, range(1, 3))):
        local.start(op, parts(MINE), parts(THEIRS))
        assert local.finish() == SUCCESS
        if op == "READ":
            expected.moved(remote, local, moves(parts(THEIRS), parts(MINE)))
        else:
            expected.moved(local, remote, moves(parts(MINE), parts(THEIRS)))
        expected.check()
    local.forget()


@pytest.mark.parametrize("op", ["READ", "WRITE"], ids=["onboard", "offload"])
def test_peer_dies(here, there, memory, op):
    survivor = here(Worker, "worker-0", memory, SIZE)
    freed = Freed()
    peer = there(Worker, "worker-1", memory, SIZE, 2)
    survivor.load_layout(peer.layout())
    survivor.start(op, whole([0]), whole([0]))
    assert survivor.finish() == SUCCESS
    assert freed.in_use()
    peer.freeze()
    assert survivor.start(op, whole(range(BLOCKS)), whole(range(BLOCKS)))
    assert survivor.status() == IN_PROGRESS
    peer.kill()
    # The C API has one error for all failures.
    assert survivor.finish() == BACKEND_ERROR
    survivor.forget()
    freed.check()

    peer = there(Worker, "worker-1", memory, SIZE, 3)
    survivor.load_layout(peer.layout())
    expected = Expectation(survivor, peer)
    survivor.start(op, whole(MINE), whole(THEIRS))
    assert survivor.finish() == SUCCESS
    if op == "READ":
        expected.moved(peer, survivor, moves(whole(THEIRS), whole(MINE)))
    else:
        expected.moved(survivor, peer, moves(whole(MINE), whole(THEIRS)))
    expected.check()
