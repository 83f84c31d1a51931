"""flops.py against published figures: MPT's sizes and throughput, Megatron-LM."""

import csv
import json
import math
import re

import pytest
import torch
from conftest import ROOT, refusal
from hypothesis import given, settings
from hypothesis import strategies as st

import flops
from config import MPTConfig, TrainConfig
from model import MPT

CONFIGS = ROOT / "configs"
TABLE = ROOT / "bench/results/mpt_single_node_throughput.csv"

# {size: (d_model, heads, layers, parameters with learned positions and biases,
#         parameters with ALiBi and no bias)}
SIZES = {
    "125m": (768, 12, 12, 125_311_488, 123_636_480),
    "350m": (1024, 16, 24, 355_985_408, 353_616_896),
    "760m": (1536, 12, 24, 760_470_528, 756_917_760),
    "1b": (2048, 16, 24, 1_315_950_592, 1_311_213_568),
    "3b": (2560, 20, 32, 2_651_837_440, 2_645_690_880),
    "7b": (4096, 32, 32, 6_658_859_008, 6_649_024_512),
    "13b": (5120, 40, 40, 12_853_954_560, 12_841_210_880),
    "30b": (7168, 56, 48, 29_975_214_080, 29_956_742_144),
    "70b": (8192, 64, 80, 64_862_437_376, 64_838_443_008),
}


def mpt(size: str, **more) -> MPTConfig:
    """One of MPT's sizes, with other settings if given."""
    d, heads, layers, *_ = SIZES[size]
    return MPTConfig(d_model=d, n_heads=heads, n_layers=layers, **more)


@pytest.mark.parametrize("size", SIZES)
def test_parameters_of_the_nine_sizes(size):
    assert flops.n_params(mpt(size)) == SIZES[size][3]
    assert flops.n_params(mpt(size, alibi=True, no_bias=True)) == SIZES[size][4]


@st.composite
def shapes(draw) -> MPTConfig:
    """Small models of any shape."""
    head_dim = draw(st.integers(1, 8))
    groups = draw(st.integers(1, 3))
    kv_heads = draw(st.integers(1, 3))
    flag_names = ("alibi", "learned_pos_emb", "no_bias", "tie_word_embeddings")
    flags = {name: draw(st.booleans()) for name in flag_names}
    normed = draw(st.sampled_from([{}, {"qk_ln": True}, {"qk_gn": True}]))
    return MPTConfig(
        d_model=head_dim * groups * kv_heads,
        n_heads=groups * kv_heads,
        kv_n_heads=kv_heads,
        n_layers=draw(st.integers(1, 4)),
        expansion_ratio=draw(st.integers(1, 5)),
        max_seq_len=draw(st.integers(1, 64)),
        vocab_size=draw(st.integers(1, 99)),
        ffn_type=draw(st.sampled_from(["mptmlp", "mptglu"])),
        norm_type=draw(st.sampled_from(["layernorm", "low_precision_rmsnorm"])),
        **flags,
        **normed,
    )


@given(shapes())
@settings(max_examples=40, deadline=None)
def test_parameters_by_part_are_those_of_the_model(cfg):
    """An input embedding of its own is a lookup: its weights cost nothing."""
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in MPT(cfg).named_parameters()}
    parts = flops.params_by_part(cfg)
    for part in ("wte", "wpe", "lm_head", *cfg.linear_layers()):
        assert parts[part] == sum(n for name, n in sizes.items() if f"{part}.weight" in name), part
    assert parts["biases"] == sum(n for name, n in sizes.items() if name.endswith("bias"))
    n = sum(sizes.values())
    assert flops.n_params(cfg) == n
    n_lookup = 0 if cfg.tie_word_embeddings else cfg.vocab_size * cfg.d_model
    assert flops.train_flops_per_token(cfg, "6nd") == 6 * (n - n_lookup)


def test_all_142_published_rows():
    """MFU and TFLOP/s from tokens/s: within 0.05 %, or within one token/s if that is more.

    The table cuts tokens/s to whole numbers.
    """
    rows = list(csv.DictReader(TABLE.read_text().splitlines()))
    assert len(rows) == 142
    for row in rows:
        cfg = MPTConfig(
            d_model=int(row["d_model"]),
            n_heads=int(row["heads"]),
            n_layers=int(row["layers"]),
            max_seq_len=int(row["seq"]),
        )
        assert flops.n_params(cfg) == int(row["params"])

        speed = int(row["tokens_s_gpu"])
        peak = float(row["peak_tflops"])
        mfu = float(row["mfu_pct"])
        least = 100 * flops.mfu(cfg, 8 * speed, 8, peak * 1e12)
        most = 100 * flops.mfu(cfg, 8 * (speed + 1), 8, peak * 1e12)
        assert least - 0.005 <= mfu <= most + 0.005, row  # printed with two decimals
        assert least == pytest.approx(mfu, rel=max(5e-4, 1 / speed + 0.005 / mfu)), row
        low, high = math.floor(least * peak / 100), math.floor(most * peak / 100)
        assert low <= float(row["tflops_per_gpu"]) <= high, row


def test_hfu_of_no_selective_and_full_checkpointing():
    run = (mpt("7b"), 1000, 1, 1e15)
    mfu = flops.mfu(*run)
    assert flops.hfu(*run, "none") == flops.hfu(*run, "selective") == mfu
    assert flops.hfu(*run, "full") == pytest.approx(mfu * 4 / 3)
    share = 7 / 32  # blocks 0, 5, .., 30
    assert flops.hfu(*run, "full", 5) == pytest.approx(mfu * (1 + share / 3))
    assert flops.mfu(mpt("1b"), 1000, 1, None) is None  # the peak is not known


# --------------------------------------------------------------------------------------------------
# Conventions


def test_conventions_of_one_model():
    cfg = mpt("7b")
    n = SIZES["7b"][3]
    LdS = 32 * 4096 * 2048
    in_matmuls = n - (2048 * 4096 + 266_240 + 1_445_888)  # without positions, norms, biases
    once = {
        "foundry": 6 * n + 12 * LdS,
        "causal": 6 * n + 6 * LdS,
        "lingua": 6 * n + 7 * LdS,
        "flopcounter": 6 * n + 14 * LdS,
        "6nd": 6 * n,
        "megatron": 6 * in_matmuls + 12 * LdS,
    }
    for name, count in once.items():
        assert flops.train_flops_per_token(cfg, name) == count, name
    assert flops.CONVENTIONS.keys() == once.keys()
    full = TrainConfig(activation_checkpointing="full")
    assert flops.flops_of(cfg, "causal", full) == (once["causal"], 8 * n + 8 * LdS)
    assert flops.flops_of(cfg, frozen=True)[0] == 4 * n + 12 * LdS  # no gradient of weights


def test_megatrons_formulas():
    """arXiv 2205.05198, app. A; arXiv 2104.04473, eq. 3, with all blocks computed again."""
    h, _, n, *_ = SIZES["7b"]
    s = 2048
    V = 50368
    cfg = mpt("7b")
    once = 72 * n * h**2 * (1 + s / (6 * h) + V / (12 * n * h))
    assert flops.train_flops_per_token(cfg, "megatron") == pytest.approx(once)
    again = 96 * n * h**2 * (1 + s / (6 * h) + V / (16 * n * h))
    full = TrainConfig(activation_checkpointing="full")
    assert flops.flops_of(cfg, "megatron", full)[1] == pytest.approx(again)


def test_a_convention_says_how_the_attention_of_adapters_counts():
    """All else is one count, whatever weights a convention has: that of the matmuls.

    The logits are not computed again: once they were counted twice, 12 to 19 % too much.
    """
    cfg = mpt("1b")
    l_d_s = 24 * 2048 * 2048
    lora = TrainConfig(lora_rank=16, activation_checkpointing="full")
    counts = {name: flops.flops_of(cfg, name, lora) for name in flops.CONVENTIONS}
    once, with_recomputed = counts["foundry"]
    by_pass = flops.flops_by_pass(cfg, lora)
    assert with_recomputed == sum(sum(passes.values()) for passes in by_pass.values())
    assert with_recomputed - once == sum(passes["recomputed"] for passes in by_pass.values())

    attention = {"megatron": (12, 4), "causal": (6, 2), "lingua": (7, 2)}
    attention |= {"flopcounter": (14, 4), "6nd": (0, 0)}
    for name, (both, forward) in attention.items():
        of_once = once - (12 - both) * l_d_s
        again = with_recomputed - (16 - both - forward) * l_d_s
        assert counts[name] == (of_once, again), name


# --------------------------------------------------------------------------------------------------
# The program


def shown(capsys, flags: str) -> str:
    """What the program prints."""
    flops.main(flags.replace("CONFIGS", str(CONFIGS)).split())
    return capsys.readouterr().out


def found(capsys, flags: str) -> dict:
    """The figures that the program prints as JSON."""
    return json.loads(shown(capsys, f"{flags} --json"))


def test_the_mfu_by_every_convention(capsys):
    run = "CONFIGS/mpt7b.py --device=mi250 --tokens_per_second=1922"
    out = shown(capsys, run)
    assert "6,658,859,008" in out and "181.05" in out and "matmuls reach 72%" in out
    rows = {line.split()[0]: line.split()[1:5] for line in out.splitlines() if "%  " in line}
    assert rows["foundry"] == ["43.174", "82.98", "45.83%", "61.11%"]
    assert rows.keys() == flops.CONVENTIONS.keys()

    figures = found(capsys, run)
    assert figures["n_params"] == sum(figures["params"].values()) == 6_658_859_008
    assert f"{figures['mfu']:.2%} {figures['hfu']:.2%}" == "45.83% 61.11%"
    assert figures["mfu_of_reachable"] == pytest.approx(figures["mfu"] / 0.72)
    causal = found(capsys, f"{run} --convention=causal")
    assert causal["mfu"] == figures["conventions"]["causal"]["mfu"] < figures["mfu"]

    # The same from its size and the shape of its attention.
    of_size = found(
        capsys,
        f"""--n_params={SIZES["7b"][3]} --n_layers=32 --d_model=4096
        --max_seq_len=2048 --activation_checkpointing=full --device=mi250
        --tokens_per_second=1922""",
    )["conventions"]
    assert figures["conventions"].keys() - of_size.keys() == {"megatron"}
    for name, row in of_size.items():
        assert row == pytest.approx(figures["conventions"][name])


THREAD = "--n_params=405e9 --tokens_per_second=34.1 --devices=8 --device=mi300x"


@pytest.mark.parametrize("flags, mfu, hfu", [
    ("", "0.80%", "0.80%"),
    ("--frozen", "0.53%", "0.53%"),
    ("--frozen --activation_checkpointing=full", "0.53%", "0.80%"),
])  # fmt: skip
def test_the_lora_thread(capsys, flags, mfu, hfu):
    """405e9 frozen parameters, 16 x 64 tokens in 30 s on 8 devices of 1.3e15 FLOP/s.

    That was published as 0.80 %, which is 6 N; frozen weights cost 4 N: 0.53 %.
    """
    figures = found(capsys, f"{THREAD} --peak_tflops=1300 {flags}")
    assert f"{figures['mfu']:.2%} {figures['hfu']:.2%}" == f"{mfu} {hfu}"
    of_table = found(capsys, f"{THREAD} {flags}")  # 1,307.4
    assert f"{of_table['mfu']:.1%}" == f"{figures['mfu']:.1%}"


@pytest.mark.parametrize("rate, words", [
    (2000, ""),
    (2500, "110% of what large matmuls reach"),
    (3200, "that is above the peak"),
])  # fmt: skip
def test_a_speed_above_what_the_device_reaches_is_doubted(capsys, rate, words):
    """MPT-7B with every forward twice: 2,500 tokens/s are 60 % MFU, 80 % HFU of an MI250."""
    run = f"CONFIGS/mpt7b.py --device=mi250 --tokens_per_second={rate}"
    doubt = found(capsys, run)["doubt"]
    assert bool(doubt) == bool(words) and words in doubt
    assert doubt in shown(capsys, run)


def test_the_masked_half_of_attention_explains_an_mfu_above_100(capsys):
    """MPT-7B on 65,536 tokens, one H100 at 7,300 tokens/s: 105 % with it, 67 % without."""
    run = "CONFIGS/mpt7b.py --alibi --no_bias --activation_checkpointing=none --max_seq_len=65536"
    figures = found(capsys, f"{run} --device=h100 --tokens_per_second=7300")
    assert figures["hfu"] > 1
    assert "67.46%" in figures["doubt"] and "--devices" not in figures["doubt"]


def test_the_device_of_a_config_file_names_no_accelerator(capsys, tmp_path):
    """`device` and `peak_tflops` are a training run's keys too."""
    path = tmp_path / "c.py"
    path.write_text('device = "cpu"\npeak_tflops = "auto"\nd_model = 64\nn_heads = 2\n')
    assert "MFU n/a" in shown(capsys, str(path))
    assert "MFU 100 %" in shown(capsys, f"{path} --device=mi250")


def test_a_device_without_a_bf16_peak(capsys):
    assert found(capsys, "--device=v100 --tokens_per_second=10")["mfu"] is None
    assert "no bf16 peak known for V100" in shown(capsys, "--device=v100 --tokens_per_second=10")


@pytest.mark.parametrize("flags, message", [
    ("--device=mi205", "did you mean .*mi250"),
    ("--convention=megatorn", "did you mean 'megatron'"),
    ("--lora_targets=Wqkw --lora_rank=4", "did you mean 'Wqkv'"),
    ("--lora_rank=2 --lora_last_blocks=25", "lora_last_blocks 25 is more than n_layers 24"),
    ("--tokens_per_second=-5", "tokens_per_second must be from 1e-06"),
    ("--n_params=1.5", "expected a whole number"),
    ("--n_params=1e9 --vocab_size=64", "vocab_size"),
    ("--n_params=1e9 --d_model=64", "need --n_layers=... --max_seq_len=...$"),
    ("--n_params=1e9 configs/mpt1b.py", "remove configs/mpt1b.py"),
    ("--n_params=1e9 --convention=megatron", "needs a model"),
])  # fmt: skip
def test_bad_input_is_one_clear_line(flags, message):
    assert re.search(message, refusal(flops.main, flags.split()))
