"""slurm/*.sbatch with stand-ins for SLURM's programs; some are in test_slurm.py with a real one."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, clean_environment

# srun notes its words and runs the command once. Of the project only config.py is real.
PROGRAMS = {
    "srun": """
echo "$*" | head -n 1 >> srun.log
while [[ $1 == --* ]]; do shift; done
exec "$@"
""",
    "scontrol": "printf 'node%s\\n' 1 2 3 4\n",
    ".venv/bin/python": f'[[ $1 != config.py ]] || exec {sys.executable} {ROOT}/"$@"; echo "$@"\n',
    ".venv/bin/torchrun": '[[ "$*" != *"--global_batch_size=$FAILS "* ]]\n',
}


def submit(folder, script, *args, nodes=1, **environment):
    """Run a script in `folder` as SLURM does, on so many nodes.

    Returns the finished process, and the words of each call of srun, a line each.
    """
    (folder / ".venv/bin").mkdir(parents=True)
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (folder / name).chmod(0o755)
    (folder / "slurm").symlink_to(ROOT / "slurm")
    job = {"JOB_ID": 5, "JOB_NODELIST": "node[1-4]", "NTASKS": 8, "CPUS_PER_TASK": 12}
    job["NNODES"] = nodes
    env = clean_environment() | {f"SLURM_{name}": str(value) for name, value in job.items()}
    env |= {"PATH": f"{folder}:{os.environ['PATH']}", "FAILS": "none"} | environment
    command = ["bash", f"slurm/{script}", *args]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    log = folder / "srun.log"
    return done, log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("script", sorted(path.name for path in ROOT.glob("slurm/*.sbatch")))
def test_srun_gives_a_task_the_cores_that_sbatch_was_asked_for(tmp_path, script):
    """Since version 22.05 it does not take --cpus-per-task from sbatch: a task gets one core."""
    done, calls = submit(tmp_path, script, str(ROOT / "configs/demo.py"))
    assert done.returncode == 0, done.stderr
    assert calls and all("--cpus-per-task=12 " in call for call in calls)


def word(line, name):
    """The value of `--name=value` or `--name value` in a command."""
    return line.replace("=", " ").split(f"--{name} ")[-1].split()[0]


def test_scaling_times_every_size_and_a_failed_one_costs_no_other(tmp_path):
    """Flags of bench's own do not keep the script from reading the batch."""
    config = str(ROOT / "configs/mpt1b.py")
    flags = ["--sharding=ZERO1", "--global_batch_size=256", "--rounds=3"]
    done, lines = submit(tmp_path, "scaling.sbatch", config, *flags, nodes=4, FAILS="1024")
    assert done.returncode == 1 and "failed: 4 nodes, global batch 1024" in done.stderr
    assert done.stdout.endswith("-m bench compare scaling.csv\n")
    names = ("nodes", "nnodes", "global_batch_size")
    sizes = [tuple(word(line, name) for name in names) for line in lines]
    strong = [("1", "1", "256"), ("2", "2", "256"), ("4", "4", "256")]
    weak = [("2", "2", "512"), ("4", "4", "1024")]
    assert sorted(sizes) == sorted(strong + weak)
    for line in lines:
        assert f" -m bench train {config} --sharding=ZERO1" in line
        assert line.endswith("--out=scaling.csv")
        assert word(line, "ntasks") == word(line, "nodes")
        assert word(line, "rdzv_endpoint").startswith("node1:")
    for name in ("rdzv_endpoint", "rdzv_id"):  # runs do not meet each other's ranks
        assert len({word(line, name) for line in lines}) == 5


def test_scaling_without_a_config_says_how_to_submit(tmp_path):
    done, lines = submit(tmp_path, "scaling.sbatch")
    assert done.returncode != 0 and "usage: sbatch" in done.stderr and not lines


def test_serve_writes_a_configuration_that_nginx_takes(tmp_path):
    """Each replica of each node is in it, and none of the examples."""
    done, _ = submit(tmp_path, "serve.sbatch", "run", nodes=4)
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "nginx-5.conf").read_text()
    servers = re.findall(r"^    server (\S+) max_fails", written, re.MULTILINE)
    assert servers == [f"node{node}:{port}" for node in range(1, 5) for port in (8000, 8001)]
    example = (ROOT / "slurm/nginx.conf").read_text()
    without = [re.sub(r"(?m)^    server .*\n", "", text) for text in (written, example)]
    assert without[0] == without[1]
