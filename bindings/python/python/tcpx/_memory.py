"""Finds the bytes of a Python object."""

from __future__ import annotations

import ctypes
from typing import Any


def resolve(memory: Any, nbytes: int | None) -> tuple[int, int, Any]:
    """Returns address, size, and the object that keeps the memory alive."""
    if isinstance(memory, int) and not isinstance(memory, bool):
        if nbytes is None:
            raise TypeError("nbytes: an address needs it, got None")
        if memory <= 0:
            raise ValueError(f"memory: expected an address, got {memory}")
        return memory, nbytes, None
    address, size, owner = _whole(memory)
    if nbytes is not None:
        if nbytes > size:
            raise ValueError(f"nbytes: the {type(memory).__name__} has only {size} bytes, got {nbytes}")
        size = nbytes
    return address, size, owner


def _whole(memory: Any) -> tuple[int, int, Any]:
    # For torch and similar tensors; checked first, since GPU tensors have no buffer.
    if hasattr(memory, "data_ptr") and hasattr(memory, "numel"):
        contiguous = not hasattr(memory, "is_contiguous") or memory.is_contiguous()
        if not contiguous and not _is_dense_tensor(memory):
            raise ValueError("memory: the tensor is not contiguous: register its storage, or a contiguous copy")
        return memory.data_ptr(), memory.numel() * memory.element_size(), memory
    for name in ("__cuda_array_interface__", "__array_interface__"):
        interface = getattr(memory, name, None)
        if interface is not None:
            return _interface(interface, memory)
    try:
        # Refuses read-only buffers; holds the buffer, so that a bytearray cannot be resized
        # meanwhile.
        view = memoryview(memory)
    except TypeError:
        raise TypeError(
            f"memory: cannot register a {type(memory).__name__}: expected an array, a tensor, a writable buffer, or an "
            "address with nbytes"
        ) from None
    if view.readonly:
        raise ValueError(f"memory: the {type(memory).__name__} is read-only, and peers may write: register a bytearray")
    if not view.c_contiguous:
        raise ValueError("memory: the buffer is not contiguous in C order")
    if view.nbytes == 0:
        raise ValueError("memory: the buffer is empty")
    held = (ctypes.c_char * view.nbytes).from_buffer(view)
    return ctypes.addressof(held), view.nbytes, held


# Letters of a typestr for elements that are plain bytes: truth values, numbers, raw bytes.
_PLAIN = "biufcV"
_OTHER = {
    "O": "Python objects, which are addresses",
    "U": "texts",
    "S": "texts",
    "T": "texts, which are addresses",
    "M": "dates",
    "m": "time spans",
}


def _interface(interface: dict[str, Any], memory: Any) -> tuple[int, int, Any]:
    address, readonly = interface["data"]
    if readonly:
        raise ValueError("memory: the array is read-only, and peers may write: register a writable one")
    typestr = interface["typestr"]
    kind = "O" if _has_objects(interface.get("descr")) else typestr[1:2]
    if kind not in _PLAIN:
        raise TypeError(
            f"memory: cannot register an array of {_OTHER.get(kind, 'such elements')} ({typestr}): expected numbers. "
            "A view of its bytes, array.view(numpy.uint8), can be registered where that makes sense"
        )
    itemsize = int(typestr[2:])
    shape = interface["shape"]
    strides = interface.get("strides")
    count = 1
    for extent in shape:
        count *= extent
    if strides is not None and count > 0 and not _is_dense(shape, strides, itemsize):
        raise ValueError("memory: the array is not contiguous: register its base, or a contiguous copy")
    return address, count * itemsize, memory


def _is_dense(shape: Any, strides: Any, itemsize: int) -> bool:
    """Returns whether elements fill their memory without gaps, in any order."""
    expected = itemsize
    for stride, extent in sorted(zip(strides, shape)):
        if extent != 1:
            if stride != expected:
                return False
            expected *= extent
    return True


def _is_dense_tensor(tensor: Any) -> bool:
    if not hasattr(tensor, "stride") or not hasattr(tensor, "shape"):
        return False
    return _is_dense(tensor.shape, tensor.stride(), 1)


def _has_objects(descr: Any) -> bool:
    """Returns whether a field, at any depth, is a Python object."""
    if isinstance(descr, str):
        return descr[1:2] == "O"
    return isinstance(descr, list) and any(_has_objects(field[1]) for field in descr)
