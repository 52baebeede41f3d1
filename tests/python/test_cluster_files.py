"""Tests examples/cluster: the batch script runs, and the manifests are consistent."""

import os
import re
import subprocess
import sys
from pathlib import Path

from cluster import PATIENCE

CLUSTER = Path(__file__).resolve().parents[2] / "examples" / "cluster"

# Replaces Slurm's srun: starts the tasks here, with the variables that srun sets.
SRUN = """#!/usr/bin/env bash
[ "$1" = --ntasks ] || exit 2
tasks=$2
while [ "${1#-}" != "$1" ]; do [ "$1" = --ntasks ] && shift; shift; done
for rank in $(seq 0 $((tasks - 1))); do
  SLURM_PROCID=$rank SLURM_NTASKS=$tasks SLURM_STEP_ID=0 SLURM_STEP_NODELIST=127.0.0.1 "$@" &
done
failed=0
for rank in $(seq $tasks); do wait -n || failed=1; done
exit $failed
"""


def submit(folder, tasks, *options):
    srun = folder / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": tasks, "SLURM_SUBMIT_DIR": str(CLUSTER.parents[1])}
    environ = {**os.environ, **slurm, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable}
    command = ["bash", CLUSTER / "slurm.sbatch", *options]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=2 * PATIENCE)


def test_the_batch_script_runs(tmp_path):
    done = submit(tmp_path, "3", "--blocks", "16", "--block-size", "4096", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    # One prefill process, two decode processes.
    assert done.stdout.splitlines()[-1] == "all bytes of 2 pairs are right"


def test_the_batch_script_needs_two_processes(tmp_path):
    done = submit(tmp_path, "1")
    assert done.returncode == 2 and "at least two processes" in done.stderr


def test_the_manifests_agree():
    """Sizes, ports and names agree in all places."""
    text = (CLUSTER / "kubernetes.yaml").read_text()
    found = lambda pattern: re.search(pattern, text, re.MULTILINE).group(1)
    size = int(found(r'WORLD_SIZE: "(\d+)"'))
    assert size == int(found(r"completions: (\d+)")) == int(found(r"parallelism: (\d+)"))
    assert size == int(found(r'"--prefill", "(\d+)"')) + int(found(r'"--decode", "(\d+)"'))
    rendezvous, listen = found(r'MASTER_PORT: "(\d+)"'), found(r'TCPX_LISTEN_PORT: "(\d+)"')
    for port in (rendezvous, listen):
        assert len(re.findall(rf"^ +(?:- |)(?:port|containerPort): {port}$", text, re.MULTILINE)) == 2
    assert found(r"MASTER_ADDR: (\S+)") == "many-nodes-0." + found(r"subdomain: (\S+)")
    assert set(re.findall(r"^  name: (\S+)$", text, re.MULTILINE)) == {"many-nodes"}
    # The image has the program at this path.
    assert found(r'"python3", "(/opt/tcpx/)many_nodes.py"') in (CLUSTER / "Containerfile").read_text()
