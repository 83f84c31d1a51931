"""Every file in configs/ loads, is the published recipe, and has correct batch arithmetic."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

import config
import devices
import flops
from config import MPTConfig, TrainConfig
from planning import memory

FOLDER = Path(__file__).parent.parent / "configs"

# LLM Foundry's recipes: lr, global batch, microbatch, activation checkpointing, steps, parameters
RECIPES = {
    "mpt125m": (6e-4, 256, 16, "none", 4800, 125_311_488),
    "mpt350m": (3e-4, 256, 8, "none", 13400, 355_985_408),
    "mpt760m": (2.5e-4, 256, 4, "none", 29000, 760_470_528),
    "mpt1b": (2e-4, 512, 4, "none", 24800, 1_315_950_592),
    "mpt3b": (1.6e-4, 512, 8, "full", 51500, 2_651_837_440),
    "mpt7b": (1.2e-4, 1024, 8, "full", 63900, 6_658_859_008),
    "mpt13b": (1e-4, 1024, 8, "full", 124000, 12_853_954_560),
    "mpt30b": (1e-4, 2048, 8, "full", 143100, 29_975_214_080),
    "mpt70b": (8e-5, 2048, 4, "full", 333800, 64_862_437_376),
    # 4 x MI250: microbatch and checkpointing computed for 64 GB. The tokens are the recipe's; 7B
    # has the batch of the MI250 posts.
    "mpt1b_mi250": (2e-4, 512, 8, "none", 24800, 1_315_950_592),
    "mpt3b_mi250": (1.6e-4, 512, 4, "none", 51500, 2_651_837_440),
    "mpt7b_mi250": (1.2e-4, 1536, 3, "none", 42600, 6_658_859_008),
    "mpt1b_1b_tokens": (2e-4, 512, 4, "none", 1000, 1_315_950_592),
}


def settings_of(name: str, *flags: str):
    """The model and the run of a config."""
    return config.load([str(FOLDER / f"{name}.py"), *flags], MPTConfig, TrainConfig)


def comment_of(name: str) -> str:
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith("#"))


def find(pattern: str, name: str) -> tuple[str, ...]:
    """The groups of a pattern in the comment of a config."""
    return re.search(pattern, comment_of(name), re.M).groups()


def number(text: str) -> float:
    """1,024 or 12.3B or 20T"""
    factor = {"M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1)
    return float(text.rstrip("MBT").replace(",", "")) * factor


@pytest.fixture(params=[*RECIPES, "llama_like"])
def recipe(request):
    """Name, model, run."""
    return request.param, *settings_of(request.param)


@pytest.mark.parametrize("name", RECIPES)
def test_a_config_is_the_recipe(name):
    assert {path.stem for path in FOLDER.glob("mpt*.py")} == set(RECIPES)
    model, train = settings_of(name)
    lr, batch, microbatch, checkpointing, steps, params = RECIPES[name]
    assert (train.lr, train.global_batch_size, train.max_steps) == (lr, batch, steps)
    assert (train.microbatch_size, train.activation_checkpointing) == (microbatch, checkpointing)
    assert flops.n_params(model) == params and model.learned_positions and not model.no_bias
    assert (model.max_seq_len, model.vocab_size) == (2048, 50368)
    assert (train.schedule, train.warmup_steps, train.alpha_f) == ("cosine", 100, 0.1)
    assert train.decoupled_weight_decay == 0
    assert (train.dataset, train.tokenizer) == ("allenai/c4:en", "gpt2")
    assert train.run_dir == f"runs/{name}"
    assert train.max_tokens == steps * batch * 2048


def test_the_comment_counts_parameters_and_tokens(recipe):
    """Tokens per step, in all, and per parameter."""
    name, model, train = recipe
    n_params = flops.n_params(model)
    (written,) = find(r"^# MPT-[^(]+ \(([\d.]+[MB]) parameters", name)
    assert number(written) == pytest.approx(n_params, rel=0.005)

    pattern = (
        r"Tokens: (\d+) sequences x (\d+) = ([\d,]+) per step; "
        r"x ([\d,]+) steps = ([\d.]+[BT]), ([\d.]+) per parameter"
    )
    batch, length, per_step, steps, total, per_parameter = map(number, find(pattern, name))
    sizes = (train.global_batch_size, model.max_seq_len, train.max_steps)
    assert (batch, length, steps) == sizes and per_step == batch * length
    assert total == pytest.approx(per_step * steps, rel=0.02)
    assert per_parameter == pytest.approx(per_step * steps / n_params, rel=0.01)


def test_the_comment_divides_the_batch(recipe):
    """Batch = devices x microbatch x accumulation steps, and the line that launches it."""
    name, _, train = recipe
    pattern = r"Batch: (\d+) = (\d+) devices x microbatch (\d+) x (\d+) accumulation steps"
    batch, n_devices, microbatch, accumulation = map(int, find(pattern, name))
    assert (batch, microbatch) == (train.global_batch_size, train.microbatch_size)
    assert batch == n_devices * microbatch * accumulation and n_devices % 8 == 0
    launch = rf"torchrun .*fsdp_train\.py configs/{name}\.py$"
    assert re.search(launch, comment_of(name), re.DOTALL | re.MULTILINE)


def peak_of(name: str, ranks: int, *flags: str) -> float:
    """Bytes of a rank at the peak, with attention as on a GPU."""
    model, train = settings_of(name, *flags)
    return memory.bytes_by_part(replace(model, attn_impl="triton"), train, ranks)["peak"]


def room(device: str) -> float:
    """Bytes of it that tensors may fill."""
    return memory.ROOM * devices.by_name(device).memory_gb * 2**30


def test_a_recipe_has_zero1_where_it_fits(recipe):
    """MI250 has recipes of its own."""
    name, _, train = recipe
    ranks = int(find(r"^# Batch: \d+ = (\d+) devices", name)[0])
    device = "mi250" if "mi250" in name else "a100"
    zero1_fits = peak_of(name, ranks, "--sharding=ZERO1") < room(device)
    assert train.sharding == ("ZERO1" if zero1_fits else "FULL_SHARD")
    assert peak_of(name, ranks) < room(device)
    if written := re.search(r"at the peak ([\d.]+) GB", comment_of(name)):
        assert f"{peak_of(name, ranks) / 1e9:.1f}" == written[1]


def test_the_llama_like_recipe_is_llamas_block():
    """Its feed-forward costs what that of MPT-125M does, and larger ones what the comment says."""
    model, train = settings_of("llama_like")
    assert (model.rope, model.alibi, model.learned_positions, model.no_bias) == (1, 0, 0, 1)
    assert (model.norm_type, model.ffn_type) == ("low_precision_rmsnorm", "mptglu")
    assert model.ffn_act_fn == "silu" and not model.tie_word_embeddings
    assert model.d_model * model.expansion_ratio == model.hidden_dim == 2048  # LLM Foundry's rule
    plain, plain_train = settings_of("mpt125m")
    assert 3 * model.hidden_dim == 2 * plain.hidden_dim
    assert model.n_heads == 3 * model.n_kv_heads
    assert (train.lr, train.warmup_steps) == (plain_train.lr, plain_train.warmup_steps)

    parts = flops.params_by_part(model)
    assert f"{(parts['wte'] + parts['lm_head']) / 1e6:.0f}M of them" in comment_of("llama_like")
    ratio = float(find(r"expansion_ratio ([\d.]+)", "llama_like")[0])
    assert all(width * ratio % 64 == 0 for width in (1024, 2048, 4096))
    assert f"{4096 * ratio:,.0f} for the last" in comment_of("llama_like")


def test_finetuning_and_adapters_of_the_released_7b():
    """Its shape is that of the release: 6,649,286,656 parameters with 50,432 ids."""
    whole, train = settings_of("finetune_mpt7b")
    assert flops.n_params(whole) == 6_649_024_512 + (50_432 - 50_368) * 4096
    assert train.init_from == "mpt-7b" and train.global_batch_size == 8 * train.microbatch_size

    model, train = settings_of("lora_mpt7b")
    assert model == whole and train.init_from == "mpt-7b"
    n_adapters = flops.n_lora(model, train)
    assert f"{n_adapters:,} parameters" in comment_of("lora_mpt7b")


CARDS = {"24": "rtx 4090", "64": "mi250", "80": "a100"}  # GB


@pytest.mark.parametrize("name", ["finetune_mpt7b", "lora_mpt7b"])
def test_finetuning_fits_the_devices_of_its_comment(name):
    """With the flags that it names for them, and as many GiB as it says."""
    lines = re.findall(r"^#   (\d+) devices? of (.*): (.*), ([\d.]+) GiB$", comment_of(name), re.M)
    assert len(lines) == 2
    for ranks, kinds, how, gib in lines:
        flags = [] if how == "as it is" else how.split()
        peak = peak_of(name, int(ranks), *flags)
        assert f"{peak / 2**30:.1f}" == gib
        for size in re.findall(r"(\d+) GB", kinds):
            assert peak < room(CARDS[size])


# Of arXiv 2312.12705: GCDs, layers, width, heads, tp, pp, sharding, parameters
FRONTIER = {
    "22b": (16, 48, 6144, 48, 1, 8, "DDP", 22e9),
    "175b": (1024, 96, 12288, 96, 4, 16, "ZERO1", 175e9),
    "1t": (3072, 128, 25600, 200, 8, 64, "ZERO1", 1e12),
}


@pytest.mark.parametrize("name", FRONTIER)
def test_frontiers_recipes_are_the_published_ones_and_their_comments_count_right(name):
    n, layers, width, heads, tp, pp, sharding, n_params = FRONTIER[name]
    name = f"frontier_{name}"
    m, cfg = settings_of(name)
    assert (m.n_layers, m.d_model, m.n_heads, m.max_seq_len) == (layers, width, heads, 2048)
    assert (cfg.tp, cfg.pp, cfg.sharding) == (tp, pp, sharding)
    assert (cfg.microbatch_size, cfg.activation_checkpointing) == (1, "full")
    assert flops.n_params(m) == pytest.approx(n_params, rel=0.01)
    assert cfg.run_dir == f"runs/{name}"

    dp = n // (tp * pp)
    microbatches = cfg.global_batch_size // dp
    bubble = f"{pp - 1} / ({microbatches} + {pp - 1})"
    share = 100 * (pp - 1) / (microbatches + pp - 1)
    per_step = cfg.global_batch_size * 2048
    assert per_step * cfg.max_steps / flops.n_params(m) == pytest.approx(20, rel=1e-3)
    peak = peak_of(name, n)
    assert peak < 64 * 2**30
    comment = re.sub(r"(\d),(\d)", r"\1\2", comment_of(name).replace("\n#", ""))
    for phrase in (
        f"tp {tp} x pp {pp} x dp {dp}. Layers: {layers} = {layers // pp} on each stage",
        f"= dp {dp} x {microbatches} microbatches of 1. Bubble: {bubble} = {share:.1f} %",
        f"x 2048 = {per_step} per step; x {cfg.max_steps} steps",
        f"Memory, computed: {peak / 1e9:.1f} GB",
        f"sbatch --nodes={n // 8} --signal=USR1@",
        f"configs/{name}.py --device=mi250x --devices={n}",
    ):
        assert phrase in comment


def test_a_config_is_short_and_flat():
    for path in FOLDER.glob("*.py"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 25, path
        assert all(re.match(r"# |#   |\w+ = |$", line) for line in lines), path


def days_at(train, rate: str) -> float:
    return train.max_tokens / number(rate) / 86400


def test_the_comment_divides_the_tokens_by_the_speed(recipe):
    """By the published speed of a device, or by the ends of a plan's band; and counts the state."""
    name, model, train = recipe
    published = r"Cost: ([\d.]+) (hours|days) on 8 x A100 80GB, at the ([\d,]+) tokens/s each"
    planned = r"Cost, by plan.py.*: ([\d.]+) to ([\d.]+) days, at ([\d,]+) to ([\d,]+) tokens/s"
    if found := re.search(published, comment_of(name)):
        time = float(found[1]) / (24 if found[2] == "hours" else 1)
        assert time == pytest.approx(days_at(train, found[3]) / 8, rel=0.05)
    else:
        fewest, most, *rates = find(planned, name)
        assert float(fewest) == pytest.approx(days_at(train, rates[0]), rel=0.05)
        assert float(most) == pytest.approx(days_at(train, rates[1]), rel=0.05)
    if state := re.search(r"; ([\d,]+) GB of weights, gradients and Adam\)", comment_of(name)):
        assert number(state[1]) == round(16 * flops.n_params(model) / 1e9)


@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith("_mi250")])
def test_the_gigabytes_of_an_mi250_are_a_product_and_a_sum(name):
    model, train = settings_of(name)
    pattern = (
        r"(12 / 8 \+ 4 bytes per parameter|16 bytes per parameter / 8) = ([\d.]+) GB,\n"
        r"#   activations (\d+) bytes x (\d+) tokens x (\d+) x (\d+) = ([\d.]+) GB"
    )
    per_parameter, state, *factors, activations = find(pattern, name)
    assert per_parameter.startswith("12") == (train.sharding == "ZERO1")
    factors = [int(factor) for factor in factors]
    assert factors[1:] == [train.microbatch_size * 2048, model.d_model, model.n_layers]
    parts = memory.bytes_by_part(model, train, ranks=8)
    states = sum(parts[f"{what}, fp32"] for what in ("weights", "gradients", "Adam's moments"))
    assert state == f"{states / 1e9:.1f}"
    assert activations == f"{math.prod(factors) / 1e9:.1f}"
    of_blocks = parts["blocks' activations"]
    assert activations == f"{of_blocks / 1e9:.1f}"


def test_the_comments_of_finetuning_count_right():
    for name in ("finetune_mpt7b", "lora_mpt7b"):
        model, train = settings_of(name)
        n_tokens = train.max_steps * train.global_batch_size * model.max_seq_len
        assert f"{n_tokens / 1e6:.1f}M tokens" in comment_of(name)
        if train.lora_rank:
            parts = memory.bytes_by_part(replace(model, attn_impl="triton"), train)
            words = f"{parts['frozen weights'] / 1e9:.1f} GB, in bf16"
        else:
            words = f"{16 * flops.n_params(model) / 1e9:.0f} GB in all"
        assert words in comment_of(name)


TFLOPS = {"22b": 73.5, "175b": 69.2, "1t": 61.2}  # of a GCD


@pytest.mark.parametrize("name", FRONTIER)
def test_frontiers_warning_comes_two_steps_before_the_end(name):
    """A run sees a signal a step late, then it saves."""
    m, cfg = settings_of(f"frontier_{name}")
    n_tokens = cfg.global_batch_size * 2048
    step = 6 * flops.n_params(m) * n_tokens / (FRONTIER[name][0] * TFLOPS[name] * 1e12)  # seconds
    comment = re.sub(r"(\d),(\d)", r"\1\2", comment_of(f"frontier_{name}").replace("\n#", ""))
    total = n_tokens * cfg.max_steps
    total = f"{total / 1e12:.4g}T" if total > 1e12 else f"{total / 1e9:.4g}B"
    share = f"{TFLOPS[name] / 1.915:.1f} % of the peak"
    assert f"{TFLOPS[name]} TFLOP/s a GCD, {share}: {10 * round(step / 10)} s a" in comment
    assert f"= {total}, 20 per parameter" in comment
    assert int(re.search(r"USR1@(\d+)", comment)[1]) > 2 * step + 200
