"""The formulas of serving/speed.py: published figures, arithmetic by hand, and a real cache."""

import dataclasses

import pytest
import torch

from config import MPTConfig
from model import MPT
from serving import speed

SMALL = MPTConfig(d_model=64, n_heads=4, n_layers=3, vocab_size=512, max_seq_len=128, kv_n_heads=2)


def test_bytes_of_keys_and_values_are_the_published_ones():
    """OPT-13B: Kwon et al. (2309.06180), section 3. Llama 2 70B keeps an eighth of its heads."""
    opt_13b = MPTConfig(d_model=5120, n_heads=40, n_layers=40)
    assert speed.kv_bytes_per_token(opt_13b) == 800 * 1024
    llama2_70b = MPTConfig(d_model=8192, n_heads=64, n_layers=80, kv_n_heads=8)
    assert speed.kv_bytes_per_token(llama2_70b) == 2 * 80 * 8 * 128 * 2


@pytest.mark.parametrize("dtype, width", [(torch.bfloat16, 2), (torch.float32, 4)])
def test_the_cache_has_the_bytes_that_are_estimated(dtype, width):
    with torch.device("meta"):
        cache = MPT(SMALL).new_cache(5, 7, dtype)
    assert cache.k.nbytes + cache.v.nbytes == 5 * 7 * speed.kv_bytes_per_token(SMALL, width)


@pytest.mark.parametrize("tied, alibi", [(True, True), (True, False), (False, False)])
def test_every_weight_is_read_but_what_is_looked_up(tied, alibi):
    m = dataclasses.replace(SMALL, tie_word_embeddings=tied, alibi=alibi)
    with torch.device("meta"):
        weights = dict(MPT(m).named_parameters())
    looked_up = ["transformer.wpe.weight"] + ([] if tied else ["transformer.wte.weight"])
    n_read = sum(p.numel() for name, p in weights.items() if name not in looked_up)
    assert speed.weight_bytes(m) == 2 * n_read


def test_milliseconds_by_hand():
    """MPT-7B: 6,658,859,008 parameters, of which 2,048 x 4,096 are positions."""
    m = MPTConfig(d_model=4096, n_heads=32, n_layers=32)
    weights = 2 * (6_658_859_008 - 2048 * 4096)
    kv_per_token = 2 * 32 * 4096 * 2
    ms = (weights + 8 * 1000 * kv_per_token) / 2039e9 * 1e3
    assert speed.ms_per_token(m, 8, 1000, 2039) == pytest.approx(ms)
    assert speed.ms_per_token(m, 8, 1000, 2039, width=4) == pytest.approx(2 * ms)
