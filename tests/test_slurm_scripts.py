"""slurm/*.sbatch with a stand-in for srun; tests/test_slurm.py submits some to a real SLURM."""

import os
import subprocess

import pytest
from conftest import ROOT, clean_environment

PROGRAMS = {
    "srun": '#!/bin/sh\necho "$*" | head -n 1 >> srun.log\n',
    "scontrol": "#!/bin/sh\necho node1\n",
    ".venv/bin/python": "#!/bin/sh\necho '\"global_batch_size\": 8'\n",
}


@pytest.mark.parametrize("script", sorted(path.name for path in ROOT.glob("slurm/*.sbatch")))
def test_srun_gives_a_task_the_cores_that_sbatch_was_asked_for(tmp_path, script):
    """Since version 22.05 it does not take --cpus-per-task from sbatch: a task gets one core."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"JOB_ID": 5, "JOB_NODELIST": "node1", "NNODES": 1, "NTASKS": 8, "CPUS_PER_TASK": 12}
    env = clean_environment() | {f"SLURM_{name}": str(value) for name, value in job.items()}
    env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", f"slurm/{script}", "runs/x"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "srun.log").read_text().splitlines()
    assert calls and all("--cpus-per-task=12 " in call for call in calls)
