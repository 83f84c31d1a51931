"""generate.py: settings, many prompts, one after another, Hugging Face folders, mistakes."""

import io
import json
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, clean_environment, flags_for, launch

import generate as program
from config import UserError
from text import tokenizer as tokenizers
from weights import hf

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = dict(d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=24)


@pytest.fixture(scope="module")
def run(tiny_data, tmp_path_factory):
    """A run folder of two steps over bytes."""
    folder = tmp_path_factory.mktemp("sampling")
    flags = [f"--{k}={v}" for k, v in (TINY | {"vocab_size": 320}).items()]
    flags += ["--alibi", *flags_for(tiny_data), "--global_batch_size=4"]
    flags += [
        "--max_steps=2",
        "--warmup_steps=1",
        "--save_interval=1",
        "--run_dir=run",
        "--eval_tokens=100",
    ]
    done = launch([], folder, flags)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def said(run, capsys):
    """`said(*args)`: what the program prints for the run, with 20 new tokens."""

    def say(*args, run=run):
        program.main([str(run), "--max_new_tokens=20", *map(str, args)])
        return capsys.readouterr().out

    return say


def test_program_is_deterministic_and_knows_the_steps(said, run):
    first = said("--prompt=the river")
    assert (
        first.startswith(f"--- {run}/checkpoints/step-2 ---\nthe river")
        and len(first.split("\n", 1)[1]) > 15
    )
    assert said("--prompt=the river") == first != said("--prompt=the river", "--seed=2")
    assert "before training" in said("--step=0") and "step-1" in said("--step=1")
    assert said("--prompt=the river", "--precision=fp32").startswith(first[:9])


def test_program_takes_many_prompts(said, tmp_path):
    (tmp_path / "prompts.txt").write_text("the river\n\nä tree\n")
    flags = [
        "--prompt=a",
        "--prompt=a",
        f"--prompts={tmp_path}/prompts.txt",
        "--json",
        "--precision=fp32",
    ]
    lines = [json.loads(line) for line in said(*flags, "--batch_size=3").splitlines()]
    assert [line["prompt"] for line in lines] == ["a", "a", "the river", "ä tree"]
    assert lines[0]["text"] != lines[1]["text"]  # the next seed
    assert {line["tokens"] for line in lines} == {20} and {line["end"] for line in lines} == {
        "max_new_tokens"
    }
    shown = said("--prompt=the river", "--precision=fp32").split("\n", 1)[1]
    assert shown.rstrip("\n") == "the river" + lines[2]["text"].rstrip("\n")
    both = said(*flags[:2], "--precision=fp32")
    assert (
        f"--- 1, max_new_tokens ---\na{lines[0]['text']}\n" in both
        and f"\na{lines[1]['text']}\n" in both
    )


def test_program_answers_mistakes_in_one_line(run, tmp_path):
    (tmp_path / "empty").write_text("\n\n")
    for args, words in (
        ([run, "--step=9"], "no checkpoint of step 9 in .*step-1, step-2, and 0 is untrained"),
        ([run, "--top_p=0"], r"top_p is in \(0, 1\]"),
        ([run, "--top_k=-1"], "top_k are 0 or more"),
        ([run, "--temperature=nan"], "temperature in the command line is nan, expected a number"),
        ([run, "--seed=-1"], "seed is 0 or more"),
        ([run, "--max_new_tokens=0"], "max_new_tokens is 1 or more"),
        (
            [run, "--max_new_tokens=many"],
            "max_new_tokens in the command line is 'many', expected a whole number",
        ),
        ([run, "--stop="], "a stop string is empty"),
        ([run, "--interactive", "--json"], "leave out --prompt, --prompts and --json"),
        ([run, f"--prompts={tmp_path}/empty"], "no prompt in .*empty: it wants one per line"),
        ([tmp_path], "no checkpoint in"),
        ([], r"usage: python .*RUN \[--key=value \.\.\.\] \(--help lists the settings\)"),
        ([run, run], "usage: python .*RUN"),
        ([run, "--prompt"], "--prompt needs a value: --prompt=..."),
        ([run, "--promt=x"], "unknown key 'promt' in the command line, did you mean 'prompt'"),
        ([run, "--precision=fp8"], "expected one of: auto, fp32, bf16"),
    ):
        with pytest.raises(UserError, match=words) as wrong:
            program.main([str(arg) for arg in args])
        assert "\n" not in str(wrong.value)
    wrong = launch([], tmp_path, ["nothing", "--prompt=x"], program="generate.py")
    assert (
        wrong.returncode == 2
        and "no checkpoint in 'nothing'" in wrong.stderr
        and wrong.stderr.count("\n") == 1
    )


def test_interactive_goes_line_by_line(said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the river\nblue\nthe river\n\nnever read\n"))
    shown = said("--interactive")
    once = said("--prompt=the river").split("\n", 1)[1]
    assert (
        shown.startswith(once)
        and "\nblue" in shown
        and shown.count("the river") >= 2
        and "never" not in shown
    )


def test_control_c_stops_the_text_and_not_the_program(run):
    command = [
        sys.executable,
        str(ROOT / "generate.py"),
        str(run),
        "--interactive",
        "--max_new_tokens=1000000",
    ]
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    process = subprocess.Popen(command, env=clean_environment(), **pipes)
    try:
        process.stdin.write(b"river\n")
        process.stdin.flush()
        assert process.stdout.read(40).startswith(b"river")  # it is writing
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(b"\n", timeout=60)
        assert (
            process.returncode == 0
            and out.endswith(b"\n")
            and b"tokens/s" in err
            and b"Traceback" not in err
        )
    finally:
        process.kill()


def test_a_hugging_face_folder(said, run, tmp_path, monkeypatch):
    hf.export(str(run), str(tmp_path / "theirs"))
    flags = ["--prompt=the river", "--precision=fp32"]
    for more in ([], ["--tokenizer=bytes"]):  # its config.json says so
        theirs = said(*flags, *more, run=tmp_path / "theirs")
        assert theirs.splitlines()[1:] == said(*flags).splitlines()[1:]
    with pytest.raises(UserError, match="has no steps: leave out --step"):
        said(*flags, "--step=3", run=tmp_path / "theirs")
    with pytest.raises(
        UserError, match="is a run of ours, which has its tokenizer: leave out --tokenizer"
    ):
        said(*flags, "--tokenizer=bytes")
    settings = json.loads((tmp_path / "theirs/config.json").read_text())
    (tmp_path / "theirs/config.json").write_text(
        json.dumps(settings | {"tokenizer_name": "EleutherAI/gpt-neox-20b"})
    )
    with pytest.raises(
        UserError, match="wants the tokenizer EleutherAI/gpt-neox-20b"
    ):  # not gpt2's ids instead
        said(*flags, run=tmp_path / "theirs")
    (tmp_path / "theirs/config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(tokenizers, "load", lambda *_: tokenizers.Tokenizer("bytes", [b"x"] * 400))
    with pytest.raises(
        UserError,
        match="bytes has ids up to 400, but the vocabulary of .* ends at 319: set the --tok",
    ):
        said(*flags, run=tmp_path / "theirs")
