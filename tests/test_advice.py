"""What messages advise is done: commands and flags that they name work, and programs exist."""

import importlib
import json
import re
import shlex
import subprocess
import types
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from random_adapters import write_random

import checkpoint
import config
import data
import lora
import program
from config import LINEAR_LAYERS, MPTConfig, TrainConfig
from lifecycle import beginning
from model import MPT, init_weights
from program import UserError
from serving.adapters import AdapterBank
from serving.decoder import Decoder
from text import corpus, prepare
from weights import hf, load, peft

CFG = MPTConfig(
    d_model=32, n_heads=4, n_layers=2, vocab_size=320, max_seq_len=32, alibi=True, no_bias=True
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of weights in runs/base, of adapters on that in runs/lora, and a text."""
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
    return place


def open_data(place) -> None:
    """Open the tokens of the text."""
    source = {"dataset": f"{place}/text.txt", "tokenizer": "bytes", "val_fraction": 0.1}
    data.open_or_prepare(TrainConfig(**source, data_dir=f"{place}/tokens"), 32)


def check_in_bank(adapter: str) -> None:
    """Ask a bank for the adapters of a run that trained norms, too."""
    chosen = TrainConfig(init_from="any", lora_rank=2, lora_train="norms")
    found = peft.Adapter(chosen, lora.trained_weights(CFG, chosen))
    bank = AdapterBank(Decoder(MPT(CFG), 300), n_slots=1, rank=2, layers=LINEAR_LAYERS)
    bank.check(adapter, found)


COMMANDS = {  # what is wrong -> (what says so, what works after its command)
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
    "a file, no folder": (
        lambda place: load.find(f"{place}/hf/model.safetensors"),
        lambda place: load.find("runs/NAME"),
    ),
    "norms in a bank": (
        lambda place: check_in_bank(f"{place}/runs/lora"),
        lambda place: load.find("MERGED"),
    ),
    "much text": (open_data, open_data),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_that_a_message_names_helps(name, folder, monkeypatch, capsys):
    """As a shell reads it, in a folder whose name has a space, an apostrophe and a dollar sign."""
    ask, works = COMMANDS[name]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(prepare, "SMALL_BYTES", 0)
    try:
        ask(folder)
        message = capsys.readouterr().out
    except UserError as error:
        message = str(error)
    command = re.split(r",? or |,? then |,? and | makes |; ", re.search(r"python .*", message)[0])[
        0
    ]
    shell = ["bash", "-c", f"printf '%s\\0' {command}"]
    printed = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    _, *words = printed.split("\0")[:-1]
    name, *flags = words[1:] if words[0] == "-m" else [words[0].removesuffix(".py"), *words[1:]]
    importlib.import_module(name).main(flags)
    works(folder)


def check_optimizer(place) -> None:
    """Resume a checkpoint of an optimizer of another name."""
    path = place / "runs/other/checkpoints/step-1"
    path.parent.mkdir(parents=True)
    meta = checkpoint.read_meta(checkpoint.find(f"{place}/runs/base"))
    checkpoint.prepare(path, meta | {"optimizer": "Lion (mean)"})
    checkpoint.require_same_optimizer(path, torch.optim.AdamW([torch.zeros(1)]))


def test_a_path_in_advice_is_one_word_of_a_shell(folder):
    with pytest.raises(UserError) as error:
        check_optimizer(folder)
    fix = str(error.value).rpartition("begin with ")[2]
    assert shlex.split(fix)[0] == f"--init_from={folder}/runs/other/checkpoints/step-1"


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
def test_the_flags_that_messages_name_end_in_settings_that_work(flags, folder, monkeypatch):
    """As a user who adds what the last error says, until there is none."""
    monkeypatch.chdir(folder)
    words = f"{MODEL} {flags}".split()
    for _ in range(6):
        try:
            model_cfg, cfg = config.load(words, MPTConfig, TrainConfig)
            beginning.check_settings(model_cfg, cfg, types.SimpleNamespace(dp_size=2))
            break
        except UserError as error:
            fix = str(error).rpartition(": ")[2]
            flag = re.search(r"--\w+(=\S+)?", fix)[0].rstrip(",")
            words.append(flag.replace("runs/NAME", "runs/base"))
    else:
        pytest.fail(f"no end: {words}")
    assert len(words) > len(f"{MODEL} {flags}".split())


OTHERS = {"pip", "venv", "ensurepip", "pytest", "gpu", "torch.distributed.run"}


def test_every_program_in_the_source_is_there():
    missing = []
    for path in [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py")]:
        if path.parent.name == "tests":
            continue
        source = path.read_text(encoding="utf-8")
        for module in re.findall(r"-m (bench [a-z]\w*|[a-z][\w.]*\w)", source):
            place = ROOT / module.replace(" ", "/").replace(".", "/")
            if module not in OTHERS and not place.with_suffix(".py").exists():
                missing += [(path, module)] if not place.is_dir() else []
        for name in re.findall(r"(?:python|per_node[ =]\d+) ([\w/]+\.py)", source):
            missing += [(path, name)] if not (ROOT / name).exists() else []
    assert not missing


def test_a_text_in_another_encoding_is_read_after_the_conversion(tmp_path):
    (tmp_path / "latin.txt").write_text("Grüße. " * 100, encoding="latin-1")
    with pytest.raises(UserError) as error:
        list(corpus.documents(f"{tmp_path}/latin.txt"))
    command = re.search(r"iconv -f \S+ -t \S+", str(error.value))[0]
    shell = ["bash", "-c", f"{command} < latin.txt > utf8.txt"]
    subprocess.run(shell, cwd=tmp_path, check=True)
    assert list(corpus.documents(f"{tmp_path}/utf8.txt"))[0].startswith("Grüße")


def test_a_command_of_a_plain_path_has_no_quotes():
    """Others are quoted, so that a shell reads each as one word."""
    command = program.shell("runs/demo", Path("a b"), "--prompt=def $x")
    assert command == "runs/demo 'a b' '--prompt=def $x'"
    assert shlex.split(program.shell("it's")) == ["it's"]
