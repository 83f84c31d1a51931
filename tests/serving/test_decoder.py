"""serving/decoder.py: the cache, left padding, packed weights, the end of learned positions."""

import copy

import pytest
import torch
import torch.nn.functional as F

from config import MPTConfig
from model import MPT, init_weights
from serving.decoder import Decoder, PackedLinear, can_pack, generate, pick_dtype

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = dict(d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=24)
LLAMA_LIKE = {
    "rope": True,
    "kv_n_heads": 2,
    "qk_gn": True,
    "sliding_window_size": 5,
    "attn_logit_softcapping": 0.5,
    "ffn_type": "mptglu",
    "ffn_act_fn": "silu",
    "norm_type": "low_precision_rmsnorm",
    "no_bias": True,
    "tie_word_embeddings": False,
    "final_logit_softcapping": 0.7,
}
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
    "llama-like": LLAMA_LIKE,
    "window": {"alibi": True, "sliding_window_size": 5, "ffn_act_fn": "relu"},
    "no positions": {"learned_pos_emb": False, "sliding_window_size": 0, "qk_ln": True},
}
every_kind = pytest.mark.parametrize("more", KINDS.values(), ids=KINDS)


def model(**more):
    """A tiny model of random weights."""
    mpt = MPT(MPTConfig(**TINY | more)).eval()
    init_weights(mpt, seed=0)
    return mpt


def decoder(mpt, vocab_size=64, dtype=None):
    """A decoder of a copy of the model, since it packs the weights of the model that it gets."""
    return Decoder(copy.deepcopy(mpt), vocab_size, dtype)


def random_ids(shape, seed):
    """Ids of the tiny model."""
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(seed))


def one_by_one(begin, end):
    """(begin, begin + 1), (begin + 1, begin + 2), ... up to end."""
    return [(i, i + 1) for i in range(begin, end)]


@every_kind
def test_cached_logits_equal_those_of_the_whole_sequence(more):
    mpt = model(**more)
    ids = random_ids((2, 20), seed=0)
    decode = decoder(mpt)
    cache = mpt.new_cache(2, 20, torch.float32)
    with torch.inference_mode():
        expected = mpt(ids)
        for begin, end in [(0, 7), (7, 8), (8, 13), *one_by_one(13, 20)]:
            logits = decode(ids[:, begin:end], cache)
            torch.testing.assert_close(logits, expected[:, end - 1], atol=1e-5, rtol=0)


@every_kind
def test_batched_logits_equal_one_at_a_time(more):
    mpt = model(**more)
    lengths = (3, 11, 7)
    rows = [random_ids((n + 5,), seed=n) for n in lengths]
    pads = [11 - n for n in lengths]
    padded = torch.stack([F.pad(row, (pad, 0)) for row, pad in zip(rows, pads, strict=True)])
    decode = decoder(mpt)
    cache = mpt.new_cache(3, 16, torch.float32, pad=torch.tensor(pads))
    with torch.inference_mode():
        for begin, end in [(0, 11), *one_by_one(11, 16)]:
            together = decode(padded[:, begin:end], cache)
            for row, pad, logits in zip(rows, pads, together, strict=True):
                alone = mpt(row[None, : end - pad])[0, -1]
                torch.testing.assert_close(logits, alone, atol=1e-5, rtol=0)


def test_greedy_sampling_equals_the_argmax_of_the_whole_sequence():
    mpt = model(alibi=True)
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
    decode = decoder(mpt, vocab_size=61)
    layers = [decode.output_layer, *decode.model.modules()]
    packed = sum(isinstance(layer, PackedLinear) for layer in layers)
    assert packed == (4 * 2 + 1 if can_pack(torch.device("cpu"), dtype) else 0)

    ids = torch.arange(10)[None]
    with torch.inference_mode():
        logits = decode(ids, mpt.new_cache(1, 10, dtype))
        expected = mpt(ids)[:, -1, :61].float()
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance)


def test_learned_positions_end_and_the_others_go_on():
    ids = torch.zeros(1, 20, dtype=torch.long)
    assert len(list(generate(decoder(model()), ids, 100))) == 24 - 20 + 1
    for more in ({"alibi": True}, {"rope": True}):
        assert len(list(generate(decoder(model(**more)), ids, 100))) == 100


def test_padding_rows_of_the_vocabulary_are_never_drawn():
    ids = torch.zeros(64, 1, dtype=torch.long)
    tokens = generate(decoder(model(alibi=True), vocab_size=5), ids, 8, temperature=5.0)
    assert torch.stack(list(tokens)).max() < 5


@pytest.mark.parametrize("has_bf16, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bf16_where_the_device_computes_in_it(has_bf16, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    for device in ("cpu", "cuda"):
        assert pick_dtype("auto", torch.device(device)) == dtype
        assert pick_dtype("fp32", torch.device(device)) == torch.float32
        assert pick_dtype("bf16", torch.device(device)) == torch.bfloat16
    assert pick_dtype("auto", torch.device("mps")) == torch.bfloat16


@pytest.mark.gpu
@every_kind
def test_a_gpu_writes_the_tokens_of_the_cpu(more):
    """Greedy, with padded prompts, in fp32."""
    ids, pad = random_ids((3, 9), seed=1), torch.tensor([0, 2, 5])
    wanted = list(generate(decoder(model(**more)), ids, 8, pad=pad, temperature=0))
    on_device = decoder(model(**more).to("cuda"))
    found = generate(on_device, ids.to("cuda"), 8, pad=pad.to("cuda"), temperature=0)
    assert torch.equal(torch.stack(list(found)).cpu(), torch.stack(wanted))
