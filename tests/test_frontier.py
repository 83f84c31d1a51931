"""Frontier's recipes: the arithmetic of their comments, what plan.py says."""

import json
import re

import pytest
import test_configs
from conftest import ROOT

import flops
import plan
from planning import memory

RECIPES = ("22b", "175b", "1t")
GCDS = {"22b": 16, "175b": 1024, "1t": 3072}
TFLOPS = {"22b": 73.5, "175b": 69.2, "1t": 61.2}  # of a GCD, published: arXiv 2312.12705
every_recipe = pytest.mark.parametrize("name", RECIPES)


def path_of(name: str) -> str:
    return str(ROOT / f"configs/frontier_{name}.py")


def settings_of(name: str, *flags: str):
    """(model, run) of a recipe, with flags."""
    return test_configs.settings_of(f"frontier_{name}", *flags)


def comment_of(name: str) -> str:
    """Its comment as one line, without commas in numbers."""
    text = re.sub(r"^# *", "", test_configs.comment_of(f"frontier_{name}"), flags=re.M)
    return re.sub(r"(\d),(\d)", r"\1\2", " ".join(text.splitlines()))


# --- The files


@every_recipe
def test_the_shape_and_the_layout_are_the_published_ones(name):
    m, cfg = settings_of(name)
    shapes = {"22b": (48, 6144, 48), "175b": (96, 12288, 96), "1t": (128, 25600, 200)}
    assert (m.n_layers, m.d_model, m.n_heads) == shapes[name]
    layouts = {"22b": (1, 8, "DDP"), "175b": (4, 16, "ZERO1"), "1t": (8, 64, "ZERO1")}
    assert (cfg.tp, cfg.pp, cfg.sharding) == layouts[name]
    assert (cfg.microbatch_size, cfg.activation_checkpointing) == (1, "full")
    assert m.max_seq_len == 2048
    sizes = {"22b": 22e9, "175b": 175e9, "1t": 1e12}
    assert flops.n_params(m) == pytest.approx(sizes[name], rel=0.01)
    assert cfg.run_dir == f"runs/frontier_{name}"


@every_recipe
def test_the_arithmetic_of_the_comment(name):
    m, cfg = settings_of(name)
    n, tp, pp = GCDS[name], cfg.tp, cfg.pp
    dp = n // (tp * pp)
    microbatches = cfg.global_batch_size // dp
    assert (n, m.n_layers % pp, cfg.global_batch_size % dp) == (tp * pp * dp, 0, 0)
    bubble = f"{pp - 1} / ({microbatches} + {pp - 1})"
    share = 100 * (pp - 1) / (microbatches + pp - 1)

    per_step = cfg.global_batch_size * 2048
    tokens = per_step * cfg.max_steps
    assert tokens / flops.n_params(m) == pytest.approx(20, rel=1e-3)
    total = f"{tokens / 1e12:.4g}T" if tokens > 1e12 else f"{tokens / 1e9:.4g}B"

    speed = TFLOPS[name]
    step = 6 * flops.n_params(m) * per_step / (n * speed * 1e12)  # seconds
    peak = memory.bytes_by_part(m, cfg, n)["peak"] / 1e9
    phrases = [
        f"{n} GCDs",
        f"tp {tp} x pp {pp} x dp {dp}. Layers: {m.n_layers} = {m.n_layers // pp} on each stage",
        f"= dp {dp} x {microbatches} microbatches of 1. Bubble: {bubble} = {share:.1f} %",
        f"x 2048 = {per_step} per step; x {cfg.max_steps} steps = {total}, 20 per parameter",
        f"{speed} TFLOP/s a GCD, {speed / 1.915:.1f} % of the peak: {10 * round(step / 10)} s a",
        f"Memory, computed: {peak:.1f} GB of a GCD's {64 * 2**30 / 1e9:.1f}",
        f"sbatch --nodes={n // 8} --signal=USR1@",
        f"configs/frontier_{name}.py --device=mi250x --devices={n}",
        "Not run on AMD hardware",
    ]
    comment = comment_of(name)
    assert not [phrase for phrase in phrases if phrase not in comment]
    seconds_left = int(re.search(r"USR1@(\d+)", comment)[1])
    assert seconds_left > 2 * step + 200  # the run notices a signal one step late, then it saves


# --- The plan


@every_recipe
def test_a_plan_stands_beside_what_was_published(name, capsys):
    """Within a quarter of it, though no run on this device was used: a fault would show."""
    _, cfg = settings_of(name)
    plan.main([path_of(name), "--device=mi250x", f"--devices={GCDS[name]}", "--json"])
    found = json.loads(capsys.readouterr().out)
    share_of_peak = {"22b": 0.3838, "175b": 0.3614, "1t": 0.3196}
    assert TFLOPS[name] / 191.5 == pytest.approx(share_of_peak[name], abs=5e-4)
    assert found["tflops_per_device"] == pytest.approx(TFLOPS[name], rel=0.25)
    assert (found["layout"]["tp"], found["layout"]["pp"]) == (cfg.tp, cfg.pp) and found["fits"]
