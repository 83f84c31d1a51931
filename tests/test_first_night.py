"""slurm/first_night.sh, without a GPU: its stages, what it skips, what it says of a failure."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE, ROOT, clean_environment
from launches import wait_for

HIDDEN = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "-1")


def start(folder, **settings) -> subprocess.Popen:
    """The script, as a user starts it on a machine without a GPU."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = clean_environment() | HIDDEN | {"PATH": path, "OUT": str(folder)} | settings
    command = ["bash", "slurm/first_night.sh"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=env, cwd=ROOT, **pipes)


def night(folder, **settings) -> tuple[int, str]:
    """Its exit status, and what it printed."""
    process = start(folder, **settings)
    printed, _ = process.communicate(timeout=4 * PATIENCE)
    return process.returncode, printed


@pytest.mark.slow
def test_a_stage_that_fails_is_named_and_one_that_is_done_is_skipped(tmp_path):
    folder = tmp_path / "a night"
    status, printed = night(folder, STAGES="tune-64 loss")
    assert status == 1
    assert "failed: tune-64, status 2: error: --tune times kernels on a GPU" in printed
    assert (folder / "loss.done").exists() and not (folder / "tune-64.done").exists()
    assert "PyTorch version: " in (folder / "versions.txt").read_text()

    log = (folder / "loss.log").read_text()
    assert "float32" in log
    status, printed = night(folder)  # all that a CPU can do
    assert status == 0 and "loss: done before\n" in printed
    assert (folder / "loss.log").read_text() == log
    assert (folder / "resume.log").read_text().endswith("bit-equal: 160 steps\n")


@pytest.mark.slow
def test_a_stage_that_is_late_or_interrupted_leaves_no_process_and_is_not_done(tmp_path):
    status, printed = night(tmp_path, STAGES="resume", LIMIT="3")
    assert status == 1 and "failed: resume, status 124" in printed
    assert not processes_of(tmp_path)

    process = start(tmp_path, STAGES="resume")
    wait_for(lambda: processes_of(tmp_path) or process.poll() is not None)
    process.send_signal(signal.SIGTERM)  # SIGINT may be ignored here
    assert process.wait(PATIENCE) == 130
    assert not processes_of(tmp_path) and not (tmp_path / "resume.done").exists()


@pytest.mark.slow
def test_a_run_that_dies_too_early_ends_its_stage(tmp_path):
    process = start(tmp_path, STAGES="resume")
    wait_for(lambda: processes_of(tmp_path, "/killed") or process.poll() is not None)
    for dying in processes_of(tmp_path, "/killed"):
        os.kill(int(dying), signal.SIGTERM)  # before its first step
    printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1 and "failed: resume, status 1" in printed, printed
    assert len((tmp_path / "resume.log").read_text().splitlines()) < 1000


def processes_of(folder, run="") -> list[str]:
    """The processes that have the folder of a run in their command line."""
    command = ["pgrep", "-f", "--", f"--run_dir={folder}{run}"]
    return subprocess.run(command, capture_output=True, text=True).stdout.split()


@pytest.mark.slow
def test_what_is_wrong_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "gpus").write_text("NVIDIA H999\n")
    other_gpus = f"error: {tmp_path} is of other GPUs: set another OUT\n"
    assert night(tmp_path) == (2, other_gpus)
    status, printed = night(tmp_path / "new", STAGES="los")
    assert status == 2 and printed.splitlines()[-1].startswith("error: no stage los: kernels loss ")
    status, printed = night(tmp_path / "file")
    assert status == 2 and printed.endswith("is in use, or no folder\n")
