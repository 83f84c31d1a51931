"""startup.py: what the trainer does before PyTorch is imported."""

import signal
import subprocess
import sys

import pytest
from conftest import ROOT, clean_environment

LINE = "runs/x: loading PyTorch\n"
RIGHT = ["--run_dir=runs/x", "--max_steps=200"]


def run(*command, **environment):
    env = clean_environment() | environment
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "flags, rank, said",
    [
        (RIGHT, "0", LINE),
        (RIGHT, "1", ""),
        ([*RIGHT, "--help"], "0", ""),
        ([*RIGHT, "--no_such_key=1"], "0", ""),
        ([*RIGHT, "--max_steps=none"], "0", ""),
    ],
)
def test_rank_0_says_what_is_loading_unless_main_has_something_else_to_say(flags, rank, said):
    done = run("startup.py", *flags, RANK=rank)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


@pytest.mark.slow
def test_importing_the_trainer_says_nothing_and_takes_no_signals():
    done = run("-c", "import fsdp_train, signal; print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)")
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_during_the_imports_ends_as_later(tmp_path, number, status):
    command = [sys.executable, str(ROOT / "fsdp_train.py"), *RIGHT]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), **streams)
    assert process.stdout.readline() == LINE
    process.send_signal(number)
    rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest, errors) == (status, "", "")
    assert not any(tmp_path.iterdir())  # it had not begun
