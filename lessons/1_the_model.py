"""Lesson 1. The model."""

# %% [markdown]
# # Lesson 1. The model
#
# You will build an MPT from tensors alone: no nn.Module, one formula at a time, with the
# shape of every tensor. Halfway you will see ALiBi as a picture. Then the whole model runs
# beside the project's own with the same weights, and both give the same logits. At the
# end you will count the parameters of models up to MPT-7B.
#
# Plan an hour. Open lessons/1_the_model.py beside this page: the terminal shows its words
# and output only, not its code. The textbook is model.py. attention.py and flops.py hold
# the solution of the exercise: read them after your own work. You need to know what a
# matrix product and a softmax are.

# %%
import sys

sys.path += [".", ".."]  # the project: an editor may start cells in the file's folder
SHORT = "--short" in sys.argv  # fewer and smaller runs, for a first look and for the tests

import math

import torch
from matplotlib.figure import Figure

import attention
import flops
import model
import program
from config import MPTConfig
from lessons import pictures

torch.set_grad_enabled(False)  # nothing is trained here

# %% [markdown]
# ## Sizes and weights
#
# The letters of this lesson are those of the project:
#
#     B  rows of a batch          H  heads of attention
#     T  tokens of a row          D  width of one head
#     V  entries of the           d  width of the model (d_model in the code), d = H * D
#        vocabulary               L  layers, also called blocks
#
# All of them differ below, so a shape tells which dimension is which. The tokens are the
# bytes of a text: V = 256. A model is a set of named tensors, and here they all are (block
# 1 is like block 0). It has ALiBi and no biases, as the released MPT-7B does. The weights
# of norms begin as ones; here they are drawn at random from 0.5 to 1.5, so that a norm that
# forgets its weight gives other numbers.

# %%
B, T, H, D, L, V = 3, 10, 4, 6, 2, 256
d = H * D
cfg = MPTConfig(
    d_model=d, n_heads=H, n_layers=L, vocab_size=V, max_seq_len=T, alibi=True, no_bias=True
)
mpt = model.MPT(cfg)
model.init_weights(mpt, seed=0)

weights = mpt.state_dict()  # {name: tensor}; the tensors are those of the model
generator = torch.Generator().manual_seed(0)
for name, tensor in weights.items():
    if "norm" in name:
        tensor.uniform_(0.5, 1.5, generator=generator)

texts = [b"the cat is", b"a dog sees", b"to be seen"]
ids = torch.tensor([list(text) for text in texts])  # (B, T) int64
for name, tensor in weights.items():
    if "blocks.1" not in name:
        print(f"{name:42} {tuple(tensor.shape)}")
print(f"The ids: {tuple(ids.shape)} = (B, T)")
assert ids.shape == (B, T)

# %% [markdown]
# A weight of nn.Linear has the shape (features out, features in), and the layer computes
# x @ weight^T. The feed-forward is 4 d = 96 wide, and Wqkv gives q, k and v together: 3 d.
#
# ## Embedding
#
#     x = wte[ids]                                         (B, T) -> (B, T, d)
#
# Row n of the table wte (word token embedding) is the vector of token n. Looking rows up
# is the same as multiplying one-hot vectors (B, T, V) by the table, without all the zeros.

# %%
wte = weights["transformer.wte.weight"]  # (V, d)
x = wte[ids]  # (B, T, d)
one_hot = torch.nn.functional.one_hot(ids, V).float()  # (B, T, V)
print(f"ids {tuple(ids.shape)} -> x {tuple(x.shape)}")
print(f"one-hot {tuple(one_hot.shape)} @ wte {tuple(wte.shape)}: the same numbers")
assert x.shape == (B, T, d)
assert torch.equal(one_hot @ wte, x)
assert torch.equal(x[0, 0], x[0, 6])  # the two "t" of row 0

# %% [markdown]
# Nothing has told the model yet where a token stands: the same byte has the same vector
# everywhere. MPT's training recipes add a row of a second table here: wpe (word position
# embedding, the learned vector of each position). With ALiBi there is none.
#
# ## Norm
#
#     y = (x - mean) / sqrt(variance + 1e-5) * weight      (B, T, d) -> (B, T, d)
#
# LayerNorm takes mean and variance over the d numbers of one token. No token sees another.
# The real thing: model.py::LayerNorm.


# %%
def layer_norm(x, weight):
    """x (..., d), normalized over its last dimension, times weight (d,)."""
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)  # divided by d, not by d - 1
    return centred / torch.sqrt(variance + 1e-5) * weight


block_0 = "transformer.blocks.0"
normed = layer_norm(x, weights[f"{block_0}.norm_1.weight"])
theirs = mpt.transformer.blocks[0].norm_1(x)
print(f"x {tuple(x.shape)} -> {tuple(normed.shape)}")
print(f"largest difference from model.LayerNorm: {(normed - theirs).abs().max():.1e}")
assert torch.allclose(normed, theirs, atol=1e-5)

# %% [markdown]
# ## Queries, keys, values; heads
#
#     q, k, v = split(norm(x) @ Wqkv^T)                    (B, T, d) -> 3 x (B, T, d)
#     cut each into H heads                                (B, T, d) -> (B, H, T, D)
#
# One large product is faster than three small ones, so MPT keeps Wq, Wk and Wv in one
# matrix: the first d rows give q, the next k, the last v. Head h owns channels h D to (h +
# 1) D. The transpose puts T beside D, so that [b, h] picks one matrix (T, D).


# %%
def queries_keys_values(normed, layer):
    """normed (B, T, d) -> q, k, v of this layer, (B, H, T, D) each."""
    rows, tokens, _ = normed.shape
    n_heads = cfg.n_heads
    qkv = normed @ weights[f"transformer.blocks.{layer}.attn.Wqkv.weight"].T  # (B, T, 3 d)
    q, k, v = qkv.chunk(3, dim=-1)  # (B, T, d) each
    return [y.view(rows, tokens, n_heads, -1).transpose(1, 2) for y in (q, k, v)]


q, k, v = queries_keys_values(normed, layer=0)
Wqkv = weights[f"{block_0}.attn.Wqkv.weight"]  # (3 d, d)
by_hand = normed[1] @ Wqkv[2 * D : 3 * D].T  # row 1, q of head 2: (T, D)
print(f"Wqkv {tuple(Wqkv.shape)}: (B, T, 3 d) = {(B, T, 3 * d)}, cut into q, k, v {(B, T, d)}")
print(f"q, k, v with heads: {tuple(q.shape)} = (B, H, T, D)")
print(f"q[1, 2], from rows {2 * D} to {3 * D - 1} of Wqkv alone: {tuple(by_hand.shape)} = (T, D)")
assert q.shape == k.shape == v.shape == (B, H, T, D)
assert torch.allclose(q[1, 2], by_hand, atol=1e-5)

# %% [markdown]
# ## One query
#
# Query i of a head looks at the keys j <= i, itself included, and never ahead: a model that
# predicts the next token must not see it.
#
#     score_j  = q_i . k_j / sqrt(D) - slope * (i - j)     for j = 0 ... i
#     weight_j = exp(score_j) / (sum of exp(score))        softmax: positive, their sum is 1
#     y_i      = sum of weight_j * v_j                     (D,)
#
# The second term is ALiBi: a key loses `slope` for each token that it lies further back. A
# product of two random vectors of D numbers grows like sqrt(D), hence the division.


# %%
def weights_of_query(q_i, seen_k, slope):
    """How much one query (D,) takes of each key that it sees, (i + 1, D) -> (i + 1,)."""
    distance = torch.arange(len(seen_k) - 1, -1, -1)  # i - j: i, ..., 1, 0
    scores = seen_k @ q_i / math.sqrt(len(q_i)) - slope * distance
    return torch.softmax(scores, dim=0)


print("Row 0 of the batch, head 0, slope 0: what each query (a line) takes of each key, in %")
print(" " * 6 + "".join(f"{chr(byte)!r:>6}" for byte in texts[0]))
for i, byte in enumerate(texts[0]):
    taken = weights_of_query(q[0, 0, i], k[0, 0, : i + 1], slope=0.0)
    print(f"{chr(byte)!r:>6}" + "".join(f"{100 * share:6.0f}" for share in taken))
    assert abs(taken.sum() - 1) < 1e-5

# %% [markdown]
# The triangle is the causal mask. The first query sees one key, so it takes all of it.
#
# ## ALiBi's slopes
#
#     slope of head h = 2^(-8 h / H)                       h = 1 ... H, H a power of two
#
# They fall geometrically: a steep head sees its neighbours, a flat one the whole text. With
# 8 heads they are 1/2, 1/4, ..., 1/256. The 8 is alibi_bias_max in the settings.

# %%
slopes = torch.tensor([2 ** (-8 * h / H) for h in range(1, H + 1)])  # (H,)
print(f"{H} heads: slopes {slopes.tolist()}")
assert torch.allclose(slopes, attention.alibi_slopes(H))

i = T - 1
for head, slope in [("no ALiBi", 0.0), ("steepest", slopes[0]), ("flattest", slopes[-1])]:
    taken = weights_of_query(q[0, 0, i], k[0, 0], slope)
    print(f"{head:8}: the last query takes, in % " + "".join(f"{100 * t:5.0f}" for t in taken))

# %% [markdown]
# ## Any number of heads
#
# MPT-125M has 12 heads, which is no power of two. MPT then takes the slopes of the next
# power of two, 16: first the second, fourth, sixth, ... of them, then the first, third,
# ..., and keeps as many as there are heads. The table has the h of 2^(-8 h / 16) for each
# of 12 heads.

# %%
of_12 = attention.alibi_slopes(12)
exponents = -torch.log2(of_12) * 16 / 8
print("12 heads have h =", ", ".join(f"{h:.0f}" for h in exponents), "of 16")
print(f"missing: {sorted(set(range(1, 17)) - {round(h.item()) for h in exponents})}")
assert torch.equal(of_12[:8], attention.alibi_slopes(8))

# %% [markdown]
# So heads 1 to 8 have the slopes of 8 heads. Head 9 is steeper than head 1 by the square
# root of 2, and so the steepest of all; heads 10 to 12 lie between heads 1-2, 2-3 and 3-4.
#
# ## How far a head sees
#
# If all products q . k were equal, a head with slope s would take exp(-s n) of a key n
# tokens back, relative to the newest one. The mean distance is then 1 / (exp(s) - 1),
# about 1 / s: 255.5 tokens for the flattest of 8 heads, 1.5 for the steepest. An untrained
# model is close to that. Training can change it: with large q and k, a head can overrule
# its slope.
#
# In the picture, left: the 12-head crosses 1 to 8 lie on the circles, 9 to 12 start again
# higher. Right: what each of 12 heads takes from a score; the solid lines are those of 8
# heads, too.

# %%
figure = Figure(figsize=(11, 4.8), layout="constrained")
left, right = figure.subplots(1, 2)
for n_heads, marker in ((8, "o"), (12, "x")):
    look = {"label": f"{n_heads} heads", "color": "black", "fillstyle": "none"}
    left.plot(range(1, n_heads + 1), attention.alibi_slopes(n_heads), marker, markersize=8, **look)
left.set_yscale("log", base=2)
left.set(title="Slope of each head", xlabel="head", ylabel="slope (score per token)")
left.legend()

end = 60  # tokens; each line has the head's number where it leaves the picture
for number, slope in enumerate(of_12.tolist(), 1):
    right.plot([0, end], [0, -slope * end], "--" if number > 8 else "-", color="black", linewidth=1)
    at = min(end, 7.7 / slope)
    right.annotate(str(number), (at, -slope * at), fontsize=8)
right.set(xlim=(0, 66), ylim=(-8, 0.2), xlabel="distance i - j (tokens)")
right.set(ylabel="bias -slope * (i - j)", title="Bias of 12 heads (dashed: 9 to 12)")
for axes in (left, right):
    axes.grid(alpha=0.3)
figure.suptitle("ALiBi: each head lowers the scores of distant keys, at its own rate")
pictures.save(figure, "1-alibi")

# %% [markdown]
# ## All queries, heads and rows
#
# Each query of each head of each row is on its own, so three loops compute them all (the
# code is attention_by_loops in lessons/1_the_model.py). Your exercise is to do the same
# with a few products of whole tensors. Then the heads are put side by side again and mixed
# by one more matrix:
#
#     y = concat(heads) @ out_proj^T                       (B, H, T, D) -> (B, T, d)


# %%
def attention_by_loops(q, k, v, slopes):
    """Causal attention with ALiBi, one query at a time: (B, H, T, D) -> (B, H, T, D)."""
    y = torch.empty_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                taken = weights_of_query(q[b, h, i], k[b, h, : i + 1], slopes[h])
                y[b, h, i] = taken @ v[b, h, : i + 1]  # (i + 1,) @ (i + 1, D)
    return y


def attend(normed, layer, slopes):
    """The attention part of a layer: (B, T, d) -> (B, T, d)."""
    y = attention_by_loops(*queries_keys_values(normed, layer), slopes)  # (B, H, T, D)
    y = y.transpose(1, 2).flatten(2)  # heads side by side: (B, T, H, D) -> (B, T, d)
    return y @ weights[f"transformer.blocks.{layer}.attn.out_proj.weight"].T


y = attention_by_loops(q, k, v, slopes)
print(f"q, k, v {tuple(q.shape)} -> y {tuple(y.shape)} -> {tuple(attend(normed, 0, slopes).shape)}")
for impl in ("reference", "blocks", "sdpa"):  # three ways to the same numbers in attention.py
    out = attention.attention(q, k, v, impl=impl, alibi_slopes=slopes)
    print(f"largest difference from attention.py, {impl:9}: {(y - out).abs().max():.1e}")
    assert torch.allclose(y, out, atol=1e-5)

# %% [markdown]
# Attention is the only place where tokens meet. Everything else treats each one alone.
#
# ## Feed-forward
#
#     ffn(x) = gelu(x @ up_proj^T) @ down_proj^T      (B, T, d) -> (B, T, 4 d) -> (B, T, d)
#     gelu(z) = z * (1 + erf(z / sqrt(2))) / 2             the exact one
#
# GELU is z times the share of a normal distribution that lies below z. Some models use an
# approximation with tanh. MPT does not, and the difference is larger than rounding.


# %%
def gelu(z):
    """z times the probability that a standard normal number is below z."""
    return z * (1 + torch.erf(z / math.sqrt(2))) / 2


def feed_forward(normed, layer):
    """The feed-forward part of a layer: (B, T, d) -> (B, T, d)."""
    ffn = f"transformer.blocks.{layer}.ffn"
    hidden = gelu(normed @ weights[f"{ffn}.up_proj.weight"].T)  # (B, T, 4 d)
    return hidden @ weights[f"{ffn}.down_proj.weight"].T


z = torch.linspace(-5, 5, 1001)
apart = (gelu(z) - torch.nn.functional.gelu(z, approximate="tanh")).abs().max()
print(f"exact GELU and tanh's: up to {apart:.1e} apart; fp32 rounds near 1 by {2**-24:.1e}")
assert torch.allclose(gelu(z), torch.nn.functional.gelu(z), atol=1e-6)
assert apart > 1e-4

# %% [markdown]
# ## The whole model
#
#     x = wte[ids]                                         (B, T, d)
#     x = x + attn(norm_1(x))                              in each layer: what is computed
#     x = x + ffn(norm_2(x))                               is added to the residual stream x
#     logits = norm_f(x) @ wte^T                           (B, T, V)
#
# The output layer is the embedding again ("tied"): the logit of token n is the product of
# the last hidden state with row n of wte. logits[b, t] scores the token that follows token
# t. In the project: model.py::Transformer.forward, Block.forward and MPT.logits.


# %%
def logits_of(ids, slopes=slopes, n_layers=L):
    """Token ids (B, T) -> logits (B, T, V). An MPT."""
    wte = weights["transformer.wte.weight"]
    x = wte[ids]
    for layer in range(n_layers):
        block = f"transformer.blocks.{layer}"
        x = x + attend(layer_norm(x, weights[f"{block}.norm_1.weight"]), layer, slopes)
        x = x + feed_forward(layer_norm(x, weights[f"{block}.norm_2.weight"]), layer)
    x = layer_norm(x, weights["transformer.norm_f.weight"])
    return x @ wte.T


ours = logits_of(ids)
theirs = mpt(ids)
difference = (ours - theirs).abs().max()
print(f"logits {tuple(ours.shape)} = (B, T, V), from {ours.min():.2f} to {ours.max():.2f}")
print(f"largest difference from model.MPT: {difference:.1e}")
assert ours.shape == (B, T, V)
assert difference < 1e-5

# %% [markdown]
# That is all of MPT. What the project's model.py has beyond it: the variants (learned
# positions, biases, fewer key heads, RoPE, dropout), a cache for decoding, and the loss.
#
# ## What causality buys
#
# Change one token: the logits before it stay as they are, bit by bit. So one forward
# trains all T predictions of a row at once. And when a model writes text, the keys and
# values of old tokens never change: they are kept in a cache, and only the new token is
# computed. Its query is the last row of attention: Tq = 1 query sees all Tk keys.

# %%
changed = ids.clone()
changed[:, 6] = ord("?")
moved = (logits_of(changed) - ours).abs().amax(dim=(0, 2))  # (T,)
print("token 6 changed; the logits at each position move by up to")
print("  " + " ".join(f"{m:.2g}" for m in moved))
assert torch.equal(moved[:6], torch.zeros(6))
assert (moved[6:] > 0).all()

cache = mpt.new_cache(B, max_tokens=T, dtype=torch.float32)
mpt(ids[:, : T - 1], cache=cache)
newest = mpt(ids[:, T - 1 :], cache=cache)  # (B, 1, V): one token in
print(f"keys of the cache {tuple(cache.k.shape)} = (L, B, H, T, D)")
print(f"newest token alone {tuple(newest.shape)}: {(newest[:, 0] - ours[:, -1]).abs().max():.1e}")
assert torch.allclose(newest[:, 0], ours[:, -1], atol=1e-5)

# %% [markdown]
# ## What ALiBi buys
#
# Without ALiBi (slopes 0) nothing in the formulas names a position. Swap two early tokens
# and look at the logits of the last one, with one layer and with two.

# %%
swapped = ids.clone()
swapped[:, [1, 4]] = ids[:, [4, 1]]
for n_layers in (1, L):
    for name, used in (("slopes 0", torch.zeros(H)), ("ALiBi", slopes)):
        before, after = (logits_of(row, used, n_layers)[:, -1] for row in (ids, swapped))
        moved = (after - before).abs().max()
        print(f"{n_layers} layer{'s' * (n_layers > 1):1}  {name:8}  moved by {moved:.1e}")
        blind = n_layers == 1 and used.max() == 0
        assert (moved < 1e-5) == blind

# %% [markdown]
# One layer without ALiBi is blind to order: the difference is rounding. Two layers are not,
# though no formula names a position. Question 3 asks why.
#
# ## Counting parameters
#
# A parameter is one number of one weight. Here are those of the small model by part,
# counted from its tensors. The numbers of flops.py, which come from formulas, are the same.
# wte is the word token embedding; wpe, the word position embedding, is empty with ALiBi.

# %%
PARTS = ["wte", "wpe", "Wqkv", "out_proj", "up_proj", "down_proj", "norms", "biases"]


def count_by_part(counted):
    """{part: parameters} of a model, from the shapes of its tensors."""
    found = dict.fromkeys(PARTS, 0)
    for name, tensor in counted.named_parameters():
        layer, kind = name.split(".")[-2:]
        part = "biases" if kind == "bias" else "norms" if "norm" in layer else layer
        found[part] += tensor.numel()
    return found


for part, n in count_by_part(mpt).items():
    print(f"{part:10} {n:>8,}")
    assert flops.params_by_part(cfg)[part] == n, part
print(f"{'all':10} {flops.n_params(cfg):>8,}")

# %% [markdown]
# Now the real sizes, in millions. The last column is MPT-7B as it was released: ALiBi, no
# biases, V = 50,432. The sizes from 125M to 3B are of the same kind, with V = 50,368. "7B
# recipe" is configs/mpt7b.py, MosaicML's training recipe: learned positions and biases.
# Counting needs no memory: on torch's "meta" device a tensor has a shape and no data.

# %%
released = {"alibi": True, "no_bias": True}
columns = {
    "125M": MPTConfig(d_model=768, n_heads=12, n_layers=12, **released),
    "350M": MPTConfig(d_model=1024, n_heads=16, n_layers=24, **released),
    "760M": MPTConfig(d_model=1536, n_heads=12, n_layers=24, **released),
    "1B": MPTConfig(d_model=2048, n_heads=16, n_layers=24, **released),
    "3B": MPTConfig(d_model=2560, n_heads=20, n_layers=32, **released),
    "7B recipe": MPTConfig(d_model=4096, n_heads=32, n_layers=32),
    "MPT-7B": MPTConfig(d_model=4096, n_heads=32, n_layers=32, **released, vocab_size=50432),
}
with torch.device("meta"):
    counts = {name: count_by_part(model.MPT(big)) for name, big in columns.items()}

totals = {name: sum(found.values()) for name, found in counts.items()}
cells = [
    ("d_model", *(f"{big.d_model:,}" for big in columns.values())),
    ("layers", *(big.n_layers for big in columns.values())),
    *((part, *(f"{counts[name][part] / 1e6:,.2f}" for name in columns)) for part in PARTS),
    ("all", *(f"{n / 1e6:,.2f}" for n in totals.values())),
    ("wte is", *(f"{counts[name]['wte'] / n:.1%}" for name, n in totals.items())),
]
print("parameters in millions")
print(program.table(("", *columns), cells))
print(f"\nMPT-7B has {totals['MPT-7B']:,} parameters")
assert totals["MPT-7B"] == 6_649_286_656
assert all(flops.n_params(big) == totals[name] for name, big in columns.items())

# %% [markdown]
# The embedding is a third of the smallest model and 3 % of MPT-7B. Almost all the rest is
# four matrices a layer. Which formula gives them, and the norms, exactly? That is the last
# part of the exercise. `python flops.py configs/mpt7b.py` prints this table for any model.
#
# ## The exercise
#
# `python -m lessons check 1` puts lessons/mine/1_the_model.py there for you. Write in it the
# slopes of any number of heads, attention of all rows, heads and queries at once, also on a
# cache (Tq < Tk), and the exact number of an MPT's parameters. Loops in attention would be
# right, but slow: try to do without. The checker runs a model.MPT with your functions in it.
#
# ## Three questions
#
# 1. With 8 heads and equal products q . k, how much less weight than the newest key gets
#    one that is 20 tokens back: in the steepest head, and in the flattest?
# 2. From 125M to 7B, the embedding shrinks from 31 % to 3 % of the parameters. Why?
# 3. Without ALiBi, one layer cannot tell the order of earlier tokens. Why can two layers?
#
# `python -m lessons 1 --answers` has the answers.
#
# ## What to read next
#
# - Vaswani et al., Attention Is All You Need, 2017 (arXiv 1706.03762)
# - Press, Smith, Lewis, Train Short, Test Long: Attention with Linear Biases Enables Input
#   Length Extrapolation, 2021 (arXiv 2108.12409)
# - Press, Wolf, Using the Output Embedding to Improve Language Models, 2016 (arXiv
#   1608.05859)
# - Xiong et al., On Layer Normalization in the Transformer Architecture, 2020 (arXiv
#   2002.04745): why the norm stands before attention and feed-forward
# - Haviv et al., Transformer Language Models without Positional Encodings Still Learn
#   Positional Information, 2022 (arXiv 2203.16634): on question 3
#
# In the project: model.py from `class Attention` down, attention.py and flops.py.
# fast/alibi_columns.py writes -slope * (i - j) as slope * j: a softmax
# does not change if all scores of a query grow by the same number, slope * i.

# Scroll on for the answers.

# %% [markdown]
# ## Answers
#
# 1. The steepest slope is 1/2: exp(-20 / 2) is 1/22,026. The flattest is 1/256: exp(-20 /
#    256) is 0.92. In the same layer one head sees a few words and another the whole page.
# 2. The embedding has V d parameters: it grows with d. The layers have about 12 d^2 each:
#    they grow with d^2 and with L. From 125M to 7B, d grows 5.3 times and L 2.7 times, so
#    the layers grow 76 times and the embedding 5.3 times.
# 3. In the first layer, the token at position t gets a mean over tokens 0 to t. That does
#    not depend on their order, but it depends on which tokens come before t and which
#    after. If tokens 1 and 4 are swapped, then the hidden states of tokens 1 to 4 differ
#    after layer one, and layer two reads them. The causal mask is what tells positions
#    apart.
