"""model.py: equal to transformers' MPT, to plain tensor code for all else, and to itself cached."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from attention import alibi_slopes
from config import MPTConfig
from evaluation.label_scores import score_labels
from loss import IGNORE
from model import MPT, init_weights, initial_weight, new_norm
from program import UserError

SMALL = MPTConfig(d_model=48, n_heads=6, n_layers=2, max_seq_len=40, vocab_size=97)
SEPARATOR = 96  # the id that ends a document
LIKE_TRANSFORMERS = dict(alibi=True, no_bias=True)  # the only MPT that transformers gets right


def build(cfg, seed=0, dtype=torch.double, scramble=False):
    """A model with MPT's initial weights. scramble moves norms from 1 and biases from 0, too."""
    model = MPT(cfg)
    init_weights(model, seed)
    if scramble:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    return model.to(dtype)


def tokens(cfg, batch=2, length=None, seed=0):
    """Random ids, (batch, length)."""
    shape = (batch, length or cfg.max_seq_len)
    return torch.randint(0, cfg.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def id_of(settings):
    """Settings as a test id."""
    return "-".join(f"{key}={value}" for key, value in settings.items()) or "default"


def relative_error(found, exact):
    """The largest difference, over the largest exact value."""
    return ((found - exact).abs().max() / exact.abs().max()).item()


# --- against transformers


@pytest.mark.parametrize(
    "dtype, limit", [(torch.double, 2e-6), (torch.float32, 1e-5)], ids=["fp64", "fp32"]
)
@pytest.mark.parametrize(
    "heads, width, layers, length", [(4, 64, 2, 33), (7, 56, 3, 17), (4, 32, 1, 1)]
)
def test_logits_loss_and_gradients_equal_transformers(heads, width, layers, length, dtype, limit):
    """The limit is 2e-6 in fp64, because transformers' softmax is fp32 even there."""
    hf = pytest.importorskip("transformers")
    cfg = replace(SMALL, d_model=width, n_heads=heads, n_layers=layers, **LIKE_TRANSFORMERS)
    ours = build(cfg, dtype=dtype, scramble=True)
    sizes = dict(d_model=width, n_heads=heads, n_layers=layers, max_seq_len=40, vocab_size=97)
    theirs = hf.MptForCausalLM(hf.MptConfig(**sizes)).to(dtype)
    theirs.load_state_dict({**ours.state_dict(), "lm_head.weight": ours.transformer.wte.weight})

    ids = tokens(cfg, 3, length + 1)
    inputs, labels = ids[:, :-1], ids[:, 1:].clone()
    labels[0, : length // 2] = IGNORE
    logits = theirs(inputs).logits
    their_loss = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    their_loss.backward()
    loss = ours(inputs, labels=labels)
    loss.backward()
    assert relative_error(ours(inputs), logits) < limit
    assert relative_error(loss, their_loss) < limit
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        # A single token attends only to itself: q and k have no gradient.
        if gradients[name].abs().max() > 1e-4 or length > 1:
            assert relative_error(p.grad, gradients[name]) < limit, name


# --- against plain tensor code: what transformers ignores


def norm(x, w, name, cfg):
    """LayerNorm or RMSNorm. `w`: all weights by name."""
    if cfg.norm_type.endswith("rmsnorm"):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w[f"{name}.weight"]
    mean = x.mean(-1, keepdim=True)
    variance = x.var(-1, unbiased=False, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5) * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)


def linear(x, w, name):
    """A linear layer, with its bias if there is one."""
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def turned(x, theta):
    """RoPE with complex numbers: pair m at position t times exp(i * t * theta^(-2 m / D))."""
    T, D = x.shape[-2:]
    pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    angles = torch.arange(T)[:, None] * theta ** (-2 * torch.arange(D // 2) / D)
    pairs = pairs * torch.polar(torch.ones(()).double(), angles.double())
    return torch.cat([pairs.real, pairs.imag], -1)


def other_documents(ids):
    """(B, T, T): whether i and j < i are in different documents, which end with SEPARATOR."""
    B, T = ids.shape
    hidden = torch.zeros(B, T, T, dtype=torch.bool)
    for b in range(B):
        for i in range(T):
            for j in range(i):
                hidden[b, i, j] = any(ids[b, m] == SEPARATOR for m in range(j, i))
    return hidden


def capped(x, cap):
    """Between -cap and cap; None: as it is."""
    return cap * torch.tanh(x / cap) if cap else x


def one_head(q, k, v, h, ids, cfg):
    """Causal attention of head h: q, k, v (B, T, D) -> (B, T, D)."""
    T, D = q.shape[-2:]
    i = torch.arange(T)[:, None]
    j = torch.arange(T)
    if cfg.rope:
        q, k = turned(q, cfg.rope_theta), turned(k, cfg.rope_theta)
    scores = q @ k.transpose(1, 2) * (cfg.softmax_scale or 1 / math.sqrt(D))
    scores = capped(scores, cfg.attn_logit_softcapping)
    if cfg.alibi:
        slope = alibi_slopes(cfg.n_heads, cfg.alibi_bias_max)[h].double()
        scores = scores - slope * (i - j)
    if cfg.attn_uses_sequence_id:
        scores = scores.masked_fill(other_documents(ids), -torch.inf)
    if cfg.sliding_window_size != -1:
        scores = scores.masked_fill(i - j > cfg.sliding_window_size, -torch.inf)
    return scores.masked_fill(j > i, -torch.inf).softmax(-1) @ v


def attended(x, w, block, ids, cfg):
    """The attention of one block, with its norm and output projection."""
    D = cfg.d_model // cfg.n_heads
    n_key_heads = cfg.kv_n_heads or cfg.n_heads
    qkv = linear(norm(x, w, f"{block}.norm_1", cfg), w, f"{block}.attn.Wqkv")
    if cfg.clip_qkv:
        low, high = torch.tensor(-cfg.clip_qkv), torch.tensor(cfg.clip_qkv)
        qkv = torch.minimum(torch.maximum(qkv, low), high)
    # All q, all k, all v: heads are not interleaved.
    q, k, v = qkv.split([cfg.d_model, n_key_heads * D, n_key_heads * D], dim=-1)
    if cfg.qk_ln:
        q = norm(q, w, f"{block}.attn.q_ln", cfg)
        k = norm(k, w, f"{block}.attn.k_ln", cfg)
    outputs = []
    for h in range(cfg.n_heads):
        key_head = h * n_key_heads // cfg.n_heads  # neighbouring heads share keys and values
        of_key = slice(key_head * D, key_head * D + D)
        q_h, k_h, v_h = q[..., h * D : h * D + D], k[..., of_key], v[..., of_key]
        if cfg.qk_gn:
            q_h = norm(q_h, w, f"{block}.attn.q_ln", cfg)
            k_h = norm(k_h, w, f"{block}.attn.k_ln", cfg)
        outputs.append(one_head(q_h, k_h, v_h, h, ids, cfg))
    return linear(torch.cat(outputs, -1), w, f"{block}.attn.out_proj")


ACTIVATIONS = {
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu": lambda x: torch.maximum(x, torch.zeros(())),
}


def fed(x, w, block, cfg):
    """The feed-forward of one block, with its norm."""
    act = ACTIVATIONS[cfg.ffn_act_fn]
    x = norm(x, w, f"{block}.norm_2", cfg)
    hidden = linear(x, w, f"{block}.ffn.up_proj")
    if cfg.ffn_type == "mptglu":
        hidden = act(linear(x, w, f"{block}.ffn.gate_proj")) * hidden
    else:
        hidden = act(hidden)
    return linear(hidden, w, f"{block}.ffn.down_proj")


def by_hand(w, ids, cfg):
    """MPT's logits from a dictionary of weights, in plain tensor code."""
    x = w["transformer.wte.weight"][ids]
    if cfg.learned_pos_emb and not cfg.alibi and not cfg.rope:
        x = x + w["transformer.wpe.weight"][: ids.shape[1]]
    learned = cfg.embedding_fraction  # this part of the embedding has a gradient
    x = learned * x + (1 - learned) * x.detach()
    for n in range(cfg.n_layers):
        block = f"transformer.blocks.{n}"
        x = x + attended(x, w, block, ids, cfg)
        x = x + fed(x, w, block, cfg)
    x = norm(x, w, "transformer.norm_f", cfg)
    logits = x @ w["transformer.wte.weight" if cfg.tie_word_embeddings else "lm_head.weight"].T
    scale = {"inv_sqrt_d_model": cfg.d_model**-0.5, None: 1}.get(cfg.logit_scale, cfg.logit_scale)
    return capped(logits * scale, cfg.final_logit_softcapping)


LLAMA_LIKE = dict(
    rope=True,
    kv_n_heads=2,
    no_bias=True,
    norm_type="low_precision_rmsnorm",
    ffn_type="mptglu",
    ffn_act_fn="silu",
    expansion_ratio=2.5,
    tie_word_embeddings=False,
)
VARIANTS = [
    dict(),  # learned positions, biases
    dict(no_bias=True),
    dict(learned_pos_emb=False),
    dict(alibi=True),
    dict(alibi=True, alibi_bias_max=16),
    dict(clip_qkv=0.5),
    dict(qk_ln=True),
    dict(qk_ln=True, no_bias=True, clip_qkv=0.5, kv_n_heads=2),
    dict(kv_n_heads=1),
    dict(kv_n_heads=3, alibi=True),
    dict(softmax_scale=0.05),
    dict(logit_scale=0.3),
    dict(logit_scale="inv_sqrt_d_model", tie_word_embeddings=False),
    dict(expansion_ratio=2.5),
    dict(tie_word_embeddings=False),
    dict(attn_impl="sdpa", alibi=True),
    dict(norm_type="layernorm"),
    dict(rope=True),
    dict(rope=True, rope_theta=500.0, qk_ln=True, kv_n_heads=2),
    dict(attn_uses_sequence_id=True),
    dict(attn_uses_sequence_id=True, alibi=True),
    dict(attn_uses_sequence_id=True, rope=True, attn_impl="sdpa"),
    dict(attn_uses_sequence_id=True, alibi=True, attn_impl="sdpa", kv_n_heads=2),
    LLAMA_LIKE,
    dict(norm_type="rmsnorm"),
    dict(norm_type="rmsnorm", qk_ln=True, kv_n_heads=2),
    dict(ffn_type="mptglu"),
    dict(ffn_type="mptglu", ffn_act_fn="relu", no_bias=True),
    dict(ffn_act_fn="silu"),
    dict(ffn_act_fn="relu"),
    dict(qk_gn=True),
    dict(qk_gn=True, norm_type="rmsnorm", rope=True, kv_n_heads=2),
    dict(sliding_window_size=0, learned_pos_emb=False),
    dict(sliding_window_size=8, attn_impl="reference"),
    dict(sliding_window_size=8, alibi=True, kv_n_heads=3),
    dict(sliding_window_size=5, alibi=True, attn_uses_sequence_id=True),
    dict(sliding_window_size=5, alibi=True, attn_impl="sdpa"),
    dict(sliding_window_size=5, attn_uses_sequence_id=True, attn_impl="sdpa"),
    dict(sliding_window_size=100, rope=True),
    dict(attn_logit_softcapping=0.3),
    dict(attn_logit_softcapping=0.3, alibi=True, kv_n_heads=2, attn_impl="reference"),
    dict(attn_logit_softcapping=0.3, sliding_window_size=6, attn_uses_sequence_id=True),
    dict(final_logit_softcapping=0.4),
    dict(final_logit_softcapping=0.4, logit_scale=0.3, tie_word_embeddings=False),
    dict(embedding_fraction=0.3),
    dict(embedding_fraction=0.3, alibi=True, tie_word_embeddings=False),
    LLAMA_LIKE
    | dict(
        qk_gn=True,
        sliding_window_size=6,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=0.7,
        embedding_fraction=0.5,
        attn_uses_sequence_id=True,
        logit_scale="inv_sqrt_d_model",
    ),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=id_of)
def test_logits_loss_and_gradients_equal_plain_tensor_code(variant):
    cfg = replace(SMALL, **variant)
    model = build(cfg, scramble=True)
    model.separator = SEPARATOR
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.state_dict().items()}
    ids = tokens(cfg, 2, 21)
    ids[0, [0, 4, 5]] = ids[1, 12] = SEPARATOR
    logits = by_hand(weights, ids[:, :-1], cfg)
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    loss.backward()
    in_fp64 = cfg.attn_impl != "sdpa" and not cfg.rope  # ALiBi columns and angles are in fp32
    limit = 1e-10 if in_fp64 else 1e-6
    assert relative_error(model(ids[:, :-1]), logits) < limit
    ours = model(ids[:, :-1], labels=ids[:, 1:])
    ours.backward()
    assert relative_error(ours, loss) < limit
    atol = 10 * limit * loss.item()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, weights[name].grad, rtol=0, atol=atol, msg=name)


# --- initial weights


def test_standard_deviations_by_the_rule():
    sizes = dict(d_model=96, n_layers=3, expansion_ratio=2)
    cfg = replace(SMALL, **sizes, tie_word_embeddings=False, ffn_type="mptglu", qk_gn=True)
    embedding = std_of_d_model = math.sqrt(2 / 96)
    residual = 1 / math.sqrt(2 * 3)
    rule = {"wte": embedding, "wpe": embedding, "lm_head": std_of_d_model}
    rule |= dict.fromkeys(["Wqkv", "gate_proj", "up_proj"], std_of_d_model)
    rule |= {"out_proj": std_of_d_model * residual, "down_proj": math.sqrt(2 / 192) * residual}
    kinds = set()
    for name, p in build(cfg).named_parameters():
        if name.endswith("bias"):
            assert p.eq(0).all(), name
        elif "norm" in name or "_ln" in name:
            assert p.eq(1).all(), name
        else:
            kind = next(kind for kind in rule if kind in name)
            kinds.add(kind)
            n = p.numel()
            assert p.std().item() == pytest.approx(rule[kind], rel=4 / math.sqrt(2 * n)), name
            assert abs(p.mean().item()) < 4 * rule[kind] / math.sqrt(n), name
    assert kinds == set(rule)


def weights(seed=0, **options):
    """The initial weights of a small model, by name."""
    return build(replace(SMALL, **options), seed).state_dict()


def test_initial_weights_are_a_function_of_the_seed_and_the_name_alone():
    wte, wqkv = "transformer.wte.weight", "transformer.blocks.{}.attn.Wqkv.weight"
    first = weights()
    assert all(torch.equal(p, first[name]) for name, p in weights().items())
    assert not torch.equal(first[wte], weights(seed=1)[wte])
    assert not torch.equal(first[wqkv.format(0)], first[wqkv.format(1)])

    fewer = weights(n_layers=1, no_bias=True, alibi=True)  # fewer parameters around these two
    assert torch.equal(fewer[wte], first[wte])
    assert torch.equal(fewer[wqkv.format(0)], first[wqkv.format(0)])

    up = "transformer.blocks.1.ffn.up_proj.weight"
    drawn_alone = initial_weight(up, (192, 48), SMALL, 0)
    assert torch.equal(drawn_alone.double(), first[up])


def test_initial_weights_do_not_touch_the_global_generator():
    torch.manual_seed(6)
    state = torch.get_rng_state()
    initial_weight("transformer.wte.weight", (97, 48), SMALL, 0)
    assert torch.equal(state, torch.get_rng_state())


PINNED = torch.tensor([0.3672002, -0.0299759, 0.0405481, -1.1094326])


def test_initial_weights_stay_the_same_numbers_from_version_to_version():
    """Another generator, or another seeding of it, would silently change every run."""
    found = initial_weight("transformer.wte.weight", (4, 8), MPTConfig(n_layers=2), seed=1337)
    torch.testing.assert_close(found[0, :4], PINNED, rtol=1e-5, atol=1e-6)


def test_initial_loss_is_a_little_over_log_v():
    """Initial logits are N(0, 2), so the loss is log V + 2 / 2."""
    cfg = replace(SMALL, d_model=128, n_heads=4, vocab_size=1000, max_seq_len=128)
    ids, labels = tokens(cfg, 8), tokens(cfg, 8, seed=1)
    with torch.no_grad():
        loss = build(cfg, dtype=torch.float32)(ids, labels=labels).item() / labels.numel()
    assert loss == pytest.approx(math.log(1000) + 1, abs=0.15)


# --- what a token may see, and decoding


@pytest.mark.parametrize("impl", ["reference", "blocks", "sdpa"])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(alibi=True, qk_ln=True),
        dict(rope=True, kv_n_heads=2),
        dict(alibi=True, sliding_window_size=4),
        LLAMA_LIKE | dict(sliding_window_size=7, qk_gn=True, final_logit_softcapping=0.7),
    ],
    ids=id_of,
)
@torch.no_grad()
def test_texts_of_different_lengths_share_a_cache(options, impl):
    """With left padding, each text gives its own logits, whatever ids are in the padding.

    Other kinds of models: serving/test_decoder.py.
    """
    cfg = replace(SMALL, attn_impl=impl, **options)
    model = build(cfg, dtype=torch.float32, scramble=True)
    texts = [tokens(cfg, 1, n, seed=n)[0] for n in (13, 20, 5)]
    alone = [model(text[None])[0, -6:] for text in texts]
    pad = torch.tensor([20 - len(text) for text in texts])
    for filler in (0, 50):
        rows = torch.stack([F.pad(text, (20 - len(text), 0), value=filler) for text in texts])
        cache = model.new_cache(3, 30, torch.float32, pad)
        for keys_or_values in (cache.k, cache.v):
            keys_or_values.fill_(torch.nan)  # positions that are not filled yet must not be read
        prompt, *single_tokens = rows.split([16, 1, 1, 1, 1], dim=1)
        prompt_logits = model(prompt, cache=cache)[:, -1:]
        token_logits = [model(token, cache=cache) for token in single_tokens]
        found = torch.cat([prompt_logits, *token_logits], dim=1)
        for row, logits in zip(found, alone, strict=True):
            n = min(5, len(logits))
            assert relative_error(row[-n:], logits[-n:]) < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(logit_scale=0.3, tie_word_embeddings=False),
        dict(logit_scale=0.3, final_logit_softcapping=0.7),
    ],
)
def test_scores_of_labels(options):
    model = build(replace(SMALL, **options), scramble=True)
    ids = tokens(SMALL, 3, 20)
    labels = tokens(SMALL, 3, 20, seed=1)
    logits = model(ids)
    labels[0] = logits[0].argmax(-1)
    labels[1, :7] = labels[2] = IGNORE
    log_probs, greedy = model(ids, labels=labels, head=score_labels)
    all_log_probs = logits.log_softmax(-1)
    exact = all_log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    assert relative_error(log_probs, exact * (labels != IGNORE)) < 1e-12
    assert not log_probs.requires_grad
    assert greedy[0].all() and not greedy[1, :7].any() and not greedy[2].any()
    assert greedy[1, 7:].tolist() == (labels[1, 7:] == logits[1, 7:].argmax(-1)).tolist()
    none_counts = torch.full_like(labels, IGNORE)
    assert model(ids, labels=none_counts, head=score_labels)[0].abs().sum() == 0


def test_longer_than_trained():
    """ALiBi continues; learned positions end, with and without a cache."""
    ids = tokens(SMALL, length=50)
    alibi = replace(SMALL, alibi=True)
    model = build(alibi)
    assert relative_error(model(ids), by_hand(model.state_dict(), ids, alibi)) < 1e-10
    with pytest.raises(UserError, match="41 tokens, but learned positions end at max_seq_len 40"):
        build(SMALL)(ids[:, :41])
    cache = model.new_cache(2, 50, torch.double)
    with torch.no_grad():
        build(SMALL)(ids[:, :40], cache=cache)
        with pytest.raises(UserError, match="41 tokens"):
            build(SMALL)(ids[:, 40:41], cache=cache)


# --- training details


@pytest.mark.parametrize("which", ["emb_pdrop", "attn_pdrop", "resid_pdrop"])
def test_each_dropout_acts_in_training_only(which):
    model, plain = build(replace(SMALL, **{which: 0.5})), build(SMALL)
    ids = tokens(SMALL)
    assert torch.equal(model.eval()(ids), plain(ids))
    model.train()
    torch.manual_seed(0)
    first, second = model(ids), model(ids)
    assert relative_error(first, plain(ids)) > 1e-2 and relative_error(first, second) > 1e-2


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_under_autocast(kind):
    """The low-precision norm answers in bf16, so the residual stream stays bf16; the other fp32."""
    low = new_norm(replace(SMALL, norm_type=f"low_precision_{kind}"), 48)
    full = new_norm(replace(SMALL, norm_type=kind), 48)
    x = torch.randn(3, 48)
    assert low(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert {low(x).dtype, low(x.bfloat16()).dtype} == {torch.bfloat16}
        assert {full(x).dtype, full(x.bfloat16()).dtype} == {torch.float32}
        assert relative_error(low(x).float(), full(x)) < 1e-2


@pytest.mark.parametrize("options", VARIANTS[::3])
def test_bf16_autocast_is_close(options):
    model = build(replace(SMALL, **options), dtype=torch.float32)
    model.separator = SEPARATOR
    ids = tokens(SMALL)
    exact = model(ids, labels=ids)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids)
    loss.backward()
    assert loss.dtype == torch.float32
    assert relative_error(loss, exact) < 1e-2
    for p in model.parameters():
        assert p.grad.dtype == torch.float32
        assert p.grad.isfinite().all()
