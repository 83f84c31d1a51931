"""MPT weights from and to other people's files: Hugging Face's (transformers, LLM Foundry) and Composer's.

    python hf.py import path/to/theirs runs/theirs       their folder or .pt file -> a run folder of ours
    python hf.py export runs/demo path/to/new            a run or checkpoint of ours -> their folder

Names are the same everywhere (`transformer.blocks.0.attn.Wqkv.weight`; Composer puts `model.` before them), so there is
no map. Weights lie in model.safetensors or pytorch_model.bin, whole or in shards that an index names, or in Composer's
.pt. A safetensors file is the length n of its header (8 bytes), n bytes of JSON (name -> dtype, shape, place), then the
tensors. A .bin or .pt is a zip; its pickle is read with `weights_only=True`, without the tensors. So each tensor is
known by its place in a file, and a rank reads the rows that it keeps straight into its own memory: see `fill`.

    config.json                                           here
    d_model n_heads n_layers expansion_ratio max_seq_len  the same; a missing one is as LLM Foundry has it, or as
    vocab_size learned_pos_emb no_bias logit_scale        transformers has it where that wrote the file
    norm_type tie_word_embeddings emb_pdrop resid_pdrop
    attn_config: attn_pdrop clip_qkv qk_ln softmax_scale  the same
    alibi alibi_bias_max rope rope_theta
    attn_uses_sequence_id
    attn_config: attn_type, kv_n_heads                    kv_n_heads
    attn_impl, init_config, torch_dtype and the like      left out: they change no logits
    any other                                             refused by name, unless it stands at its default

fsdp_train.py calls `init_from` for --init_from. Read next: generate.py.
"""

import argparse
import contextlib
import datetime
import json
import math
import os
import shutil
import struct
import sys
import typing
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard

import checkpoint
import config
import parallel
import tokenizer as tokenizers
from config import MPTConfig, TrainConfig, UserError, require
from model import MPT
from resume import SAME_MODEL

WEIGHTS = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of safetensors
CHUNK = 2**24  # bytes that are read at once
SHARD = 5 * 10**9  # bytes of one exported file, at most
THEIR_TOKENIZER, OUR_TOKENIZER = "tokenizer.json", "bpe_tokenizer.json"  # their format, and that of our bpe-N

TOP = """d_model n_heads n_layers expansion_ratio max_seq_len vocab_size learned_pos_emb no_bias logit_scale norm_type
         tie_word_embeddings emb_pdrop resid_pdrop""".split()
ATTENTION = "attn_pdrop clip_qkv qk_ln softmax_scale alibi alibi_bias_max rope rope_theta attn_uses_sequence_id".split()
# Names that decide neither weights nor logits, or are read elsewhere in this file.
IGNORED = """architectures auto_map model_type name _name_or_path transformers_version torch_dtype dtype tokenizer_name
    use_cache verbose init_config init_device initializer_range loss_fn use_pad_tok_in_ffn bos_token_id eos_token_id
    pad_token_id attn_config ffn_config attn_impl attn_type kv_n_heads rope_impl rope_dail_config rope_hf_config
    return_dict id2label label2id problem_type is_encoder_decoder chunk_size_feed_forward output_attentions
    output_hidden_states""".split()
DEFAULTS = {  # of what we do not have; of any other, one of NOTHING
    **{"embedding_fraction": [1], "layer_norm_epsilon": [1e-5], "norm_eps": [1e-5], "sliding_window_size": [-1]},
    **{"fused_qkv": [True], "ffn_type": ["mptmlp"], "fc_type": [None, "torch", {"name": "torch"}]},
    **{"ffn_act_fn": [None, {"name": "gelu", "approximate": "none"}]},
}
NOTHING = [None, False, [], {}]


def config_from(settings: dict, source: str = "config.json") -> MPTConfig:
    """The model that a config.json of transformers or LLM Foundry describes. UserError for what we do not have."""
    model_type = settings.get("model_type")
    require(model_type == "mpt", f"{source} has model_type {model_type!r}: only 'mpt' can be read")
    by_transformers = any(name.startswith("Mpt") for name in settings.get("architectures") or [])
    values = {"no_bias": True, "alibi": True} if by_transformers else {}
    attention, ffn = settings.get("attn_config") or {}, settings.get("ffn_config") or {}
    hints = typing.get_type_hints(MPTConfig)
    for group, names in ((settings, TOP), (attention, ATTENTION), (ffn, ())):
        for key, value in group.items():
            if key in names:
                values[key] = config.checked(value, hints[key], key, source)
            elif key not in IGNORED:
                fine = value in DEFAULTS.get(key, NOTHING)
                require(fine, f"{source} sets {key} to {value!r}, which this project's MPT does not have")
    heads = {"multihead_attention": None, "multiquery_attention": 1}
    heads["grouped_query_attention"] = attention.get("kv_n_heads") or 0
    kind = attention.get("attn_type", "multihead_attention")
    require(kind in heads, f"{source} sets attn_type to {kind!r}, expected one of: {', '.join(heads)}")
    if values.get("rope"):
        group = f"rope_{attention.get('rope_impl', 'dail')}_config"
        form = attention.get(group, {}).get("type", "original")
        require(form in ("original", "no_scaling"), f"{source} sets {group} to {form!r}: only plain RoPE can be read")
    cfg = MPTConfig(**values, kv_n_heads=heads[kind])
    cfg.check()
    return cfg


def config_to(cfg: MPTConfig, dtype: torch.dtype = torch.float32) -> dict:
    """What config.json says of a model, for transformers and LLM Foundry alike."""
    values = asdict(cfg)
    for name in ("expansion_ratio", "alibi_bias_max", "attn_pdrop"):  # transformers takes only whole numbers here
        values[name] = int(values[name]) if values[name] == int(values[name]) else values[name]
    kind = {None: "multihead_attention", 1: "multiquery_attention"}.get(cfg.kv_n_heads, "grouped_query_attention")
    attention = {"attn_type": kind, **{name: values[name] for name in ATTENTION}}
    if kind == "grouped_query_attention":
        attention["kv_n_heads"] = cfg.kv_n_heads
    head = {"model_type": "mpt", "architectures": ["MptForCausalLM"], "torch_dtype": str(dtype).removeprefix("torch.")}
    return {**head, **{name: values[name] for name in TOP}, "attn_config": attention}


def lost_in_transformers(cfg: MPTConfig) -> list[str]:
    """The settings of a model, as `name=value`, that transformers' MptForCausalLM overlooks or its config refuses."""
    usual = MPTConfig(no_bias=True, alibi=True, clip_qkv=cfg.clip_qkv, softmax_scale=cfg.softmax_scale)
    names = "alibi alibi_bias_max rope no_bias qk_ln logit_scale expansion_ratio attn_uses_sequence_id".split()
    names += "emb_pdrop attn_pdrop resid_pdrop".split()
    lost = [f"{name}={getattr(cfg, name)}" for name in names if getattr(cfg, name) != getattr(usual, name)]
    lost += ["learned_pos_emb=True"] if cfg.learned_positions else []
    return lost + ([f"kv_n_heads={cfg.kv_n_heads}"] if cfg.n_kv_heads != cfg.n_heads else [])


@dataclass
class Stored:
    """Where a tensor lies: contiguous, little-endian, `offset` bytes from the beginning of a file."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def bytes(self) -> int:
        return self.shape[0] * self.row_bytes


def weight_files(path: Path) -> list[Path]:
    """The files that hold the weights of a folder, or a file itself. UserError if one is missing."""
    if path.is_file():
        return [path]
    found = next((path / name for name in WEIGHTS if (path / name).exists()), None)
    require(found is not None, f"no weights in {path}: expected {', '.join(WEIGHTS)}, a .pt file, or a run of ours")
    if found.suffix != ".json":
        return [found]
    files = [path / name for name in sorted(set(read_json(found).get("weight_map", {}).values()))]
    missing = [file.name for file in files if not file.exists()]
    require(not missing, f"{found} names {len(files)} files, but {', '.join(missing[:3])} is not there")
    return files


def read_json(path: Path) -> dict:
    """A JSON object. UserError if that is not what the file holds."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {config.one_line(error)}") from error
    require(isinstance(values, dict), f"{path} is not a JSON object")
    return values


def safetensors_layout(path: Path) -> dict[str, Stored]:
    """What the header of a safetensors file says. UserError if the file is not one, or not whole."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, size)))
        header.pop("__metadata__", None)
        layout, end = {}, 8 + length
        for name, entry in header.items():
            kind = entry["dtype"]
            require(kind in DTYPES, f"{name} in {path} is {kind}, expected one of: {', '.join(DTYPES)}")
            layout[name] = Stored(path, 8 + length + entry["data_offsets"][0], DTYPES[kind], tuple(entry["shape"]))
            end = max(end, layout[name].offset + layout[name].bytes)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is no safetensors file, or is damaged: {config.one_line(error)}") from error
    require(size == end, f"{path} is truncated or damaged: {size:,} bytes instead of {end:,}")
    return layout


def read_pickle(path: Path):
    """What a .bin or .pt file holds, its tensors with shape and place but without memory.

    UserError if it holds more than tensors, plain Python, and what Composer adds: times and numpy's random state.
    """
    rebuild = np.zeros(0).__reduce__()[0]
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")]  # before numpy 2 and since
    safe = [datetime.timedelta, np.ndarray, np.dtype, type(np.dtype("uint32")), *((rebuild, name) for name in names)]
    try:
        with FakeTensorMode(), torch.serialization.safe_globals(safe):
            return torch.load(path, weights_only=True)
    except Exception as error:  # whatever a damaged zip or an unwanted pickle brings about
        reason = config.one_line(str(error).split("WeightsUnpickler error:")[-1])
        raise UserError(f"cannot read {path} with weights_only=True: {reason}") from error


def pickle_layout(path: Path) -> dict[str, Stored]:
    """Where the tensors of a .bin file lie, or those of state.model in a Composer checkpoint."""
    content = read_pickle(path)
    if isinstance(content, dict) and "state" in content:
        content = content["state"].get("model")
    require(isinstance(content, dict), f"{path} holds no dictionary of weights")
    layout = {}
    for name, tensor in content.items():
        known = isinstance(tensor, torch.Tensor) and tensor.dtype in DTYPES.values() and tensor.is_contiguous()
        require(known, f"{name} in {path} is not a contiguous tensor of floating-point numbers")
        begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        require(begin is not None, f"{path} has the format of torch before 1.6: torch.load and torch.save it once")
        offset = begin + tensor.storage_offset() * tensor.itemsize
        layout[name] = Stored(path, offset, tensor.dtype, tuple(tensor.shape))
    return layout


def find_tensors(path: Path, model: MPT) -> dict[str, Stored]:
    """Where the parameters of `model` lie in a folder or file: each exactly once, in its shape, or UserError."""
    found = {}
    for file in weight_files(path):
        layout = pickle_layout(file) if file.suffix in (".bin", ".pt") else safetensors_layout(file)
        for name, stored in layout.items():
            name = name.removeprefix("model.")  # Composer's
            require(name not in found, f"{name} is in {path} twice, the second time in {file.name}")
            found[name] = stored
    wanted = {name: tuple(param.shape) for name, param in model.named_parameters()}
    missing = [name for name in wanted if name not in found]
    require(not missing, f"{path} lacks {len(missing)} tensors of this model, such as {missing[:1]}")
    head = found.pop("lm_head.weight") if model.cfg.tie_word_embeddings and "lm_head.weight" in found else None
    tied = head is None or same(head, found["transformer.wte.weight"])
    require(tied, f"lm_head.weight in {path} differs from the embedding: its config wants tie_word_embeddings false")
    strangers = [name for name in found if name not in wanted]
    require(not strangers, f"{path} holds {len(strangers)} tensors that this model lacks, such as {strangers[:1]}")
    for name, shape in wanted.items():
        require(found[name].shape == shape, f"{name} is {found[name].shape} in {path}, but {shape} in this model")
    return found


def same(a: Stored, b: Stored) -> bool:
    """Whether two stored tensors are the same numbers in the same dtype."""
    if a == b:  # in one place, under two names
        return True

    def piece(stored, begin):
        return np.fromfile(stored.file, np.uint8, min(CHUNK, stored.bytes - begin), offset=stored.offset + begin)

    alike = (a.dtype, a.shape) == (b.dtype, b.shape)
    return alike and all(np.array_equal(piece(a, i), piece(b, i)) for i in range(0, a.bytes, CHUNK))


def read_rows(file, stored: Stored, first: int, target: torch.Tensor) -> None:
    """Read rows of a stored tensor, from `first` on, into a contiguous CPU tensor of its dtype."""
    left = memoryview(target.flatten().view(torch.uint8).numpy())
    file.seek(stored.offset + first * stored.row_bytes)
    while len(left):
        n = file.readinto(left)
        require(n, f"{stored.file} is truncated: it ends within a tensor")
        left = left[n:]


@torch.no_grad()
def fill(param: torch.Tensor, stored: Stored) -> None:
    """Put a stored tensor into a parameter; of a sharded one each rank reads the rows of its part only.

    On the CPU, rows of full width and equal dtype are read straight into place.
    """
    local, corner, shape = param.detach(), (0,) * param.dim(), stored.shape
    if isinstance(param, DTensor):
        if any(type(placement) not in (Shard, Replicate) for placement in param.placements):
            fill(whole := torch.empty(shape, dtype=stored.dtype), stored)  # the part is no block of the tensor
            return parallel.assign_full(param, whole)
        local, corner = param.to_local(), param.__create_chunk_list__()[0].offsets
    straight = (local.device.type, local.dtype, local.shape[1:]) == ("cpu", stored.dtype, shape[1:])
    columns = [slice(begin, begin + size) for begin, size in zip(corner[1:], local.shape[1:], strict=True)]
    step = max(1, CHUNK // stored.row_bytes)  # rows
    buffer = None if straight else torch.empty(min(step, len(local)), *shape[1:], dtype=stored.dtype)
    with open(stored.file, "rb", buffering=0) as file:
        for row in range(0, len(local), step):
            part = local[row : row + step]
            rows = part if straight else buffer[: len(part)]
            read_rows(file, stored, corner[0] + row, rows)
            if not straight:
                part.copy_(rows[(slice(None), *columns)])


def load_into(model: MPT, path) -> None:
    """Fill a model, plain or sharded in any way, from a Hugging Face folder, a file of it, or a Composer checkpoint.

    Every rank calls it. Numbers are converted to the parameters' dtype. UserError unless each fits.
    """
    tensors = on_rank_zero(lambda: find_tensors(Path(path), model))
    params = dict(model.named_parameters())
    for name in sorted(tensors, key=lambda name: (tensors[name].file, tensors[name].offset)):
        fill(params[name], tensors[name])


def on_rank_zero(decide):
    """`decide()`, by rank 0 for all, or by a process without others."""
    return parallel.rank_zero_decides(decide) if dist.is_initialized() else decide()


def is_ours(path: Path) -> bool:
    """Is this a run folder or a checkpoint of this project?"""
    return path in checkpoint.complete(path.parent) or checkpoint.latest(path) is not None


def foreign_settings(path: Path) -> tuple[dict, Path]:
    """What config.json says, or a Composer checkpoint that holds the same; and where it stands."""
    beside = path / "config.json" if path.is_dir() else path.parent / "config.json"
    if path.suffix != ".pt" or beside.exists():
        return read_json(beside), beside
    content = read_pickle(path)
    try:
        return content["state"]["integrations"]["huggingface"]["model"]["config"]["content"], path
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} does not hold its model's settings: put its config.json beside it") from error


def settings_of(path) -> MPTConfig:
    """The model of a Hugging Face folder, a Composer checkpoint, or a run or checkpoint of ours."""
    path = Path(path)
    if is_ours(path):
        return config.from_dict(MPTConfig, checkpoint.read_meta(checkpoint.find(str(path))))
    weight_files(path)  # first of all: is it there
    settings, source = foreign_settings(path)
    return config_from(settings, str(source))


def init_from(model: MPT, path) -> None:
    """Start from weights trained elsewhere: fill a model of any sharding from whatever `settings_of` can read.

    UserError if these are of another model. Dropouts, attn_impl, packing, and a max_seq_len without learned positions
    may differ. Every rank calls it.
    """
    path = Path(path)
    on_rank_zero(lambda: check_same_model(path, settings_of(path), model.cfg))
    if not on_rank_zero(lambda: is_ours(path)):
        return load_into(model, path)
    found = on_rank_zero(lambda: checkpoint.find(str(path)))
    damage = checkpoint.verify(found) if dist.is_initialized() else None
    require(not damage, f"{found} is damaged ({damage})")
    load_ours(found, model.state_dict())


def check_same_model(path: Path, theirs: MPTConfig, ours: MPTConfig) -> None:
    """UserError naming the settings in which two models differ as functions."""
    here = meaning(ours)
    differ = [f"{k} {value} (here {here[k]})" for k, value in meaning(theirs).items() if here.get(k, value) != value]
    require(not differ, f"{path} is of another model: {', '.join(differ)}. Set them alike")


def meaning(cfg: MPTConfig) -> dict:
    """The settings that decide shapes and logits, without those that have no effect beside the others."""
    values = {name: getattr(cfg, name) for name in SAME_MODEL if name != "attn_uses_sequence_id"}
    values |= {"learned_pos_emb": cfg.learned_positions, "kv_n_heads": cfg.n_kv_heads}
    needs = {"alibi_bias_max": cfg.alibi, "rope_theta": cfg.rope, "max_seq_len": cfg.learned_positions}
    return {name: value for name, value in values.items() if needs.get(name, True)}


def load_ours(path: Path, state: dict) -> None:
    """Fill the tensors of `state` (name -> tensor, sharded or not) from a checkpoint of ours."""
    with warnings.catch_warnings(), checkpoint.damage_named(path):
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
        dcp.load({"model": state}, checkpoint_id=path, no_dist=not dist.is_initialized())


@contextlib.contextmanager
def published(folder: Path):
    """A new folder to write into; it gets its name when all is on disk, and vanishes on any error."""
    folder = folder.absolute()
    free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    require(free, f"{folder} is there already: name another folder, or remove it")
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            checkpoint.sync(path)
        temporary.rename(folder)
        checkpoint.sync(folder.parent)
    except (OSError, dcp.CheckpointException) as error:  # the latter is only a BaseException
        reasons = getattr(error, "failures", None)  # rank -> (exception, traceback)
        reason = next(iter(reasons.values()))[0] if reasons else error
        raise UserError(f"could not write {folder}: {config.one_line(reason)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def export(source, folder, max_bytes: int = SHARD) -> None:
    """Write a model (an MPT on one device, or the path of a run or checkpoint) as a Hugging Face folder.

    Only as much of a checkpoint as goes to one file, `max_bytes` or a single tensor, is in memory at a time.
    """
    found = None if isinstance(source, MPT) else checkpoint.find(str(source))
    cfg = settings_of(found) if found else source.cfg
    state = weights_of(found) if found else source.state_dict()
    groups, weight_map = in_groups(state, max_bytes), {}
    settings = config_to(cfg, next(iter(state.values())).dtype)
    with published(Path(folder)) as temporary:
        for number, names in enumerate(groups, 1):
            tensors = {name: state[name] for name in names}
            if found:
                tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}
                load_ours(found, tensors)
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else WEIGHTS[0]
            write_safetensors(temporary / file, tensors)
            weight_map |= dict.fromkeys(names, file)
        if len(groups) > 1:
            index = {"metadata": {"total_size": sum(t.nbytes for t in state.values())}, "weight_map": weight_map}
            (temporary / WEIGHTS[1]).write_text(json.dumps(index, indent=2))
        if found:
            settings["tokenizer_name"] = copy_tokenizer(found, temporary)
        (temporary / "config.json").write_text(json.dumps(settings, indent=2))
    for setting in lost_in_transformers(cfg):
        print(f"warning: transformers' MptForCausalLM does not know {setting}: do not load it there", file=sys.stderr)


def copy_tokenizer(path: Path, folder: Path) -> str:
    """The name of the tokenizer of a checkpoint; if it has a file, that goes into `folder`."""
    name, ours = checkpoint.read_meta(path)["tokenizer"], path.parent.parent / "tokenizer.json"
    theirs = Path(name) if name.endswith(".json") else None
    if theirs or ours.exists():
        shutil.copy(theirs or ours, folder / (THEIR_TOKENIZER if theirs else OUR_TOKENIZER))
    return THEIR_TOKENIZER if theirs else name


def weights_of(path: Path) -> dict:
    """Name -> tensor without memory, of the weights in a checkpoint of ours."""
    with checkpoint.damage_named(path):
        entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    weights = {name.removeprefix("model."): entry for name, entry in entries.items() if name.startswith("model.")}
    return {name: torch.empty(w.size, dtype=w.properties.dtype, device="meta") for name, w in weights.items()}


def in_groups(tensors: dict, max_bytes: int) -> list[list[str]]:
    """Names in their order, in groups of at most `max_bytes` (or of one tensor that is larger)."""
    groups, free = [], 0
    for name, tensor in tensors.items():
        if not groups or tensor.nbytes > free:
            groups.append([])
            free = max_bytes
        groups[-1].append(name)
        free -= tensor.nbytes
    return groups


def write_safetensors(path: Path, tensors: dict) -> None:
    """One file: see the top. The header ends at a multiple of 8 bytes, filled up with spaces."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(memoryview(tensor.detach().cpu().flatten().view(torch.uint8).numpy()))


def import_(source, run_dir, tokenizer: str | None = None) -> None:
    """Write foreign weights as a run folder with a checkpoint `step-0`, in the dtype that they have.

    tokenizer: the one that the model was trained with; None: see `name_of_tokenizer`.
    """
    source, run_dir = Path(source), Path(run_dir)
    cfg = settings_of(source)
    name = tokenizer or name_of_tokenizer(source)
    cut = tokenizers.load(name, (source if source.is_dir() else source.parent) / OUR_TOKENIZER)
    fits = cut.vocab_size <= cfg.vocab_size
    require(fits, f"{name} has {cut.vocab_size} ids, but the model's vocab_size is {cfg.vocab_size}: set --tokenizer")
    of_run = asdict(TrainConfig(run_dir=str(run_dir), tokenizer=name))
    meta = {"step": 0, **asdict(cfg), **of_run, "precision": "fp32", "data_fingerprint": f"imported from {source}"}
    with torch.device("meta"):
        model = MPT(cfg)
    with published(run_dir) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
        dtypes = {stored.dtype for stored in find_tensors(source, model).values()}
        model.to(dtypes.pop() if len(dtypes) == 1 else torch.float32).to_empty(device="cpu")
        load_into(model, source)
        step = temporary / "checkpoints" / "step-0"
        step.parent.mkdir()
        checkpoint.prepare(step, meta)
        dcp.save({"model": model.state_dict()}, storage_writer=checkpoint.Writer(step), no_dist=True)
        if cut.name.startswith("bpe"):
            cut.save(temporary / "tokenizer.json")
    size = sum(param.numel() for param in model.parameters())
    print(f"{run_dir}: {size:,} parameters. Text is cut by {name}: a model trained with other ids writes nonsense")


def name_of_tokenizer(source: Path) -> str:
    """tokenizer.json if that is there, or what config.json names if that is one of ours, or gpt2 if it names none."""
    file = (source if source.is_dir() else source.parent) / THEIR_TOKENIZER
    named = foreign_settings(source)[0].get("tokenizer_name", "gpt2")
    try:
        return str(file.absolute()) if file.exists() else tokenizers.canonical(named)
    except UserError as error:
        raise UserError(
            f"{source} wants the tokenizer {named}: put its tokenizer.json there, or take gpt2's ids, which to this "
            "model are other words, with --tokenizer=gpt2"
        ) from error


def main(argv) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("import", "export"))
    parser.add_argument("source", help="import: a Hugging Face folder or Composer .pt; export: a run or checkpoint")
    parser.add_argument("target", help="a new folder")
    parser.add_argument(
        "--tokenizer", help="import: gpt2, bytes, bpe-N or a tokenizer.json (default: theirs, else gpt2)"
    )
    args = parser.parse_args(argv)
    if args.what == "import":
        return import_(args.source, args.target, args.tokenizer)
    export(args.source, args.target)
    name = read_json(Path(args.target) / "config.json")["tokenizer_name"]
    print(f"{args.target}: written. Its ids are those of the tokenizer {name}")


if __name__ == "__main__":
    config.run(main)
