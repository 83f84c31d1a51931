"""What messages advise is done, as a user would paste it: commands run, flags exist and help.

All paths are in a folder whose name has a space, an apostrophe and a dollar sign.
"""

import ast
import contextlib
import importlib
import io
import json
import re
import shlex
import subprocess
import types
from pathlib import Path

import pytest
from conftest import ROOT

import config
import data
import fsdp_train
import lora
from config import LINEAR_LAYERS, MPTConfig, TrainConfig, UserError
from model import MPT, init_weights
from planning import picture
from serving.adapters import AdapterBank, write_random
from serving.decoder import Decoder
from text import corpus
from weights import hf, load, peft

CFG = MPTConfig(
    d_model=32, n_heads=4, n_layers=2, vocab_size=320, max_seq_len=32, alibi=True, no_bias=True
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Weights in hf/, a run of them in runs/base, adapters on that in runs/lora, a text."""
    place = tmp_path_factory.mktemp("advice") / "my run's $HOME"
    model = MPT(CFG)
    init_weights(model, seed=0)
    hf.export(model, place / "hf")
    settings = json.loads((place / "hf/config.json").read_text())
    (place / "hf/config.json").write_text(json.dumps(settings | {"tokenizer_name": "bytes"}))
    hf.import_(place / "hf", place / "runs/base")
    write_random(place / "peft", CFG, TrainConfig(init_from="any", lora_rank=2), seed=0)
    peft.import_(place / "peft", place / "runs/lora", base=str(place / "runs/base"))
    (place / "text.txt").write_text("A text of ours. " * 2000 + "\n\n" + "Another one. " * 2000)
    (place / "latin.txt").write_text("Grüße. " * 100, encoding="latin-1")
    return place


@pytest.fixture(autouse=True)
def in_the_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def message_of(call) -> str:
    """What a call says: its error, or else what it prints."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            call()
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return printed.getvalue()


def as_bash_reads(text: str) -> list[str]:
    """The words of a command that a message names, by a real shell."""
    command = (re.search(r"\b(python|mkdir) .*", text) or re.search(r"'?--\w+=.*", text))[0]
    command = re.split(r",? or |,? then |,? and | makes |; ", command)[0]
    shell = ["bash", "-c", f"printf '%s\\0' {command}"]
    return subprocess.run(shell, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


def run(words: list[str]) -> None:
    """Call the program of a command in this process."""
    if words[:2] == ["mkdir", "-p"]:
        return Path(*words[2:]).mkdir(parents=True)
    assert words[0] == "python"
    name, first = (words[2], 3) if words[1] == "-m" else (words[1].removesuffix(".py"), 2)
    if name == "bench":
        name, first = f"bench.{words[3]}", 4
    return importlib.import_module(name).main(words[first:])


def check_in_bank(adapter: str) -> None:
    """Ask a bank for the adapters of a run that trained norms, too."""
    chosen = TrainConfig(init_from="any", lora_rank=2, lora_train="norms")
    found = peft.Adapter(chosen, lora.trained_weights(CFG, chosen))
    bank = AdapterBank(Decoder(MPT(CFG), 300), n_slots=1, rank=2, layers=LINEAR_LAYERS)
    bank.check(adapter, found)


def draw(path: str) -> None:
    """Save an empty picture."""
    figure = pytest.importorskip("matplotlib.figure", reason="see requirements-extra.txt").Figure()
    picture.save(figure, path)


TEXT = {"tokenizer": "bytes", "val_fraction": 0.1}


def open_data(place, **more) -> None:
    """Open the tokens of the text."""
    given = TEXT | {"dataset": f"{place}/text.txt", "data_dir": f"{place}/tokens"} | more
    data.open_or_prepare(TrainConfig(**given), 32)


def open_without_a_shard(place) -> None:
    """Open the tokens after one of their files was removed."""
    made = data.prepare(
        TrainConfig(**TEXT, dataset=f"{place}/text.txt", data_dir=f"{place}/tokens")
    )
    (made / "train-00000.bin").unlink()
    open_data(place)


COMMANDS = {  # what is wrong -> (what says so, what works after its command)
    "a file, no folder": (
        lambda place: load.find(f"{place}/hf/model.safetensors"),
        lambda place: load.find("runs/NAME"),
    ),
    "adapters as a base": (
        lambda place: load.check_same_model(f"{place}/runs/lora", CFG),
        lambda place: load.check_same_model("runs/merged", CFG),
    ),
    "adapters as a model": (
        lambda place: hf.export(f"{place}/runs/lora", place / "out"),
        lambda place: peft.read(place / "out"),
    ),
    "a base that others lack": (
        lambda place: peft.export(place / "runs/lora", place / "shared"),
        lambda place: hf.settings_of("BASE"),
    ),
    "norms in a bank": (
        lambda place: check_in_bank(f"{place}/runs/lora"),
        lambda place: load.find("MERGED"),
    ),
    "much text": (open_data, open_data),
    "a shard is gone": (open_without_a_shard, open_data),
    "a picture in no folder": (
        lambda place: draw(f"{place}/new/a.png"),
        lambda place: draw(f"{place}/new/a.png"),
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_that_a_message_names_helps(name, folder, monkeypatch):
    ask, works = COMMANDS[name]
    monkeypatch.setattr(data, "SMALL_BYTES", 0)
    run(as_bash_reads(message_of(lambda: ask(folder))))
    if works:
        works(folder)


def test_a_text_in_another_encoding_is_read_after_the_conversion(folder):
    message = message_of(lambda: list(corpus.documents(f"{folder}/latin.txt")))
    command = re.search(r"iconv -f \S+ -t \S+", message)[0]
    shell = ["bash", "-c", f"{command} < latin.txt > utf8.txt"]
    subprocess.run(shell, check=True)
    assert list(corpus.documents(f"{folder}/utf8.txt"))[0].startswith("Grüße")


# --- Flags


MODEL = "--d_model=32 --n_heads=4 --n_layers=2 --vocab_size=320 --max_seq_len=32 --no_bias"
CONTRADICTIONS = [
    "--alibi --sequence_parallel",
    "--alibi --sequence_parallel --tp=2 --max_seq_len=31",
    "--alibi --pp=3",
    "--alibi --tp=2 --compile",
    "--alibi --pp=2 --compile",
    "--alibi --icl_interval=5",
    "--alibi --lora_targets=",
    "--alibi --lora_alpha=4",
    "--alibi --lora_rank=32",
    "--alibi --lora_rank=2 --lora_last_blocks=1 --pp=2",
    "--alibi --lora_rank=2 --lora_dropout=0.1 --tp=2",
    "--alibi --global_batch_size=9",
    "--alibi=False --target_prompts=all --max_tokens=5",
]


@pytest.mark.parametrize("flags", CONTRADICTIONS)
def test_the_flags_that_messages_name_end_in_settings_that_work(flags, folder):
    """As a user who adds what the last error says, until there is none."""
    words = f"{MODEL} {flags}".split()
    for _ in range(6):
        try:
            model_cfg, cfg = config.load(words, MPTConfig, TrainConfig)
            fsdp_train.check_settings(model_cfg, cfg, types.SimpleNamespace(dp_size=2))
            break
        except UserError as error:
            fix = str(error).rpartition(": ")[2]
            flag = re.search(r"--\w+(=\S+)?", fix)[0].rstrip(",")
            words.append(flag.replace("runs/NAME", "runs/base"))
    else:
        pytest.fail(f"no end: {words}")
    assert len(words) > len(f"{MODEL} {flags}".split())


def strings() -> list[tuple[str, str]]:
    """(file, text) of every string in the source, docstrings included; {} is a value."""
    found = []
    paths = (path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0][0] != ".")
    for path in paths:
        if "tests" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", None) for part in node.values]
                text = "".join(p if isinstance(p, str) else "{}" for p in parts)
                found.append((str(path), text))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append((str(path), node.value))
    return found


STRINGS = strings()


def test_every_program_in_the_source_is_there():
    missing = []
    for path, text in STRINGS:
        for module in re.findall(r"-m (bench [a-z]\w*|[a-z][\w.]*\w)", text):
            program = module.replace(" ", ".").replace(".", "/")
            if not (ROOT / f"{program}.py").exists() and not (ROOT / program).is_dir():
                missing.append((path, module))
        for name in re.findall(r"(?:python|per_node[ =]\d+) ([\w/]+\.py)", text):
            if not (ROOT / name).exists():
                missing.append((path, name))
    others = {"pip", "venv", "ensurepip", "pytest", "gpu", "torch.distributed.run"}
    assert not [(path, name) for path, name in missing if name not in others]


def test_a_command_of_a_plain_path_has_no_quotes():
    assert config.shell("runs/demo", Path("a b"), "--prompt=def $x") == (
        "runs/demo 'a b' '--prompt=def $x'"
    )
    assert shlex.split(config.shell("it's")) == ["it's"]
