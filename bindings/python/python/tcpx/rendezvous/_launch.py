"""Reads rank and size of this process from the variables of launchers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tcpx.rendezvous._errors import RendezvousError

# torch's own default for MASTER_PORT.
DEFAULT_PORT = 29500

# Ports for Slurm jobs: below those that Linux assigns to outgoing connections (from 32768 on).
SLURM_PORTS = range(20000, 30000)


@dataclass(frozen=True)
class Launch:
    """The information of a launcher about a process."""

    launcher: str
    rank: int
    size: int
    # Differs between runs, and is the same for all processes of one.
    run: str | None = None
    # The address at which rank 0 serves a store.
    address: tuple[str, int] | None = None
    # The place of each rank, as far as known.
    places: dict[int, str] = field(default_factory=dict)


def detect(environ: Mapping[str, str], full_name: Callable[[], str]) -> Launch | None:
    """Returns the information of this process's launcher; None if no known launcher started it.

    More specific launchers come first: torchrun runs inside Slurm and Kubernetes, not the other way
    round. `full_name` returns the name of this host with its domain.
    """
    if "RANK" in environ:
        return _torchrun(environ)
    if "JOB_COMPLETION_INDEX" in environ:
        # Only here: the look-up may take as long as an unresponsive name server.
        return _kubernetes(environ, full_name())
    if "SLURM_PROCID" in environ:
        return _slurm(environ)
    return None


def _torchrun(environ: Mapping[str, str]) -> Launch:
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE", "RANK")
    address = None
    if host := environ.get("MASTER_ADDR"):
        port = _port(environ)
        # In this mode torchrun itself has a store at that port.
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1
        address = (host, port)
    run = environ.get("TORCHELASTIC_RUN_ID")
    # torchrun reports "none" for a run without a name.
    return Launch("torchrun", rank, size, None if run == "none" else run, address)


def _kubernetes(environ: Mapping[str, str], hostname: str) -> Launch:
    rank, size = _number(environ, "JOB_COMPLETION_INDEX"), _number(environ, "WORLD_SIZE", "JOB_COMPLETION_INDEX")
    pod, _, domain = hostname.partition(".")
    job = pod.removesuffix(f"-{rank}")
    is_indexed = job != pod
    first = environ.get("MASTER_ADDR")
    if not first and is_indexed and domain:
        first = f"{job}-0.{domain}"
    places = {other: f"pod {job}-{other}" for other in range(size)} if is_indexed else {}
    return Launch("Kubernetes", rank, size, None, (first, _port(environ)) if first else None, places)


def _slurm(environ: Mapping[str, str]) -> Launch:
    rank = _number(environ, "SLURM_PROCID")
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    size = _number(environ, tasks, "SLURM_PROCID")
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    run = None
    if job:
        run = "-".join(filter(None, ("slurm", job, step, environ.get("SLURM_RESTART_COUNT"))))
    nodes = expand_nodes(_first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    address = None
    if nodes:
        # The same for all processes of a job step, and different for the next step and the next
        # job.
        offset = (_digits(job) + 101 * _digits(step)) % len(SLURM_PORTS)
        port = _port(environ) if environ.get("MASTER_PORT") else SLURM_PORTS[offset]
        address = (environ.get("MASTER_ADDR") or nodes[0], port)
    return Launch("Slurm", rank, size, run, address, _slurm_places(environ, nodes, size))


def _slurm_places(environ: Mapping[str, str], nodes: list[str], size: int) -> dict[int, str]:
    """Returns the node of each rank, assuming that ranks fill nodes one by one, as is the
    default."""
    if not environ.get("SLURM_DISTRIBUTION", "block").startswith("block"):
        return {}
    counts = expand_counts(_first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if len(counts) != len(nodes) or sum(counts) != size:
        return {}
    ranks = [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]
    return {rank: f"node {node}" for rank, node in enumerate(ranks)}


def expand_nodes(text: str) -> list[str]:
    """Returns the names in a node list of Slurm, such as `gpu[01-03,7],login`."""
    names = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        partial = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", word):
            endings = [literal] if literal else _expand_ranges(ranges)
            partial = [start + ending for start in partial for ending in endings]
        names += partial
    return names


def _expand_ranges(text: str) -> list[str]:
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise RendezvousError(f"cannot read the node list of Slurm: [{text}]")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers


def expand_counts(text: str) -> list[int]:
    """Returns the numbers in a list of Slurm, such as `2(x3),1`."""
    counts = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(times or 1)
    return counts


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def _digits(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _port(environ: Mapping[str, str]) -> int:
    return _number(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else DEFAULT_PORT


def _number(environ: Mapping[str, str], name: str, beside: str | None = None) -> int:
    text = environ.get(name)
    if not text:
        raise RendezvousError(f"the variable {name} is not set, though {beside} is: set it for every process")
    if not text.isdigit():
        raise RendezvousError(f"the variable {name} is {text!r}: a whole number is needed")
    return int(text)
