"""Where the bytes of a Python object are."""

from __future__ import annotations

import ctypes
from typing import Any


def resolve(memory: Any, nbytes: int | None) -> tuple[int, int, Any]:
    """Address, size, and what keeps the memory alive."""
    if isinstance(memory, int):
        if nbytes is None:
            raise TypeError("an address needs nbytes")
        return memory, nbytes, None
    address, size, owner = _whole(memory)
    if nbytes is not None:
        if nbytes > size:
            raise ValueError(f"nbytes is {nbytes}, but there are only {size} bytes")
        size = nbytes
    return address, size, owner


def _whole(memory: Any) -> tuple[int, int, Any]:
    # torch and whatever looks like it; asked first, since tensors of a GPU have no buffer.
    if hasattr(memory, "data_ptr") and hasattr(memory, "numel"):
        if hasattr(memory, "is_contiguous") and not memory.is_contiguous():
            raise ValueError("the tensor is not contiguous: register its storage, or a contiguous copy")
        return memory.data_ptr(), memory.numel() * memory.element_size(), memory
    for name in ("__cuda_array_interface__", "__array_interface__"):
        interface = getattr(memory, name, None)
        if interface is not None:
            return _interface(interface, memory)
    try:
        # Refuses what is read-only; holds the buffer, so that a bytearray cannot be resized meanwhile.
        view = memoryview(memory)
    except TypeError:
        raise TypeError(
            f"cannot register a {type(memory).__name__}: expected an array, a tensor, a writable buffer, or an "
            "address with nbytes"
        ) from None
    if view.readonly:
        raise ValueError(f"the {type(memory).__name__} is read-only, and peers may write: register a bytearray")
    if not view.contiguous:
        raise ValueError("the buffer is not contiguous")
    if view.nbytes == 0:
        raise ValueError("the buffer is empty")
    held = (ctypes.c_char * view.nbytes).from_buffer(view.cast("B") if view.format != "B" else view)
    return ctypes.addressof(held), view.nbytes, held


def _interface(interface: dict[str, Any], memory: Any) -> tuple[int, int, Any]:
    address, readonly = interface["data"]
    if readonly:
        raise ValueError("the array is read-only, and peers may write")
    itemsize = int(interface["typestr"][2:])
    count = 1
    for extent in interface["shape"]:
        count *= extent
    strides = interface.get("strides")
    if strides is not None and count > 0:
        expected = itemsize
        for extent, stride in zip(reversed(interface["shape"]), reversed(strides)):
            if extent != 1 and stride != expected:
                raise ValueError("the array is not contiguous: register its base, or a contiguous copy")
            expected *= extent
    return address, count * itemsize, memory
