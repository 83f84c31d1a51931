"""config.json of an MPT <-> MPTConfig, and the models that this format cannot hold.

    config.json                             MPTConfig
    d_model n_heads n_layers                the same; a missing one has LLM Foundry's default, or
    expansion_ratio max_seq_len vocab_size  that of transformers if transformers wrote the file
    learned_pos_emb no_bias logit_scale
    norm_type tie_word_embeddings
    emb_pdrop resid_pdrop
    embedding_fraction
    final_logit_softcapping
    in attn_config: attn_pdrop clip_qkv     the same
    qk_ln qk_gn softmax_scale alibi
    alibi_bias_max rope rope_theta
    attn_uses_sequence_id
    sliding_window_size
    attn_logit_softcapping
    in ffn_config: ffn_type ffn_act_fn      the same; ffn_act_fn is {"name": "silu"} there
    in attn_config: attn_type kv_n_heads    kv_n_heads
    attn_impl init_config torch_dtype ...   ignored: they change neither weights nor logits
    head_dim hidden_size ...                must agree with the settings above
    in ffn_config: ffn_hidden_size
    one of the above in another place       refused, with the place where it counts
    any other                               refused by name, unless it is at rest: with its default
                                            value or another that changes no logits

Weights have the same names everywhere (`transformer.blocks.0.attn.Wqkv.weight`), so there is no
table of names. `check_format` refuses a model with weights that an MPT does not have, such as one
of a fork.
"""

import json
import re
import typing
from dataclasses import asdict, fields
from pathlib import Path

import torch

import program
from config import MPTConfig, function_of, norm_of
from launch import parser
from program import UserError, require, say_once
from storage import files
from weights.tensor_files import nested, read_pickle

MODEL_KEYS = """
    d_model n_heads n_layers expansion_ratio max_seq_len vocab_size learned_pos_emb no_bias
    logit_scale norm_type tie_word_embeddings emb_pdrop resid_pdrop embedding_fraction
    final_logit_softcapping
""".split()
ATTENTION_KEYS = """
    attn_pdrop clip_qkv qk_ln qk_gn softmax_scale alibi alibi_bias_max rope rope_theta
    attn_uses_sequence_id sliding_window_size attn_logit_softcapping
""".split()
FFN_KEYS = ["ffn_type", "ffn_act_fn"]
# Written only where they are set: older versions of LLM Foundry refuse keys that they do not know.
LATER_KEYS = """
    qk_gn sliding_window_size attn_logit_softcapping embedding_fraction final_logit_softcapping
""".split()
# Read by `kv_heads` and `check_rope`.
OTHER_ATTENTION_KEYS = "attn_type kv_n_heads rope_impl rope_dail_config rope_hf_config".split()

TOP = "the top level"
HOMES = {
    **dict.fromkeys(MODEL_KEYS, TOP),
    **dict.fromkeys(ATTENTION_KEYS + OTHER_ATTENTION_KEYS, "attn_config"),
    **dict.fromkeys(FFN_KEYS, "ffn_config"),
}

# Keys that change neither weights nor logits, or are read elsewhere in this file. The last ones are
# about sampling: transformers 4 writes their defaults.
IGNORED_KEYS = """
    architectures auto_map model_type name _name_or_path transformers_version torch_dtype dtype
    tokenizer_name tokenizer_class use_cache verbose init_config init_device initializer_range
    loss_fn use_pad_tok_in_ffn bos_token_id eos_token_id pad_token_id sep_token_id attn_config
    ffn_config attn_impl _attn_implementation_autoset return_dict id2label label2id problem_type
    is_encoder_decoder chunk_size_feed_forward output_attentions output_hidden_states
    max_length min_length do_sample early_stopping num_beams num_beam_groups num_return_sequences
    temperature top_k top_p typical_p repetition_penalty length_penalty diversity_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size
""".split()

# A setting that this project does not have is accepted only with one of these values, which change
# nothing in the model. One that is not even listed here is accepted only with a value in OFF.
DEFAULTS = {
    "layer_norm_epsilon": [1e-5],
    "norm_eps": [1e-5],
    "fused_qkv": [True],
    "seq_parallel_world_size": [None, 1],
    "attn_temperature_tuning.attn_scale": [None, 0],
    "fc_type": [None, "torch"],
    "fc_type.name": [None, "torch"],
}
OFF = [None, False, [], {}]
# In these objects one setting decides. Queries are scaled by 1 + attn_scale x a function of their
# position; torch's linear layer is the same with any other setting.
DECIDES = {"attn_temperature_tuning": "attn_scale", "fc_type": "name"}
# These say what other settings say already, some in the words of other models: what it must be.
RESTATED = {
    "head_dim": (lambda cfg: cfg.head_dim, "d_model / n_heads"),
    "ffn_hidden_size": (lambda cfg: cfg.hidden_dim, "d_model x expansion_ratio"),
    "attention_bias": (lambda cfg: not cfg.no_bias, "the opposite of no_bias"),
    "hidden_size": (lambda cfg: cfg.d_model, "d_model"),
    "num_hidden_layers": (lambda cfg: cfg.n_layers, "n_layers"),
    "num_attention_heads": (lambda cfg: cfg.n_heads, "n_heads"),
    "num_key_value_heads": (lambda cfg: cfg.n_kv_heads, "n_heads, or kv_n_heads"),
    "intermediate_size": (lambda cfg: cfg.hidden_dim, "d_model x expansion_ratio"),
    "max_position_embeddings": (lambda cfg: cfg.max_seq_len, "max_seq_len"),
}

# Written out, not taken from model.py: that file may have been changed in a fork.
WEIGHTS = re.compile(
    r"transformer\.(wte|wpe|norm_f|blocks\.\d+\.(norm_[12]|attn\.(Wqkv|out_proj|[qk]_ln)"
    r"|ffn\.(up|gate|down)_proj))\.(weight|bias)|lm_head\.weight"
)

# --------------------------------------------------------------------------------------------------
# config.json -> MPTConfig


def config_from(settings: dict, source: str = "config.json") -> MPTConfig:
    """The model that a config.json of transformers or LLM Foundry describes.

    source: names the file in messages. Raises UserError for anything that this project's MPT lacks.
    """
    model_type = settings.get("model_type")
    require(
        model_type == "mpt",
        f"{source} has model_type {files.shown(model_type)}: only 'mpt' can be read",
    )
    architectures = settings.get("architectures") or []
    require(isinstance(architectures, list), f"{source}: architectures must be a list of names")
    attention = settings.get("attn_config") or {}
    ffn = settings.get("ffn_config") or {}
    are_objects = isinstance(attention, dict) and isinstance(ffn, dict)
    require(are_objects, f"{source}: attn_config and ffn_config must be objects with settings")

    # The defaults of MPTConfig are those of LLM Foundry (MPTForCausalLM).
    values = {"no_bias": True, "alibi": True} if is_of_transformers(settings) else {}
    values |= values_of(settings, TOP, source)
    values |= values_of(attention, "attn_config", source)
    values |= values_of({**ffn, **activation_of(ffn, source)}, "ffn_config", source)
    check_rope(attention, values, source)

    cfg = MPTConfig(**values, kv_n_heads=kv_heads(attention, source))
    try:
        cfg.check()
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    for group in (settings, attention, ffn):
        check_restated(group, cfg, source)
    return cfg


def foreign_settings(path: Path) -> tuple[dict, Path]:
    """The content of config.json, and the file that it came from.

    That is the config.json of a folder or beside a file, or else a Composer checkpoint, which may
    hold the same settings.
    """
    config_path = path / "config.json" if path.is_dir() else path.parent / "config.json"
    if path.is_dir() or config_path.exists():
        return files.read_json(config_path), config_path

    without_settings = f"{path} does not hold its model's settings: put its config.json beside it"
    require(path.suffix == ".pt", without_settings)
    keys = ["state", "integrations", "huggingface", "model", "config", "content"]
    settings = nested(read_pickle(path), *keys)
    require(isinstance(settings, dict), without_settings)
    return settings, path


def is_of_transformers(settings: dict) -> bool:
    """Does a config.json name transformers' own MPT (MptForCausalLM), not LLM Foundry's?"""
    architectures = settings.get("architectures") or []
    return any(isinstance(name, str) and name.startswith("Mpt") for name in architectures)


def values_of(group: dict, place: str, source: str) -> dict:
    """The values of our settings in a group of settings, with their types checked.

    place: of the group. Raises UserError for a setting that belongs to another place, and for any
    other key, unless it is ignored or its feature is turned off.
    """
    types = typing.get_type_hints(MPTConfig)
    values = {}
    for key, value in group.items():
        home = HOMES.get(key)
        if home == place:
            if key not in OTHER_ATTENTION_KEYS:
                values[key] = parser.check_value(value, types[key], key, source)
        elif key not in [*IGNORED_KEYS, *RESTATED]:
            if key in DECIDES and isinstance(value, dict):
                value = value.get(DECIDES[key])
                key = f"{key}.{DECIDES[key]}"
            misplaced = f" at {place}, where nothing reads it: move it to {home}"
            problem = misplaced if home else ", which this project's MPT does not have"
            # 0 == False, but reuse_kv_layer_idx=0 names a layer.
            is_false = value is False
            at_rest = [rest for rest in DEFAULTS.get(key, OFF) if (rest is False) == is_false]
            require(
                value in at_rest,
                f"{source} sets {program.one_line(key)} to {files.shown(value)}{problem}",
            )
    return values


def check_restated(group: dict, cfg: MPTConfig, source: str) -> None:
    """UserError if a size or bias that follows from `cfg` is set to something else."""
    for key, (follows, reason) in RESTATED.items():
        wanted = follows(cfg)
        value = group.get(key)
        require(
            value is None or value == wanted,
            f"{source} sets {key} to {files.shown(value)}, "
            f"only {json.dumps(wanted)} ({reason}) can be read",
        )


def activation_of(ffn: dict, source: str) -> dict:
    """{"ffn_act_fn": "silu"} for {"name": "silu"} in an ffn_config; GELU if it has none.

    UserError for an activation with arguments, such as the GELU by tanh.
    """
    given = ffn.get("ffn_act_fn")
    if given is None:
        return {"ffn_act_fn": "gelu"}
    has_name = isinstance(given, dict) and "name" in given
    problem = f"{source} sets ffn_act_fn to {files.shown(given)}"
    require(has_name, f'{problem}, expected an object such as {{"name": "silu"}}')
    if given != {"name": "gelu", "approximate": "none"}:  # the exact GELU has a second name
        arguments = ", ".join(str(key) for key in given if key != "name")
        problem = f"{source} sets {program.one_line(arguments)} of ffn_act_fn"
        require(not arguments, f"{problem}, which this project's MPT does not have")
    return {"ffn_act_fn": given["name"]}


def kv_heads(attention: dict, source: str) -> int | None:
    """kv_n_heads of MPTConfig (None: as many as there are query heads) for an attn_config."""
    attn_type = attention.get("attn_type", "multihead_attention")
    choices = ["multihead_attention", "multiquery_attention", "grouped_query_attention"]
    require(
        isinstance(attn_type, str) and attn_type in choices,
        f"{source} sets attn_type to {files.shown(attn_type)}, "
        f"expected one of: {', '.join(choices)}",
    )
    if attn_type != "grouped_query_attention":
        return {"multihead_attention": None, "multiquery_attention": 1}[attn_type]
    count = attention.get("kv_n_heads") or 0
    problem = f"{source} sets kv_n_heads to {files.shown(count)}, expected a whole number"
    require(type(count) is int, problem)
    return count


def check_rope(attention: dict, values: dict, source: str) -> None:
    """UserError if an attn_config has other rotary positions than RoPE. values: read so far."""
    if not values.get("rope"):
        return
    impl = attention.get("rope_impl", "dail")
    require(
        impl in ("dail", "hf"),
        f"{source} sets rope_impl to {files.shown(impl)}, expected dail or hf",
    )
    key = f"rope_{impl}_config"
    group = attention.get(key)
    require(isinstance(group, dict | None), f"{source}: {key} must be an object with settings")
    group = group or {}
    kind = group.get("type", "original")
    unscaled = kind == "linear" and group.get("factor") == 1
    require(
        unscaled or kind in ("original", "no_scaling"),
        f"{source} sets {key} to {files.shown(kind)}: only plain RoPE can be read",
    )


# --------------------------------------------------------------------------------------------------
# MPTConfig -> config.json


def config_to(cfg: MPTConfig, dtype: torch.dtype = torch.float32) -> dict:
    """The config.json of a model, for transformers and LLM Foundry alike.

    dtype: of its weights. Raises UserError for a setting that the format lacks: an attention or
    norm other than MPT's, or a setting that a fork added.
    """
    require(
        function_of(cfg.attn_impl) == "auto",
        f"attn_impl={cfg.attn_impl} does not compute MPT's attention: "
        "Hugging Face's format cannot hold it",
    )
    require(
        norm_of(cfg.norm_type) in ("layernorm", "rmsnorm"),
        f"norm_type={cfg.norm_type} is not MPT's norm: Hugging Face's format cannot hold it",
    )
    values = asdict(cfg)
    in_format = {*MODEL_KEYS, *ATTENTION_KEYS, *FFN_KEYS, "kv_n_heads", "attn_impl"}
    not_in_format = [
        f"{field.name}={values[field.name]}"
        for field in fields(cfg)
        if field.name not in in_format and values[field.name] != field.default
    ]
    require(
        not not_in_format,
        f"Hugging Face's format cannot hold {', '.join(not_in_format)}: "
        "the exported model would not be the same",
    )

    for name in ("expansion_ratio", "alibi_bias_max", "attn_pdrop"):
        if values[name] == int(values[name]):
            values[name] = int(values[name])  # transformers accepts only whole numbers here
    types = {None: "multihead_attention", 1: "multiquery_attention"}  # by heads of keys and values
    attention = {"attn_type": types.get(cfg.kv_n_heads, "grouped_query_attention")}
    at_rest = [name for name in LATER_KEYS if values[name] == getattr(MPTConfig, name)]
    attention |= {name: values[name] for name in ATTENTION_KEYS if name not in at_rest}
    if cfg.kv_n_heads not in types:
        attention["kv_n_heads"] = cfg.kv_n_heads
    settings = {
        "model_type": "mpt",
        "architectures": ["MptForCausalLM"],
        "torch_dtype": str(dtype).removeprefix("torch."),
        **{name: values[name] for name in MODEL_KEYS if name not in at_rest},
        "attn_config": attention,
    }
    if (cfg.ffn_type, cfg.ffn_act_fn) != ("mptmlp", "gelu"):
        activation = {"name": cfg.ffn_act_fn}
        settings["ffn_config"] = {"ffn_type": cfg.ffn_type, "ffn_act_fn": activation}
    return settings


def lost_in_transformers(cfg: MPTConfig) -> list[str]:
    """The settings that transformers' MptForCausalLM ignores or refuses, each with its value."""
    known = MPTConfig(alibi=True, no_bias=True)  # the only values that transformers knows
    names = """
        alibi alibi_bias_max rope no_bias qk_ln qk_gn logit_scale expansion_ratio
        attn_uses_sequence_id sliding_window_size attn_logit_softcapping final_logit_softcapping
        ffn_type ffn_act_fn embedding_fraction emb_pdrop attn_pdrop resid_pdrop
    """.split()
    lost = [
        f"{name}={getattr(cfg, name)} (computes with {getattr(known, name)})"
        for name in names
        if getattr(cfg, name) != getattr(known, name)
    ]
    if cfg.norm_type.endswith("rmsnorm"):
        lost.append(f"norm_type={cfg.norm_type} (computes with layernorm)")
    if cfg.learned_positions:
        lost.append("learned_pos_emb=True (computes with False)")
    if cfg.n_kv_heads != cfg.n_heads:
        lost.append(f"kv_n_heads={cfg.kv_n_heads} (computes with {cfg.n_heads})")
    return lost


def warn_of_transformers(settings: dict, cfg: MPTConfig, source: str) -> None:
    """Warn of settings in a config.json that transformers wrote, but ignored in training."""
    by_transformers = is_of_transformers(settings) and "transformers_version" in settings
    lost = ", ".join(lost_in_transformers(cfg))
    if by_transformers and lost:
        ignored = f"transformers wrote {source}, and its MptForCausalLM ignores {lost}"
        fix = "if the model was trained in transformers, remove them from the file"
        say_once("warning", f"{ignored}; here and in LLM Foundry they count: {fix}")


# --------------------------------------------------------------------------------------------------
# The weights of an MPT


def check_format(names) -> None:
    """UserError naming weights that no MPT has, such as those of a fork."""
    unknown = [name for name in names if not WEIGHTS.fullmatch(name)]
    problem = f"Hugging Face's format cannot hold the model: no MPT has {', '.join(unknown[:3])}"
    require(not unknown, problem)
