"""Two ways to the engine, with the same methods: NIXL with the TCPX backend, and the C library.

A request is made of segments (own block, own offset, remote block, remote offset, length); blocks go by their names.
"""

import ctypes
import os
import pathlib
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
DIST = pathlib.Path(os.environ.get("DIST", ROOT / "dist"))
LIBRARY = DIST / "lib" / "libtcpx_p2p.so"
PLUGINS = DIST / "nixl"

# Reached only when something is wrong.
TIMEOUT = 30.0

NAMES = ("nixl", "c")


def missing(name):
    """Returns why an engine cannot be used here; None if it can."""
    if name == "c":
        return None if LIBRARY.is_file() else f"{LIBRARY} does not exist"
    if not (PLUGINS / "libplugin_TCPX.so").is_file():
        return f"{PLUGINS}/libplugin_TCPX.so does not exist"
    try:
        import nixl._api  # noqa: F401
    except Exception as error:  # A NIXL that does not load fails in many ways.
        return f"NIXL cannot be imported: {error}"
    return None


def make(name, title):
    return {"nixl": Nixl, "c": C}[name](title)


class Nixl:
    """An agent. Each list of NIXL has one kind of memory: a mixed request is several of its
    requests."""

    def __init__(self, title):
        from nixl._api import nixl_agent, nixl_agent_config

        self.title = title
        self.agent = nixl_agent(title, nixl_agent_config(backends=[]))
        self.agent.create_backend("TCPX", {})
        self.own = {}
        self.peer = None

    def register(self, name, block, device):
        kind = ("VRAM", device) if block.on_gpu else ("DRAM", 0)
        rows = self.rows(kind, [block.address], [block.size])
        registration = self.agent.register_memory(rows, mem_type=kind[0], backends=["TCPX"])
        self.own[name] = (block.address, kind, registration)

    def deregister(self, name):
        self.agent.deregister_memory(self.own.pop(name)[2])

    def info(self):
        blocks = {name: (address, kind) for name, (address, kind, _) in self.own.items()}
        return self.agent.get_agent_metadata(), blocks

    def connect(self, info):
        metadata, blocks = info
        self.peer = (self.agent.add_remote_agent(metadata).decode(), blocks)

    def request(self, op, segments):
        agent, remote = self.peer
        groups = {}
        for own, own_offset, other, other_offset, length in segments:
            mine, theirs = self.own[own], remote[other]
            rows = groups.setdefault((mine[1], theirs[1]), [])
            rows.append((mine[0] + own_offset, theirs[0] + other_offset, length))
        return [
            self.agent.initialize_xfer(
                op,
                self.agent.get_xfer_descs(self.rows(kinds[0], *self.columns(rows, 0)), mem_type=kinds[0][0]),
                self.agent.get_xfer_descs(self.rows(kinds[1], *self.columns(rows, 1)), mem_type=kinds[1][0]),
                agent,
                b"",
            )
            for kinds, rows in groups.items()
        ]

    def post(self, request):
        for handle in request:
            self.agent.transfer(handle, b"")

    def wait(self, request):
        deadline = time.monotonic() + TIMEOUT
        for handle in request:
            while (state := self.agent.check_xfer_state(handle)) != "DONE":
                if state != "PROC" or time.monotonic() > deadline:
                    raise AssertionError(f"the transfer is {state}")

    def release(self, request):
        for handle in request:
            self.agent.release_xfer_handle(handle)

    @staticmethod
    def columns(rows, side):
        return [row[side] for row in rows], [row[2] for row in rows]

    @staticmethod
    def rows(kind, addresses, lengths):
        table = np.zeros((len(addresses), 3), dtype=np.uint64)
        table[:, 0], table[:, 1], table[:, 2] = addresses, lengths, kind[1]
        return table


class Bytes(ctypes.Structure):
    _fields_ = [("data", ctypes.POINTER(ctypes.c_uint8)), ("len", ctypes.c_size_t)]


class Segment(ctypes.Structure):
    _fields_ = [
        ("local", ctypes.c_void_p),
        ("local_address", ctypes.c_uint64),
        ("remote", ctypes.c_void_p),
        ("remote_address", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
    ]


class C:
    """A session of the C library; lists may mix all kinds of memory."""

    def __init__(self, title):
        self.library = ctypes.CDLL(str(LIBRARY))
        self.library.tcpx_last_error.restype = ctypes.c_char_p
        config = self.made("config_from_env")
        self.call("config_set", config, b"name", title.encode())
        self.session = self.made("session_new", config)
        self.library.tcpx_config_free(config)
        self.own = {}
        self.peer = self.remote = None

    def call(self, name, *arguments):
        if getattr(self.library, f"tcpx_{name}")(*arguments):
            raise AssertionError(f"{name}: {self.library.tcpx_last_error().decode()}")

    def made(self, name, *arguments):
        handle = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(handle))
        return handle

    def bytes(self, name, *arguments):
        found = Bytes()
        self.call(name, *arguments, ctypes.byref(found))
        copy = ctypes.string_at(found.data, found.len)
        self.library.tcpx_bytes_free(found)
        return copy

    def register(self, name, block, device):
        kind = (1, device) if block.on_gpu else (0, 0)
        address, size = ctypes.c_void_p(block.address), ctypes.c_size_t(block.size)
        self.own[name] = (block.address, self.made("session_register", self.session, address, size, *kind))

    def deregister(self, name):
        self.library.tcpx_region_free(self.own.pop(name)[1])

    def info(self):
        blocks = {name: (address, self.bytes("region_descriptor", region)) for name, (address, region) in self.own.items()}
        return self.bytes("session_connection_info", self.session), blocks

    def connect(self, info):
        text, blocks = info
        self.peer = self.made("session_add_peer", self.session, text, ctypes.c_size_t(len(text)))
        self.remote = {
            name: (address, self.made("remote_region_from_bytes", descriptor, ctypes.c_size_t(len(descriptor))))
            for name, (address, descriptor) in blocks.items()
        }

    def request(self, op, segments):
        rows = (Segment * len(segments))()
        for row, (own, own_offset, other, other_offset, length) in zip(rows, segments):
            mine, theirs = self.own[own], self.remote[other]
            row.local, row.local_address = mine[1].value, mine[0] + int(own_offset)
            row.remote, row.remote_address = theirs[1].value, theirs[0] + int(other_offset)
            row.length = int(length)
        code = {"READ": 0, "WRITE": 1}[op]
        return self.made("session_prepare", self.session, code, self.peer, rows, ctypes.c_size_t(len(segments)))

    def post(self, request):
        self.call("transfer_post", request)

    def wait(self, request):
        self.call("transfer_wait", request, ctypes.c_uint64(int(TIMEOUT * 1000)))

    def release(self, request):
        self.library.tcpx_transfer_free(request)
