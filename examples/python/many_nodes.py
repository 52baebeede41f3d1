"""Many nodes: P prefill and D decode processes; every decode process reads KV blocks from every
prefill process, verifies each byte, and rank 0 prints a matrix of GB/s.

    python many_nodes.py --local                             all processes on this machine
    srun -n 4 python many_nodes.py                           Slurm; see examples/cluster for Kubernetes
    torchrun --nnodes 2 --nproc-per-node 2 … many_nodes.py

The first P ranks are the prefill processes. See docs/many-nodes.md.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import tcpx
from tcpx.rendezvous import rendezvous


def main():
    args = arguments()
    if args.local:
        return run_here(args)
    who = "many_nodes"
    try:
        with rendezvous(args.rendezvous, rank=args.rank, size=args.size, run=args.run, timeout=args.timeout) as meeting:
            who = f"many_nodes: rank {meeting.rank}"
            run(args, meeting)
    except (tcpx.Error, ValueError) as error:
        print(f"{who}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--prefill", type=positive, default=2, metavar="P", help="prefill processes (default 2)")
    add("--decode", type=positive, default=2, metavar="D", help="decode processes (default 2)")
    add("--blocks", type=positive, default=1024, metavar="N", help="blocks of each cache (default 1024)")
    add("--block-size", type=positive, default=64 << 10, metavar="S", help="bytes of a block (default 65536)")
    add("--rounds", type=positive, default=3, metavar="R", help="measured rounds, after one that is not (default 3)")
    add("--memory", choices=["host", "cuda"], default="host", help="memory of the caches; cuda needs torch (default host)")
    add("--timeout", type=float, default=300, help="seconds that processes wait for each other (default 300)")
    add("--rendezvous", default="env", metavar="URL", help="etcd://…, file:///…, tcp://HOST:PORT or env (default)")
    add("--run", help="distinguishes this run from others; see TCPX_RENDEZVOUS_RUN")
    add("--rank", type=int, help="rank of this process, without a launcher")
    add("--local", action="store_true", help="start all processes on this machine")
    args = parser.parse_args()
    if args.block_size % 8:
        parser.error("argument --block-size: must be a multiple of 8")
    args.size = None if args.rank is None else args.prefill + args.decode
    return args


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def run(args, meeting):
    agree(args, meeting)
    is_prefill = meeting.rank < args.prefill
    name = f"prefill-{meeting.rank}" if is_prefill else f"decode-{meeting.rank - args.prefill}"
    cache_bytes = args.blocks * args.block_size
    memory = Memory(args.memory, cache_bytes * (1 if is_prefill else args.prefill))
    if is_prefill:
        memory.fill(pattern(meeting.rank, args))
    with tcpx.Session(name) as session:
        region = session.register(memory.array)
        infos = meeting.exchange(session.connection_info, "info")
        caches = meeting.exchange(region.descriptor, "cache")
        seconds = []
        if is_prefill:
            # Decode processes read this memory while the program waits.
            for _ in range((args.rounds + 1) * (steps(args) + 1)):
                meeting.barrier("step")
        else:
            seconds = Decode(args, meeting, session, memory, region, infos, caches).measure()
        results = meeting.exchange(" ".join(f"{second:.9f}" for second in seconds).encode(), "result")
    if meeting.rank == 0:
        report(args, [[float(word) for word in result.split()] for result in results[args.prefill :]])


def agree(args, meeting):
    """Checks that every process was started with the same arguments."""
    plan = f"--prefill {args.prefill} --decode {args.decode} --blocks {args.blocks}"
    plan += f" --block-size {args.block_size} --rounds {args.rounds}"
    if meeting.size != args.prefill + args.decode:
        raise ValueError(f"{meeting.size} processes were started, and {plan} needs {args.prefill + args.decode}")
    for rank, other in enumerate(meeting.exchange(plan.encode(), "plan")):
        if other != plan.encode():
            raise ValueError(f"rank {rank} was started with {other.decode()}, rank {meeting.rank} with {plan}")


def steps(args):
    return max(args.prefill, args.decode)


def pattern(rank, args):
    """Returns the cache of a prefill process, one row per block: all words of all processes
    differ."""
    words = args.block_size // 8
    numbers = np.arange(args.blocks * words, dtype=np.uint64) | np.uint64(rank << 40)
    return (numbers * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8).reshape(args.blocks, args.block_size)


class Decode:
    """Reads the cache of each prefill process into a part of its own memory."""

    def __init__(self, args, meeting, session, memory, region, infos, caches):
        self.args, self.meeting, self.memory = args, meeting, memory
        self.index = meeting.rank - args.prefill
        self.orders, self.transfers = [], []
        places = np.arange(args.blocks) * args.block_size
        for rank in range(args.prefill):
            peer = session.add_peer(infos[rank])
            try:
                peer.connect(args.timeout)
            except tcpx.Error as error:
                raise ValueError(f"cannot connect to prefill-{rank} (rank {rank}): {error}") from error
            # Blocks are scattered in the memory of either side.
            order = np.random.default_rng([self.index, rank]).permutation(args.blocks)
            mine = rank * args.blocks * args.block_size + places
            theirs = tcpx.RemoteRegion(caches[rank])
            self.orders.append(order)
            transfer = session.prepare_blocks("read", peer, region, mine, theirs, places[order], args.block_size)
            self.transfers.append(transfer)

    def measure(self):
        """Returns the mean seconds for each prefill process, and for all of them at once."""
        all_ranks = range(self.args.prefill)
        seconds = []
        for _ in range(self.args.rounds + 1):
            alone = [0.0] * self.args.prefill
            for step in range(steps(self.args)):
                # Each process is in one pair at a time, as far as their numbers allow.
                turn = (self.index + step) % steps(self.args)
                ranks = [turn] if turn < self.args.prefill else []
                duration = self.read(ranks)
                for rank in ranks:
                    alone[rank] = duration
            seconds.append([*alone, self.read(all_ranks)])
        # Leave out the first round, which opens connections that later rounds reuse.
        return np.mean(seconds[1:], axis=0)

    def read(self, ranks):
        """Reads from these prefill processes at once; verifies the bytes."""
        self.memory.clear()
        self.meeting.barrier("step")
        begin = time.perf_counter()
        for rank in ranks:
            self.transfers[rank].post()
        for rank in ranks:
            try:
                self.transfers[rank].wait(self.args.timeout)
            except tcpx.Error as error:
                raise ValueError(f"cannot read from prefill-{rank} (rank {rank}): {error}") from error
        seconds = time.perf_counter() - begin
        blocks = self.memory.contents().reshape(self.args.prefill, self.args.blocks, self.args.block_size)
        for rank in ranks:
            if not np.array_equal(blocks[rank], pattern(rank, self.args)[self.orders[rank]]):
                raise ValueError(f"bytes of prefill-{rank} (rank {rank}) are wrong")
        return seconds


class Memory:
    """Memory of the host or of a GPU."""

    def __init__(self, kind, nbytes):
        self.is_cuda = kind == "cuda"
        if not self.is_cuda:
            self.array = np.zeros(nbytes, np.uint8)
            return
        try:
            import torch
        except ImportError:
            raise ValueError("--memory cuda needs torch, which is not installed") from None
        if not torch.cuda.is_available():
            raise ValueError("--memory cuda needs a GPU, and torch finds none")
        local = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
        self.torch = torch
        self.array = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{local % torch.cuda.device_count()}")

    def fill(self, array):
        if self.is_cuda:
            self.array.copy_(self.torch.from_numpy(array.reshape(-1)))
            self.torch.cuda.synchronize(self.array.device)
        else:
            self.array[:] = array.reshape(-1)

    def clear(self):
        self.array[:] = 0
        if self.is_cuda:
            self.torch.cuda.synchronize(self.array.device)

    def contents(self):
        return self.array.cpu().numpy() if self.is_cuda else self.array


def report(args, seconds):
    cache_bytes = args.blocks * args.block_size
    print(f"GB/s, each process in one pair at a time; caches of {args.blocks} blocks of {args.block_size} bytes")
    print(" " * 12 + "".join(f"{f'decode-{decode}':>12}" for decode in range(args.decode)))
    for prefill in range(args.prefill):
        rates = (cache_bytes / one[prefill] / 1e9 for one in seconds)
        print(f"{f'prefill-{prefill}':<12}" + "".join(f"{rate:12.2f}" for rate in rates))
    total = cache_bytes * args.prefill * args.decode
    print(f"all pairs at once: {total / max(one[-1] for one in seconds) / 1e9:.2f} GB/s in sum")
    print(f"all bytes of {args.prefill * args.decode} pairs are right", flush=True)


def run_here(args):
    """Starts every process on this machine, with the variables of torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = [word for word in sys.argv[1:] if word != "--local"]
    size = args.prefill + args.decode
    processes = []
    for rank in range(size):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
        environ = {**os.environ, **{name: str(value) for name, value in variables.items()}, "MASTER_ADDR": "127.0.0.1"}
        environ.pop("TCPX_RENDEZVOUS", None)
        processes.append(subprocess.Popen([sys.executable, __file__, *options], env=environ))
    try:
        return max(process.wait() for process in processes)
    except KeyboardInterrupt:
        # The processes got the same signal: wait for their end.
        return max(process.wait() for process in processes)


if __name__ == "__main__":
    sys.exit(main())
