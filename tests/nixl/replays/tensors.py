"""Tensors for applications that hand such to NIXL: torch's where it is installed, else a stand-in.

NIXL asks a tensor for its address, size and device, and whether it is one: an instance of
`torch.Tensor`. Without torch a stub takes its name.
"""

import pathlib
import sys

from .memory import GUARD

STUB = pathlib.Path(__file__).parents[1] / "stubs"


def load_torch():
    try:
        import torch
    except ImportError:
        sys.path.append(str(STUB))
        try:
            import torch
        finally:
            sys.path.remove(str(STUB))
    return torch


torch = load_torch()


def tensor(block, offset, length):
    """Returns a tensor of bytes that is a part of a block."""
    if not hasattr(torch, "as_tensor"):
        return StandIn(block, offset, length)
    if block.memory == "DRAM":
        return torch.from_numpy(block.host[GUARD + offset : GUARD + offset + length])
    return torch.as_tensor(OnGpu(block.base + offset, length), device="cuda:0")


class OnGpu:
    """Memory of a GPU, as array libraries describe it to each other."""

    def __init__(self, address, length):
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (length,),
            "typestr": "|u1",
            "version": 3,
        }


class StandIn(torch.Tensor if not hasattr(torch, "as_tensor") else object):
    """The attributes of a tensor that NIXL reads."""

    def __init__(self, block, offset, length):
        self.device = "cpu" if block.memory == "DRAM" else "cuda:0"
        self.address = block.base + offset
        self.length = length

    def __getitem__(self, index):
        return self  # an element is a tensor, too, and NIXL asks no more of it

    def is_contiguous(self):
        return True

    def data_ptr(self):
        return self.address

    def numel(self):
        return self.length

    def element_size(self):
        return 1

    def get_device(self):
        return -1 if self.device == "cpu" else 0
