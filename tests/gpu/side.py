"""One end of the transfers: an engine and its blocks; the other end is the same in another
process."""

import ctypes
import multiprocessing
import signal
import traceback

import engines
import memory

CONTEXT = multiprocessing.get_context("spawn")

SMALL = 4 << 20
# Several pieces of physical memory, if the allocator maps them one by one.
LARGE = 48 << 20
BLOCKS = {"dram": SMALL, "vram": SMALL, "dram-large": LARGE, "vram-large": LARGE}


class Side:
    """`device` None: GPU memory is replaced by host memory."""

    def __init__(self, engine, title, device):
        self.device = device
        self.engine = engines.make(engine, title)
        self.blocks = {}
        for name, size in BLOCKS.items():
            self.add(name, size, name.startswith("vram"))

    def add(self, name, size, on_gpu):
        if on_gpu and self.device is not None:
            self.blocks[name] = memory.Vram(size, self.device)
        else:
            self.blocks[name] = memory.Host(size)
        self.engine.register(name, self.blocks[name], self.device)

    def drop(self, name):
        self.engine.deregister(name)
        del self.blocks[name]

    def fill(self, names, seed):
        """Returns every byte, including the guards."""
        for index, name in enumerate(sorted(names)):
            block = self.blocks[name]
            block.write(memory.pattern(seed * 100 + index, block.size + 2 * memory.GUARD))

    def contents(self, names):
        return {name: self.blocks[name].read() for name in names}

    def info(self):
        return self.engine.info()

    def usage(self):
        memory.trim()
        return memory.usage(self.device)


def serve(connection, arguments):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    side = None
    while True:
        try:
            method, values = connection.recv()
        except EOFError:
            return
        try:
            if side is None:
                side = Side(*arguments)
            connection.send((True, getattr(side, method)(*values)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class Other:
    """A `Side` in another process, called by the names of its methods."""

    def __init__(self, *arguments):
        self.connection, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(theirs, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def __getattr__(self, method):
        def call(*values):
            self.connection.send((method, values))
            if not self.connection.poll(120):
                raise AssertionError(f"{method}: the other process has not answered for 120 s")
            good, answer = self.connection.recv()
            if not good:
                raise AssertionError(f"in the other process:\n{answer}")
            return answer

        return call

    def stop(self):
        self.connection.close()
        self.process.join(30)
        if self.process.exitcode != 0:
            self.process.kill()
            raise AssertionError(f"the other process ended with {self.process.exitcode}")
