"""lifecycle/stopping.py, begin: what the trainer does before PyTorch is imported."""

import signal
import subprocess
import sys

import pytest
from conftest import PATIENCE, ROOT, clean_environment

LINE = (
    "runs/x: loading PyTorch, then checking data and checkpoints, which takes up to half a minute\n"
)
RIGHT = ["--run_dir=runs/x", "--max_steps=200"]


def run(*command, **environment):
    """Run Python to its end."""
    env = clean_environment() | environment
    options = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": 60}
    return subprocess.run([sys.executable, *command], **options)


@pytest.mark.parametrize(
    "flags, rank, said",
    [
        (RIGHT, "0", LINE),
        (RIGHT, "1", ""),
        ([*RIGHT, "--help"], "0", ""),
        ([*RIGHT, "--max_steps=none"], "0", ""),
    ],
)
def test_rank_0_says_what_is_loading_unless_main_has_something_else_to_say(flags, rank, said):
    code = "import sys; from lifecycle import stopping; stopping.while_loading(sys.argv[1:])"
    done = run("-c", code, *flags, RANK=rank, WORLD_SIZE="2")
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


@pytest.mark.slow
def test_importing_the_trainer_says_nothing_and_takes_no_signals():
    code = "import fsdp_train, signal; "
    code += "print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"
    done = run("-c", code)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_during_the_imports_ends_as_later(tmp_path, number, status):
    command = [sys.executable, str(ROOT / "fsdp_train.py"), *RIGHT]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), **streams)
    assert process.stdout.readline() == LINE
    process.send_signal(number)
    rest, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, rest, errors) == (status, "", "")
    assert not any(tmp_path.iterdir())  # it had not begun


def test_a_rank_ends_with_torchrun_during_the_imports(tmp_path):
    """A shell plays torchrun; the rank sleeps where it would import."""
    code = "import time; from lifecycle import stopping; stopping.while_loading(['--help']); "
    code += "print('here', flush=True); time.sleep(600)"
    shell = ["sh", "-c", f'{sys.executable} -c "{code}" & wait']
    env = clean_environment() | {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    parent = subprocess.Popen(shell, cwd=ROOT, env=env, **streams)
    assert parent.stdout.readline() == "here\n"
    parent.kill()
    _, errors = parent.communicate(timeout=PATIENCE)  # ends when the rank has closed its streams
    assert errors.startswith("error: rank 1 (process ")
    assert "torchrun" in errors
