"""Lesson 3. Many devices."""

# %% [markdown]
# # Lesson 3. Many devices
#
# A model that is too large or too slow for one device is trained by many. On two real ranks
# you will see the collectives, FULL_SHARD by hand, the ZeRO stages, tensor and pipeline
# parallelism. Then all of it is counted for MPT-7B on 64 devices.
#
# Plan 75 minutes. The textbook is parallel.py (`parallelize`, and the table at its top), then
# tensor_parallel.py and pipeline.py. You need lesson 2, or to know what a gradient is.

# %%
import sys

sys.path += [".", ".."]  # the project: an editor may start cells in the file's folder
SHORT = "--short" in sys.argv  # fewer and smaller runs, for a first look and for the tests

import inspect
from dataclasses import replace

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

import flops
import model
import pipeline
import program
from config import MPTConfig, TrainConfig
from lessons import pictures, two_ranks
from planning import memory

# %% [markdown]
# ## 1. Two ranks, three collectives
#
# A rank is a process with one device of its own. It has its own memory: no rank can read a
# tensor of another one. So they call collectives, functions that all ranks call at the same
# time. Here are two ranks, joined by gloo, which is PyTorch's backend for CPUs. (On GPUs it
# is NCCL or RCCL.) What they do stands in lessons/two_ranks.py, since a process is started
# from a file, not from a cell.

# %%
ranks = two_ranks.start()
cells = []
for rank, found in enumerate(ranks(two_ranks.collectives)):
    cells += [(rank, name, x.tolist(), y.tolist()) for name, (x, y) in found.items()]
    whole = [11.0, 22.0, 33.0, 44.0]  # the sum of [1, 2, 3, 4] and ten times that
    assert found["all-gather"][1].tolist() == [1, 2, 11, 12]
    assert found["reduce-scatter"][1].tolist() == whole[2 * rank : 2 * rank + 2]
    assert found["all-reduce"][1].tolist() == whole
print(program.table(("rank", "collective", "before", "after"), cells))

# %% [markdown]
#     all-gather       each rank has a part; afterwards all have all parts, in order
#     reduce-scatter   each rank has a whole tensor; afterwards rank r has part r of the sum
#     all-reduce       each rank has a whole tensor; afterwards all have the sum
#
# An all-reduce is a reduce-scatter followed by an all-gather. Remember that: it explains
# most of this lesson.
#
# What does it cost? In a ring, each of n ranks sends to the next one only. To gather S
# bytes, every part must travel past n - 1 ranks, so each rank sends
#
#     all-gather, reduce-scatter   S (n - 1) / n bytes
#     all-reduce                   2 S (n - 1) / n bytes
#
# That is nearly S, or 2 S, however many ranks there are. Here is such a ring in one
# process, with the numbers counted.


# %%
def ring_reduce_scatter(vectors):
    """vectors: of each rank. Returns (part r of the sum, for each rank r; numbers a rank sent)."""
    n = len(vectors)
    parts = [list(vector.chunk(n)) for vector in vectors]  # parts[rank][part]
    sent = 0
    for hop in range(1, n):
        moving = [parts[rank][(rank - hop) % n] for rank in range(n)]
        for rank in range(n):
            right = (rank + 1) % n
            parts[right][(rank - hop) % n] = parts[right][(rank - hop) % n] + moving[rank]
        sent += len(moving[0])
    return [parts[rank][rank] for rank in range(n)], sent


def ring_all_gather(own_parts):
    """own_parts: of each rank. Returns (the whole, on each rank; numbers a rank sent)."""
    n = len(own_parts)
    parts = [{rank: own_parts[rank]} for rank in range(n)]
    sent = 0
    for hop in range(n - 1):
        for rank in range(n):
            parts[(rank + 1) % n][(rank - hop) % n] = parts[rank][(rank - hop) % n]
        sent += len(own_parts[0])
    return [torch.cat([found[part] for part in range(n)]) for found in parts], sent


S = 960  # numbers
cells = []
for n in (2, 4, 8):
    vectors = [torch.randn(S) for _ in range(n)]
    own_parts, first = ring_reduce_scatter(vectors)
    wholes, second = ring_all_gather(own_parts)
    cells.append((n, first, second, first + second))
    assert all(torch.allclose(whole, sum(vectors), atol=1e-4) for whole in wholes)
    assert first == second == S * (n - 1) // n
print(f"sent by a rank, of {S} numbers")
print(program.table(("ranks", "reduce-scatter", "all-gather", "all-reduce"), cells))

# %% [markdown]
# ## 2. FULL_SHARD of one layer, by hand
#
# Data parallelism: each rank has rows of its own, and computes the gradient of their mean
# loss. The mean of these gradients is the gradient of the whole batch. The plain way
# (DDP) keeps all weights on every rank and all-reduces the gradients: n copies of the
# same numbers.
#
# FULL_SHARD, or ZeRO-3, keeps each number once. A rank has 1/n of the rows of W, makes W
# whole just before it is used, and frees it again:
#
#     forward    W = all-gather(parts);  y = x W^T;          free W
#     backward   W = all-gather(parts);  dx = dy W;          free W
#                dW = dy^T x;  own part of dW = reduce-scatter(dW) / n
#     update     own part of W -= lr * own part of dW
#
# The update needs no communication at all. In lessons/two_ranks.py:

# %%
print(inspect.getsource(two_ranks.ShardedLinear))
print(inspect.getsource(two_ranks.GatheredProduct))

# %% [markdown]
# It trains on two ranks, each with half of the rows, and beside it one process trains a
# plain layer on all rows. (`train_sharded` in the same file is the loop.)

# %%
generator = torch.Generator().manual_seed(0)
W = torch.randn(64, 32, generator=generator) / 32**0.5  # (out, in)
x = torch.randn(16, 32, generator=generator)
target = torch.randn(16, 64, generator=generator)
LR, N_STEPS = 2.0, 4

plain, plain_losses = W.clone().requires_grad_(), []
for _ in range(N_STEPS):
    loss = F.mse_loss(x @ plain.T, target)
    plain_losses.append(loss.item())
    (gradient,) = torch.autograd.grad(loss, plain)
    with torch.no_grad():
        plain -= LR * gradient

results = ranks(two_ranks.train_sharded, W, x, target, LR, N_STEPS)
cells = [("one process", *(f"{value:.6f}" for value in plain_losses))]
for rank, (losses, part, _) in enumerate(results):
    cells.append((f"two ranks, rank {rank}", *(f"{value:.6f}" for value in losses)))
    assert part.shape == (32, 32)
    assert all(abs(a - b) < 1e-6 for a, b in zip(losses, plain_losses, strict=True))
print(program.table(("loss before step", *map(str, range(N_STEPS))), cells))
W_at_end = torch.cat([part for _, part, _ in results])
difference = (W_at_end - plain).abs().max().item()
print(f"largest difference of a weight after {N_STEPS} steps: {difference:.1e}")
assert difference < 1e-6

calls = results[0][2]
print("\nA step of rank 0, of a layer of", W.nbytes, "bytes:")
for kind, _, n_bytes in calls:
    print(f"    {kind:15} {n_bytes:6} bytes in all, {n_bytes // 2} of them sent by this rank")
assert [kind for kind, *_ in calls] == ["all-gather", "all-gather", "reduce-scatter"]

# %% [markdown]
# The hand-made layer and PyTorch's `fully_shard` do the same. What PyTorch adds is speed:
# it gathers all weights of a block in one call, and gathers the next block while this one
# computes. The project's use of it is parallel.py::parallelize: one call for each block.
# Here it trains the same layer on the same rows.

# %%
theirs = ranks(two_ranks.fully_sharded, W, x, target, LR, N_STEPS)
for losses, weight in theirs:
    print("fully_shard:", ", ".join(f"{value.item():.6f}" for value in losses))
    assert torch.allclose(weight, plain, atol=1e-6)

# %% [markdown]
# ## 3. DDP and the ZeRO stages, on a real model
#
# Training with Adam keeps 16 bytes for each parameter: the fp32 weight, its gradient, and
# two moments. The ZeRO stages say how much of that is cut over the n ranks of data
# parallelism. Here is the table of parallel.py with the names of the paper:
#
#     mode            ZeRO   cut over ranks                      whole weights live
#     DDP             0      nothing                             always
#     ZERO1           1      fp32 masters, moments               during a step
#     SHARD_GRAD_OP   2      fp32 masters, moments, gradients    during a microbatch
#     FULL_SHARD      3      the same                            while a block computes
#
# The masters are the weights that Adam updates; the whole weights are gathered from them.
#
# A step may have several microbatches, whose gradients are added up. Then it matters when
# gradients are reduced: DDP and ZERO1 add up whole ones, and reduce once a step. The other
# two reduce after each microbatch, since they must not keep whole gradients.
#
# Measured: a small MPT on two ranks in fp32, four microbatches a step. `measured_step`
# trains one step with fsdp_train.py::train_step under a TorchDispatchMode, which sees each
# operation, and counts collectives.

# %%
SMALL = MPTConfig(
    d_model=64, n_heads=4, n_layers=4, vocab_size=256, max_seq_len=32, alibi=True, no_bias=True
)
RUN = TrainConfig(
    global_batch_size=8, microbatch_size=1, precision="fp32", device="cpu", max_steps=1000
)
LAYOUTS = {  # what differs from RUN; each has four microbatches
    "DDP": {"sharding": "DDP"},
    "ZERO1": {"sharding": "ZERO1"},
    "SHARD_GRAD_OP": {"sharding": "SHARD_GRAD_OP"},
    "FULL_SHARD": {"sharding": "FULL_SHARD"},
    "tp 2": {"tp": 2, "microbatch_size": 2},
    "pp 2": {"pp": 2, "microbatch_size": 2},
}
MODES = list(LAYOUTS)[:4]
rows = torch.randint(256, (8, 33), generator=generator)  # ids, and a last label
measured = {}
for name, change in LAYOUTS.items():
    measured[name] = ranks(two_ranks.measured_step, SMALL, replace(RUN, **change), rows)

mpt = model.MPT(SMALL)
model.init_weights(mpt, RUN.seed)
alone = mpt(rows[:, :-1], labels=rows[:, 1:]).item() / rows[:, 1:].numel()
cells = [("one process", f"{alone:.6f}")]
for name, ((loss, *_), _) in measured.items():
    cells.append((f"two ranks, {name}", f"{loss:.6f}"))
    assert abs(loss - alone) < 1e-5
print(program.table(("", "loss of the first step, nats a token"), cells))

# %% [markdown]
# The layout is not part of the mathematics: all give the same loss, up to rounding. What a
# rank keeps differs. W stands for one fp32 copy of all weights.

# %%
W_bytes = 4 * flops.n_params(SMALL)
MOMENTS = ["between steps", "after a forward", "between microbatches"]
print(f"W = {W_bytes:,} bytes. What a rank keeps, activations left out:")
cells = []
for name in MODES:
    _, _, kept = measured[name][0]
    cells.append((name, *(f"{kept[moment] / W_bytes:.2f} W" for moment in MOMENTS)))
print(program.table(("", *MOMENTS), cells))
print("(DDP through fully_shard; a plain DDP: 1 W less in columns 2 and 3)")

root = (SMALL.vocab_size + 1) * SMALL.d_model * 4 / W_bytes  # embedding and final norm: stay whole
EXPECTED = {
    "DDP": (3, 4, 5),
    "ZERO1": (1.5, 2.5, 3.5),
    "SHARD_GRAD_OP": (1.5, 2.5, 2),
    "FULL_SHARD": (1.5, 1.5 + root, 2),
}
for name, in_W in EXPECTED.items():
    for moment, wanted in zip(MOMENTS, in_W, strict=True):
        assert abs(measured[name][0][2][moment] / W_bytes - wanted) < 0.02, (name, moment)

# %% [markdown]
# Read it line by line. Between steps there are weights and two moments: 3 W whole, or 1.5
# W in halves. ZERO1 gathers 1 W of whole weights in the forward, and keeps that and 1 W
# of whole gradients until the last microbatch. SHARD_GRAD_OP keeps only its half of the
# gradients between microbatches, and gathers the weights again in each. FULL_SHARD frees
# each block after its forward: only the embedding and the final norm stay whole.
# `fully_shard` works on a copy of the weights even if nothing is cut, as for DDP. In bf16
# the gathered copies are half as large.
#
# And what does the saving cost? Calls and bytes of one step. L blocks and the rest, which
# is embedding and final norm, are L + 1 units that are gathered and reduced, each in one
# call; k microbatches; P parameters.


# %%
def collectives_of(m, cfg, ranks, gathered, reduced):
    """[(kind, ranks of its group, calls, bytes in all)] of one rank in a step.

    gathered, reduced: bytes of a number of a weight and of activations, and of a gradient.
    Left out: the few numbers of losses and norms, and the gradient of a tied embedding in pp.
    """
    dp = ranks // (cfg.tp * cfg.pp)
    k = cfg.global_batch_size // dp // cfg.microbatch_size
    L = m.n_layers // cfg.pp
    P = flops.n_params(m) // (cfg.tp * cfg.pp)  # if all parts were equal
    rest = (m.vocab_size + 1) * m.d_model // (cfg.tp * cfg.pp)
    stream = cfg.microbatch_size * m.max_seq_len * m.d_model * gathered  # the hidden states

    found = []
    if dp > 1:
        in_all = {"FULL_SHARD": (k, k), "SHARD_GRAD_OP": (k, k), "ZERO1": (1, 1), "DDP": (0, 1)}
        gathers, reduces = in_all[cfg.sharding]
        again = k if cfg.sharding == "FULL_SHARD" else 0  # the blocks, in the backward
        if gathers:
            n_bytes = (gathers * P + again * (P - rest)) * gathered
            found.append(("all-gather", dp, gathers * (L + 1) + again * L, n_bytes))
        reduction = "all-reduce" if cfg.sharding == "DDP" else "reduce-scatter"
        found.append((reduction, dp, reduces * (L + 1), reduces * P * reduced))
    if cfg.tp > 1:  # four a layer, two of the embedding
        calls = k * (4 * L + 2)
        found.append(("all-reduce", cfg.tp, calls, calls * stream))
    if cfg.pp > 1:  # hidden states or gradients to one neighbour, of a middle stage to two
        calls = k * (1 if cfg.pp == 2 else 2)
        found.append(("send", cfg.pp, calls, calls * stream))
    return found


def predicted(layout):
    """{kind: (calls, bytes)} of a layout of the small model on two ranks."""
    found = collectives_of(SMALL, replace(RUN, **LAYOUTS[layout]), 2, gathered=4, reduced=4)
    return {kind: (calls, n_bytes) for kind, _, calls, n_bytes in found}


def sent_by_a_rank(kind, n_bytes, n):
    """How much of it a rank of n sends, in a ring."""
    if kind == "send":
        return n_bytes
    return n_bytes * (n - 1) / n * (2 if kind == "all-reduce" else 1)


def large_calls(calls):
    """{kind: (calls, bytes)}, without the sums in the loss of tp and pp's tied gradient."""
    found = {}
    for kind, numbers, n_bytes in calls:
        is_row_sum = kind == "all-reduce" and numbers <= 2 * 2 * SMALL.max_seq_len
        is_tied = kind == "send" and numbers == SMALL.vocab_size * SMALL.d_model
        if not (is_row_sum or is_tied):
            before = found.get(kind, (0, 0))
            found[kind] = (before[0] + 1, before[1] + n_bytes)
    return found


KINDS = ("all-gather", "reduce-scatter", "all-reduce")
table = []
for name in MODES:
    counted = large_calls(measured[name][0][1])
    cells = []
    for kind in KINDS:
        n_calls, n_bytes = counted.get(kind, (0, 0))
        cells.append(f"{n_calls} x, {n_bytes / W_bytes:.2f} W" if n_calls else "-")
    sent = sum(sent_by_a_rank(kind, n_bytes, 2) for kind, (_, n_bytes) in counted.items())
    table.append((name, *cells, f"{sent / W_bytes:.2f} W"))
    assert counted == predicted(name), name
print(program.table(("", *KINDS, "sent by a rank"), table))

# %% [markdown]
# The formulas of `collectives_of` give exactly what was counted. DDP and ZERO1 send the
# same: an all-reduce is a reduce-scatter and an all-gather, and ZERO1 puts the update in
# between. So its saving is free. SHARD_GRAD_OP and FULL_SHARD pay in each microbatch.
# FULL_SHARD's second gather, in the backward, makes it 1.5 times as much as
# SHARD_GRAD_OP; here a bit less, since the embedding stays whole between the passes.
#
# ## 4. One matmul pair, cut over two ranks
#
# Data parallelism gathers weights to where the rows are. Tensor parallelism leaves weights
# where they are, and every rank computes its share of each layer for the same rows. A
# feed-forward is two matmuls with a GELU between:
#
#     y = gelu(x W) U
#
# Cut W by columns and U by rows, in two: W = [W_1 W_2], U = [U_1; U_2]. Then
#
#     gelu(x W) = [gelu(x W_1), gelu(x W_2)]            whole columns: no sum is missing
#     y         = gelu(x W_1) U_1 + gelu(x W_2) U_2     one all-reduce
#
# Rank i computes the i-th term. The other way round, W by rows first, x W would be a sum
# of two terms before the GELU, and gelu(a + b) is not gelu(a) + gelu(b): two collectives.
# In the backward it is the same: all ranks have read x, so its gradient is a sum of their
# shares.

# %%
print(inspect.getsource(two_ranks.column_then_row))
d, hidden = 32, 128
W_in = torch.randn(hidden, d, generator=generator) / d**0.5  # (out, in)
U_out = torch.randn(d, hidden, generator=generator) / hidden**0.5
dy = torch.randn(16, d, generator=generator)
whole_x = x.clone().requires_grad_()
y = F.gelu(whole_x @ W_in.T) @ U_out.T
(dx,) = torch.autograd.grad(y, whole_x, dy)

for rank, (y_2, dx_2, shape, calls) in enumerate(
    ranks(two_ranks.column_then_row, x, W_in, U_out, dy)
):
    apart = max((y_2 - y).abs().max().item(), (dx_2 - dx).abs().max().item())
    print(f"rank {rank}: hidden part {shape} of {(16, hidden)}; y and dx differ by {apart:.1e}")
    print(f"        sent: {', '.join(f'{kind} of {n} bytes' for kind, _, n in calls)}")
    assert apart < 1e-5 and shape == (16, hidden // 2)
    assert [kind for kind, *_ in calls] == ["all-reduce", "all-reduce"]

# %% [markdown]
# In attention the same pair is Wqkv, cut by whole heads, and out_proj. So a layer takes
# four all-reduces for each microbatch, two forward and two backward, each of the size of
# the hidden states: B T d numbers. And no computation is there to hide them, since the
# next matmul needs the sum. Two more are of the embedding, which is cut by its rows, the
# vocabulary, and serves twice: a rank looks up only its own ids (forward, a sum of hidden
# states), and computes only their logits (backward, a sum of gradients). Counted on the
# small model:

# %%
counted = large_calls(measured["tp 2"][0][1])
((n_calls, n_bytes),) = counted.values()
stream = 2 * SMALL.max_seq_len * SMALL.d_model * 4
print(f"tp 2: {n_calls} all-reduces of {stream:,} bytes = 4 microbatches x (4 x 4 layers + 2)")
print(f"a rank sends {sent_by_a_rank('all-reduce', n_bytes, 2):,.0f} bytes a step")
assert counted == predicted("tp 2")
assert counted["all-reduce"] == (4 * (4 * 4 + 2), n_bytes) and n_bytes == n_calls * stream

# %% [markdown]
# The real thing is tensor_parallel.py. Keep tp inside of a node, where links are fast.
#
# ## 5. A pipeline
#
# A model is a chain of layers. Cut the chain into four stages, give each to a rank, and
# send a batch through: rank 0 computes the first layers and sends the hidden states to
# rank 1, and so on to rank 3, which computes the loss. The gradient comes back the same
# way. Each rank holds about a quarter of the weights and of Adam's moments, and
# neighbours exchange little: (B, T, d) numbers each way. But three of four ranks always
# wait.
#
# So cut the batch into microbatches that follow each other. Time goes from left to right;
# a digit is the forward of a microbatch, its backward is two letters (`aa` belongs to 0),
# since it takes about twice as long; a dot is a rank that waits.

# %%
for stage, line in enumerate(pipeline.draw_schedule(4, 8)):
    print(f"stage {stage}  {line}")
picture = "".join(pipeline.draw_schedule(4, 8))
dots = picture.count(".") / len(picture)
print(f"dots: {dots:.3f} of the picture; (p - 1) / (n + p - 1) = {pipeline.bubble_share(4, 8):.3f}")
assert abs(dots - pipeline.bubble_share(4, 8)) < 1e-9

# %% [markdown]
# The dots are the bubble: (p - 1) / (n + p - 1) of the step, for p stages and n
# microbatches. `python pipeline.py --stages=4 --microbatches=8` prints all of this for
# any pipeline.
#
# The order is called 1F1B, one forward, one backward. Each line of the picture has three
# phases, and pipeline.py::one_f_one_b has a loop for each:
#
#     warm-up   a forward for each later stage: 012 on stage 0 of 4, none on the last stage
#     steady    a forward and a backward in turns
#     drain     the backwards that are left, as many as the warm-up had forwards
#
# Why not all forwards first, then all backwards? The bubble would be the same. But each
# stage would keep the activations of all n microbatches; here stage s keeps those of p - s.

# %%
print("Activations kept at once by stage 0 of 4, in microbatches; and the bubble:")
cells = []
for n in (1, 4, 8, 32, 128):
    kept_1f1b = pipeline.most_kept(0, 4, n)
    cells.append((n, kept_1f1b, n, f"{pipeline.bubble_share(4, n):.1%}"))
    assert kept_1f1b == min(n, 4)
print(program.table(("microbatches", "1F1B", "forwards first", "bubble"), cells))

counted = large_calls(measured["pp 2"][0][1])
(sent, n_bytes), tied = counted["send"], SMALL.vocab_size * SMALL.d_model * 4
print(f"\npp 2 on the small model: {sent} messages, {n_bytes:,} bytes sent by a rank in a step,")
print(f"and {tied:,} bytes once: the two gradients of the tied embedding, added up")
assert counted == predicted("pp 2")
assert ("send", tied // 4, tied) in measured["pp 2"][0][1]
ranks.stop()

# %% [markdown]
# To see it train (about a minute on two CPU cores):
#
#     torchrun --nproc_per_node 2 fsdp_train.py configs/demo.py --max_steps=150 \
#         --precision=fp32 --run_dir=runs/stages --pp=2
#
# ## 6. MPT-7B on 64 devices
#
# The same formulas, for a model that matters: weights gathered in bf16, gradients reduced
# in fp32, 512 sequences of 2048 tokens a step, one sequence a microbatch, activations
# recomputed. Memory is planning/memory.py's, which the project's tests compare with real
# steps. The last two lines cut the model over 8 ranks, and have 8 data-parallel ranks
# each, with ZERO1. A middle stage sends to both of its neighbours.

# %%
BIG = MPTConfig(
    d_model=4096, n_heads=32, n_layers=32, max_seq_len=2048, vocab_size=50368,
    alibi=True, no_bias=True, attn_impl="sdpa",
)  # fmt: skip
BIG_RUN = replace(
    RUN, global_batch_size=512, device="cuda", precision="bf16", activation_checkpointing="full"
)
BIG_LAYOUTS = {
    **{mode: {"sharding": mode} for mode in MODES},
    "tp 8, ZERO1": {"tp": 8, "sharding": "ZERO1"},
    "pp 8, ZERO1": {"pp": 8, "sharding": "ZERO1"},
}
DEVICES = 64
PARTS = ["weights, fp32", "Adam's moments, fp32", "gradients, fp32", "copies of the weights"]
cells, total = [], {}
for name, change in BIG_LAYOUTS.items():
    cfg = replace(BIG_RUN, **change)
    kept = memory.bytes_by_part(BIG, cfg, DEVICES, "bf16")
    traffic = {}
    for kind, n, _, n_bytes in collectives_of(BIG, cfg, DEVICES, gathered=2, reduced=4):
        traffic[kind] = sent_by_a_rank(kind, n_bytes, n)
    total[name] = sum(traffic.values())
    kinds = ", ".join(f"{kind} {n / 1e9:.1f}" for kind, n in traffic.items())
    in_gb = [f"{kept[part] / 1e9:.1f}" for part in (*PARTS, "peak")]
    cells.append((name, *in_gb, f"{total[name] / 1e9:.1f}", kinds))
print("GB (10^9 bytes) of a device: kept at the peak, by part, and sent in a step")
heads = ("", "weights", "moments", "gradients", "copies", "peak", "sent", "of these")
print(program.table(heads, cells))
n = BIG_RUN.global_batch_size // (DEVICES // 8)
print(f"The bubble of 8 stages and {n} microbatches: {pipeline.bubble_share(8, n):.1%} of the step")
assert abs(total["DDP"] / total["ZERO1"] - 4 / 3) < 0.01  # fp32 gradients twice; once, and bf16
assert 10 < total["FULL_SHARD"] / total["ZERO1"] < 11
assert 6 < total["tp 8, ZERO1"] / total["ZERO1"] < 7
assert min(total, key=total.get) == "pp 8, ZERO1"

# %% [markdown]
# Three things to take home. In bf16 ZERO1 sends even less than DDP, since it gathers bf16
# weights where DDP sends fp32 sums a second time. FULL_SHARD sends ten times as much as
# ZERO1, because there are eight microbatches: larger ones would need fewer. (On a fast
# network most of it is hidden behind computation.) And a pipeline sends the least, so it
# may cross nodes; its price is the bubble. Tensor parallelism sends six times as much as
# ZERO1, and hides none of it. `python plan.py configs/mpt7b.py --device=mi250
# --devices=64` weighs all that.

# %%
figure = Figure(figsize=(6.5, 4.5), layout="constrained")
axes = figure.subplots()
numbers = range(1, 65)
for p, style in ((2, ":"), (4, "-"), (8, "--"), (16, "-.")):
    shares = [100 * pipeline.bubble_share(p, n) for n in numbers]
    axes.plot(numbers, shares, style, color="black", label=f"{p} stages")
look = {"markersize": 9, "color": "black", "fillstyle": "none"}
axes.plot(8, 100 * dots, "o", label="the picture above", **look)
axes.set_xscale("log", base=2)
axes.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
axes.set(title="The bubble: (p - 1) / (n + p - 1)", ylim=(0, 100))
axes.set(xlabel="microbatches n of a step", ylabel="share of the step (%)")
axes.grid(alpha=0.3)
axes.legend(fontsize=8)
pictures.save(figure, "3-bubble")

# %% [markdown]
# ## The exercise
#
# Shard a net of two layers over n ranks by hand: `python -m lessons check 3` puts
# lessons/mine/3_many_devices.py there for you. Write in it shard, this rank's piece of a
# weight; gather, the whole weight again; and step, a step of SGD from the pieces.
#
# ## Three questions
#
# 1. ZERO1 cuts weights and moments, and sends no more than DDP. Why does it need more
#    memory in a step of four microbatches than SHARD_GRAD_OP, and when is it the better
#    choice?
# 2. With the global batch fixed, you double the microbatch size, so there are half as
#    many microbatches. What happens to the bytes that FULL_SHARD, ZERO1, tp and pp send
#    in a step?
# 3. Two ranks see the same rows: why can the loss be equal bit by bit to that of one rank,
#    and why is it only nearly equal if one rank has all the rows of both?
#
# ## Two more, on the pipeline
#
# 4. The bubble of four stages and eight microbatches is 27 %. From how many microbatches
#    on is it smaller than 10 %? If the batch stays the same, do larger microbatches help?
# 5. The embedding is tied: stage 0 looks up the ids in it, the last stage makes the logits
#    with it, and each gets a part of its gradient. What must the two stages send each
#    other, and how often, so that both keep the same embedding? How many bytes is it here?
#
# `python -m lessons 3 --answers` has the answers.
#
# ## What to read next
#
# - Rajbhandari, Rasley, Ruwase, He, ZeRO: Memory Optimizations Toward Training Trillion
#   Parameter Models, 2019 (arXiv 1910.02054): the stages
# - Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, 2023
#   (arXiv 2304.11277)
# - Shoeybi et al., Megatron-LM, 2019 (arXiv 1909.08053): the cut by columns, then by rows
# - Huang et al., GPipe, 2018 (arXiv 1811.06965); Narayanan et al., Memory-Efficient
#   Pipeline-Parallel DNN Training, 2020 (arXiv 2006.09503): 1F1B with a flush
# - Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM, 2021 (arXiv 2104.04473): all dimensions together
#
# In the project: parallel.py from `build` to `parallelize`, then pipeline.py::one_f_one_b.

# Scroll on for the answers.

# %% [markdown]
# ## Answers
#
# 1. It reduces gradients only once a step, so until then it adds up whole ones, and it
#    keeps the gathered weights for all microbatches: 3.5 W against 2 W here. It is better
#    whenever it fits, since it sends once a step what the others send in each microbatch.
# 2. FULL_SHARD sends half as much: it gathers and reduces in each microbatch, whatever
#    their size. ZERO1 sends the same: once a step. tp and pp send the same: half as many
#    messages of twice the size. (The bubble of pp grows.)
# 3. Both ranks then compute the same gradient g, and (g + g) / 2 is g exactly: adding a
#    number to itself and halving change only the exponent. With different rows the sum
#    over the rows is taken in another order, as two halves, and floating-point addition
#    is rounded.
# 4. (4 - 1) / (n + 4 - 1) is smaller than 0.1 from n = 28 on:
#    `python pipeline.py --stages=4 --microbatches=28`. Larger microbatches make the bubble
#    larger, since the batch has fewer of them.
# 5. Their gradients of it, once a step: 65,536 bytes each way, 256 x 64 fp32 numbers. Both
#    add them up (pipeline.py::sum_tied_gradients) and make the same update. The weights
#    never travel.
