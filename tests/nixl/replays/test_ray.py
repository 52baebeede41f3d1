"""Ray's direct transport: one actor reads the tensors of another, which come and go.

Follows python/ray/experimental/rdt/nixl_tensor_transport.py of 2.60 and later, where the backend is
UCX: whole storages registered from tuples, descriptors made of lists of tensors, serialized; the
metadata of the source travels with each object and is loaded each time; a source that has
deregistered memory is removed before its metadata is loaded again; what an aborted transfer still
does ends with the release of its handle.
"""

from endpoint import DISCONNECTED, DONE

from .replay import SOON, Application, Expectation, Freed
from .tensors import tensor

KIB = 1 << 10
SIZE = 4 << 20


class Actor(Application):
    def set_up(self):
        self.mem_type = "cpu" if self.memory == "DRAM" else "cuda"
        self.storages = {}
        self.version = 0
        self.sources = {}

    # Source

    def register(self, offset, length):
        """Registers a storage. Tensors are parts of it."""
        storage = [(self.base + offset, length, 0, "")]
        self.storages[offset] = self.agent.register_memory(storage, mem_type=self.mem_type)

    def deregister(self, offset):
        self.agent.deregister_memory(self.storages.pop(offset))
        self.version += 1

    def descriptors(self, tensors):
        return self.agent.get_xfer_descs([tensor(self.block, *one) for one in tensors])

    def describe(self, tensors):
        """Returns the metadata of an object whose tensors are (offset, length) each."""
        serialized = self.agent.get_serialized_descs(self.descriptors(tensors))
        return self.agent.name, self.version, self.agent.get_agent_metadata(), serialized

    def register_pool(self, offset, length):
        self.agent.register_memory(tensor(self.block, offset, length))

    # Receiver

    def fetch(self, description, tensors):
        """Starts to read an object into own tensors."""
        name, version, metadata, serialized = description
        theirs = self.agent.deserialize_descs(serialized)
        for offset, length in tensors:
            self.register(offset, length)
        mine = self.descriptors(tensors)
        if self.sources.get(name, version) != version:
            self.agent.remove_remote_agent(name)
        self.sources[name] = version
        self.agent.add_remote_agent(metadata)
        handle = self.agent.initialize_xfer("READ", mine, theirs, name, b"UUID")
        assert self.agent.transfer(handle) in ("PROC", DONE)
        return handle

    def finish(self, handle, tensors, timeout=SOON):
        state = self.wait(handle, timeout)
        self.clean_up(handle, tensors)
        return state

    def clean_up(self, handle, tensors):
        self.agent.release_xfer_handle(handle)
        for offset, _ in tensors:
            self.deregister(offset)


def moves(theirs, mine):
    return [(a, b, length) for (a, length), (b, _) in zip(theirs, mine)]


def test_objects_that_come_and_go(here, there, memory):
    source, receiver = there(Actor, "actor-1", memory, SIZE, 2), here(Actor, "RAY-DRIVER-1", memory, SIZE)
    expected = Expectation(source, receiver)

    # Two tensors of one storage and one of another.
    source.register(0, 512 * KIB)
    source.register(1024 * KIB, 256 * KIB)
    theirs = [(100, 200 * KIB), (300 * KIB, 100 * KIB), (1024 * KIB, 256 * KIB)]
    mine = [(0, 200 * KIB), (256 * KIB, 100 * KIB), (512 * KIB, 256 * KIB)]
    assert receiver.finish(receiver.fetch(source.describe(theirs), mine), mine) == DONE
    expected.moved(source, receiver, moves(theirs, mine))
    expected.check()

    # More memory is registered: the metadata grows. Two objects are fetched at once.
    source.register(2048 * KIB, 1024 * KIB)
    both = [[(2048 * KIB, 600 * KIB)], [(2700 * KIB, 300 * KIB), (0, 64)]]
    into = [[(1024 * KIB, 600 * KIB)], [(2048 * KIB, 300 * KIB), (3000 * KIB, 64)]]
    handles = [receiver.fetch(source.describe(one), place) for one, place in zip(both, into)]
    for handle, one, place in zip(handles, both, into):
        assert receiver.finish(handle, place) == DONE
        expected.moved(source, receiver, moves(one, place))
    expected.check()

    # The first storage is freed; a larger one takes its address.
    source.deregister(0)
    source.register(0, 900 * KIB)
    theirs, mine = [(0, 900 * KIB)], [(1000 * KIB, 900 * KIB)]
    assert receiver.finish(receiver.fetch(source.describe(theirs), mine), mine) == DONE
    expected.moved(source, receiver, moves(theirs, mine))
    expected.check()
    assert {message for _, message in source.notifications(4)} == {b"UUID"}


def test_pool(here, there, memory):
    """A source that registers one large pool, by its tensor."""
    source, receiver = there(Actor, "actor-1", memory, SIZE, 2), here(Actor, "actor-2", memory, SIZE)
    source.register_pool(0, SIZE)
    expected = Expectation(source, receiver)
    for start in (0, 1 << 20, 3 << 20):
        theirs, mine = [(start, 333 * KIB)], [((3 << 20) - start, 333 * KIB)]
        assert receiver.finish(receiver.fetch(source.describe(theirs), mine), mine) == DONE
        expected.moved(source, receiver, moves(theirs, mine))
    expected.check()


def test_abort(here, there, memory):
    """An aborted fetch releases its memory, while its source does not answer."""
    source, receiver = there(Actor, "actor-1", memory, SIZE, 2), here(Actor, "actor-2", memory, SIZE)
    source.register(0, SIZE)
    everything = [(0, SIZE)]
    description = source.describe(everything)
    small = [(0, 64)]
    assert receiver.finish(receiver.fetch(source.describe(small), small), small) == DONE
    expected = Expectation(source, receiver)
    source.freeze()
    handle = receiver.fetch(description, everything)
    assert receiver.agent.check_xfer_state(handle) == "PROC"
    receiver.clean_up(handle, everything)
    source.thaw()
    part = [(1 << 20, 1 << 20)]
    assert receiver.finish(receiver.fetch(source.describe(part), part), part) == DONE
    expected.moved(source, receiver, moves(part, part))
    expected.check()


def test_source_dies(here, there, memory):
    receiver = here(Actor, "actor-2", memory, SIZE)
    freed = Freed()
    source = there(Actor, "actor-1", memory, SIZE, 2)
    source.register(0, SIZE)
    everything, small = [(0, SIZE)], [(0, 64)]
    assert receiver.finish(receiver.fetch(source.describe(small), small), small) == DONE
    assert freed.in_use()
    description = source.describe(everything)
    source.freeze()
    handle = receiver.fetch(description, everything)
    assert receiver.agent.check_xfer_state(handle) == "PROC"
    source.kill()
    assert receiver.finish(handle, everything) == DISCONNECTED
    freed.check()
    assert not receiver.storages

    # The actor is restarted, with a name of its own.
    source = there(Actor, "actor-3", memory, SIZE, 3)
    source.register(0, SIZE)
    expected = Expectation(source, receiver)
    assert receiver.finish(receiver.fetch(source.describe(everything), everything), everything) == DONE
    expected.moved(source, receiver, moves(everything, everything))
    expected.check()
