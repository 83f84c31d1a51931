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
from planning import memory, search
from planning.fleet import Fleet

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


def n_ranks(name: str) -> int:
    """The devices in its comment."""
    return int(find(r"^# Batch: \d+ = (\d+) devices", name)[0])


@pytest.fixture(params=RECIPES)
def recipe(request):
    """Name, model, run."""
    return request.param, *settings_of(request.param)


def test_a_config_is_the_recipe(recipe):
    assert {path.stem for path in FOLDER.glob("mpt*.py")} == set(RECIPES)
    name, model, train = recipe
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
    (written,) = find(r"^# MPT-\w+ \(([\d.]+[MB]) parameters", name)
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


def test_the_comment_divides_the_tokens_by_the_speed(recipe):
    """By the published speed of a device, or by the plan's band for all of them."""
    name, _, train = recipe
    published = r"Cost: ([\d.]+) (hours|days) on 8 x A100 80GB, at the ([\d,]+) tokens/s each"
    planned = r"Cost, by plan.py.*: ([\d.]+) to ([\d.]+) days, at ([\d,]+) to ([\d,]+) tokens/s"

    def days(rate):
        return train.max_tokens / number(rate) / 86400

    if found := re.search(published, comment_of(name)):
        time = float(found[1]) / (24 if found[2] == "hours" else 1)
        assert time == pytest.approx(days(found[3]) / 8, rel=0.05)
        return
    fewest, most, *rates = find(planned, name)
    assert float(fewest) == pytest.approx(days(rates[0]), rel=0.05)
    assert float(most) == pytest.approx(days(rates[1]), rel=0.05)


def test_the_comment_divides_the_batch(recipe):
    """Batch = devices x microbatch x accumulation steps, and the line that launches it."""
    name, _, train = recipe
    pattern = r"Batch: (\d+) = (\d+) devices x microbatch (\d+) x (\d+) accumulation steps"
    batch, devices, microbatch, accumulation = map(int, find(pattern, name))
    assert (batch, microbatch) == (train.global_batch_size, train.microbatch_size)
    assert batch == devices * microbatch * accumulation and devices % 8 == 0
    launch = rf"torchrun .*fsdp_train\.py configs/{name}\.py$"
    assert re.search(launch, comment_of(name), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith("_mi250")])
def test_the_gigabytes_in_an_mi250_comment_are_those_of_memory_py(name):
    """State, activations and peak as written there; the product in the comment is right too."""
    model, train = settings_of(name)
    comment = comment_of(name)
    pattern = (
        r"(12 / 8 \+ 4 bytes per parameter|16 bytes per parameter / 8) = ([\d.]+) GB,\n"
        r"#   activations (\d+) bytes x (\d+) tokens x (\d+) x (\d+) = ([\d.]+) GB, "
        r"at the peak ([\d.]+) GB"
    )
    per_parameter, state, *factors, activations, peak = find(pattern, name)
    assert per_parameter.startswith("12") == (train.sharding == "ZERO1")  # whole gradients
    factors = [int(factor) for factor in factors]
    assert factors[1:] == [train.microbatch_size * 2048, model.d_model, model.n_layers]

    def gigabytes(n_bytes):
        return f"{n_bytes / 1e9:.1f}"

    parts = memory.bytes_by_part(model, train, ranks=8)
    states = ("weights", "gradients", "Adam's moments")
    assert state == gigabytes(sum(parts[f"{what}, fp32"] for what in states))
    assert activations == gigabytes(parts["blocks' activations"]) == gigabytes(math.prod(factors))
    assert peak == gigabytes(parts["peak"])
    assert parts["peak"] < memory.ROOM * devices.by_name("mi250").memory_gb * 2**30
    assert "not measured on AMD hardware" in comment
    assert f"python -m planning.memory configs/{name}.py --ranks=8" in comment


@pytest.mark.parametrize("name", ["mpt30b", "mpt70b"])
def test_the_state_in_the_comment_of_a_large_recipe(name):
    (gigabytes,) = find(r"; ([\d,]+) GB of weights, gradients and Adam\)", name)
    assert number(gigabytes) == round(16 * flops.n_params(settings_of(name)[0]) / 1e9)


def test_a_recipe_has_zero1_where_it_fits_and_is_the_faster_mode(recipe):
    """By the planner, with the recipe's microbatch; MI250 has recipes of its own."""
    name, model, train = recipe
    for device in ["mi250"] if "mi250" in name else ["a100", "h100"]:
        fleet = Fleet(devices.by_name(device), n_ranks(name))
        plans = {}
        for mode in ("FULL_SHARD", "ZERO1"):
            cfg = replace(train, sharding=mode)
            plans[mode] = search.evaluate(model, cfg, fleet)
        assert plans["ZERO1"].tokens_per_second >= plans["FULL_SHARD"].tokens_per_second
        assert train.sharding == ("ZERO1" if plans["ZERO1"].fits else "FULL_SHARD")
        assert plans[train.sharding].fits
        share = re.search(r"(\d+) % of", comment_of(name))
        if share and device != "h100":  # the comment's percentage is of a device with less memory
            assert int(share[1]) == round(100 * plans["ZERO1"].share_of_memory)


def test_finetuning_and_adapters_of_the_released_7b():
    """Its shape is that of the release: 6,649,286,656 parameters with 50,432 ids."""
    whole, train = settings_of("finetune_mpt7b")
    assert flops.n_params(whole) == 6_649_024_512 + (50_432 - 50_368) * 4096
    assert train.init_from == "mpt-7b" and train.global_batch_size == 8 * train.microbatch_size

    model, train = settings_of("lora_mpt7b")
    assert model == whole and train.init_from == "mpt-7b"
    n_adapters = flops.n_lora(model, train)
    assert f"{n_adapters:,} parameters" in comment_of("lora_mpt7b")
    assert n_adapters == 32 * train.lora_rank * (2 + 4 + 5 + 5) * 4096  # in + out of four layers


FINETUNING = ["finetune_mpt7b", "lora_mpt7b"]
CARDS = {"24": "rtx 4090", "64": "mi250", "80": "a100"}  # GB


@pytest.mark.parametrize("name", FINETUNING)
def test_finetuning_fits_the_devices_of_its_comment(name):
    """With the flags that it names for them, and as many GiB as it says."""
    comment = comment_of(name)
    lines = re.findall(r"^#   (\d+) devices? of (.*): (.*), ([\d.]+) GiB$", comment, re.M)
    assert len(lines) == 2 and "not measured on a GPU" in comment
    cards = set()
    for ranks, kinds, how, gib in lines:
        flags = [] if how == "as it is" else how.split()
        model, train = settings_of(name, *flags)
        model = replace(model, attn_impl="triton")  # auto, on a GPU
        peak = memory.bytes_by_part(model, train, int(ranks))["peak"]
        assert f"{peak / 2**30:.1f}" == gib
        for size in re.findall(r"(\d+) GB", kinds):
            cards.add(size)
            assert peak < memory.ROOM * devices.by_name(CARDS[size]).memory_gb * 2**30
    assert cards == set(CARDS)


@pytest.mark.parametrize("name", FINETUNING)
def test_the_comment_of_finetuning_is_right(name):
    """Tokens in all, and the bytes that no recomputation saves."""
    model, train = settings_of(name)
    comment = comment_of(name)
    n_tokens = train.max_steps * train.global_batch_size * model.max_seq_len
    assert f"{n_tokens / 1e6:.1f}M tokens" in comment
    if train.lora_rank:
        parts = memory.bytes_by_part(replace(model, attn_impl="triton"), train)
        assert f"{parts['frozen weights'] / 1e9:.1f} GB, in bf16" in comment
    else:
        assert f"{16 * flops.n_params(model) / 1e9:.0f} GB in all" in comment


def test_a_config_is_short_and_flat():
    for path in FOLDER.glob("*.py"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 25, path
        assert all(re.match(r"# |#   |\w+ = |$", line) for line in lines), path
