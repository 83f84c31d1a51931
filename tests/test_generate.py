"""generate.py: settings, several prompts, interactive use, Hugging Face folders, user errors."""

import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types

import pytest
from conftest import PATIENCE, ROOT, clean_environment, refusal
from random_adapters import write_random

import checkpoint
import generate as program
from config import TrainConfig
from serving import speed
from storage import checkpoint_files
from text import tokenizer as tokenizers
from weights import hf, peft

pytestmark = pytest.mark.usefixtures("one_thread")


MEASURED = functools.cache(speed.measure_bandwidth)  # else 0.2 s at the end of each program


@pytest.fixture
def run(tiny_run):
    """A run folder of two steps over bytes."""
    return tiny_run


@pytest.fixture
def said(run, capsys, monkeypatch):
    """`said(*args)`: what the program prints for the run, with 20 new tokens."""
    monkeypatch.setattr(speed, "measure_bandwidth", MEASURED)

    def say(*args, run=run):
        program.main([str(run), "--max_new_tokens=20", *map(str, args)])
        return capsys.readouterr().out

    return say


def texts(shown: str) -> list[dict]:
    """What --json shows."""
    return [json.loads(line) for line in shown.splitlines()]


def test_program_is_deterministic_and_knows_the_steps(said, run):
    first = said("--prompt=the river")
    assert first.startswith(f"--- {run}/checkpoints/step-2 ---\nthe river")
    assert len(first.split("\n", 1)[1]) > 15
    assert said("--prompt=the river") == first
    assert "before training" in said("--step=0")
    assert "step-1" in said("--step=1")


def test_a_special_token_in_a_prompt(said):
    """End-of-text as an id is what a model reads before a new document."""
    both = ["--prompt=", "--prompt=<|endoftext|>", "--json", "--temperature=0", "--precision=fp32"]
    new_document, as_id = texts(said(*both, "--special_tokens"))
    assert as_id["text"] == new_document["text"] != texts(said(*both))[1]["text"]


def test_program_takes_many_prompts(said, tmp_path):
    (tmp_path / "prompts.txt").write_text("the river\n\nä tree\n")
    twice = ["--prompt=a", "--prompt=a", "--precision=fp32"]
    found = texts(said(*twice, f"--prompts={tmp_path}/prompts.txt", "--json", "--batch_size=3"))
    assert [text["prompt"] for text in found] == ["a", "a", "the river", "ä tree"]
    assert found[0]["text"] != found[1]["text"]  # of one prompt
    assert {text["tokens"] for text in found} == {20}
    assert {text["end"] for text in found} == {"max_new_tokens"}
    one_by_one = said("--prompt=the river", *twice, "--json", "--batch_size=1")
    assert texts(one_by_one) == [found[2], *found[:2]]

    both = said(*twice)
    assert f"--- 1, max_new_tokens ---\na{found[0]['text']}\n" in both
    assert f"\na{found[1]['text']}\n" in both


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_json_is_json_whatever_the_terminal_can_show(monkeypatch, encoding):
    text = {"prompt": "ä 😀", "text": "ł", "new_tokens": 1, "end": "x", "adapter": "none"}
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding, "backslashreplace"))
    print(program.as_json(types.SimpleNamespace(**text)), flush=True)
    shown = json.loads(out.getvalue().decode(encoding))
    assert (shown["prompt"], shown["text"]) == ("ä 😀", "ł")


def test_every_flag_of_sampling_changes_the_text(said, run, capsys):
    river = ["--prompt=the river", "--json", "--precision=fp32"]
    (found,) = texts(said(*river))
    for flag in "temperature=2 top_k=2 top_p=0.2 max_new_tokens=5 seed=2".split():
        assert texts(said(*river, f"--{flag}")) != [found], flag
    program.main([str(run), "--prompt=the river", "--precision=fp32", f"--stop={found['text'][0]}"])
    assert "no text: stop string came first" in capsys.readouterr().err


def test_a_prompt_ends_at_a_line_feed_and_nowhere_else(tmp_path):
    path = tmp_path / "prompts.txt"
    prompts = ["one\u2028still one", "two\x0cstill two", "three\x85\x1c\x0bstill", " four "]
    path.write_bytes(("\ufeff" + "\r\n".join(prompts) + "\n\n").encode())
    assert program.read_prompts(str(path)) == prompts
    path.write_bytes("größe\n".encode("latin-1"))
    assert "byte 0xf6 at offset 2" in refusal(program.read_prompts, str(path))


def write_adapters(run, folder) -> tuple[str, str]:
    """Two PEFT folders for the model of a run, of other ranks and layers."""
    cfg = checkpoint_files.read_settings(checkpoint.find(str(run)))
    first = TrainConfig(init_from="any", lora_rank=4)
    second = TrainConfig(init_from="any", lora_rank=2, lora_targets="Wqkv")
    write_random(folder / "a", cfg, first, seed=0)
    write_random(folder / "b", cfg, second, seed=1)
    return str(folder / "a"), str(folder / "b")


def test_each_prompt_may_have_its_adapter(said, run, tmp_path):
    a, b = write_adapters(run, tmp_path)
    river = ["--prompt=the river", "--precision=fp32", "--json"]
    adapters = [f"--adapter={path}" for path in (a, "none", b)]
    mixed = texts(said(*river, *river[:1] * 2, *adapters))
    assert [text.get("adapter") for text in mixed] == [a, None, b]
    assert len({text["text"] for text in mixed}) == 3
    assert texts(said(*river, *river[:1] * 2, *adapters, "--batch_size=1")) == mixed
    for_all = texts(said(*river, *river[:1], adapters[0]))
    assert for_all[0] == mixed[0] != for_all[1]  # each adapter begins with the first seed
    assert [text["adapter"] for text in for_all] == [a, a]

    shown = said("--prompt=x", "--prompt=y", *adapters[:2])
    assert re.search(rf"^--- 1, {a}, [a-z_ ]+ ---\nx", shown, re.MULTILINE)
    assert re.search(r"^--- 2, [a-z_ ]+ ---\ny", shown, re.MULTILINE)


@pytest.mark.slow
def test_a_run_with_adapters_is_one_for_its_base_alone(said, run, tmp_path, capsys):
    a, _ = write_adapters(run, tmp_path)
    tuned = tmp_path / "tuned"
    peft.import_(a, tuned, base=str(run))
    capsys.readouterr()
    flags = ["--prompt=the river", "--precision=fp32", "--temperature=0"]
    wanted = said(*flags, f"--adapter={a}")
    assert said(*flags, f"--adapter={tuned}") == wanted
    assert said(*flags, run=tuned).splitlines()[1:] == wanted.splitlines()[1:]  # merged
    message = refusal(said, *flags, "--step=1", f"--adapter={tuned}")
    assert f"{tuned} belongs to " in message and "step-1" in message


WRONG = {  # flags, words of the answer
    "--adapter={a} --adapter={b}": "2 adapters for 1 prompts",
    "--prompt=x --adapter=none --adapter={a}": "2 adapters for 1 prompts",
    "--interactive --adapter={a} --adapter={b}": "--interactive writes all texts with one adapter",
    "--step=0 --adapter={a}": "before training, to which no adapter belongs",
    "--adapter={a}/none": "a/none, which does not exist",
    "--adapter={folder}": "expected a run, or adapter_config.json",
    "--adapter=": "--adapter is empty",
    "--adapter={run}": "holds a whole model, no adapters",
    "--adapter={cut}": "cut/adapter_model.safetensors is truncated or damaged",
    "--step=9": "step-1, step-2, and 0 is untrained",
    "--top_p=-0.1": "top_p in [0, 1]",
    "--top_k=-1": "top_k must be 0 or more",
    "--temperature=nan": "expected a number",
    "--seed=-1": "seed must be from 0 to",
    "--max_new_tokens=0": "max_new_tokens must be from 1 to",
    "--stop=": "a stop string is empty",
    "--interactive --json": "remove --prompt, --prompts and --json",
    "--interactive --tp=2": "the terminal, which torchrun keeps",
    "--tp=2": "torchrun has started none: start torchrun --nproc_per_node=2",
    "--prompts={folder}/empty": "no prompt in",
    "--promt=x": "did you mean 'prompt'",
    "--precision=fp8": "expected one of: auto, fp32, bf16",
}


def test_mistakes_are_answered_in_one_line(run, tmp_path):
    a, b = write_adapters(run, tmp_path)
    cut = tmp_path / "cut"
    shutil.copytree(a, cut)
    os.truncate(cut / "adapter_model.safetensors", 5000)
    (tmp_path / "empty").write_text("\n\n")
    places = {"a": a, "b": b, "run": run, "cut": cut, "folder": tmp_path}
    for flags, message in WRONG.items():
        assert message in refusal(program.main, [str(run), *flags.format(**places).split()])
    assert "no checkpoint in" in refusal(program.main, [str(tmp_path)])
    assert "is a file, not a folder: import it first" in refusal(program.main, [__file__])
    assert "usage: python" in refusal(program.main, [str(run), str(run)])


def test_interactive_goes_line_by_line(said, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the river\nblue\nthe river\n\nnever read\n"))
    shown = said("--interactive")
    assert shown.startswith(said("--prompt=the river").split("\n", 1)[1])
    assert "\nblue" in shown and "never" not in shown
    assert shown.count("the river") >= 2


@pytest.mark.slow
def test_control_c_stops_the_text_and_not_the_program(run):
    flags = ["--interactive", "--max_new_tokens=1000000"]
    command = [sys.executable, str(ROOT / "generate.py"), str(run), *flags]
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    with subprocess.Popen(command, env=clean_environment(), **pipes) as process:
        try:
            process.stdin.write(b"river\n")
            process.stdin.flush()
            assert process.stdout.read(40).startswith(b"river")  # it has begun
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(b"\n", timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 0 and out.endswith(b"\n")
    assert b"tokens/s" in err and b"Traceback" not in err


@pytest.mark.slow
def test_a_hugging_face_folder(said, run, tmp_path, monkeypatch):
    exported = tmp_path / "theirs"
    hf.export(str(run), str(exported))
    flags = ["--prompt=the river", "--precision=fp32"]
    expected = said(*flags).splitlines()[1:]
    assert said(*flags, run=exported).splitlines()[1:] == expected
    assert "has no steps" in refusal(said, *flags, "--step=3", run=exported)
    assert "has its tokenizer" in refusal(said, *flags, "--tokenizer=bytes")
    large = tokenizers.Tokenizer("bytes", [b"x"] * 400)
    monkeypatch.setattr(tokenizers, "load", lambda *_: large)
    message = refusal(said, *flags, run=exported)
    assert "ids up to 400" in message and "ends at 319" in message
