"""A model from a path, and checks that a run may start from it.

    path                                    what is loaded
    runs/demo                               the newest complete checkpoint of a run
    runs/demo/checkpoints/step-200          this checkpoint
    path/to/mpt-7b                          a Hugging Face folder (weights/hf.py)

`load_for_sampling` gives generate.py and evaluation a model with its tokenizer; evaluation may want
it cut over tensor ranks. `init_from` fills a model that is about to train, sharded or not
(--init_from). Before that, `check_same_model` compares
the settings that decide what the two models compute, and `check_same_tokenizer` their ids. For a
run that resumes, lifecycle/resume.py has a stricter check.

Run `python -m weights.load runs/demo` to see what is at a path.
"""

from dataclasses import fields, replace
from pathlib import Path

import torch

import checkpoint
import parallel
import tensor_parallel
from attention import function_of
from config import MPTConfig, UserError, arguments, require, run
from lifecycle.resume import SAME_MODEL, norm_of
from model import MPT
from processes import rank_zero_decides
from storage.checkpoint_files import read_metadata, require_weights
from tensor_parallel import Team, layout_of
from text import tokenizer as tokenizers
from weights import hf


def find(path: str) -> Path:
    """The Hugging Face folder or the checkpoint at a path. UserError if there is neither.

    A run folder stands for its newest complete checkpoint.
    """
    folder = Path(path)
    is_hugging_face = (folder / "config.json").exists() and not is_run(folder)
    return folder if is_hugging_face else checkpoint.find(path)


def is_run(path: Path) -> bool:
    """Is this a run folder with a checkpoint, or a checkpoint, of this project?"""
    return path in checkpoint.complete(path.parent) or checkpoint.latest(path) is not None


def settings_of(path) -> MPTConfig:
    """The settings of the model at a path.

    path: of a Hugging Face folder, a Composer file, a run or a checkpoint.
    Raises UserError if there is none, or if this project cannot hold it.
    """
    path = Path(path)
    if is_run(path):
        return checkpoint.settings(checkpoint.find(str(path)))
    return hf.settings_of(path)


def load_model(path: Path, device: torch.device, team: Team | None = None) -> MPT:
    """The model of a checkpoint on one device, for sampling and evaluation.

    It needs no process group; where there is one, every rank calls it. team: tensor ranks, of which
    this one gets its part of the model; None: the whole. Raises UserError if the checkpoint is
    damaged.
    """
    checkpoint.require_sound(path)
    cfg = checkpoint.settings(path)
    metadata = rank_zero_decides(lambda: read_metadata(path))
    n_tensors = len(metadata.state_dict_metadata)
    require(  # first: building a model of thousands of layers takes a minute
        cfg.n_layers <= n_tensors,
        f"{path} holds {n_tensors} tensors, too few for {cfg.n_layers} layers",
    )
    # This may be another device than the one that it was trained on: choose the implementation
    # anew.
    cfg = replace(cfg, attn_impl=function_of(cfg.attn_impl))
    with torch.device("meta"):
        model = MPT(cfg)
    require_weights(path, metadata, model.state_dict())  # before memory is allocated
    if team:
        tensor_parallel.cut(model, team)
    model.to_empty(device=device)
    checkpoint.fill(path, {"model": model.state_dict()}, metadata, layout_of(model))
    return model.eval()


def load_for_sampling(
    path: str, step: int | None, device, tokenizer: str = "", team: Team | None = None
):
    """The model at a path, its tokenizer, and a name for it.

    step: of a run (None: the newest, 0: the untrained model).
    tokenizer: of a Hugging Face folder (empty: see `hf.name_of_tokenizer`).
    team: as for `load_model`.
    Raises UserError if there is no such model, or a flag does not apply to it.
    """
    require(step is None or step >= 0, f"step must be 0 or more, not {step}")
    found = find(path)
    if is_run(found):
        require(
            not tokenizer,
            f"{path} is a run of this project, which has its tokenizer: remove --tokenizer",
        )
        return load_from_run(found, step, device, team)

    require(step is None, f"{path} is a Hugging Face folder, which has no steps: remove --step")
    model = hf.load_model(found, device, team)
    tokenizer_name = tokenizer or hf.name_of_tokenizer(found)
    file = hf.tokenizer_file(found, tokenizer_name)
    return model, tokenizers.load(tokenizer_name, file), path


def load_from_run(found: Path, step: int | None, device, team: Team | None):
    """The model, tokenizer and name that `load_for_sampling` returns for a run.

    found: a checkpoint of the run, loaded unless `step` asks for another one.
    """
    has_step_0 = (found.parent / "step-0").exists()  # of imported weights
    untrained = step == 0 and not has_step_0
    if step is not None and not untrained:
        found = found.parent / f"step-{step}"
        existing = ", ".join(path.name for path in checkpoint.complete(found.parent))
        require(
            found.exists(),
            f"no checkpoint of step {step} in {found.parent}: "
            f"there are {existing}, and 0 is untrained",
        )
    model = load_model(found, device, team)  # checks the checkpoint, so it comes first
    meta = checkpoint.read_meta(found)
    try:
        tokenizer = tokenizers.load(meta["tokenizer"], tokenizer_file(found))
    except UserError as error:
        raise UserError(f"the tokenizer in {found}/meta.json: {error}") from error
    if untrained:
        parallel.draw_weights(model, meta["seed"])
        return model, tokenizer, "before training"
    return model, tokenizer, str(found)


def tokenizer_file(found: Path) -> Path:
    """The file of the tokenizer in the run folder of a checkpoint. gpt2 and bytes have none."""
    return found.parent.parent / "tokenizer.json"


def init_from(model: MPT, path) -> None:
    """Start from weights trained elsewhere: fill a model, cut over ranks in any way or not.

    path: as for `settings_of`. Every rank calls it. Raises UserError if the weights are those of
    another model. These settings may differ: dropout, attn_impl, packing, and max_seq_len unless
    positions are learned.
    """
    path = Path(path)
    rank_zero_decides(lambda: check_same_model(path, model.cfg))
    if not rank_zero_decides(lambda: is_run(path)):
        return hf.load_into(model, path)
    found = rank_zero_decides(lambda: checkpoint.find(str(path)))
    checkpoint.require_sound(found)
    metadata = rank_zero_decides(lambda: read_metadata(found))
    require_weights(found, metadata, checkpoint.whole_weights(model.cfg))
    checkpoint.fill(found, {"model": model.state_dict()}, metadata, layout_of(model))


def check_same_model(path, cfg: MPTConfig) -> None:
    """UserError if the settings of the model at `path` give other weight shapes or logits than cfg.

    The message names the settings that differ.
    """
    here = function_settings(cfg)
    there = function_settings(settings_of(path))
    differing = [
        f"{name} {value} (here {here[name]})"
        for name, value in there.items()
        if here.get(name, value) != value
    ]
    require(
        not differing, f"{path} is of another model: {', '.join(differing)}. Use the same settings"
    )


def function_settings(cfg: MPTConfig) -> dict:
    """The settings that decide the shapes and logits of a model, by name.

    Settings that have no effect here are left out, such as rope_theta without rope.
    """
    values = {name: getattr(cfg, name) for name in SAME_MODEL if name != "attn_uses_sequence_id"}
    values["learned_pos_emb"] = cfg.learned_positions
    values["kv_n_heads"] = cfg.n_kv_heads
    values["attn_impl"] = function_of(cfg.attn_impl)
    values["norm_type"] = norm_of(cfg.norm_type)
    has_effect = {
        "alibi_bias_max": cfg.alibi,
        "rope_theta": cfg.rope,
        "max_seq_len": cfg.learned_positions,
    }
    return {name: value for name, value in values.items() if has_effect.get(name, True)}


def check_same_tokenizer(path, name: str, file) -> None:
    """UserError if the weights at `path` were trained with other ids than those of a tokenizer.

    name, file: of the tokenizer, as `tokenizers.load` takes them.
    """
    path = Path(path)
    if is_run(path):
        found = checkpoint.find(str(path))
        their_name = checkpoint.read_meta(found)["tokenizer"]
        their_file = tokenizer_file(found)
    else:
        their_name = hf.name_of_tokenizer(path)
        their_file = hf.tokenizer_file(path, their_name)

    # There is only one gpt2 and one bytes. Others may differ under the same name.
    same_ids = their_name in ("gpt2", "bytes") and their_name == tokenizers.canonical(name)
    if not same_ids:
        theirs = tokenizers.load(their_name, their_file)
        same_ids = theirs.fingerprint == tokenizers.load(name, file).fingerprint
    require(
        same_ids,
        f"{path} was trained with the tokenizer {their_name}, whose ids are not those of {name}: "
        "set --tokenizer",
    )


def demonstrate(argv) -> None:
    """Print the settings of the model at a path. Its weights are not read."""
    (path,) = arguments(argv, "RUN")
    found = find(path)
    cfg = settings_of(found)
    if is_run(found):
        meta = checkpoint.read_meta(found)
        kind = f"a checkpoint of this project, step {meta['step']}"
        tokenizer = meta["tokenizer"]
    else:
        kind = "a Hugging Face folder"
        tokenizer = hf.name_of_tokenizer(found)
    with torch.device("meta"):
        n_params = sum(param.numel() for param in MPT(cfg).parameters())
    print(f"{found}: {kind}")
    print(f"{n_params:,} parameters, tokenizer {tokenizer}")
    for field in fields(cfg):
        value = getattr(cfg, field.name)
        print(f"  {field.name:24}{value}" + (" (default)" if value == field.default else ""))


if __name__ == "__main__":
    run(demonstrate)
