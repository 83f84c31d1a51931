"""Each attention of the tables, a fork's too: one function, or a variant that decodes as it trains.

tests/test_walks.py runs this file in a project with another one.
"""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch

import attention
import config
import flops
from config import MPTConfig, TrainConfig
from lifecycle import resume
from model import MPT, init_weights
from program import UserError
from weights import hf

pytestmark = pytest.mark.usefixtures("one_thread")
ON_ANY_DEVICE = [name for name in attention.IMPLEMENTATIONS if name not in ("flex", "triton")]
SIZES = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64, "max_seq_len": 24}


def test_a_name_that_is_in_no_table_is_refused():
    """Before it is used, in export, too, and where it is."""
    cfg = MPTConfig(**SIZES, attn_impl="nowhere")
    message = "attn_impl=nowhere is neither in IMPLEMENTATIONS nor in VARIANTS"
    with pytest.raises(UserError, match=message):
        MPT(cfg)(torch.zeros(1, 3).long())
    with pytest.raises(UserError, match="attn_impl=nowhere"):
        hf.config_to(cfg)
    with pytest.raises(UserError, match="add it to ATTENDED_KEYS"):
        flops.flops_of(cfg)


def test_each_is_declared_as_what_it_computes():
    kernels = set(get_args(config.Kernel))
    assert {"auto", *attention.IMPLEMENTATIONS} == kernels
    assert {*attention.VARIANTS} == set(get_args(config.AttentionImpl)) - kernels


def test_the_standard_ones_stay_exchangeable():
    meta = {**vars(MPTConfig()), **vars(TrainConfig()), "data_fingerprint": "f00"}
    for saved in get_args(config.Kernel):
        for resumed in ("auto", *attention.IMPLEMENTATIONS):
            cfg = MPTConfig(attn_impl=resumed)
            saved_meta = meta | {"attn_impl": saved}
            resume.check_same(Path("x"), saved_meta, cfg, TrainConfig(), "f00")
            assert "attn_impl" not in json.dumps(hf.config_to(cfg))


@pytest.mark.parametrize("name", ON_ANY_DEVICE)
def test_every_implementation_computes_one_function(name):
    """A variant in the wrong table would fail here. flex and triton have their own tests."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 40, 16) for heads in (4, 2, 2))
    slopes = attention.alibi_slopes(4)
    found = attention.attention(q, k, v, impl=name, alibi_slopes=slopes)
    reference = attention.attention(q, k, v, impl="reference", alibi_slopes=slopes)
    torch.testing.assert_close(found, reference)


@pytest.mark.parametrize("kv_n_heads", [4, 2])
@pytest.mark.parametrize("name", ["auto", *attention.VARIANTS])
@torch.inference_mode()
def test_every_variant_decodes_as_it_trains_and_keeps_documents_apart(name, kv_n_heads):
    """Row 0 of a cache has two documents, row 1 padding and then the second document."""
    model = MPT(MPTConfig(**SIZES, alibi=True, kv_n_heads=kv_n_heads, attn_impl=name)).eval()
    init_weights(model, seed=0)
    first, second = torch.randint(64, (2, 1, 12), generator=torch.Generator().manual_seed(0))
    packed = torch.cat([first, second], 1)
    rows = torch.cat([packed, torch.cat([first * 0, second], 1)])
    cache = model.new_cache(2, 24, torch.float32, pad=torch.tensor([0, 12]))
    both = model(packed)[0]  # (24, V)
    alone = model(second)[0]  # (12, V)
    for piece in rows.split([15] + [1] * 9, dim=1):
        logits = model(piece, cache=cache)[:, -1]
        last = cache.length - 1
        torch.testing.assert_close(logits[0], both[last], atol=1e-5, rtol=0)
        torch.testing.assert_close(logits[1], alone[last - 12], atol=1e-5, rtol=0)

    documents = torch.tensor([[0] * 12 + [1] * 12])
    hidden = model.transformer(packed, sequence_ids=documents)
    torch.testing.assert_close(hidden[:, 12:], model.transformer(second), atol=1e-5, rtol=0)
    if name in attention.VARIANTS:  # another function
        model.cfg.attn_impl = "reference"
        assert (model(packed)[0] - both).abs().max() > 1e-2
