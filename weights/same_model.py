"""Do two settings describe the same model, so that weights of one can be loaded into the other?"""

from dataclasses import asdict

from attention import function_of
from config import MPTConfig

# The settings that decide what a model computes.
SAME_MODEL = [f for f in MPTConfig.__dataclass_fields__ if not f.endswith("_pdrop")]


def differing(names: list[str], saved: dict, ours: dict) -> list[str]:
    """A few words for each of the settings `names` that differs."""
    return [f"{k} {saved[k]} (here {ours[k]})" for k in names if saved[k] != ours[k]]


def different_functions(there: MPTConfig, here: MPTConfig) -> list[str]:
    """The settings by which two models have other weight shapes or logits, in a few words each."""
    theirs, ours = function_settings(there), function_settings(here)
    return differing([name for name in theirs if name in ours], theirs, ours)


def function_settings(cfg: MPTConfig) -> dict:
    """The settings that decide the shapes and logits of a model, by name.

    Settings that have no effect here are left out, such as rope_theta without rope.
    """
    values = comparable(asdict(cfg))
    values |= {"learned_pos_emb": cfg.learned_positions, "kv_n_heads": cfg.n_kv_heads}
    has_effect = {
        "attn_uses_sequence_id": False,
        "alibi_bias_max": cfg.alibi,
        "rope_theta": cfg.rope,
        "max_seq_len": cfg.learned_positions,
        "embedding_fraction": False,  # of gradients
    }
    return {name: values[name] for name in SAME_MODEL if has_effect.get(name, True)}


def comparable(settings: dict) -> dict:
    """The settings with one name for all ways to compute the same function.

    A run may be resumed with another attention kernel, or with its norms in another precision.
    """
    attn_impl = function_of(settings["attn_impl"])
    return settings | {"attn_impl": attn_impl, "norm_type": norm_of(settings["norm_type"])}


def norm_of(norm_type: str) -> str:
    """The function of a norm, whatever its precision."""
    return norm_type.removeprefix("low_precision_")
