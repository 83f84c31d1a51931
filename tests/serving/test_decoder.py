"""serving/decoder.py: the cache, batches of different lengths, packed weights, where texts end."""

import copy

import pytest
import torch

from config import MPTConfig
from model import MPT, KVCache, init_weights
from serving.decoder import Decoder, PackedLinear, can_pack, generate

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = dict(d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=24)
KINDS = {
    "alibi": {"alibi": True},
    "learned": {},
    "rope": {"rope": True},
    "gqa": {"alibi": True, "kv_n_heads": 2},
    "rope, multi-query": {"rope": True, "kv_n_heads": 1},
    "scaled, untied": {
        "alibi": True,
        "logit_scale": "inv_sqrt_d_model",
        "tie_word_embeddings": False,
    },
}
every_kind = pytest.mark.parametrize("more", KINDS.values(), ids=KINDS)


def model(**more):
    mpt = MPT(MPTConfig(**TINY | more)).eval()
    init_weights(mpt, seed=0)
    return mpt


def decoder(mpt, vocab_size=64, dtype=None):
    return Decoder(
        copy.deepcopy(mpt), vocab_size, dtype
    )  # it packs the weights of the model that it takes


@every_kind
def test_cached_logits_equal_those_of_the_whole_sequence(more):
    mpt, ids = model(**more), torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))
    decode, cache = decoder(mpt), KVCache.empty(mpt.cfg, 2, 20, "cpu", torch.float32)
    with torch.inference_mode():
        whole = mpt(ids)
        for begin, end in [(0, 7), (7, 8), (8, 13), *((i, i + 1) for i in range(13, 20))]:
            torch.testing.assert_close(
                decode(ids[:, begin:end], cache), whole[:, end - 1], atol=1e-5, rtol=0
            )


@every_kind
def test_batched_logits_equal_one_at_a_time(more):
    mpt, lengths = model(**more), (3, 11, 7)
    rows = [
        torch.randint(64, (n + 5,), generator=torch.Generator().manual_seed(n)) for n in lengths
    ]
    pad = torch.tensor([11 - n for n in lengths])
    padded = torch.stack(
        [torch.nn.functional.pad(row, (p, 0)) for row, p in zip(rows, pad.tolist(), strict=True)]
    )
    decode, cache = decoder(mpt), KVCache.empty(mpt.cfg, 3, 16, "cpu", torch.float32, pad=pad)
    with torch.inference_mode():
        for begin, end in [(0, 11), *((i, i + 1) for i in range(11, 16))]:
            together = decode(padded[:, begin:end], cache)
            for row, p, logits in zip(rows, pad.tolist(), together, strict=True):
                torch.testing.assert_close(
                    logits, mpt(row[None, : end - p])[0, -1], atol=1e-5, rtol=0
                )


@every_kind
def test_greedy_sampling_equals_the_argmax_of_the_whole_sequence(more):
    mpt = model(**more)
    ids = torch.arange(6).view(2, 3)
    for token in list(generate(decoder(mpt), ids, 12, temperature=0)):
        with torch.no_grad():
            assert torch.equal(token, mpt(ids)[:, -1].argmax(-1))
        ids = torch.cat([ids, token[:, None]], dim=1)
    assert ids.shape == (2, 15)


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float64, 1e-12)]
)
def test_packed_weights_are_the_same_weights(dtype, tolerance):
    mpt = model(alibi=True).to(dtype)
    decode, ids = decoder(mpt, vocab_size=61), torch.arange(10)[None]
    packed = sum(
        isinstance(module, PackedLinear) for module in [decode.head, *decode.model.modules()]
    )
    assert packed == (4 * 2 + 1 if can_pack(torch.device("cpu"), dtype) else 0)
    with torch.inference_mode():
        logits = decode(ids, KVCache.empty(mpt.cfg, 1, 10, "cpu", dtype))
        torch.testing.assert_close(
            logits, mpt(ids)[:, -1, :61].float(), atol=tolerance, rtol=tolerance
        )


def test_learned_positions_end_and_the_others_go_on():
    ids = torch.zeros(1, 20, dtype=torch.long)
    assert len(list(generate(decoder(model()), ids, 100))) == 24 - 20 + 1
    for more in ({"alibi": True}, {"rope": True}):
        assert len(list(generate(decoder(model(**more)), ids, 100))) == 100


def test_padding_rows_of_the_vocabulary_are_never_drawn():
    tokens = generate(
        decoder(model(alibi=True), 5), torch.zeros(64, 1, dtype=torch.long), 8, temperature=5.0
    )
    assert torch.stack(list(tokens)).max() < 5
