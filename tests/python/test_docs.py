"""Tests that every public name is documented, and that errors name wrong arguments."""

import copy
import importlib
import inspect
import pickle
import pkgutil

import numpy as np
import pytest
import tcpx

MODULES = ["tcpx"] + [
    module.name
    for module in pkgutil.walk_packages(tcpx.__path__, "tcpx.")
    # The NIXL backend is a library, not a module.
    if not any(part.startswith(("_", "lib")) for part in module.name.split("."))
]


def members(owner):
    names = getattr(owner, "__all__", None) or [name for name in vars(owner) if not name.startswith("_")]
    for name in names:
        yield name, inspect.getattr_static(owner, name)


def undocumented(module):
    if not module.__doc__:
        yield module.__name__
    for name, item in members(module):
        if not (inspect.isclass(item) or callable(item)):
            continue
        if not getattr(item, "__module__", "tcpx").startswith("tcpx"):
            continue  # imported from elsewhere
        if not inspect.getdoc(item):
            yield f"{module.__name__}.{name}"
        if inspect.isclass(item):
            for attribute, value in members(item):
                documented = callable(value) or isinstance(value, (property, staticmethod, classmethod))
                documented = documented or inspect.isdatadescriptor(value)
                if documented and not getattr(value, "__doc__", None):
                    yield f"{module.__name__}.{name}.{attribute}"


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_has_a_docstring(name):
    assert list(undocumented(importlib.import_module(name))) == []


def test_the_walk_sees_what_is_missing():
    class Bare:
        def method(self):
            pass

    module = type(tcpx)("tcpx.bare", "A module.")
    Bare.__module__ = "tcpx.bare"
    module.Bare = Bare
    assert list(undocumented(module)) == ["tcpx.bare.Bare", "tcpx.bare.Bare.method"]


@pytest.fixture
def parts(pair):
    alice, bob, peer = pair
    mine, served = alice.register(bytearray(64)), bob.register(bytearray(64))
    return alice, peer, mine, tcpx.RemoteRegion(served.descriptor)


def refused(error, words, call, *args, **kwargs):
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    for word in words if isinstance(words, tuple) else (words,):
        assert word in str(caught.value), str(caught.value)


def test_segments_are_named_in_errors(parts):
    alice, peer, mine, theirs = parts
    row = (mine, 0, theirs, 0, 8)
    expected = "(local Region, offset, RemoteRegion, offset, nbytes)"
    refused(TypeError, (f"segments: expected a sequence of {expected}", "got 7"), alice.prepare, "read", peer, 7)
    refused(TypeError, (f"segments[0]: expected {expected}", "got 7"), alice.prepare, "read", peer, [7])
    refused(TypeError, f"segments[1]: expected {expected}", alice.read, peer, [row, row[:4]])
    refused(TypeError, f"segments[2]: expected {expected}", alice.write, peer, [row, row, (mine, 0, mine, 0, 8)])
    refused(TypeError, "segments[0]", alice.write, peer, [(mine, 0.5, theirs, 0, 8)])


def test_offsets_are_named_in_errors(parts):
    alice, peer, mine, theirs = parts

    def blocks(ours, others):
        return alice.prepare_blocks("read", peer, mine, ours, theirs, others, 8)

    for right in ([0, 8], (0, 8), range(0, 16, 8), np.array([0, 8]), np.array([0, 8], np.uint8), np.array([0, 8], object)):
        assert blocks(right, right).nbytes == 16
    assert blocks([], []).nbytes == 0
    refused(TypeError, "local_offsets: expected a sequence of offsets", blocks, 7, [0])
    refused(TypeError, ("remote_offsets[1]: expected", "got 'b'"), blocks, [0, 8], [0, "b"])
    refused(TypeError, "local_offsets[0]", blocks, np.array([0.0, 8.0]), [0, 8])
    refused(TypeError, "local_offsets[0]", blocks, np.array([[0, 8]]), [0, 8])
    refused(TypeError, ("local_offsets[0]", "got True"), blocks, np.array([True, False]), [0, 8])
    refused(ValueError, ("local_offsets[1]", "got -8"), blocks, [0, -8], [0, 8])
    refused(ValueError, "local_offsets has 1 items and remote_offsets 2", blocks, [0], [0, 8])


def test_other_arguments_are_named_in_errors(parts):
    alice, peer, mine, theirs = parts
    refused(TypeError, "peer: expected a tcpx.Peer, got 7 (int)", alice.notify, 7, b"")
    refused(TypeError, "message: expected bytes, a bytearray or a memoryview, got 7 (int)", alice.notify, peer, 7)
    refused(TypeError, "message: expected bytes", alice.notify, peer, "text")
    refused(TypeError, "notify: expected bytes", alice.read, peer, [(mine, 0, theirs, 0, 8)], notify="text")
    refused(TypeError, "descriptor: expected bytes", tcpx.RemoteRegion, "text")
    refused(TypeError, "info: expected bytes", alice.add_peer, None)
    refused(ValueError, "op is", alice.prepare, "move", peer, [])
    refused(TypeError, "tag: expected a whole number", alice.send, peer, mine, "seven")
    refused(ValueError, "tag: expected a whole number", alice.recv, peer, mine, -1)
    refused(TypeError, "region: expected a tcpx.Region", alice.send, peer, theirs, 7)
    refused(TypeError, "nbytes: expected a whole number", alice.register, bytearray(8), 1.5)
    refused(TypeError, "timeout: expected a number of seconds", alice.accept, "soon")
    refused(TypeError, "events: expected a tcpx.Events", alice.subscribe, alice)
    refused(TypeError, "local: expected a tcpx.Region", alice.prepare_blocks, "read", peer, 1, [], theirs, [], 8)
    refused(TypeError, "remote: expected a tcpx.RemoteRegion", alice.prepare_blocks, "read", peer, mine, [], mine, [], 8)


def test_bytes_may_be_any_buffer(pair):
    alice, bob, peer = pair
    served = bob.register(bytearray(64))
    for kind in (bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)):
        assert alice.add_peer(kind(bob.connection_info)).name == "bob"
        theirs = tcpx.RemoteRegion(kind(served.descriptor))
        alice.notify(peer, kind(b"alone"))
        alice.write(peer, [(alice.register(bytearray(8)), 0, theirs, 0, 8)], notify=kind(b"along")).wait(20)
        assert {bob.wait_notification(20).message for _ in range(2)} == {b"alone", b"along"}


def test_remote_regions_compare_and_pickle(pair):
    _, bob, _ = pair
    first, second = bob.register(bytearray(64)), bob.register(bytearray(64))
    region, same, other = (tcpx.RemoteRegion(r.descriptor) for r in (first, first, second))
    assert region == same and region != other and region != first.descriptor
    assert hash(region) == hash(same) and {region, same, other} == {region, other}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copied = pickle.loads(pickle.dumps(region, protocol))
        assert copied == region and copied.descriptor == first.descriptor
    assert copy.copy(region) == copy.deepcopy(region) == region
