"""A model from a path, and whether it is the model that a run wants to begin with.

    path                                    what is loaded
    runs/demo                               the newest complete checkpoint of a run
    runs/demo/checkpoints/step-200          this one
    path/to/mpt-7b                          a Hugging Face folder (weights/hf.py)

`load_for_sampling` gives generate.py and evaluation a model with its tokenizer. `init_from` fills a
model that is about to train, sharded or not (--init_from); before that, `check_same_model` compares
what both models compute, and `check_same_tokenizer` their ids. lifecycle/resume.py has the stricter
check of a run that goes on.

Run `python -m weights.load runs/demo` to see what is at a path. Read next: evaluation/tasks.py.
"""

from dataclasses import fields, replace
from pathlib import Path

import torch

import checkpoint
from attention import function_of
from config import MPTConfig, arguments, require, run
from lifecycle.resume import SAME_MODEL, norm_of
from model import MPT, init_weights
from processes import rank_zero_decides
from storage.checkpoint_files import read_metadata, require_weights
from text import tokenizer as tokenizers
from weights import hf


def find(path: str) -> Path:
    """A Hugging Face folder, or a checkpoint of ours. UserError if there is neither."""
    folder = Path(path)
    theirs = (folder / "config.json").exists() and not is_ours(folder)
    return folder if theirs else checkpoint.find(path)


def is_ours(path: Path) -> bool:
    """Is this a run folder or a checkpoint of this project?"""
    return path in checkpoint.complete(path.parent) or checkpoint.latest(path) is not None


def settings_of(path) -> MPTConfig:
    """The model of a Hugging Face folder, a Composer checkpoint, or a run or checkpoint of ours."""
    path = Path(path)
    return (
        checkpoint.settings(checkpoint.find(str(path))) if is_ours(path) else hf.settings_of(path)
    )


def load_model(path: Path, device: torch.device) -> MPT:
    """The whole model of a checkpoint on one device, for sampling and evaluation; needs no process group.

    UserError if the checkpoint is damaged. Where there are several ranks, all call it.
    """
    checkpoint.require_sound(path)
    cfg, metadata = checkpoint.settings(path), rank_zero_decides(lambda: read_metadata(path))
    n_tensors = len(
        metadata.state_dict_metadata
    )  # a model of thousands of layers takes a minute to make
    require(
        cfg.n_layers <= n_tensors,
        f"{path} holds {n_tensors} tensors, too few for {cfg.n_layers} layers",
    )
    with torch.device("meta"):
        model = MPT(
            replace(cfg, attn_impl=function_of(cfg.attn_impl))
        )  # this may be another device
    require_weights(path, metadata, model.state_dict())  # before there is memory for them
    model.to_empty(device=device)
    checkpoint.fill(path, {"model": model.state_dict()}, metadata)
    return model.eval()


def load_for_sampling(path: str, step: int | None, device, tokenizer: str = ""):
    """The model, its tokenizer and a name, from whatever `find` finds.

    step: of a run of ours (None: the newest, 0: the untrained model).
    tokenizer: of a Hugging Face folder (empty: its tokenizer.json, else gpt2).
    """
    require(step is None or step >= 0, f"step must be 0 or more, not {step}")
    found = find(path)
    if not is_ours(found):
        require(
            step is None, f"{path} is a Hugging Face folder, which has no steps: leave out --step"
        )
        model = hf.load_model(found, device)
        tokenizer = tokenizer or hf.name_of_tokenizer(found)
        return model, tokenizers.load(tokenizer, hf.own_file(found, tokenizer)), path
    require(
        not tokenizer, f"{path} is a run of ours, which has its tokenizer: leave out --tokenizer"
    )
    if step is not None and (step > 0 or (found.parent / "step-0").exists()):
        found = found.parent / f"step-{step}"
        there = ", ".join(p.name for p in checkpoint.complete(found.parent))
        require(
            found.exists(),
            f"no checkpoint of step {step} in {found.parent}: there are {there}, and 0 is untrained",
        )
    model, name = load_model(found, device), str(found)  # checks it
    meta = checkpoint.read_meta(found)
    if step == 0 and found.name != "step-0":
        init_weights(model, meta["seed"])
        name = "before training"
    return model, tokenizers.load(meta["tokenizer"], found.parent.parent / "tokenizer.json"), name


def init_from(model: MPT, path) -> None:
    """Start from weights trained elsewhere: fill a model of any sharding from whatever `settings_of` can read.

    UserError if these are of another model. Dropouts, attn_impl, packing, and a max_seq_len without learned positions
    may differ. Every rank calls it.
    """
    path = Path(path)
    rank_zero_decides(lambda: check_same_model(path, model.cfg))
    if not rank_zero_decides(lambda: is_ours(path)):
        return hf.load_into(model, path)
    found = rank_zero_decides(lambda: checkpoint.find(str(path)))
    checkpoint.require_sound(found)
    metadata, state = rank_zero_decides(lambda: read_metadata(found)), model.state_dict()
    require_weights(found, metadata, state)
    checkpoint.fill(found, {"model": state}, metadata)


def check_same_model(path, ours: MPTConfig) -> None:
    """UserError naming the settings in which the model at `path` and `ours` differ as functions."""
    here, theirs = meaning(ours), meaning(settings_of(path))
    differ = [
        f"{k} {value} (here {here[k]})"
        for k, value in theirs.items()
        if here.get(k, value) != value
    ]
    require(not differ, f"{path} is of another model: {', '.join(differ)}. Set them alike")


def meaning(cfg: MPTConfig) -> dict:
    """The settings that decide shapes and logits, without those that have no effect beside the others."""
    values = {name: getattr(cfg, name) for name in SAME_MODEL if name != "attn_uses_sequence_id"}
    values |= {"learned_pos_emb": cfg.learned_positions, "kv_n_heads": cfg.n_kv_heads}
    values |= {"attn_impl": function_of(cfg.attn_impl), "norm_type": norm_of(cfg.norm_type)}
    needs = {
        "alibi_bias_max": cfg.alibi,
        "rope_theta": cfg.rope,
        "max_seq_len": cfg.learned_positions,
    }
    return {name: value for name, value in values.items() if needs.get(name, True)}


def check_same_tokenizer(path, name: str, file) -> None:
    """UserError if the weights at `path` were trained with other ids than those of the tokenizer `name` (its own file,
    if it has one: `file`)."""
    path = Path(path)
    if is_ours(path):
        found = checkpoint.find(str(path))
        theirs, their_file = (
            checkpoint.read_meta(found)["tokenizer"],
            found.parent.parent / "tokenizer.json",
        )
    else:
        theirs = hf.name_of_tokenizer(path)
        their_file = hf.own_file(path, theirs)
    same = theirs == tokenizers.canonical(name) and theirs in ("gpt2", "bytes")
    if not same:
        same = (
            tokenizers.load(theirs, their_file).fingerprint
            == tokenizers.load(name, file).fingerprint
        )
    require(
        same,
        f"{path} was trained with the tokenizer {theirs}, whose ids are not those of {name}: set --tokenizer",
    )


def demonstrate(argv) -> None:
    """What is at a path. Its weights are not read, so this takes no longer for a large model."""
    (path,) = arguments(argv, "RUN")
    found = find(path)
    cfg = settings_of(found)
    if is_ours(found):
        meta = checkpoint.read_meta(found)
        kind, tokenizer = f"a checkpoint of ours, step {meta['step']}", meta["tokenizer"]
    else:
        kind, tokenizer = "a Hugging Face folder", hf.name_of_tokenizer(found)
    with torch.device("meta"):
        n_params = sum(param.numel() for param in MPT(cfg).parameters())
    print(f"{found}: {kind}")
    print(f"{n_params:,} parameters, tokenizer {tokenizer}")
    for field in fields(cfg):
        value = getattr(cfg, field.name)
        print(f"  {field.name:24}{value}" + (" (default)" if value == field.default else ""))


if __name__ == "__main__":
    run(demonstrate)
