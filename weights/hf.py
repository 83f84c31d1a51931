"""Import and export MPT weights: Hugging Face folders (transformers, LLM Foundry), Composer files.

    python -m weights.hf import path/to/theirs runs/new   a folder or a Composer .pt -> a run folder
    python -m weights.hf export runs/demo path/to/new     a run or checkpoint -> a folder for others

Names are the same everywhere (`transformer.blocks.0.attn.Wqkv.weight`; Composer puts `model.`
before them). How tensors are stored in files, and how a rank reads its part of them, is in
weights/tensor_files.py. What config.json means is in weights/hf_config.py, which tokenizer a folder
has in weights/hf_tokenizer.py.
"""

import contextlib
import json
import os
import shutil
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import checkpoint
import config
import program
from config import MPTConfig, TrainConfig
from lora import is_adapter
from model import MPT
from processes import rank_zero_decides
from program import UserError, require
from storage import checkpoint_files, files
from storage.checkpoint_files import Writer, read_metadata, reason_of
from tensor_parallel import Team, cut, layout_of
from text import tokenizer as tokenizers
from weights import card, hf_tokenizer
from weights.hf_config import (
    check_format,
    config_from,
    config_to,
    foreign_settings,
    lost_in_transformers,
    warn_of_transformers,
)
from weights.tensor_files import (
    Stored,
    fill,
    locate,
    same_values,
    weight_files,
    write_folder,
)

MAX_FILE_BYTES = 5 * 10**9  # of an exported file

# --------------------------------------------------------------------------------------------------
# Reading


def find_tensors(path: Path, model: MPT) -> dict[str, Stored]:
    """Where the parameters of the whole of `model` are stored in a folder or file, by name.

    model: it may be cut over ranks, or be one stage of it. Raises UserError unless each parameter
    is there once, in its shape, and nothing else.
    """
    found = locate(path)
    wholes = checkpoint.whole_weights(model.cfg)
    wanted = {name: tuple(whole.shape) for name, whole in wholes.items()}
    missing = [name for name in wanted if name not in found]
    require(
        not missing, f"{path} lacks {len(missing)} tensors of this model, such as {missing[:1]}"
    )
    # Older versions of transformers wrote a tied output layer under both names.
    head = found.pop("lm_head.weight", None) if model.cfg.tie_word_embeddings else None
    unknown = [name for name in found if name not in wanted]
    require(
        not unknown,
        f"{path} holds {len(unknown)} tensors that this model lacks, such as {unknown[:1]}",
    )
    for name, shape in wanted.items():
        require(
            found[name].shape == shape,
            f"{name} is {found[name].shape} in {path}, but {shape} in this model",
        )
    require(
        head is None or same_values(head, found["transformer.wte.weight"]),
        f"lm_head.weight in {path} differs from the embedding: "
        "set tie_word_embeddings to false in its config.json",
    )
    return found


def load_into(model: MPT, path) -> None:
    """Fill a model, cut over ranks in any way or not, from a Hugging Face folder or Composer file.

    Every rank calls it, and reads its part of the parameters that it has. Numbers are converted to
    the dtype of the parameters. Raises UserError unless the files hold exactly the parameters of
    the whole model.
    """
    tensors = rank_zero_decides(lambda: find_tensors(Path(path), model))
    # Adapters (lora.py) are ours.
    params = {name: p for name, p in model.named_parameters() if not is_adapter(name)}
    layout = layout_of(model)
    pieces = {name: layout.pieces(name, p.detach()) for name, p in params.items()}
    fill(pieces, tensors)


def settings_of(path) -> MPTConfig:
    """The settings of a Hugging Face folder or Composer file. UserError if we lack some."""
    path = Path(path)
    weight_files(path)  # first: is there anything at all
    settings, source = foreign_settings(path)
    cfg = config_from(settings, str(source))
    warn_of_transformers(settings, cfg, str(source))
    return cfg


def load_model(path, device, team: Team | None = None) -> MPT:
    """The model of a Hugging Face folder or Composer checkpoint on one device.

    Its parameters have the dtype of the stored tensors, or fp32 if these have several. team: tensor
    ranks, of which this one gets its part of the model; None: the whole.
    """
    path = Path(path)
    with torch.device("meta"):
        model = MPT(settings_of(path))
    if team:
        cut(model, team)
    dtypes = {stored.dtype for stored in find_tensors(path, model).values()}
    model.to(dtypes.pop() if len(dtypes) == 1 else torch.float32)
    model.to_empty(device=device)
    load_into(model, path)
    return model.eval()


# --------------------------------------------------------------------------------------------------
# Export


@contextlib.contextmanager
def published(folder: Path):
    """A new folder to write into. It gets its name once all is on disk, and vanishes on any error.

    Raises UserError if the folder has content already, or cannot be written.
    """
    folder = folder.absolute()
    require_free(folder)
    staging = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        staging.mkdir(parents=True)
        yield staging
        for path in (*staging.rglob("*"), staging):
            files.sync(path)
        staging.rename(folder)
        files.sync(folder.parent)
    except (OSError, dcp.CheckpointException) as error:  # the latter is only a BaseException
        raise UserError(f"could not write {folder}: {reason_of(error)}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def require_free(folder: Path) -> None:
    """UserError if a folder has content already, or is a file."""
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    problem = f"{folder.absolute()} is there already"
    require(is_free, f"{problem}: name another folder, or remove it")


def export(source, folder, max_bytes: int = MAX_FILE_BYTES) -> None:
    """Write a Hugging Face folder from a run, a checkpoint (by its path) or an MPT on one device.

    max_bytes: the largest size of one file; a larger tensor gets a file of its own. Of a
    checkpoint, only the tensors of one output file are in memory at a time. Raises UserError if
    the format cannot hold the model.
    """
    path = None
    if isinstance(source, MPT):
        cfg = source.cfg
        tensors = source.state_dict()
    else:
        path = checkpoint.find(str(source))
        checkpoint.require_sound(path)
        fix = f"python -m weights.peft export {program.shell(source, folder)}, or merge them first"
        require(not checkpoint_files.read_adapter_settings(path), f"{source} holds adapters: {fix}")
        cfg = checkpoint_files.read_settings(path)
        metadata = read_metadata(path)
        tensors = weights_of(metadata)  # on the meta device
    check_format(tensors)
    settings = config_to(cfg, next(iter(tensors.values())).dtype)

    def read(names):
        """The tensors of one file, with memory."""
        chosen = {name: tensors[name] for name in names}
        if path:
            chosen = {name: torch.empty_like(t, device="cpu") for name, t in chosen.items()}
            checkpoint.fill(path, {"model": chosen}, metadata)
        return chosen

    with published(Path(folder)) as staging:
        if path:  # before the weights: this may fail, and they take minutes
            settings |= hf_tokenizer.export(path, staging)
            card.write_beside(staging, path)
        write_folder(staging, tensors, max_bytes, read)
        (staging / "config.json").write_text(json.dumps(settings, indent=2))

    lost = ", ".join(lost_in_transformers(cfg))
    if lost:
        print(
            f"warning: transformers' MptForCausalLM ignores {lost}: do not load it there",
            file=sys.stderr,
        )


def weights_of(metadata) -> dict:
    """Name -> tensor on the meta device, of the weights in a checkpoint with this DCP metadata."""
    weights = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith("model."):
            name = key.removeprefix("model.")
            weights[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
    return weights


# --------------------------------------------------------------------------------------------------
# Import


def import_(source, run_dir, tokenizer: str = "") -> None:
    """Write foreign weights, in their dtype, as a run folder with a checkpoint `step-0`.

    tokenizer: the one that the model was trained with; empty: see `hf_tokenizer.name_of`.
    Raises UserError if the weights or the tokenizer cannot be used.
    """
    source = Path(source)
    run_dir = Path(run_dir)
    cfg = settings_of(source)
    name = tokenizer or hf_tokenizer.name_of(source)
    if name.endswith(".json"):
        name = str(Path(name).absolute())
    file = hf_tokenizer.file_of(source, name)
    loaded = tokenizers.load(name, file)
    require(
        loaded.vocab_size <= cfg.vocab_size,
        f"{name} has {loaded.vocab_size} ids, but the model's vocab_size is {cfg.vocab_size}: "
        "set --tokenizer",
    )
    meta = {
        "step": 0,
        **asdict(cfg),
        **asdict(TrainConfig(run_dir=str(run_dir), tokenizer=name)),
        "precision": "fp32",
        "data_fingerprint": f"imported from {source}",
    }
    with published(run_dir) as staging:
        model = load_model(source, "cpu")
        write_checkpoint(staging / "checkpoints" / "step-0", meta, {"model": model.state_dict()})
        hf_tokenizer.save(loaded.name, file, staging)
        hf_tokenizer.keep_generation(hf_tokenizer.generation_of(source), staging)

    n_params = sum(param.numel() for param in model.parameters())
    print(f"{run_dir}: {n_params:,} parameters")
    print(f"Tokenizer: {name}. If the model was trained with other ids, it writes nonsense.")


def write_checkpoint(path: Path, meta: dict, state: dict) -> None:
    """Write a checkpoint from one process. Its parent folder is new.

    state: {"model": weights}, perhaps with "optim", as of `checkpoint.state_of`.
    """
    path.parent.mkdir()
    checkpoint.prepare(path, meta)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
        dcp.save(state, storage_writer=Writer(path), no_dist=True)


@dataclass
class ImportSettings:
    """The flags of `import`."""

    tokenizer: str = ""  # gpt2, bytes, bpe-N or a tokenizer.json (empty = theirs)


def main(argv) -> None:
    """Import or export, as the command line says."""
    arguments, cfg = config.load(argv, ImportSettings, takes="import|export SOURCE TARGET")
    command, source, target = arguments
    require(
        command in ("import", "export"),
        f"{command!r} is neither import nor export (--help shows both)",
    )
    if command == "import":
        return import_(source, target, cfg.tokenizer)
    export(source, target)
    tokenizer = files.read_json(Path(target) / "config.json")["tokenizer_name"]
    print(f"{target}: written. Tokenizer: {tokenizer}")


if __name__ == "__main__":
    program.run(main)
