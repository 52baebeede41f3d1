"""Blocks of memory in the host and on a GPU, each between guards that no transfer may touch."""

import ctypes
import os

import numpy as np

GUARD = 4096


def pattern(seed, size):
    """Returns bytes that are unique to the seed."""
    return np.frombuffer(np.random.Generator(np.random.SFC64(seed)).bytes(size), dtype=np.uint8)


class Host:
    """Memory of this process."""

    on_gpu = False

    def __init__(self, size):
        self.size = size
        self.bytes = np.zeros(size + 2 * GUARD, dtype=np.uint8)
        self.address = self.bytes.ctypes.data + GUARD

    def write(self, content):
        self.bytes[:] = content

    def read(self):
        return self.bytes.copy()


class Vram:
    """A tensor of torch's, from the selected allocator."""

    on_gpu = True

    def __init__(self, size, device):
        import torch

        self.torch = torch
        self.size = size
        self.tensor = torch.empty(size + 2 * GUARD, dtype=torch.uint8, device=f"cuda:{device}")
        self.address = self.tensor.data_ptr() + GUARD

    def write(self, content):
        # A tensor cannot be made of read-only memory, as `pattern` returns it.
        self.tensor.copy_(self.torch.from_numpy(np.array(content)))
        # Transfers do not wait for torch's streams: the bytes must be written before.
        self.torch.cuda.synchronize()

    def read(self):
        return self.tensor.cpu().numpy().copy()


def allocator(wanted):
    """Checks that torch uses the selected allocator; with another one the checks would be wrong."""
    import torch

    backend = torch.cuda.get_allocator_backend()
    if backend != ("cudaMallocAsync" if wanted == "async" else "native"):
        raise AssertionError(f"torch uses the allocator {backend}, not {wanted}")
    if wanted != "async":
        expandable = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
        if expandable != (wanted == "expandable"):
            raise AssertionError(f"torch's segments are {'' if expandable else 'not '}expandable")


def usage(device):
    """Returns resident bytes, open descriptors, and free bytes of the GPU (None: no GPU)."""
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    descriptors = len(os.listdir("/proc/self/fd")) - 1
    free = None
    if device is not None:
        import torch

        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info(device)[0]
    return resident, descriptors, free


def trim():
    """Frees memory that only caches hold, so that what is left is in use."""
    import gc
    import sys

    gc.collect()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
    ctypes.CDLL(None).malloc_trim(0)
