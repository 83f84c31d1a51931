"""flops.py against published figures: MPT's sizes, LLM Foundry's throughput tables, the MI250 posts, PaLM, GPT-3."""

import json
from pathlib import Path

import pytest

import config
import devices
import flops
from config import MPTConfig, UserError

CONFIGS = Path(__file__).parent.parent / "configs"

SIZES = {  # d_model, heads, layers, parameters with learned positions and biases, with ALiBi and no bias
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
    d, heads, layers, *_ = SIZES[size]
    return MPTConfig(d_model=d, n_heads=heads, n_layers=layers, **more)


@pytest.mark.parametrize("size", SIZES)
def test_parameters_of_the_nine_sizes(size):
    assert flops.n_params(mpt(size)) == SIZES[size][3]
    assert flops.n_params(mpt(size, alibi=True, no_bias=True)) == SIZES[size][4]


def test_parameters_with_grouped_heads_qk_norms_and_an_untied_head():
    cfg = MPTConfig(
        d_model=8, n_heads=4, n_layers=2, expansion_ratio=3, max_seq_len=16, vocab_size=32,
        kv_n_heads=2, qk_ln=True, tie_word_embeddings=False,
    )  # fmt: skip
    assert flops.params_by_part(cfg) == {
        "wte": 32 * 8,
        "wpe": 16 * 8,
        "Wqkv": 2 * 8 * (8 + 4 + 4),
        "out_proj": 2 * 8 * 8,
        "up_proj": 2 * 8 * 24,
        "down_proj": 2 * 24 * 8,
        "norms": 2 * (8 + 8 + 8 + 4) + 8,  # norm_1, norm_2, q_ln, k_ln; norm_f
        "biases": 2 * (16 + 8 + 24 + 8 + 8 + 8 + 8 + 4) + 8,
        "lm_head": 32 * 8,
    }
    assert flops.flops_by_term(cfg)["weights"] == 6 * (flops.n_params(cfg) - 32 * 8)  # the input embedding is a lookup
    cfg.no_bias = True
    assert flops.params_by_part(cfg)["biases"] == 0


# LLM Foundry's throughput tables (scripts/train/benchmarking): size, sequence, peak TFLOP/s, checkpointing,
# TFLOP/s a GPU, MFU %, tokens/s a GPU. All on 8 GPUs.
PUBLISHED = [
    ("30b", 8192, 989.5, "full", 296, 29.92, 1384),
    ("13b", 2048, 989.5, "none", 393, 39.79, 4792),
    ("7b", 65536, 989.5, "full", 282, 28.59, 1956),
    ("7b", 2048, 989.5, "none", 459, 46.44, 10643),
    ("3b", 512, 989.5, "none", 458, 46.32, 27965),
    ("1b", 2048, 989.5, "none", 413, 41.82, 45455),
    ("760m", 32768, 989.5, "none", 315, 31.84, 16291),
    ("30b", 2048, 312, "full", 172, 55.3, 916),
    ("13b", 32768, 312, "full", 161, 51.69, 1016),
    ("7b", 2048, 312, "none", 200, 64.23, 4641),
    ("3b", 16384, 312, "none", 178, 57.13, 5529),
    ("1b", 1024, 312, "none", 187, 60.15, 22112),
    ("350m", 65536, 312, "none", 164, 52.7, 7524),
    ("125m", 2048, 312, "none", 139, 44.79, 142830),
    ("125m", 512, 312, "none", 125, 40.26, 156735),
]


@pytest.mark.parametrize("size, seq, peak, checkpointing, tflops, mfu, speed", PUBLISHED)
def test_mfu_equals_the_published_one(size, seq, peak, checkpointing, tflops, mfu, speed):
    cfg = mpt(size, max_seq_len=seq)
    ours, more = (flops.mfu(cfg, 8 * tokens, 8, peak * 1e12) for tokens in (speed, speed + 1))
    assert 100 * ours - 0.005 <= mfu <= 100 * more + 0.005  # tokens/s are cut to whole ones, MFU is rounded
    assert 100 * ours == pytest.approx(mfu, abs=0.045)
    assert ours * peak == pytest.approx(tflops, abs=1)  # the tables cut or round these to whole numbers
    recomputed = 4 / 3 if checkpointing == "full" else 1
    assert flops.hfu(cfg, 8 * speed, 8, peak * 1e12, checkpointing) == pytest.approx(recomputed * ours)


def test_palm_540b():
    """PaLM, appendix B: 238.3e3 tokens/s on 6144 TPU v4 of 275 TFLOP/s: 46.2 % with attention, 45.7 % without."""
    shape = MPTConfig(d_model=48 * 256, n_heads=48, n_layers=118, max_seq_len=2048)  # all heads together: 12288 wide
    rate = 238.3e3 / (6144 * 275e12)
    assert 6 * 540.35e9 * rate == pytest.approx(0.457, abs=5e-4)
    assert (6 * 540.35e9 + flops.flops_by_term(shape)["attention"]) * rate == pytest.approx(0.462, abs=5e-4)


def test_gpt3_3_14e23_flops():
    """GPT-3: 300e9 tokens, 6 N D. The table in its appendix D says 3.14e23, for 174.6e9 parameters."""
    gpt3 = MPTConfig(d_model=12288, n_heads=96, n_layers=96, max_seq_len=2048, vocab_size=50257)
    assert flops.n_params(gpt3) == pytest.approx(174.6e9, rel=1e-3)
    assert flops.flops_by_term(gpt3)["weights"] * 300e9 == pytest.approx(3.14e23, rel=2e-3)


def test_mi250_posts():
    """166 TFLOP/s a card are 45.9 % of its 362, and the same share of one of its two torch devices (GCDs)."""
    gcd = devices.by_name("mi250").bf16_tflops
    assert 166 / (2 * gcd) == pytest.approx(0.459, abs=1e-3)
    cfg = mpt("7b")
    speed = 166e12 / flops.train_flops_per_token(cfg)  # tokens/s a card
    assert flops.mfu(cfg, speed, 2, gcd * 1e12) == pytest.approx(0.459, abs=1e-3)


def test_an_unknown_peak_gives_no_utilization():
    assert flops.mfu(mpt("1b"), 1000, 1, None) is None
    assert flops.hfu(mpt("1b"), 1000, 1, None, "full") is None


def shown(capsys, *argv) -> str:
    flops.main(list(argv))
    return capsys.readouterr().out


def test_the_table_names_its_convention(capsys):
    out = shown(capsys, str(CONFIGS / "mpt7b.py"), "--device=mi250", "--tokens_per_second=1922", "--devices=1")
    assert "6,658,859,008" in out and "45.83%" in out and "61.11%" in out and "181.05" in out
    assert all("LLM Foundry" in line for line in out.splitlines() if "MFU" in line or "HFU" in line)


def test_json_has_the_same_figures(capsys):
    flags = ("--peak_tflops=312", "--tokens_per_second=164104", "--devices=8", "--json")
    figures = json.loads(shown(capsys, str(CONFIGS / "mpt1b.py"), *flags))
    assert figures["n_params"] == sum(figures["params"].values()) == 1_315_950_592
    assert figures["mfu"] == figures["hfu"] == pytest.approx(0.5986, abs=1e-4)
    assert "LLM Foundry" in figures["convention"]


def test_training_settings_of_a_config_file_mean_this_machine(capsys, tmp_path):
    """`device` and `peak_tflops` are a training run's keys too."""
    (tmp_path / "c.py").write_text('device = "cpu"\npeak_tflops = "auto"\nd_model = 64\nn_heads = 2\n')
    assert "MFU n/a" in shown(capsys, str(tmp_path / "c.py"))
    assert "MFU 100 %" in shown(capsys, str(tmp_path / "c.py"), "--device=mi250")
    assert "MFU 100 %" in shown(capsys, str(tmp_path / "c.py"), "--peak_tflops=measure")


def test_a_device_without_a_bf16_peak_and_one_that_does_not_exist(capsys):
    assert "no bf16 peak known for V100" in shown(capsys, "--device=v100")
    with pytest.raises(UserError, match="did you mean .*mi250"):
        flops.main(["--device=mi205"])
    with pytest.raises(UserError, match="did you mean 'n_layers'"):
        config.load(["--n_layer=3"], MPTConfig, flops.FlopsArgs)
