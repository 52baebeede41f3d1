"""Tests which memory can be registered."""

import array
import ctypes
import gc
import weakref

import numpy as np
import pytest
import tcpx


class Tensor:
    """Has the attributes of torch's tensors that registration reads."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def data_ptr(self):
        return self.array.ctypes.data

    def numel(self):
        return self.array.size

    def element_size(self):
        return self.array.itemsize

    def is_contiguous(self):
        return self.array.flags.c_contiguous

    def stride(self):
        return tuple(stride // self.array.itemsize for stride in self.array.strides)


@pytest.fixture
def session():
    with tcpx.Session() as session:
        yield session


@pytest.mark.parametrize(
    ("memory", "size"),
    [
        (bytearray(10), 10),
        (memoryview(bytearray(10))[2:], 8),
        (array.array("d", [1, 2]), 16),
        (np.zeros((3, 4), np.float32), 48),
        (np.zeros((3, 4), np.float32).T[:, :1].T, 16),
        (np.zeros((3, 4), np.float32, order="F"), 48),
        (np.zeros((2, 3, 4), np.int16).transpose(1, 0, 2), 48),
        (np.zeros((3, 1, 4), np.complex64)[:, :, ::1], 96),
        (np.zeros(3, bool), 3),
        (np.zeros(3, [("a", np.int32), ("b", "S4")]), 24),
        ((ctypes.c_int * 3)(), 12),
        (Tensor(np.zeros(7, np.float16)), 14),
        (Tensor(np.zeros((3, 4), np.float32).T), 48),
    ],
)
def test_what_has_memory(session, memory, size):
    region = session.register(memory)
    assert region.nbytes == size and region.address > 0
    assert session.register(memory, nbytes=size - 1).nbytes == size - 1
    with pytest.raises(ValueError, match="only"):
        session.register(memory, nbytes=size + 1)


def test_address(session):
    memory = np.zeros(64, np.uint8)
    region = session.register(memory.ctypes.data + 16, 32)
    assert (region.address, region.nbytes) == (memory.ctypes.data + 16, 32)
    with pytest.raises(TypeError, match="nbytes"):
        session.register(memory.ctypes.data)


@pytest.mark.parametrize(
    ("memory", "error", "words"),
    [
        (b"bytes", ValueError, "read-only"),
        (np.broadcast_to(np.zeros(1), (4,)), ValueError, "read-only"),
        (np.zeros((4, 4))[:, :2], ValueError, "not contiguous"),
        (np.zeros(8)[::2], ValueError, "not contiguous"),
        (memoryview(bytearray(8))[::2], ValueError, "not contiguous"),
        (np.zeros((4, 4), order="F")[:2], ValueError, "not contiguous"),
        (np.zeros(8)[::-1], ValueError, "not contiguous"),
        (Tensor(np.zeros((4, 4))[:, :2]), ValueError, "not contiguous"),
        (np.array(["text", "t"]), TypeError, "array of texts \\(<U4\\)"),
        (np.array([b"text"]), TypeError, "array of texts"),
        (np.array(["2026-11-16"], "M8[ns]"), TypeError, "array of dates \\(<M8\\[ns\\]\\)"),
        (np.zeros(3, "m8[s]"), TypeError, "array of time spans"),
        (np.array([object()]), TypeError, "array of Python objects"),
        (np.zeros(3, [("a", "i4"), ("b", [("c", "O")])]), TypeError, "array of Python objects"),
        (bytearray(), ValueError, "empty"),
        (np.zeros(0), ValueError, "at least one byte"),
        ("text", TypeError, "cannot register a str"),
        (1.5, TypeError, "cannot register a float"),
    ],
)
def test_what_has_not(session, memory, error, words):
    with pytest.raises(error, match=words):
        session.register(memory)


def test_a_region_keeps_memory_alive_and_lets_it_go(session):
    memory = np.zeros(1 << 20, np.uint8)
    gone = weakref.ref(memory)
    region = session.register(memory)
    del memory
    gc.collect()
    assert gone() is not None
    del region
    gc.collect()
    assert gone() is None


def test_a_registered_bytearray_cannot_be_resized(session):
    memory = bytearray(16)
    region = session.register(memory)
    with pytest.raises(BufferError):
        memory.extend(b"more")
    del region
    memory.extend(b"more")


def test_the_same_range_has_the_same_descriptor(session):
    memory = bytearray(16)
    first = session.register(memory).descriptor
    assert session.register(memory).descriptor == first
