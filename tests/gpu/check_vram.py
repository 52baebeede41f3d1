#!/usr/bin/env python3
"""Moves GPU memory between two processes on loopback and compares every byte after each transfer.

DRAM and VRAM in every combination, READ and WRITE, all alignments, odd sizes, lists that mix both kinds, posting again,
release in flight; with torch's caching allocator, with cudaMallocAsync and with expandable segments. Uses NIXL with the
backend in dist/nixl where NIXL can be imported, and the C library in dist/lib. Before each transfer all memory, with the
guards around it, is filled with something else.

Ends with 0 when all checks passed, 1 on any failure, 3 when nothing could be checked.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

ALLOCATORS = {
    "caching": "",
    "async": "backend:cudaMallocAsync",
    "expandable": "expandable_segments:True",
}
VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
NOTHING = 3

# More than allocators and drivers keep cached.
GPU_NOISE = 16 << 20
HOST_NOISE = 16 << 20


class Check:
    """Both sides, and the checks with them."""

    def __init__(self, engine, device):
        from side import Other, Side

        self.other = Other(engine, f"vram-target-{os.getpid()}", device)
        self.mine = Side(engine, f"vram-initiator-{os.getpid()}", device)
        self.mine.engine.connect(self.other.info())
        self.engine = self.mine.engine
        self.seed = 1
        self.transfers = 0

    def poison(self, names):
        """Fills the named blocks with different bytes on both sides; returns the new bytes."""
        self.mine.fill(names, self.seed)
        self.other.fill(names, self.seed + 1)
        self.seed += 2
        return self.mine.contents(names), self.other.contents(names)

    def expect(self, what, mine, theirs):
        """Compares every byte of both sides."""
        import numpy as np

        for side, found, expected in (
            ("initiator", self.mine.contents(mine), mine),
            ("target", self.other.contents(list(theirs)), theirs),
        ):
            for name, content in expected.items():
                wrong = np.flatnonzero(found[name] != content)
                if len(wrong):
                    raise AssertionError(
                        f"{what}: {len(wrong)} bytes of {name} at the {side} are wrong, the first at {wrong[0]}"
                    )

    def run(self, what, op, segments, request=None):
        """Performs one transfer and compares all bytes of the blocks that it touches."""
        names = sorted({row[0] for row in segments} | {row[2] for row in segments})
        mine, theirs = self.poison(names)
        move(op, mine, theirs, segments)
        own = request or self.engine.request(op, segments)
        self.engine.post(own)
        self.engine.wait(own)
        self.transfers += 1
        self.expect(f"{op} of {what}", mine, theirs)
        if request is None:
            self.engine.release(own)

    def lists(self, quick):
        """Moves every list in every combination of memory."""
        from lists import everything
        from side import SMALL

        for own in ("dram", "vram"):
            for other in ("dram", "vram"):
                for op in ("WRITE", "READ"):
                    every = everything(SMALL)
                    for name, rows in every[-7:] if quick else every:
                        self.run(f"{name}, {own} and {other}", op, [(own, a, other, b, n) for a, b, n in rows])

    def mixed(self):
        """Moves one list with all four combinations."""
        from lists import scattered
        from side import SMALL

        kinds = [(own, other) for own in ("dram", "vram") for other in ("dram", "vram")]
        quarter = SMALL // 4
        for op in ("WRITE", "READ"):
            for seed in range(3):
                rows = scattered(quarter, 200, seed)
                # Each combination has a quarter of both blocks: nothing overlaps.
                segments = [
                    (own, index * quarter + a, other, index * quarter + b, n)
                    for a, b, n in rows
                    for index, (own, other) in enumerate(kinds)
                ]
                self.run("a mixed list", op, segments)

    def large(self, quick):
        """Moves memory that the allocator may have mapped in several pieces."""
        from lists import blocks
        from side import LARGE

        pairs = (("vram-large", "vram-large"), ("dram-large", "vram-large"), ("vram-large", "dram-large"))
        for own, other in pairs[:1] if quick else pairs:
            for op in ("WRITE", "READ"):
                self.run(f"a large block, {own} and {other}", op, [(own, 0, other, 0, LARGE)])
                rows = [(own, a, other, b, n) for a, b, n in blocks(LARGE, 16 << 10)]
                self.run(f"16 KiB blocks, {own} and {other}", op, rows)

    def repost(self):
        """Posts the same request with new bytes."""
        from lists import scattered
        from side import SMALL

        for op in ("WRITE", "READ"):
            segments = [("vram", a, "vram", b, n) for a, b, n in scattered(SMALL, 300, 3)]
            request = self.engine.request(op, segments)
            for _ in range(5):
                self.run("a request posted again", op, segments, request)
            self.engine.release(request)

    def together(self):
        """Has many requests in flight at once, each in its own part of the blocks."""
        from side import SMALL

        count = 16
        part = SMALL // count
        names = ["dram", "vram"]
        mine, theirs = self.poison(names)
        requests = []
        for index in range(count):
            own, other = names[index % 2], names[index // 2 % 2]
            segments = [(own, index * part + 1, other, index * part + 2, part - 3)]
            op = ("WRITE", "READ")[index // 4 % 2]
            move(op, mine, theirs, segments)
            requests.append(self.engine.request(op, segments))
        for request in requests:
            self.engine.post(request)
        for request in requests:
            self.engine.wait(request)
            self.engine.release(request)
            self.transfers += 1
        self.expect("many at once", mine, theirs)

    def released(self, rounds):
        """Releases a request in flight: only its own bytes change, and its memory is free at
        once."""
        import numpy as np

        from memory import GUARD, pattern
        from side import LARGE

        names = ["vram-large"]
        segments = [("vram-large", a, "vram-large", a, 1 << 20) for a in range(0, LARGE, 1 << 20)]
        for index in range(rounds):
            op = ("WRITE", "READ")[index % 2]
            mine, theirs = self.poison(names)
            request = self.engine.request(op, segments)
            self.engine.post(request)
            self.engine.release(request)
            self.transfers += 1
            if op == "READ":
                # Released memory belongs to the application again: nothing lands in it any more.
                fresh = {"vram-large": pattern(9999 + index, LARGE + 2 * GUARD)}
                self.mine.blocks["vram-large"].write(fresh["vram-large"])
                self.run("a transfer after a released one", "READ", [("vram", 0, "dram", 0, 1 << 20)])
                self.expect("a released READ", fresh, theirs)
                continue
            self.run("a transfer after a released one", "WRITE", [("vram", 0, "dram", 0, 1 << 20)])
            self.expect("a released WRITE", mine, {})
            landed = self.other.contents(names)["vram-large"]
            old, new = theirs["vram-large"], mine["vram-large"]
            inside = slice(GUARD, GUARD + LARGE)
            if not np.array_equal(landed[:GUARD], old[:GUARD]) or not np.array_equal(landed[-GUARD:], old[-GUARD:]):
                raise AssertionError("a released WRITE touched a guard")
            if not np.all((landed[inside] == old[inside]) | (landed[inside] == new[inside])):
                raise AssertionError("a released WRITE left bytes that were never anywhere")

    def leak(self, count):
        """Registers new memory for each transfer; neither side keeps anything."""
        from side import SMALL

        before = None
        for index in range(count):
            if index == count // 5:
                before = self.mine.usage(), self.other.usage()
            # Resources that every lane creates with its first transfer are created in the first
            # fifth, which has only large ones.
            size = SMALL - 64 if index < count // 5 else 1 + (index * 7919) % (1 << 20)
            self.mine.add("passing", size, True)
            segments = [("passing", 0, "vram", 5, size)]
            op = ("WRITE", "READ")[index % 2]
            if index % 50 == 0:
                self.passing(op, size)
            else:
                request = self.engine.request(op, segments)
                self.engine.post(request)
                self.engine.wait(request)
                self.engine.release(request)
                self.transfers += 1
            self.mine.drop("passing")
        after = self.mine.usage(), self.other.usage()
        words = []
        for side, old, new in zip(("initiator", "target"), before, after):
            resident, descriptors = new[0] - old[0], new[1] - old[1]
            gpu = 0 if old[2] is None else old[2] - new[2]
            words.append(f"{side} {resident / 2**20:+.1f} MiB, {descriptors:+d} fds, GPU {gpu / 2**20:+.1f} MiB")
            if resident > HOST_NOISE or descriptors > 0 or gpu > GPU_NOISE:
                raise AssertionError(f"over {count} transfers grew: {words[-1]}")
        return "; ".join(words)

    def passing(self, op, size):
        """Does what `run` does, with memory for which the other side has no block of the same
        name."""
        from memory import GUARD, pattern

        block = self.mine.blocks["passing"]
        block.write(pattern(self.seed, size + 2 * GUARD))
        self.other.fill(["vram"], self.seed + 1)
        self.seed += 2
        mine, theirs = {"passing": block.read()}, self.other.contents(["vram"])
        segments = [("passing", 0, "vram", 5, size)]
        move(op, mine, theirs, segments)
        request = self.engine.request(op, segments)
        self.engine.post(request)
        self.engine.wait(request)
        self.engine.release(request)
        self.transfers += 1
        self.expect(f"{op} of memory that comes and goes", mine, theirs)


def move(op, mine, theirs, segments):
    """Applies the effect of the transfer on the blocks to `mine` and `theirs`."""
    from memory import GUARD

    for own, a, other, b, n in segments:
        here, there = mine[own], theirs[other]
        a, b = a + GUARD, b + GUARD
        if op == "WRITE":
            there[b : b + n] = here[a : a + n]
        else:
            here[a : a + n] = there[b : b + n]


def check(engine, allocator, device, quick, leak):
    """Runs all checks with one engine and one allocator; prints a line per part."""
    import memory

    started = time.monotonic()
    one = Check(engine, device)
    if device is not None:
        memory.allocator(allocator)
    parts = [
        ("lists", lambda: one.lists(quick)),
        ("mixed", one.mixed),
        ("large", lambda: one.large(quick)),
        ("repost", one.repost),
        ("together", one.together),
        ("released", lambda: one.released(4 if quick else 20)),
    ]
    if leak:
        parts = [("leak", lambda: one.leak(leak))]
    for name, part in parts:
        begun = time.monotonic()
        word = part()
        print(f"  {name:<9} ok  {time.monotonic() - begun:6.1f} s  {word or ''}".rstrip(), flush=True)
    one.other.stop()
    print(f"  {one.transfers} transfers in {time.monotonic() - started:.1f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=int, default=0, help="the GPU [0]")
    parser.add_argument("--engine", choices=["nixl", "c"], help="only this way [all that are there]")
    parser.add_argument("--allocator", choices=list(ALLOCATORS), help="only this one [all]")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--leak", type=int, default=0, metavar="N", help="only N transfers of memory that comes and goes")
    parser.add_argument("--host", action="store_true", help="no GPU: host memory, through the stand-in for one")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        import engines
    except ImportError as error:
        print(f"SKIPPED: {error}: install numpy")
        return NOTHING

    os.environ["TCPX_INTERFACES"] = "lo"
    os.environ.setdefault("NIXL_PLUGIN_DIR", str(engines.PLUGINS))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    if arguments.host:
        os.environ["TCPX_STAGING"] = "always"
    if arguments.here:
        try:
            device = None if arguments.host else arguments.device
            check(arguments.engine, arguments.allocator, device, arguments.quick, arguments.leak)
            return 0
        except AssertionError as error:
            print(f"  FAILED: {error}", flush=True)
            return 1

    reason = None if arguments.host else no_gpu(arguments.device)
    if reason:
        print(f"SKIPPED: {reason}")
        return NOTHING
    runs = []
    allocators = [arguments.allocator] if arguments.allocator else list(ALLOCATORS)
    for engine in [arguments.engine] if arguments.engine else engines.NAMES:
        if reason := engines.missing(engine):
            print(f"SKIPPED: {engine}: {reason}", flush=True)
            continue
        runs += [(engine, allocator) for allocator in (allocators[:1] if arguments.host else allocators)]
    if not runs:
        return NOTHING
    # A leak shows in the free memory of the whole GPU: so one at a time.
    with ThreadPoolExecutor(1 if arguments.leak else len(runs)) as pool:
        outcomes = list(pool.map(lambda run: start(*run, arguments.host), runs))
    failed = not all(outcomes)
    print("FAILED" if failed else "all checks passed")
    return int(failed)


def start(engine, allocator, host):
    """Checks in a process of its own: torch selects its allocator when it is imported."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if ALLOCATORS[allocator]:
        environment[VARIABLE] = ALLOCATORS[allocator]
    words = [sys.executable, __file__, *sys.argv[1:], "--here", "--engine", engine, "--allocator", allocator]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    memory = "host memory, staged" if host else f"allocator: {allocator}"
    print(f"{'NIXL' if engine == 'nixl' else 'C library'}, {memory}\n{done.stdout}", end="", flush=True)
    return done.returncode == 0


def no_gpu(device):
    """Returns why GPU memory is not available; None if it is. In a process of its own: CUDA
    starts once in each."""
    code = (
        "import sys, torch\n"
        "count = torch.cuda.device_count()\n"
        f"sys.exit(None if count > {device} else f'torch sees {{count}} GPUs')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return None if found.returncode == 0 else (found.stderr.strip().splitlines() or ["torch does not work"])[-1]


if __name__ == "__main__":
    sys.exit(main())
