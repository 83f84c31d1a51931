"""MPT weights from and to other people's files: Hugging Face's (transformers, LLM Foundry) and Composer's.

    python -m weights.hf import path/to/theirs runs/new     their folder or Composer's .pt -> a run folder
    python -m weights.hf export runs/demo path/to/new       a run or checkpoint of ours -> a folder of theirs

Names are the same everywhere (`transformer.blocks.0.attn.Wqkv.weight`; Composer puts `model.` before them), so there is
no map. How tensors lie in files, and how a rank reads its part of them, is in weights/tensor_files.py.

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

Read next: weights/load.py.
"""

import contextlib
import json
import os
import shutil
import sys
import typing
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import checkpoint
import config
from attention import function_of
from config import MPTConfig, TrainConfig, UserError, require
from lifecycle.resume import norm_of
from model import MPT
from processes import rank_zero_decides
from storage import files
from storage.checkpoint_files import read_metadata, reason_of
from text import tokenizer as tokenizers
from weights.tensor_files import (
    Stored,
    fill,
    nested,
    locate,
    read_pickle,
    same_values,
    weight_files,
    write_folder,
)

SHARD = 5 * 10**9  # bytes of one exported file, at most
THEIR_TOKENIZER, OUR_TOKENIZER = (
    "tokenizer.json",
    "bpe_tokenizer.json",
)  # their format, and that of our bpe-N

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
    **{
        "embedding_fraction": [1],
        "layer_norm_epsilon": [1e-5],
        "norm_eps": [1e-5],
        "sliding_window_size": [-1],
    },
    **{"fused_qkv": [True], "ffn_type": ["mptmlp"], "fc_type": [None, "torch", {"name": "torch"}]},
    **{"ffn_act_fn": [None, {"name": "gelu", "approximate": "none"}]},
}
NOTHING = [None, False, [], {}]


def config_from(settings: dict, source: str = "config.json") -> MPTConfig:
    """The model that a config.json of transformers or LLM Foundry describes. UserError for what we do not have."""
    model_type = settings.get("model_type")
    require(
        model_type == "mpt",
        f"{source} has model_type {files.shown(model_type)}: only 'mpt' can be read",
    )
    architectures = settings.get("architectures") or []
    require(isinstance(architectures, list), f"{source}: architectures must be a list of names")
    by_transformers = any(
        isinstance(name, str) and name.startswith("Mpt") for name in architectures
    )
    values = {"no_bias": True, "alibi": True} if by_transformers else {}
    attention, ffn = settings.get("attn_config") or {}, settings.get("ffn_config") or {}
    groups = isinstance(attention, dict) and isinstance(ffn, dict)
    require(groups, f"{source}: attn_config and ffn_config must be objects with settings")
    hints = typing.get_type_hints(MPTConfig)
    for group, names in ((settings, TOP), (attention, ATTENTION), (ffn, ())):
        for key, value in group.items():
            if key in names:
                values[key] = config.checked(simple(value, key, source), hints[key], key, source)
            elif key not in IGNORED:
                fine = value in DEFAULTS.get(key, NOTHING)
                named = f"{source} sets {config.one_line(key)} to {files.shown(value)}"
                require(fine, f"{named}, which this project's MPT does not have")
    check_rope(attention, values, source)
    cfg = MPTConfig(**values, kv_n_heads=kv_heads(attention, source))
    try:
        cfg.check()
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    return cfg


def simple(value, key: str, source: str):
    """`value` if it is text, true, false, null or a number that fits 64 bits, else UserError."""
    number = isinstance(value, int | float) and abs(value) < 2**63  # False for NaN
    fine = number or isinstance(value, str | None)
    require(fine, f"{source} sets {key} to {files.shown(value)}, expected text or a number")
    return value


def kv_heads(attention: dict, source: str) -> int | None:
    """The heads of keys and values that an attn_config asks for, as MPTConfig has it."""
    kind = attention.get("attn_type", "multihead_attention")
    heads = {"multihead_attention": None, "multiquery_attention": 1, "grouped_query_attention": 0}
    known = isinstance(kind, str) and kind in heads
    require(
        known,
        f"{source} sets attn_type to {files.shown(kind)}, expected one of: {', '.join(heads)}",
    )
    if kind != "grouped_query_attention":
        return heads[kind]
    count = attention.get("kv_n_heads") or 0
    require(
        type(count) is int,
        f"{source} sets kv_n_heads to {files.shown(count)}, expected a whole number",
    )
    return count


def check_rope(attention: dict, values: dict, source: str) -> None:
    """UserError unless the positions are those of plain RoPE, if of any."""
    impl = attention.get("rope_impl", "dail")
    known = not values.get("rope") or impl in ("dail", "hf")
    require(known, f"{source} sets rope_impl to {files.shown(impl)}, expected dail or hf")
    group = attention.get(f"rope_{impl}_config") if values.get("rope") else None
    require(
        isinstance(group, dict | None),
        f"{source}: rope_{impl}_config must be an object with settings",
    )
    form = (group or {}).get("type", "original")
    plain = form in ("original", "no_scaling")
    require(
        plain,
        f"{source} sets rope_{impl}_config to {files.shown(form)}: only plain RoPE can be read",
    )


def config_to(cfg: MPTConfig, dtype: torch.dtype = torch.float32) -> dict:
    """What config.json says of a model, for transformers and LLM Foundry alike.

    UserError for a function that the format lacks: another attention or norm, a setting of your own.
    """
    values = asdict(cfg)
    known = function_of(cfg.attn_impl) == "auto"
    require(
        known,
        f"attn_impl={cfg.attn_impl} is another function than MPT's attention: this format cannot hold it",
    )
    known = norm_of(cfg.norm_type) == "layernorm"
    require(known, f"norm_type={cfg.norm_type} is not MPT's norm: this format cannot hold it")
    theirs = {*TOP, *ATTENTION, "kv_n_heads", "attn_impl"}
    own = [field for field in fields(cfg) if field.name not in theirs]
    changed = [
        f"{field.name}={values[field.name]}" for field in own if values[field.name] != field.default
    ]
    require(
        not changed, f"this format cannot hold {', '.join(changed)}: the model would be another one"
    )
    for name in (
        "expansion_ratio",
        "alibi_bias_max",
        "attn_pdrop",
    ):  # transformers takes only whole numbers here
        values[name] = int(values[name]) if values[name] == int(values[name]) else values[name]
    kind = {None: "multihead_attention", 1: "multiquery_attention"}.get(
        cfg.kv_n_heads, "grouped_query_attention"
    )
    attention = {"attn_type": kind, **{name: values[name] for name in ATTENTION}}
    if kind == "grouped_query_attention":
        attention["kv_n_heads"] = cfg.kv_n_heads
    head = {
        "model_type": "mpt",
        "architectures": ["MptForCausalLM"],
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    return {**head, **{name: values[name] for name in TOP}, "attn_config": attention}


def weights_in_format(cfg: MPTConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all weights that their MPT of these settings has, whatever model.py may have by now."""
    wide, kv = cfg.d_model, cfg.n_kv_heads * cfg.head_dim
    layers = {"norm_1": (wide,), "norm_2": (wide,)}
    layers |= {"attn.Wqkv": (wide + 2 * kv, wide), "attn.out_proj": (wide, wide)}
    layers |= {"ffn.up_proj": (cfg.hidden_dim, wide), "ffn.down_proj": (wide, cfg.hidden_dim)}
    layers |= {"attn.q_ln": (wide,), "attn.k_ln": (kv,)} if cfg.qk_ln else {}
    shapes = {
        f"blocks.{i}.{name}": shape for i in range(cfg.n_layers) for name, shape in layers.items()
    }
    shapes["norm_f"] = (wide,)
    found = {f"transformer.{name}.weight": shape for name, shape in shapes.items()}
    if not cfg.no_bias:
        found |= {f"transformer.{name}.bias": shape[:1] for name, shape in shapes.items()}
    found["transformer.wte.weight"] = (cfg.vocab_size, wide)
    if cfg.learned_positions:
        found["transformer.wpe.weight"] = (cfg.max_seq_len, wide)
    return found if cfg.tie_word_embeddings else found | {"lm_head.weight": (cfg.vocab_size, wide)}


def check_format(state: dict, cfg: MPTConfig) -> None:
    """UserError naming the weights of a model that their MPT of these settings lacks, or has in another shape."""
    wanted, held = (
        weights_in_format(cfg),
        {name: tuple(tensor.shape) for name, tensor in state.items()},
    )
    extra = [f"{name} {shape}" for name, shape in held.items() if name not in wanted]
    other = [
        f"{name} {held[name]} instead of {wanted[name]}"
        for name in wanted
        if held.get(name) != wanted[name]
    ]
    other = [line.replace("None instead", "missing instead") for line in other]
    named = ", ".join((extra + other)[:3])
    count = len(extra + other)
    require(
        not count,
        f"this is no MPT that others can read: {count} weights are not those of the format: {named}",
    )


def lost_in_transformers(cfg: MPTConfig) -> list[str]:
    """The settings of a model, as `name=value`, that transformers' MptForCausalLM overlooks or its config refuses."""
    usual = MPTConfig(
        no_bias=True, alibi=True, clip_qkv=cfg.clip_qkv, softmax_scale=cfg.softmax_scale
    )
    names = "alibi alibi_bias_max rope no_bias qk_ln logit_scale expansion_ratio attn_uses_sequence_id".split()
    names += "emb_pdrop attn_pdrop resid_pdrop".split()
    lost = [
        f"{name}={getattr(cfg, name)}"
        for name in names
        if getattr(cfg, name) != getattr(usual, name)
    ]
    lost += ["learned_pos_emb=True"] if cfg.learned_positions else []
    return lost + ([f"kv_n_heads={cfg.kv_n_heads}"] if cfg.n_kv_heads != cfg.n_heads else [])


def find_tensors(path: Path, model: MPT) -> dict[str, Stored]:
    """Where the parameters of `model` lie in a folder or file: each exactly once, in its shape, or UserError."""
    found = locate(path)
    wanted = {name: tuple(param.shape) for name, param in model.named_parameters()}
    missing = [name for name in wanted if name not in found]
    require(
        not missing, f"{path} lacks {len(missing)} tensors of this model, such as {missing[:1]}"
    )
    head = (
        found.pop("lm_head.weight")
        if model.cfg.tie_word_embeddings and "lm_head.weight" in found
        else None
    )
    tied = head is None or same_values(head, found["transformer.wte.weight"])
    require(
        tied,
        f"lm_head.weight in {path} differs from the embedding: its config wants tie_word_embeddings false",
    )
    strangers = [name for name in found if name not in wanted]
    require(
        not strangers,
        f"{path} holds {len(strangers)} tensors that this model lacks, such as {strangers[:1]}",
    )
    for name, shape in wanted.items():
        require(
            found[name].shape == shape,
            f"{name} is {found[name].shape} in {path}, but {shape} in this model",
        )
    return found


def load_into(model: MPT, path) -> None:
    """Fill a model, plain or sharded in any way, from a Hugging Face folder, a file of it, or a Composer checkpoint.

    Every rank calls it. Numbers are converted to the parameters' dtype. UserError unless each fits.
    """
    tensors = rank_zero_decides(lambda: find_tensors(Path(path), model))
    params = dict(model.named_parameters())
    for name in sorted(tensors, key=lambda name: (tensors[name].file, tensors[name].offset)):
        fill(params[name], tensors[name])


def settings_of(path) -> MPTConfig:
    """The model of a Hugging Face folder or a Composer checkpoint."""
    path = Path(path)
    weight_files(path)  # first of all: is it there
    settings, source = foreign_settings(path)
    return config_from(settings, str(source))


def load_model(path, device) -> MPT:
    """The model of a Hugging Face folder or Composer checkpoint, in its tensors' dtype.

    If they have several dtypes, fp32.
    """
    path = Path(path)
    with torch.device("meta"):
        model = MPT(settings_of(path))
    dtypes = {stored.dtype for stored in find_tensors(path, model).values()}
    model.to(dtypes.pop() if len(dtypes) == 1 else torch.float32).to_empty(device=device)
    load_into(model, path)
    return model.eval()


def foreign_settings(path: Path) -> tuple[dict, Path]:
    """What config.json says, or a Composer checkpoint that holds the same; and where it stands."""
    beside = path / "config.json" if path.is_dir() else path.parent / "config.json"
    if path.is_dir() or beside.exists():
        return files.read_json(beside), beside
    require(
        path.suffix == ".pt",
        f"{path} does not hold its model's settings: put its config.json beside it",
    )
    settings = nested(
        read_pickle(path), *"state integrations huggingface model config content".split()
    )
    require(
        isinstance(settings, dict),
        f"{path} does not hold its model's settings: put its config.json beside it",
    )
    return settings, path


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
        raise UserError(f"could not write {folder}: {reason_of(error)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def export(source, folder, max_bytes: int = SHARD) -> None:
    """Write a model (an MPT on one device, or the path of a run or checkpoint) as a Hugging Face folder.

    Only as much of a checkpoint as goes to one file, `max_bytes` or a single tensor, is in memory at a time.
    """
    found = None if isinstance(source, MPT) else checkpoint.find(str(source))
    if found:
        checkpoint.require_sound(found)
    cfg = checkpoint.settings(found) if found else source.cfg
    metadata = read_metadata(found) if found else None
    state = weights_of(metadata) if found else source.state_dict()
    check_format(state, cfg)
    settings = config_to(cfg, next(iter(state.values())).dtype)

    def read(names):
        tensors = {name: state[name] for name in names}
        if found:
            tensors = {
                name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()
            }
            checkpoint.fill(found, {"model": tensors}, metadata)
        return tensors

    with published(Path(folder)) as temporary:
        write_folder(temporary, state, max_bytes, read)
        if found:
            settings["tokenizer_name"] = copy_tokenizer(found, temporary)
        (temporary / "config.json").write_text(json.dumps(settings, indent=2))
    if lost := lost_in_transformers(cfg):
        lost = ", ".join(lost)
        print(
            f"warning: transformers' MptForCausalLM overlooks {lost}: do not load it there",
            file=sys.stderr,
        )


def copy_tokenizer(path: Path, folder: Path) -> str:
    """The name of the tokenizer of a checkpoint; if it has a file, that goes into `folder`."""
    name, file = checkpoint.read_meta(path)["tokenizer"], path.parent.parent / "tokenizer.json"
    theirs = name.endswith(".json")
    if theirs or name.startswith("bpe"):
        require(not file.is_symlink(), f"{file} is a link: put the file there that it points to")
        tokenizers.load(name, file)  # is it one?
        shutil.copy(file, folder / (THEIR_TOKENIZER if theirs else OUR_TOKENIZER))
    return THEIR_TOKENIZER if theirs else name


def weights_of(metadata) -> dict:
    """Name -> tensor without memory, of the weights in a checkpoint of ours, from what `read_metadata` says."""
    entries = metadata.state_dict_metadata
    weights = {
        name.removeprefix("model."): entry
        for name, entry in entries.items()
        if name.startswith("model.")
    }
    return {
        name: torch.empty(w.size, dtype=w.properties.dtype, device="meta")
        for name, w in weights.items()
    }


def import_(source, run_dir, tokenizer: str = "") -> None:
    """Write foreign weights as a run folder with a checkpoint `step-0`, in the dtype that they have.

    tokenizer: the one that the model was trained with; empty: see `name_of_tokenizer`.
    """
    source, run_dir = Path(source), Path(run_dir)
    cfg = settings_of(source)
    name = tokenizer or name_of_tokenizer(source)
    name = str(Path(name).absolute()) if name.endswith(".json") else name
    cut = tokenizers.load(name, own_file(source, name))
    fits = cut.vocab_size <= cfg.vocab_size
    require(
        fits,
        f"{name} has {cut.vocab_size} ids, but the model's vocab_size is {cfg.vocab_size}: set --tokenizer",
    )
    of_run = asdict(TrainConfig(run_dir=str(run_dir), tokenizer=name))
    meta = {
        "step": 0,
        **asdict(cfg),
        **of_run,
        "precision": "fp32",
        "data_fingerprint": f"imported from {source}",
    }
    with published(run_dir) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
        model = load_model(source, "cpu")
        step = temporary / "checkpoints" / "step-0"
        step.parent.mkdir()
        checkpoint.prepare(step, meta)
        dcp.save(
            {"model": model.state_dict()}, storage_writer=checkpoint.Writer(step), no_dist=True
        )
        if cut.name.startswith("bpe"):
            cut.save(temporary / "tokenizer.json")
        elif cut.name.endswith(".json"):
            shutil.copy(cut.name, temporary / "tokenizer.json")
    size = sum(param.numel() for param in model.parameters())
    print(
        f"{run_dir}: {size:,} parameters. Text is cut by {name}: a model trained with other ids writes nonsense"
    )


def name_of_tokenizer(source: Path) -> str:
    """tokenizer.json if that is there, or what config.json names if that is one of ours, or gpt2 if it names none."""
    file = (source if source.is_dir() else source.parent) / THEIR_TOKENIZER
    named = str(foreign_settings(source)[0].get("tokenizer_name") or "gpt2")
    if file.exists():
        return str(file)
    try:
        require(
            not named.endswith(".json"), "not beside the weights"
        )  # a stranger may name any file
        return tokenizers.canonical(named)
    except UserError as error:
        raise UserError(
            f"{source} wants the tokenizer {named}: put its tokenizer.json there, or take gpt2's ids, which to this "
            "model are other words, with --tokenizer=gpt2"
        ) from error


def own_file(source: Path, name: str) -> Path | None:
    """Where the tokenizer of a foreign folder or file lies if it is a bpe-N. A tokenizer.json is its own path."""
    return (
        None
        if name.endswith(".json")
        else (source if source.is_dir() else source.parent) / OUR_TOKENIZER
    )


@dataclass
class ImportSettings:
    """What is known of a model that is imported."""

    tokenizer: str = ""  # gpt2, bytes, bpe-N or a tokenizer.json (empty = theirs, else gpt2)


def main(argv) -> None:
    (what, source, target), cfg = config.load(
        argv, ImportSettings, takes="import|export SOURCE TARGET"
    )
    require(
        what in ("import", "export"), f"{what!r} is neither import nor export (--help shows both)"
    )
    if what == "import":
        return import_(source, target, cfg.tokenizer)
    export(source, target)
    name = files.read_json(Path(target) / "config.json")["tokenizer_name"]
    print(f"{target}: written. Its ids are those of the tokenizer {name}")


if __name__ == "__main__":
    config.run(main)
