"""Tests GPU memory, with only the CUDA driver: no torch is needed. Skipped, with a message,
without a GPU."""

import ctypes

import numpy as np
import pytest
import tcpx
from conftest import WAIT, Ends, pattern
from tcpx import p2p

SIZE = 16 << 20


class Gpu:
    """Device memory of the first GPU."""

    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)

    def __call__(self, function, *arguments):
        code = getattr(self.driver, function)(*arguments)
        if code != 0:
            raise OSError(f"{function}: {code}")

    def allocate(self, array):
        """Copies an array to the device; returns its address."""
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(array.nbytes))
        self.put(address.value, array)
        return address.value

    def put(self, address, array):
        self("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))

    def get(self, address):
        array = np.empty(SIZE, np.uint8)
        self("cuMemcpyDtoH_v2", ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(address), ctypes.c_size_t(SIZE))
        return array


class Tensor:
    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address

    def numel(self):
        return SIZE

    def element_size(self):
        return 1


@pytest.fixture(scope="module")
def gpu():
    try:
        return Gpu()
    except OSError as error:
        pytest.skip(f"no GPU here: {error}")


def test_session(gpu, pair):
    alice, bob, peer = pair
    data = pattern(SIZE, 1)
    device = gpu.allocate(data)
    theirs = bob.register(device, SIZE)
    assert theirs.memory == "cuda:0"
    host = np.zeros(SIZE, np.uint8)
    mine, remote = alice.register(host), tcpx.RemoteRegion(theirs.descriptor)
    alice.read(peer, [(mine, 0, remote, 0, SIZE)]).wait(WAIT)
    assert (host == data).all()
    host[:] = pattern(SIZE, 2)
    blocks = np.arange(SIZE // 4096) * 4096
    transfer = alice.prepare_blocks("write", peer, mine, blocks, remote, blocks[::-1], 4096)
    transfer.post()
    transfer.wait(WAIT)
    assert (gpu.get(device).reshape(-1, 4096)[::-1] == host.reshape(-1, 4096)).all()


def test_p2p(gpu, ends: Ends):
    data = pattern(SIZE, 3)
    here, there = gpu.allocate(data), gpu.allocate(np.zeros(SIZE, np.uint8))
    *_, bdf = p2p.Endpoint.parse_metadata(ends.here.get_metadata())
    assert len(bdf) == 12
    (ok, mr), (_, remote) = ends.here.reg(here, SIZE), ends.there.reg(there, SIZE)
    _, blob = ends.there.advertise(remote, there, SIZE)
    assert ok is True and ends.here.write(ends.conn, mr, here, SIZE, blob) is True
    assert (gpu.get(there) == data).all()
    gpu.put(there, data[::-1].copy())
    assert ends.here.read(ends.conn, mr, here, SIZE, blob) is True and (gpu.get(here) == data[::-1]).all()
    local, remote = ends.here.register_memory([Tensor(here)]), ends.there.register_memory([Tensor(there)])
    gpu.put(here, data)
    assert ends.finish(ends.here.transfer(ends.conn, "write", local, remote)) is True and (gpu.get(there) == data).all()
    ok, info = ends.there.advertise_ipc(0, there, SIZE)
    gpu.put(there, np.zeros(SIZE, np.uint8))
    assert ends.here.write_ipc(ends.conn, here, SIZE, info) is True and (gpu.get(there) == data).all()
