"""TensorRT-LLM's transfer agent: a context worker writes into the buffers of a generation worker.

Follows nixl_utils/transferAgent.cpp and agent_utils/connection.cpp, both in
cpp/tensorrt_llm/executor/cache_transmission of August 2026 (1.2 and later), which takes no backend
but UCX and LIBFABRIC by name: the C++ API; the plugin's default parameters; buffers registered in
one list; metadata fetched from the listener, and sent inside a notification; requests for whole
buffers, followed by a notification or with one; transfers to itself; a release in flight.
tensorrt_llm.cpp is compiled here, against the libraries of the NIXL that is tested.
"""

import ctypes
import os
import pathlib
import pickle
import shlex
import shutil
import subprocess
import time

import nixl._bindings
import numpy as np
import pytest
from conftest import NIXL
from endpoint import BACKEND, on_free_ports, rows, until

from .replay import SOON, Application, Expectation, Freed

HERE = pathlib.Path(__file__).parent
BUFFER = 1 << 20
BUFFERS = 4  # two to receive into, two to send from
SIZE = BUFFERS * BUFFER

IN_PROGRESS, SUCCESS, NOT_FOUND, REMOTE_DISCONNECT = 1, 0, -4, -10
MEMORIES = {"DRAM": 0, "VRAM": 1}
READ, WRITE = 0, 1

Taken = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)
TakenFrom = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Compiles the agent; skips, with the compiler's message, if that fails."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    if not shutil.which(compiler[0]):
        pytest.skip(f"no C++ compiler: {compiler[0]} does not exist")
    packages = pathlib.Path(nixl._bindings.__file__).parents[1]
    libraries = next(packages.glob(".nixl_cu*.mesonpy.libs"))
    out = tmp_path_factory.mktemp("tensorrt-llm") / "libagent.so"
    port = "int" if NIXL < (1, 2) else "uint16_t"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", f"-DNIXL_LISTEN_PORT={port}"]
    link = ["-shared", f"-L{libraries}", "-lnixl", "-lnixl_build", f"-Wl,-rpath,{libraries}", "-o", out]
    built = subprocess.run(
        [*compiler, *flags, HERE / "tensorrt_llm.cpp", *link], capture_output=True, text=True
    )
    if built.returncode:
        pytest.skip(f"tensorrt_llm.cpp cannot be built: {built.stderr.strip().splitlines()[-1]}")
    return str(out)


class Worker(Application):
    def __init__(self, name, library, *args, **kwargs):
        self.library = ctypes.CDLL(library)
        for function in ("agent_new", "agent_submit"):
            getattr(self.library, function).restype = ctypes.c_void_p
        super().__init__(name, *args, **kwargs)

    def make_agent(self):
        def start(port):
            agent = self.library.agent_new(self.name.encode(), port, BACKEND.encode())
            assert agent
            self.port = port
            return ctypes.c_void_p(agent)

        return on_free_ports(1, start)

    def set_up(self):
        self.kind = MEMORIES[self.memory]
        buffers = self.table([(buffer * BUFFER, BUFFER) for buffer in range(BUFFERS)])
        count = ctypes.c_size_t(len(buffers))
        assert self.call("register", self.kind, pointer(buffers), count) == SUCCESS

    def close(self):
        if self.agent:
            self.library.agent_free(self.agent)
            self.agent = None

    def call(self, name, *args):
        return getattr(self.library, f"agent_{name}")(self.agent, *args)

    def table(self, parts, base=None):
        """Returns descriptors of (offset, length) as an array, which must live during the call."""
        offsets, lengths = np.array(parts, dtype=np.uint64).reshape(-1, 2).T
        return rows(np.uint64(self.base if base is None else base) + offsets, lengths)

    # Metadata

    def where(self):
        return self.name, self.port

    def fetch(self, name, port):
        """Gets the metadata of an agent from its listener."""
        assert self.call("fetch", name.encode(), b"127.0.0.1", port) == SUCCESS
        until(lambda: self.knows(name), f"the metadata of {name}", SOON)

    def knows(self, name, parts=(), base=0):
        table = self.table(parts, base)
        status = self.call("knows", name.encode(), self.kind, pointer(table), ctypes.c_size_t(len(table)))
        assert status in (SUCCESS, NOT_FOUND)
        return status == SUCCESS

    def metadata(self):
        taken = []
        keep = Taken(lambda data, length: taken.append(ctypes.string_at(data, length)))
        assert self.call("metadata", keep) == SUCCESS
        return taken[0]

    def load(self, name, metadata):
        """Loads metadata from a request, replacing earlier metadata."""
        self.call("invalidate", name.encode())
        assert self.call("load", name.encode(), metadata, ctypes.c_size_t(len(metadata))) == SUCCESS

    def invalidate(self, name):
        """Ignores the result: NIXL up to 1.4 has already dropped a lost peer."""
        self.call("invalidate", name.encode())

    # Notifications

    def notify(self, name, message):
        assert self.call("notify", name.encode(), message, ctypes.c_size_t(len(message))) == SUCCESS

    def notifications(self, count, timeout=SOON):
        got = []

        @TakenFrom
        def keep(sender, data, length):
            got.append((sender.decode(), ctypes.string_at(data, length)))

        def enough():
            assert self.call("notifications", keep) == SUCCESS
            return len(got) >= count

        until(enough, f"{count} notifications", timeout)
        return got

    def request(self, name, buffer):
        """Asks a context worker for data, with everything that it needs to write here."""
        self.notify(name, pickle.dumps((self.name, self.metadata(), self.base + buffer * BUFFER)))

    def accept(self):
        """Waits for a request: returns the sender, and where to write."""
        ((_, message),) = self.notifications(1)
        name, metadata, address = pickle.loads(message)
        if not self.knows(name, [(0, BUFFER)], address):
            self.load(name, metadata)
        assert self.knows(name, [(0, BUFFER)], address)
        assert not self.knows(name, [(1 << 40, 1)], address)
        return name, address

    # Transfers

    def submit(self, op, mine, name, address, parts=((0, BUFFER),), message=None):
        """Posts a request for parts of a buffer."""
        local = self.table(parts, self.base + mine * BUFFER)
        remote = self.table(parts, address)
        lists = pointer(local), pointer(remote), ctypes.c_size_t(len(local))
        handle = self.call("submit", op, self.kind, *lists, name.encode(), message)
        assert handle
        return ctypes.c_void_p(handle)

    def status(self, handle):
        return self.call("status", handle)

    def wait(self, handle, timeout=SOON):
        deadline = time.monotonic() + timeout
        while (status := self.status(handle)) == IN_PROGRESS:
            assert time.monotonic() < deadline, f"in progress for {timeout} s"
        return status

    def release(self, handle):
        assert self.call("release", handle) == SUCCESS

    def shut_down(self, *names):
        for name in names:
            self.invalidate(name)
        self.close()


def pointer(table):
    return table.ctypes.data_as(ctypes.c_void_p)


def test_context_and_generation(here, there, memory, library):
    context = here(Worker, "host_1_0", library, memory, SIZE)
    generation = there(Worker, "host_2_0", library, memory, SIZE, 2)
    generation.fetch(*context.where())
    for buffer in range(2):
        generation.request("host_1_0", buffer)
        name, address = context.accept()
        assert name == "host_2_0"
        expected = Expectation(context, generation)
        source = 2 + buffer
        # Many small parts in the first round, the whole buffer in the second one.
        parts = [(0, BUFFER)] if buffer else [(start, 3000) for start in range(0, BUFFER, 8192)]
        message = b"with the data" if buffer else None
        handle = context.submit(WRITE, source, name, address, parts, message)
        assert context.wait(handle) == SUCCESS
        context.release(handle)
        if not buffer:
            context.notify(name, b"after the data")
        assert generation.notifications(1) == [("host_1_0", message or b"after the data")]
        moved = [(source * BUFFER + start, buffer * BUFFER + start, length) for start, length in parts]
        expected.moved(context, generation, moved)
        expected.check()
    context.shut_down("host_2_0")
    generation.shut_down("host_1_0")


def test_to_itself(here, memory, library):
    worker = here(Worker, "host_1_0", library, memory, SIZE)
    expected = Expectation(worker)
    for op in (WRITE, READ):
        handle = worker.submit(op, 2, "host_1_0", worker.base, message=b"to myself")
        assert worker.wait(handle) == SUCCESS
        worker.release(handle)
        assert worker.notifications(1) == [("host_1_0", b"to myself")]
        expected.moved(worker, worker, [(2 * BUFFER, 0, BUFFER)])
        expected.check()


@pytest.mark.parametrize("op", [WRITE, READ], ids=["write", "read"])
def test_cancel_in_flight(here, there, memory, library, op):
    """A release in flight succeeds while the peer does not answer; the next transfer works."""
    context, generation, name, address = connected(here, there, memory, library)
    expected = Expectation(context, generation)
    generation.freeze()
    handle = context.submit(op, 3, name, address)
    assert context.status(handle) == IN_PROGRESS
    context.release(handle)
    generation.thaw()
    # Bytes that a WRITE has already sent are overwritten by the next one.
    handle = context.submit(op, 2, name, address, message=b"now")
    assert context.wait(handle) == SUCCESS
    context.release(handle)
    assert generation.notifications(1) == [("host_1_0", b"now")]
    if op == WRITE:
        expected.moved(context, generation, [(2 * BUFFER, 0, BUFFER)])
    else:
        expected.moved(generation, context, [(0, 2 * BUFFER, BUFFER)])
    expected.check()


def connected(here, there, memory, library, name="host_2_0", context=None):
    """Returns a context worker that has been asked, and has written once."""
    context = context or here(Worker, "host_1_0", library, memory, SIZE)
    generation = there(Worker, name, library, memory, SIZE, 2)
    generation.fetch(*context.where())
    generation.request("host_1_0", 0)
    name, address = context.accept()
    handle = context.submit(WRITE, 2, name, address, [(0, 64)])
    assert context.wait(handle) == SUCCESS
    context.release(handle)
    return context, generation, name, address


@pytest.mark.parametrize("op", [WRITE, READ], ids=["write", "read"])
def test_peer_dies(here, there, memory, library, op):
    context = here(Worker, "host_1_0", library, memory, SIZE)
    freed = Freed(ignored_port=context.port)
    _, generation, name, address = connected(here, there, memory, library, context=context)
    assert freed.in_use()
    generation.freeze()
    handle = context.submit(op, 2, name, address)
    assert context.status(handle) == IN_PROGRESS
    generation.kill()
    assert context.wait(handle) == REMOTE_DISCONNECT
    context.release(handle)
    context.invalidate(name)
    freed.check()

    _, generation, name, address = connected(here, there, memory, library, "host_3_0", context)
    expected = Expectation(context, generation)
    handle = context.submit(op, 3, name, address)
    assert context.wait(handle) == SUCCESS
    context.release(handle)
    if op == WRITE:
        expected.moved(context, generation, [(3 * BUFFER, 0, BUFFER)])
    else:
        expected.moved(generation, context, [(0, 3 * BUFFER, BUFFER)])
    expected.check()
