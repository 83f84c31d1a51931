"""planning/conventions.py against published figures: PaLM, GPT-3, Megatron-LM, Chinchilla, LoRA."""

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flops import SIZES, mpt, shapes

import devices
import flops
from config import MPTConfig, UserError
from planning import conventions
from planning.conventions import ConventionArgs
from planning.matmuls import TrainingSetup

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIGS = ROOT / "configs"

ONE_MORE = dict.fromkeys(["n_layers", "max_seq_len", "vocab_size", "expansion_ratio"], 1)


@given(shapes(), st.sampled_from(["none", "full"]), st.sampled_from([0, 2]))
@settings(max_examples=50, deadline=None)
def test_every_size_makes_every_count_larger(cfg, mode, rank):
    setup = TrainingSetup(activation_checkpointing=mode, lora_rank=rank)
    by_heads = {"d_model": cfg.n_heads, "kv_n_heads": cfg.n_heads - cfg.kv_n_heads}
    for name, added in (ONE_MORE | by_heads).items():
        larger = replace(cfg, **{name: getattr(cfg, name) + added})
        if added == 0:  # as many key heads as there are already
            continue
        no_table = name == "max_seq_len" and cfg.alibi  # no table of positions grows
        assert flops.n_params(larger) > flops.n_params(cfg) or no_table
        for convention in conventions.FORMULAS:
            before = conventions.flops_per_token(cfg, convention, setup)
            after = conventions.flops_per_token(larger, convention, setup)
            assert after > before > 0 or (no_table and convention == "6nd"), (convention, name)


def test_palm_540b():
    """PaLM, appendix B: 238.3e3 tokens/s on 6144 TPU v4 of 275 TFLOP/s.

    46.2 % with attention, 45.7 % without.
    """
    all_heads = 48 * 256  # 12288 wide
    shape = MPTConfig(d_model=all_heads, n_heads=48, n_layers=118, max_seq_len=2048)
    rate = 238.3e3 / (6144 * devices.by_name("tpu v4").bf16_tflops * 1e12)
    weights = 6 * 540.35e9
    attention = conventions.flops_by_term(shape, TrainingSetup())["attention"]
    assert f"{weights * rate:.1%}" == "45.7%"
    assert f"{(weights + attention) * rate:.1%}" == "46.2%"


def test_gpt3_3_14e23_flops():
    """GPT-3: 300e9 tokens, 6 N D. Its appendix D says 3.14e23, for 174.6e9 parameters."""
    gpt3 = MPTConfig(d_model=12288, n_heads=96, n_layers=96, max_seq_len=2048, vocab_size=50257)
    assert f"{flops.n_params(gpt3) / 1e9:.1f}" == "174.6"
    assert f"{conventions.flops_per_token(gpt3, '6nd') * 300e9:.2e}" == "3.14e+23"


@pytest.mark.parametrize("size", ["125m", "7b", "70b"])
def test_megatrons_formulas(size):
    """arXiv 2205.05198, app. A; arXiv 2104.04473, eq. 3, with all blocks computed again."""
    h, _, n, *_ = SIZES[size]
    s = 2048
    V = 50368
    cfg = mpt(size)
    once = 72 * n * h**2 * (1 + s / (6 * h) + V / (12 * n * h))
    assert conventions.flops_per_token(cfg, "megatron") == pytest.approx(once)
    again = 96 * n * h**2 * (1 + s / (6 * h) + V / (16 * n * h))
    assert conventions.flops_per_token(cfg, "megatron_recompute") == pytest.approx(again)
    full = TrainingSetup(activation_checkpointing="full")
    assert conventions.by_matmuls(cfg, full) == pytest.approx(again)


# arXiv 2203.15556, table A4: layers, d_model, heads, FLOPs by appendix F / 6 N D.
# N has relative positions, d^2 a layer, and a vocabulary of 32,000.
CHINCHILLA = [
    (10, 640, 10, 1.03),
    (20, 1024, 16, 1.10),
    (24, 1280, 10, 1.08),
    (26, 1792, 14, 1.04),
    (28, 2048, 16, 1.03),
    (40, 3584, 28, 0.99),
]


@pytest.mark.parametrize("layers, d, heads, ratio", CHINCHILLA)
def test_chinchillas_ratios_to_6nd(layers, d, heads, ratio):
    """The table's ratios do not count the embedding and the logits, which appendix F lists."""
    cfg = MPTConfig(d_model=d, n_heads=heads, n_layers=layers, max_seq_len=2048, vocab_size=32000)
    embedding_and_logits = 3 * 2 * (2 * 32000 * d)
    blocks = conventions.chinchilla(cfg, TrainingSetup()) - embedding_and_logits
    n = 12 * layers * d**2 + 32000 * d + layers * d**2
    assert blocks / (6 * n) == pytest.approx(ratio, abs=0.0055)  # printed with two decimals


def test_chinchilla_counts_what_appendix_f_lists():
    cfg = MPTConfig(
        d_model=8, n_heads=2, n_layers=3, max_seq_len=5, vocab_size=7, expansion_ratio=2
    )
    S, d, V, heads, ffw = 5, 8, 7, 2, 16
    qkv = 2 * 3 * S * d * d
    scores = 2 * S * S * d
    softmax = 3 * heads * S * S
    values = 2 * S * S * d
    projection = 2 * S * d * d
    mlp = 2 * S * (d * ffw + d * ffw)
    block = qkv + scores + softmax + values + projection + mlp
    embedding = logits = 2 * S * V * d
    forward = embedding + 3 * block + logits
    assert S * conventions.flops_per_token(cfg, "chinchilla") == 3 * forward


def test_the_lora_thread():
    """405e9 frozen parameters, 16 x 64 tokens in 30 s on 8 devices of 1.3e15 FLOP/s.

    That was published as 0.80 %, which is 6 N; frozen weights cost 4 N: 0.53 %.
    """
    rate = 16 * 64 / 30 / (8 * 1.3e15)
    assert f"{6 * 405e9 * rate:.2%} {4 * 405e9 * rate:.2%}" == "0.80% 0.53%"


def test_conventions_of_one_model():
    cfg = mpt("7b")
    n = SIZES["7b"][3]
    LdS = 32 * 4096 * 2048
    counts = {name: conventions.flops_per_token(cfg, name) for name in conventions.FORMULAS}
    assert counts["foundry"] == flops.train_flops_per_token(cfg) == 6 * n + 12 * LdS
    assert counts["palm"] == counts["foundry"]
    assert counts["causal"] == 6 * n + 6 * LdS
    assert counts["lingua"] == 6 * n + 7 * LdS
    assert counts["flopcounter"] == 6 * n + 14 * LdS
    assert counts["6nd"] == 6 * n


def test_frozen_weights_and_adapters():
    """Frozen weights have no gradient: 4 N. Attention costs as much as ever.

    An adapter of rank r on a linear layer of i x o has r (i + o) parameters.
    """
    cfg = mpt("1b")
    n = SIZES["1b"][3]
    d = 2048
    attention = 12 * 24 * d * 2048

    def count(setup: TrainingSetup) -> float:
        return conventions.flops_per_token(cfg, "foundry", setup)

    assert count(TrainingSetup(frozen=True)) == 4 * n + attention
    lora = TrainingSetup(lora_rank=16, lora_targets="Wqkv,down_proj")
    n_lora = 24 * 16 * (d + 3 * d + 4 * d + d)
    assert count(lora) == 4 * n + attention + 6 * n_lora
    full = replace(lora, activation_checkpointing="full")
    assert count(full) - count(lora) == 2 * n + attention / 3 + 2 * n_lora

    top = replace(lora, lora_last_blocks=6)  # 18 of 24 blocks: forward only
    weights = 4 * n - 2 * 18 * 12 * d**2
    share_of_attention = 6 / 24 + 18 / 24 / 3
    assert count(top) == weights + attention * share_of_attention + 6 * n_lora / 4


def shown(capsys, *argv) -> str:
    conventions.main(list(argv))
    return capsys.readouterr().out


def test_the_table_shows_the_chosen_convention_first(capsys):
    flags = (str(CONFIGS / "mpt7b.py"), "--device=mi250", "--tokens_per_second=1922", "--devices=1")
    out = shown(capsys, *flags)
    assert "6,658,859,008" in out and "181.05" in out and "matmuls reach 72%" in out
    rows = out.split("convention")[1].splitlines()[1:]
    assert len(rows) > 9
    assert rows[0].split()[:5] == ["foundry", "43.174", "82.98", "45.83%", "61.11%"]
    assert rows[0].endswith("LLM Foundry: 6 N + 12 L d S")

    out = shown(capsys, *flags, "--convention=causal").split("convention")[1]
    assert out.splitlines()[1].split()[0] == "causal"
    assert out.count("causal") == 1
    assert max(map(len, out.splitlines())) <= 130


def test_json_has_the_same_figures(capsys):
    flags = ("--peak_tflops=312", "--tokens_per_second=164104", "--devices=8", "--json")
    figures = json.loads(shown(capsys, str(CONFIGS / "mpt1b.py"), *flags))
    assert figures["n_params"] == sum(figures["params"].values()) == 1_315_950_592
    assert figures["mfu"] == figures["hfu"] == pytest.approx(0.5986, abs=1e-4)
    rows = figures["conventions"]
    assert "LLM Foundry" in figures["convention"] and set(rows) == set(conventions.FORMULAS)
    assert rows["megatron"]["flops_per_token"] == conventions.by_matmuls(mpt("1b"), TrainingSetup())


def test_the_share_of_what_matmuls_reach(capsys):
    flags = ("--device=a100", "--tokens_per_second=20513", "--json")
    figures = json.loads(shown(capsys, str(CONFIGS / "mpt1b.py"), *flags))
    assert figures["reachable"] == 0.87
    assert figures["mfu_of_reachable"] == pytest.approx(figures["mfu"] / 0.87)
    figures = json.loads(shown(capsys, *flags, "--peak_tflops=100"))  # the user's own peak
    assert figures["peak_tflops"] == 100
    assert figures["mfu_of_reachable"] is None


def test_without_a_model(capsys):
    """The run of `test_the_lora_thread`, by flags."""
    flags = "--n_params=405e9 --tokens_per_second=34.1 --devices=8 --device=mi300x".split()
    flags.append("--peak_tflops=1300")
    out = shown(capsys, *flags)
    assert "0.80%" in out and "6 N, no attention" in out
    out = shown(capsys, *flags, "--frozen")
    assert "0.53%" in out and "4 N, no attention" in out

    out = shown(capsys, *flags, "--frozen", "--activation_checkpointing=full", "--json")
    full = json.loads(out)
    assert full["hfu"] == pytest.approx(full["mfu"] * 6 / 4)


def test_adapters_on_the_command_line(capsys):
    flags = (str(CONFIGS / "mpt125m.py"), "--lora_rank=8", "--lora_targets=Wqkv, out_proj")
    out = shown(capsys, *flags, "--device=h100")
    assert "adapters" in out and "weight gradient" in out
    assert "4 N + 6 N_lora + 12 L d S" in out
    assert "chinchilla" not in out and "72 L" not in out


def test_megatrons_closed_form_is_shown_for_ungrouped_heads_only(capsys):
    assert "72 L" in shown(capsys)
    assert "72 L" not in shown(capsys, "--kv_n_heads=4")


@pytest.mark.parametrize("flags, message", [
    ("--device=mi205", "did you mean .*mi250"),
    ("--device=mi250-card", "2 torch devices: say mi250"),
    ("--n_layer=3", "did you mean 'n_layers'"),
    ("--convention=megatorn", "did you mean megatron"),
    ("--convention=xyz", "did you mean foundry or palm"),
    ("--convention=chinchilla --frozen", "take --convention=foundry"),
    ("--lora_targets=Wqkw --lora_rank=4", "did you mean 'Wqkv'"),
    ("--lora_rank=-1", "lora_rank must be from 0 to 65,536"),
    ("--lora_rank=2 --lora_last_blocks=25", "lora_last_blocks 25 is more than n_layers 24"),
    ("--devices=0", "devices must be from 1 to 1,000,000"),
    ("--tokens_per_second=-5", "tokens_per_second must be from 1e-06 to 1,0.*, not -5"),
    ("--tokens_per_second=1e300", "tokens_per_second must be from 1e-06 to 1,0.*, not 1e.300"),
    ("--tokens_per_second=inf", "tokens_per_second in the command line is inf, expected a number"),
    ("--tokens_per_second=nan", "tokens_per_second"),
    ("--peak_tflops=0", "peak_tflops must be from 0.001 to 1,000,000"),
    ("--n_params=0", "n_params must be from 1 to"),
    ("--n_params=-405e9", "n_params must be from 1 to"),
    ("--n_params=1.5", "expected a whole number"),
    ("--n_params=1e9 --vocab_size=64", "remove it or --vocab_size=64"),
    ("--n_params=1e9 --d_model=64", "12 L d S, need --n_layers=... --max_seq_len=...$"),
    ("--n_params=1e9 --n_layers=-1", "n_layers must be from 1 to 10,000, not -1"),
    ("--n_params=1e9 --n_layers=2 --head_dim=8 --max_seq_len=9", "need --n_heads=...$"),
    ("--n_params=1e9 --convention=lingua", "needs --n_layers, --d_model and --max_seq_len"),
    ("--n_params=1e9 configs/mpt1b.py", "remove it or configs/mpt1b.py"),
    ("--n_params=1e9 --lora_rank=2", "conventions --n_params=1e9 --frozen$"),
    ("--n_params=1e9 --recompute_every=2", "remove it or --recompute_every=2"),
    ("--n_params=1e9 --convention=megatron", "needs a model"),
    ("--d_model=-8", "d_model must be from 1 to 1,048,576, not -8"),
    ("--recompute_every=0", "recompute_every must be from 1 to 10,000"),
    ("--attention=half", "expected one of: full, causal, flash"),
])  # fmt: skip
def test_bad_input_is_one_clear_line(flags, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=message) as error:
        conventions.main(flags.split())
    assert "\n" not in str(error.value)


def test_the_answer_comes_without_torch():
    """Importing torch would be most of the time of a single question."""
    code = (
        "import sys; from planning import conventions; "
        "conventions.main(['configs/mpt7b.py', '--device=mi250', '--tokens_per_second=1922']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "45.83%" in done.stdout, done.stderr


def test_an_untied_input_embedding_is_a_lookup():
    cfg = MPTConfig(d_model=8, n_heads=4, n_layers=2, vocab_size=32, tie_word_embeddings=False)
    assert conventions.flops_by_term(cfg, TrainingSetup())["weights"] == 6 * (
        flops.n_params(cfg) - 32 * 8
    )


@given(shapes(), st.sampled_from(["none", "selective", "full"]), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_foundry_and_causal_are_those_of_flops(cfg, mode, every):
    setup = TrainingSetup(activation_checkpointing=mode, recompute_every=every)
    for name in flops.FORMULAS:
        with_recomputed = flops.hardware_flops_per_token(cfg, mode, every, name)
        assert conventions.flops_per_token(cfg, name, setup) == with_recomputed
        assert conventions.flops_per_token(cfg, name) == flops.train_flops_per_token(cfg, name)


def test_flops_names_this_program_for_every_flag_that_it_does_not_have():
    of_conventions = {field.name for field in fields(TrainingSetup) + fields(ConventionArgs)}
    of_flops = {field.name for field in fields(flops.Recomputation) + fields(flops.FlopsArgs)}
    assert set(flops.CONVENTION_FLAGS) == of_conventions - of_flops
