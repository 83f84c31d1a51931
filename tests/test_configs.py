"""Every file in configs/: it loads, it is the published recipe, and its comment does the arithmetic right."""

import math
import re
from pathlib import Path

import pytest

import config
import devices
import flops
from config import MPTConfig, TrainConfig
from planning import memory

FOLDER = Path(__file__).parent.parent / "configs"
FILES = sorted(FOLDER.glob("mpt*.py"))

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
    # 4 x MI250: microbatch and checkpointing computed for 64 GB; the MI250 posts' batch for 7B, the recipe's tokens
    "mpt1b_mi250": (2e-4, 512, 8, "none", 24800, 1_315_950_592),
    "mpt3b_mi250": (1.6e-4, 512, 4, "none", 51500, 2_651_837_440),
    "mpt7b_mi250": (1.2e-4, 1536, 3, "none", 42600, 6_658_859_008),
    "mpt1b_1b_tokens": (2e-4, 512, 4, "none", 1000, 1_315_950_592),
}


def test_every_recipe_has_its_file():
    assert {path.stem for path in FILES} == set(RECIPES)


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def recipe(request):
    """Path, model, run."""
    return request.param, *config.load([str(request.param)], MPTConfig, TrainConfig)


def test_a_config_is_the_recipe(recipe):
    path, model, train = recipe
    lr, batch, microbatch, checkpointing, steps, params = RECIPES[path.stem]
    assert (train.lr, train.global_batch_size, train.max_steps) == (lr, batch, steps)
    assert (train.microbatch_size, train.activation_checkpointing) == (microbatch, checkpointing)
    assert flops.n_params(model) == params and model.learned_positions and not model.no_bias
    assert (model.max_seq_len, model.vocab_size) == (2048, 50368)
    assert (train.schedule, train.warmup_steps, train.alpha_f, train.decoupled_weight_decay) == (
        "cosine",
        100,
        0.1,
        0,
    )
    assert (train.dataset, train.tokenizer, train.run_dir) == (
        "allenai/c4:en",
        "gpt2",
        f"runs/{path.stem}",
    )
    assert train.max_tokens == steps * batch * 2048


def test_a_config_is_short_and_flat(recipe):
    lines = recipe[0].read_text().splitlines()
    assert len(lines) <= 25
    assert all(re.match(r"# |#   |\w+ = ", line) for line in lines)


def test_the_comment_does_the_batch_arithmetic(recipe):
    """Tokens a step, in all and a parameter; batch = devices x microbatch x accumulation; the launch line."""
    path, model, train = recipe
    comment = "\n".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    tokens = train.global_batch_size * model.max_seq_len
    step, steps, total, unit, ratio = re.search(
        r"= ([\d,]+) tokens; x ([\d,]+) steps = ([\d.]+)(B|T) tokens, ([\d.]+) a parameter", comment
    ).groups()
    assert int(step.replace(",", "")) == tokens and int(steps.replace(",", "")) == train.max_steps
    assert float(total) * {"B": 1e9, "T": 1e12}[unit] == pytest.approx(
        tokens * train.max_steps, rel=0.02
    )
    assert float(ratio) == pytest.approx(tokens * train.max_steps / flops.n_params(model), rel=0.01)
    batch, ranks, microbatch, accumulation = map(
        int,
        re.search(r"(\d+) = (\d+) x microbatch (\d+) x (\d+) accumulation steps", comment).groups(),
    )
    assert (batch, microbatch) == (train.global_batch_size, train.microbatch_size)
    assert batch == ranks * microbatch * accumulation and ranks % 8 == 0
    assert re.search(
        rf"torchrun .*fsdp_train\.py configs/{path.name}$", comment, re.DOTALL | re.MULTILINE
    )


@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith("_mi250")])
def test_the_gigabytes_in_an_mi250_comment_are_those_of_memory_py(name):
    """State, activations and the peak, each as it is written there; activations also by the product in the comment."""
    model, train = config.load([str(FOLDER / f"{name}.py")], MPTConfig, TrainConfig)
    comment = (FOLDER / f"{name}.py").read_text()
    pattern = r"parameter / 8 = ([\d.]+) GB, activations (\d+) bytes x (\d+) tokens x (\d+) x (\d+) = ([\d.]+) GB, "
    said = re.search(pattern + r"at the peak ([\d.]+) GB\.", comment).groups()
    parts = memory.bytes_by_part(model, train, ranks=8)
    state = sum(parts[f"{what}, fp32"] for what in ("weights", "gradients", "Adam's moments"))
    product = math.prod(map(int, said[1:5]))
    gigabytes = [
        f"{n / 1e9:.1f}" for n in (state, product, parts["blocks' activations"], parts["peak"])
    ]
    assert [said[0], said[5], said[5], said[6]] == gigabytes
    sizes = (train.microbatch_size * model.max_seq_len, model.d_model, model.n_layers)
    assert tuple(map(int, said[2:5])) == sizes
    assert parts["peak"] < memory.ROOM * devices.by_name("mi250").memory_gb * 2**30
    assert (
        "not measured on AMD hardware" in comment
        and f"python -m planning.memory configs/{name}.py --ranks=8" in comment
    )


@pytest.mark.parametrize("name", ["mpt30b", "mpt70b"])
def test_the_state_in_the_comment_of_a_large_recipe(name):
    model, _ = config.load([str(FOLDER / f"{name}.py")], MPTConfig, TrainConfig)
    said = re.search(
        r"\(weights, gradients, Adam: ([\d,]+) GB\)", (FOLDER / f"{name}.py").read_text()
    )[1]
    assert int(said.replace(",", "")) == round(16 * flops.n_params(model) / 1e9)


def test_every_recipe_fits_the_devices_of_its_comment(recipe):
    """Of 80 GB, or of 64 GB where the name says MI250."""
    path, model, train = recipe
    ranks = int(re.search(r"^# On (\d+) devices", path.read_text(), re.M)[1])
    device = devices.by_name("mi250" if "mi250" in path.stem else "a100")
    assert (
        memory.bytes_by_part(model, train, ranks)["peak"] < memory.ROOM * device.memory_gb * 2**30
    )


def test_the_finetuning_of_the_released_7b():
    """Its shape as facts about the release say: 6,649,286,656 parameters with 50,432 ids."""
    model, train = config.load([str(FOLDER / "finetune_mpt7b.py")], MPTConfig, TrainConfig)
    assert flops.n_params(model) == 6_649_024_512 + (50_432 - 50_368) * 4096
    assert train.init_from == "mpt-7b" and train.global_batch_size == 8 * train.microbatch_size
