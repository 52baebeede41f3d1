"""The example of many nodes: four processes in network namespaces, as on four machines.

MANY_NODES names the program of the Rust example (default: the one that the Rust tests have built).
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from cluster import PATIENCE, Machines, etcd_server, free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = [sys.executable, str(ROOT / "examples" / "python" / "many_nodes.py")]
SMALL = ["--blocks", "32", "--block-size", "4096", "--rounds", "1", "--timeout", str(PATIENCE)]

RUST = Path(os.environ.get("MANY_NODES") or ROOT / "target" / "debug" / "examples" / "many_nodes")


@pytest.fixture(scope="module")
def machines():
    with Machines(4) as made:
        yield made


@pytest.fixture(scope="module")
def etcd(machines, tmp_path_factory):
    """Runs an etcd on the switch, which all machines reach."""
    with etcd_server(tmp_path_factory.mktemp("etcd"), "10.202.0.254", machines.inside(machines.switch)) as address:
        yield address


class Run:
    """The processes of one run, one on each machine."""

    def __init__(self, machines, ranks, variables, options=(), programs=()):
        self.processes = {}
        # Bytes cross the switch: on one host they could be copied directly.
        clean = {name: value for name, value in os.environ.items() if name != "TCPX_INTERFACES"}
        for rank in ranks:
            said = {name: str(value).replace("RANK", str(rank)) for name, value in variables.items()}
            program = programs[rank] if programs else EXAMPLE
            self.processes[rank] = subprocess.Popen(
                [*machines.inside(machines.names[rank]), *program, *SMALL, *options],
                env={**clean, "TCPX_SAME_HOST": "off", "OPENBLAS_NUM_THREADS": "1", **said},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.communicate()

    def finish(self):
        """Returns the exit code, output and errors of each process."""
        ends = {}
        for rank, process in self.processes.items():
            output, errors = process.communicate(timeout=2 * PATIENCE)
            ends[rank] = (process.returncode, output, errors)
        return ends

    def succeed(self):
        ends = self.finish()
        assert [end[0] for end in ends.values()] == [0] * len(ends), ends
        lines = ends[0][1].splitlines()
        assert lines[1].split() == ["decode-0", "decode-1"]
        for prefill in range(2):
            name, *rates = lines[2 + prefill].split()
            assert name == f"prefill-{prefill}" and len(rates) == 2 and all(float(rate) >= 0 for rate in rates)
        assert lines[-1] == "all bytes of 4 pairs are right"
        assert not any(end[1] for rank, end in ends.items() if rank), "rank 0 alone reports"


def torchrun(**more):
    return {"RANK": "RANK", "WORLD_SIZE": "4", "MASTER_ADDR": "10.202.0.1", "MASTER_PORT": free_port(), **more}


def meet(url):
    return {"RANK": "RANK", "WORLD_SIZE": "4", "TCPX_RENDEZVOUS": url, "TCPX_RENDEZVOUS_RUN": uuid.uuid4()}


def test_two_runs_at_once_in_one_etcd(machines, etcd):
    place = f"etcd://{etcd}/tcpx"
    with Run(machines, range(4), meet(place)) as one, Run(machines, range(4), meet(place)) as other:
        one.succeed()
        other.succeed()


def test_over_a_shared_directory(machines, tmp_path):
    with Run(machines, range(4), meet(f"file://{tmp_path}")) as run:
        run.succeed()
    assert os.listdir(tmp_path) == []


def test_with_the_variables_of_torchrun(machines):
    with Run(machines, range(4), torchrun()) as run:
        run.succeed()


def test_with_the_variables_of_slurm(machines):
    variables = {"SLURM_PROCID": "RANK", "SLURM_NTASKS": "4", "SLURM_JOB_ID": os.getpid(), "SLURM_STEP_ID": "0"}
    with Run(machines, range(4), {**variables, "SLURM_JOB_NODELIST": "10.202.0.[1-4]"}) as run:
        run.succeed()


def test_a_missing_process_is_named(machines):
    with Run(machines, [0, 1, 3], torchrun(), ["--timeout", "3"]) as run:
        ends = run.finish()
    assert all(code == 1 and not output for code, output, _ in ends.values()), ends
    # Others may be named too: on a busy machine they have not started yet.
    assert "rank 2" in ends[0][2] and "never came" in ends[0][2], ends


def test_a_process_that_dies_ends_all(machines):
    # So many rounds that they do not end before the test.
    before = received(machines, 2)
    with Run(machines, range(4), torchrun(), ["--rounds", "1000000"]) as run:
        deadline = time.monotonic() + PATIENCE
        while received(machines, 2) < before + (4 << 20):
            assert time.monotonic() < deadline, "no bytes move"
            time.sleep(0.05)
        run.processes[2].send_signal(signal.SIGKILL)
        ends = run.finish()
    assert [ends[rank][0] for rank in (0, 1, 3)] == [1, 1, 1], ends
    told = {rank: "rank 2 (" in ends[rank][2] and "failed: its connection" in ends[rank][2] for rank in (0, 1, 3)}
    # While rank 3 reads, it may notice first that a prefill process has been told and has ended.
    assert told[0] and told[1] and (told[3] or "cannot read from prefill-" in ends[3][2]), ends


def received(machines, rank):
    counter = "/sys/class/net/eth0/statistics/rx_bytes"
    command = [*machines.inside(machines.names[rank]), "cat", counter]
    return int(subprocess.run(command, check=True, capture_output=True).stdout)


def test_arguments_must_agree(machines):
    programs = [EXAMPLE] * 3 + [[*EXAMPLE, "--prefill", "3", "--decode", "1"]]
    with Run(machines, range(4), torchrun(), programs=programs) as run:
        ends = run.finish()
    assert all(end[0] == 1 for end in ends.values()), ends
    assert "rank 3 was started with --prefill 3 --decode 1" in ends[0][2], ends


@pytest.mark.parametrize("serves", ["python", "rust"])
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_processes_in_python_and_in_rust(machines, tmp_path, kind, serves):
    if not RUST.is_file():
        pytest.skip(f"{RUST} does not exist: `cargo build --package tcpx --example many_nodes` builds it")
    programs = [EXAMPLE, [str(RUST)]] * 2 if serves == "python" else [[str(RUST)], EXAMPLE] * 2
    variables = torchrun() if kind == "tcp" else meet(f"file://{tmp_path}")
    with Run(machines, range(4), variables, programs=programs) as run:
        run.succeed()
    assert os.listdir(tmp_path) == []


def test_rust_names_a_missing_process(machines):
    if not RUST.is_file():
        pytest.skip(f"{RUST} does not exist: `cargo build --package tcpx --example many_nodes` builds it")
    with Run(machines, [0, 1, 3], torchrun(), ["--timeout", "3"], programs=[[str(RUST)]] * 4) as run:
        ends = run.finish()
    assert all(code == 1 and not output for code, output, _ in ends.values()), ends
    assert "rank 2 never came" in ends[0][2], ends


def test_usage():
    said = subprocess.run([*EXAMPLE, "--help"], check=True, capture_output=True, text=True, timeout=PATIENCE).stdout
    assert "--prefill P" in said and "torchrun" in said
    wrong = subprocess.run([*EXAMPLE, "--block-size", "9"], capture_output=True, text=True, timeout=PATIENCE)
    assert wrong.returncode == 2 and "must be a multiple of 8" in wrong.stderr
