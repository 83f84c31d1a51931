"""A model from a path, and checks that a run may start from it.

    path                                    what is loaded
    runs/demo                               the newest complete checkpoint of a run
    runs/demo/checkpoints/step-200          this checkpoint
    path/to/mpt-7b                          a Hugging Face folder (weights/hf.py)

`load_for_sampling` gives generate.py and evaluation a model with its tokenizer; evaluation may want
it cut over tensor ranks. `init_from` fills a model that is about to train, sharded or not
(--init_from). Before that, `check_same_model` compares the settings that decide what the two models
compute, and `check_same_tokenizer` their ids. For a run that resumes, lifecycle/resume.py has a
stricter check.

A run with adapters (lora.py) holds them alone, and names its base: the path, and a fingerprint of
the weights there. `load_model` finds that base, checks the fingerprint, and merges the adapters
into it.

Run `python -m weights.load runs/demo` to see what is at a path.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import torch

import checkpoint
import lora
import parallel
import tensor_parallel
from config import MPTConfig, TrainConfig, function_of
from model import MPT
from processes import rank_zero_decides
from program import UserError, arguments, require, run, say_once, shell
from storage import checkpoint_files
from storage.checkpoint_files import (
    checksum,
    different_functions,
    read_checksums,
    read_metadata,
    require_weights,
)
from tensor_parallel import Team, layout_of
from text import sources
from text import tokenizer as tokenizers
from weights import hf, hf_tokenizer
from weights.adapters import Adapter, check_fits, of_run

MERGE_FROM = "run python -m weights.peft merge RUN OUT --init_from=PATH"


def find(path: str) -> Path:
    """The Hugging Face folder at a path, or the checkpoint, of a run its newest complete one."""
    folder = Path(path)
    fix = f"import it first: python -m weights.hf import {shell(path)} runs/NAME"
    require(not folder.is_file(), f"{path} is a file, not a folder: {fix}")
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
        return checkpoint_files.read_settings(checkpoint.find(str(path)))
    return hf.settings_of(path)


def load_model(
    path: Path, device: torch.device, team: Team | None = None, in_fp32: bool = False
) -> MPT:
    """The model of a checkpoint on one device, for sampling and evaluation.

    If it holds adapters: their base, with the adapters merged into it. in_fp32: the caller will
    compute in fp32, so the merged weights are not rounded to the dtype of a base in half precision.
    team: tensor ranks, of which this one gets its part of the model; None: the whole. Where there
    is a process group, every rank calls it. Raises UserError if the checkpoint is damaged.
    """
    checkpoint.require_sound(path)
    if checkpoint_files.read_adapter_settings(path):
        model = load_adapted(path, device, team)
        if in_fp32:
            model.float()
        lora.merge(model)
        return model
    cfg = checkpoint_files.read_settings(path)
    metadata = rank_zero_decides(lambda: read_metadata(path))
    model = without_memory(cfg)
    require_weights(path, metadata, model.state_dict())  # before memory is allocated
    if team:
        tensor_parallel.cut(model, team)
    model.to_empty(device=device)
    checkpoint.fill(path, {"model": model.state_dict()}, metadata, layout_of(model))
    return model.eval()


def without_memory(cfg: MPTConfig) -> MPT:
    """A model on the meta device. Its attention is chosen anew: this may be another device than
    the one that it was trained on.
    """
    with torch.device("meta"):
        return MPT(replace(cfg, attn_impl=function_of(cfg.attn_impl)))


def load_adapted(path: Path, device: torch.device, team: Team | None = None, base: str = "") -> MPT:
    """The model of a checkpoint of adapters before these are merged; see `with_adapter`.

    base: where its base is now, if it was moved. UserError if the base is not there any more, or
    has changed.
    """
    adapter = of_run(path)
    place = base_at(path, base)
    return with_adapter(place, checkpoint_files.read_settings(path), adapter, device, team)


@torch.no_grad()
def with_adapter(
    base: Path, cfg: MPTConfig, adapter: Adapter, device: torch.device, team: Team | None = None
) -> MPT:
    """The model at `base` with an adapter put on, for evaluation. cfg: its settings.

    W has the dtype of the base (fp32 if norms or biases were trained, which would be rounded), A
    and B have fp32 or wider: before it is merged, a model in half precision runs under autocast.
    Raises UserError if the adapter does not fit.
    """
    check_fits(adapter, cfg, base)
    model = without_memory(cfg)
    if team:
        tensor_parallel.cut(model, team)
    model.to(torch.float32 if adapter.settings.lora_train else dtype_of(base, model))
    lora.put_on(model, adapter.settings)
    model.to_empty(device=device)
    init_from(model, base)
    lora.draw(model, seed=0)  # where an adapter from PEFT lacks a layer, B stays zero
    layout = layout_of(model)
    for name, tensor in adapter.tensors.items():
        layout.copy_part(name, model.get_parameter(name), tensor)
    return model.eval()


def dtype_of(base: Path, model: MPT) -> torch.dtype:
    """The dtype of the stored weights of `model`, or fp32 if they have several."""
    if is_run(base):
        tensors = hf.weights_of(read_metadata(checkpoint.find(str(base))))
    else:
        tensors = hf.find_tensors(base, model)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def base_at(path: Path, moved_to: str = "") -> Path:
    """Where the base of a checkpoint of adapters is: see `base_of`. A collective."""
    init_from = moved_to or checkpoint_files.read_adapter_settings(path).init_from
    meta = checkpoint.read_meta(path)
    return Path(rank_zero_decides(lambda: base_of(init_from, meta))["base"])


def base_of(path: str, meta: dict, fix: str = MERGE_FROM) -> dict:
    """The model that adapters are trained on: its path, and a fingerprint of its weights.

    path: --init_from; of a run, its newest checkpoint. meta: of a checkpoint of adapters, whose
    fingerprint must be the same, or empty. If the base run went on training, its checkpoint of then
    is looked for. UserError, which ends with `fix`, if it is not there.
    """
    expected = meta.get("base_fingerprint")
    base = Path(meta.get("base", path))
    places = [Path(path)]
    is_as_then = path == meta.get("init_from")
    if is_as_then or not Path(path).exists():
        places.append(base)
    for place in places:
        found = checkpoint.find(str(place)) if is_run(place) else place
        if expected and not found.exists():
            continue
        fingerprint = fingerprint_of(found)
        if fingerprint == expected or not expected:
            return {"base": str(found.absolute()), "base_fingerprint": fingerprint}
    problem = f"{path} does not hold the weights that the adapters were trained on"
    raise UserError(f"{problem}; they were in {base}: put them there, or {fix}")


def warn_if_it_may_go(base: str) -> None:
    """Say that training the base's run further deletes the base, if it is a checkpoint of a run.

    An imported step-0 stays.
    """
    if is_run(Path(base)) and Path(base).name != "step-0":
        needed = f"the adapters need {base}, which --keep_last deletes if that run trains on"
        say_once("note", f"{needed}: copy it, or merge them: python -m weights.peft merge RUN OUT")


def fingerprint_of(path: Path) -> str:
    """16 hex digits that say which weights are at a path: a hash of the checksums of its files.

    path: a checkpoint, whose checksums are known, or a Hugging Face folder or Composer file, which
    is read in full by each call. UserError if the checksums are missing or damaged.
    """
    if is_run(path):
        known = read_checksums(path)
        require(known, f"{path} is damaged (checksums.json is missing or damaged)")
        sums = {name: known[name] for name in known if name.endswith(".distcp")}
    else:
        weights = hf.weight_files(path)
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(checksum, weights))
        sums = {file.name: pair for file, pair in zip(weights, found, strict=True)}
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:16]


def load_for_sampling(
    path: str,
    step: int | None,
    device,
    tokenizer: str = "",
    team: Team | None = None,
    in_fp32: bool = False,
):
    """The model at a path, its tokenizer, and a name for it.

    step: of a run (None: the newest, 0: the untrained model). tokenizer: of a Hugging Face folder
    (empty: its own). team, in_fp32: as for `load_model`. Raises UserError if there is no such
    model, or a flag does not apply to it.
    """
    require(step is None or step >= 0, f"step must be 0 or more, not {step}")
    found = find(path)
    if is_run(found):
        require(
            not tokenizer,
            f"{path} is a run of this project, which has its tokenizer: remove --tokenizer",
        )
        return load_from_run(found, step, device, team, in_fp32)

    require(step is None, f"{path} is a Hugging Face folder, which has no steps: remove --step")
    model = hf.load_model(found, device, team)
    name = tokenizer or hf_tokenizer.name_of(found)
    loaded = tokenizers.load(name, hf_tokenizer.file_of(found, name))
    loaded.ends |= hf_tokenizer.end_ids(generation_of(found))
    return model, loaded, path


def load_from_run(found: Path, step: int | None, device, team: Team | None, in_fp32: bool = False):
    """What `load_for_sampling` returns for a run. found: its checkpoint, if `step` is none."""
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
    is_base = untrained and checkpoint_files.read_adapter_settings(found)
    source = base_at(found) if is_base else found
    # This checks the checkpoint, so it comes first.
    if is_run(source):
        model = load_model(source, device, team, in_fp32)
    else:
        model = hf.load_model(source, device, team)
    meta = checkpoint.read_meta(found)
    try:
        tokenizer = tokenizers.load(meta["tokenizer"], tokenizer_file(found))
    except UserError as error:
        raise UserError(f"the tokenizer in {found}/meta.json: {error}") from error
    tokenizer.ends |= hf_tokenizer.end_ids(generation_of(found))
    if is_base:
        return model, tokenizer, "before finetuning"
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
    another model. These settings may differ: dropout, attn_impl, attn_uses_sequence_id, and
    max_seq_len unless positions are learned.
    """
    path = Path(path)
    rank_zero_decides(lambda: check_same_model(path, model.cfg))
    if not rank_zero_decides(lambda: is_run(path)):
        return hf.load_into(model, path)
    found = rank_zero_decides(lambda: checkpoint.find(str(path)))
    checkpoint.require_sound(found)
    metadata = rank_zero_decides(lambda: read_metadata(found))
    require_weights(found, metadata, checkpoint.whole_weights(model.cfg))
    state = {k: value for k, value in model.state_dict().items() if not lora.is_adapter(k)}
    checkpoint.fill(found, {"model": state}, metadata, layout_of(model))


def check_init_from(cfg: TrainConfig, model_cfg: MPTConfig) -> None:
    """UserError unless --init_from holds such a model. It may be gone if a checkpoint is whole."""
    path = cfg.init_from
    if Path(path).exists():
        return check_same_model(path, model_cfg)
    has_all_weights = checkpoint.latest(cfg.run_dir) and not cfg.lora_rank
    fix = "give a run, one of its checkpoints, or a Hugging Face folder"
    require(has_all_weights, f"--init_from={path} does not exist: {fix}")


def check_same_model(path, cfg: MPTConfig) -> None:
    """UserError naming the settings at `path` that give other weight shapes or logits than cfg."""
    if is_run(Path(path)):
        holds_adapters = checkpoint_files.read_adapter_settings(checkpoint.find(str(path)))
        fix = f"merge them first: python -m weights.peft merge {shell(path)} runs/merged"
        require(not holds_adapters, f"{path} holds adapters, not a whole model: {fix}")
    differences = different_functions(settings_of(path), cfg)
    problem = f"{path} is of another model: {', '.join(differences)}"
    require(not differences, f"{problem}. Use the same settings")


def generation_of(path: Path) -> dict:
    """How the model at a path generates text, if it is from a Hugging Face folder; else empty."""
    if is_run(path):
        return hf_tokenizer.kept_generation(checkpoint.find(str(path)).parent.parent)
    return hf_tokenizer.generation_of(path)


def keep_generation(base: str, run_dir: str) -> None:
    """Keep in a new run how the model that it begins with generates text: which ids end it, its
    chat template and the names of special tokens.
    """
    path = Path(base)
    hf_tokenizer.keep_generation(generation_of(path), Path(run_dir))
    if is_run(path):
        beside = checkpoint.find(base).parent.parent / hf_tokenizer.KEPT
    else:
        beside = hf_tokenizer.folder_of(path)
    hf_tokenizer.copy_beside(beside, Path(run_dir) / hf_tokenizer.KEPT)


def tokenizer_of(path: Path) -> tuple[str, Path | None]:
    """Name and file of the tokenizer of the model at a path, as `tokenizers.load` takes them."""
    if is_run(path):
        found = checkpoint.find(str(path))
        return checkpoint.read_meta(found)["tokenizer"], tokenizer_file(found)
    name = hf_tokenizer.name_of(path)
    return name, hf_tokenizer.file_of(path, name)


def check_same_tokenizer(path, name: str, file) -> None:
    """UserError if the weights at `path` were trained with other ids than those of a tokenizer.

    name, file: of the tokenizer, as `tokenizers.load` takes them. Nothing is checked if the weights
    are gone: see `check_init_from`.
    """
    if not Path(path).exists():
        return
    their_name, their_file = tokenizer_of(Path(path))
    # There is only one gpt2 and one bytes. Others may differ under the same name.
    same_ids = their_name in ("gpt2", "bytes") and their_name == sources.canonical(name)
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
    kind = "a Hugging Face folder"
    if is_run(found):
        meta = checkpoint.read_meta(found)
        kind = f"a checkpoint of this project, step {meta['step']}"
        if settings := checkpoint_files.read_adapter_settings(found):
            kind += f": adapters of rank {settings.lora_rank} on {meta['base']}"
    name, file = tokenizer_of(found)
    n_params = sum(param.numel() for param in without_memory(cfg).parameters())
    print(f"{found}: {kind}")
    print(f"{n_params:,} parameters, tokenizer {name}")
    if ends := hf_tokenizer.end_ids(generation_of(found)):
        tokenizer = tokenizers.load(name, file)
        print("its texts end with", *(tokenizer.decode([i]) for i in sorted(ends)))
    for field in fields(cfg):
        value = getattr(cfg, field.name)
        print(f"  {field.name:24}{value}" + (" (default)" if value == field.default else ""))


if __name__ == "__main__":
    run(demonstrate)
