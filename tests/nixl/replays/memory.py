"""Blocks of host and of GPU memory, each between guards that no transfer may touch.

GPU memory comes from the CUDA driver itself: no other package is needed.
"""

import ctypes
import functools

import numpy as np

from endpoint import pattern

GUARD = 4096


@functools.cache
def cuda():
    """Returns the CUDA driver, or the reason why there is no GPU to use."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no CUDA driver: {error}"
    if code := driver.cuInit(0):
        return f"the CUDA driver finds no GPU (error {code})"
    return driver


def missing_gpu():
    """Returns why VRAM cannot be tested here; None if it can."""
    driver = cuda()
    return driver if isinstance(driver, str) else None


class Block:
    """`size` bytes of DRAM or VRAM, registered or not, filled with the pattern of `seed`."""

    def __init__(self, memory, size, seed):
        self.memory = memory
        self.size = size
        whole = size + 2 * GUARD
        if memory == "DRAM":
            self.host = np.empty(whole, dtype=np.uint8)
            start = self.host.ctypes.data
        else:
            self.gpu = Allocation(whole)
            start = self.gpu.address
        self.base = start + GUARD
        self.write(pattern(seed, whole))

    def write(self, content):
        """Replaces all bytes, including the guards."""
        if self.memory == "DRAM":
            self.host[:] = content
        else:
            self.gpu.write(content)

    def read(self):
        """Returns a copy of all bytes, including the guards."""
        return self.host.copy() if self.memory == "DRAM" else self.gpu.read()


class Allocation:
    """Memory of the first GPU, in its primary context, where the applications' memory is too."""

    def __init__(self, size):
        self.size = size
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        call("cuCtxSetCurrent", context)
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.address = address.value

    def write(self, content):
        source = np.ascontiguousarray(content)
        call("cuMemcpyHtoD_v2", self._at(), ctypes.c_void_p(source.ctypes.data), self._len())
        # The copy of pageable memory may still be in progress when the call returns.
        call("cuCtxSynchronize")

    def read(self):
        target = np.empty(self.size, dtype=np.uint8)
        call("cuMemcpyDtoH_v2", ctypes.c_void_p(target.ctypes.data), self._at(), self._len())
        return target

    def _at(self):
        return ctypes.c_uint64(self.address)

    def _len(self):
        return ctypes.c_size_t(self.size)


def call(name, *args):
    code = getattr(cuda(), name)(*args)
    assert code == 0, f"{name}: CUDA error {code}"
