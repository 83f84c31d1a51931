"""Lesson 5. How fast is fast."""

# %% [markdown]
# # Lesson 5. How fast is fast
#
# "1,922 tokens/s": is that fast? You will count the FLOPs of a training step by hand,
# divide by what the device could do (MFU, HFU), see which operations can reach that peak
# at all (the roofline), and recompute what others published. Then an argument about "0.8
# %" is settled, and you predict the speed of a fleet that you do not have.
#
# Plan two hours. The textbook is flops.py, with devices.py and planning/step_time.py; keep
# flops.py open beside this page. You need lesson 1, or to know what is in a transformer.

# %%
import sys

sys.path += [".", ".."]  # the project: an editor may start cells in the file's folder
SHORT = "--short" in sys.argv  # fewer and smaller runs, for a first look and for the tests

import csv
import statistics
import time
from dataclasses import replace

import torch
from matplotlib.figure import Figure
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import devices
import flops
import model
import optim
import parallel
import program
from config import MPTConfig, TrainConfig
from lessons import pictures
from planning import answer, search, step_time
from planning.fleet import PUBLISHED_MI250, FleetArgs, fleet_of

# One core, and its processor seconds: other programs on this machine then disturb less.
torch.set_num_threads(1)
torch.manual_seed(0)


def seconds(function, turns: int) -> float:
    """The least processor seconds of several turns."""
    best = float("inf")
    for _ in range(turns):
        start = time.process_time()
        function()
        best = min(best, time.process_time() - start)
    return best


# %% [markdown]
# ## FLOPs by hand
#
# A FLOP is one addition or one multiplication of floating-point numbers. Each number of a
# product (m, k) x (k, n) needs k multiplications and k additions:
#
#     FLOPs = 2 m k n        so one token (m = 1) costs 2 FLOPs for each weight
#
# Here is a block of MPT-1B, for one token of a sequence of S = 2048. A query meets S
# keys: 2 S d for the scores, 2 S d for the weighted sum of the values. (The causal mask
# hides half of them. This count includes the hidden half, as LLM Foundry and PaLM do.)

# %%
d, L, S, V = 2048, 24, 2048, 50368
by_hand = {
    "Wqkv": 2 * d * 3 * d,
    "scores q k^T": 2 * S * d,
    "sum of v": 2 * S * d,
    "out_proj": 2 * d * d,
    "up_proj": 2 * d * 4 * d,
    "down_proj": 2 * 4 * d * d,
}
block = sum(by_hand.values())
for name, count in by_hand.items():
    print(f"{name:14} {count / 1e6:6.1f} MFLOP a token  {count / block:6.1%} of the block")
forward = L * block + 2 * d * V  # and the logits
print(f"{L} blocks and the logits: {forward / 1e9:.3f} GFLOP a token, forward")

# %% [markdown]
# The backward of y = x W has two products of the same size: the gradient of x, and that
# of W. So a training step costs three forwards. torch can count the products as they are
# called, on tensors that have shapes but no data:

# %%
cfg = MPTConfig(d_model=d, n_heads=16, n_layers=2 if SHORT else L, max_seq_len=S, vocab_size=V)
with FakeTensorMode(), FlopCounterMode(display=False) as counter:
    obvious = model.MPT(replace(cfg, attn_impl="reference"))
    obvious(torch.zeros(1, S, dtype=torch.int64)).sum().backward()
counted = counter.get_total_flops() / S
step_by_hand = 3 * (cfg.n_layers * block + 2 * d * V)
print(f"{cfg.n_layers} layers and the logits, forward and backward, GFLOP a token:")
print(f"{step_by_hand / 1e9:.4f} by hand, {counted / 1e9:.4f} by torch")
assert abs(counted / step_by_hand - 1) < 1e-9

# %% [markdown]
# Nobody lists products in practice. All weights together are N, so with attention:
#
#     training FLOPs of a token = 6 N + 12 L d S         flops.py::train_flops_per_token
#
# (d: the width of all heads together; in MPT d_model.)
# N also has biases, norms and positions, which are in no product: 0.4 % of N below. A
# tied embedding is two things: as the input it is a lookup and costs nothing, as the
# output it is a product. It counts once, which is right. (An untied input embedding does
# not count.)

# %%
mpt1b = replace(cfg, n_layers=L)
N = flops.n_params(mpt1b)
per_token = flops.train_flops_per_token(mpt1b)
assert per_token == 6 * N + 12 * L * d * S
print(f"MPT-1B (with learned positions and biases): N = {N:,},")
print(f"6 N + 12 L d S = {per_token / 1e9:.3f} GFLOP a token, ", end="")
print(f"{per_token / (3 * forward) - 1:.2%} above the products alone")
assert 0 < per_token / (3 * forward) - 1 < 0.005

SIZES = {"125m": (768, 12, 12), "1b": (2048, 16, 24), "3b": (2560, 20, 32), "7b": (4096, 32, 32)}
MODELS = {
    name: MPTConfig(d_model=width, n_heads=heads, n_layers=layers, attn_impl="sdpa")
    for name, (width, heads, layers) in SIZES.items()
}
cells = []
for length in (512, 2048, 8192, 32768):
    shares = []
    for m in MODELS.values():
        m = replace(m, max_seq_len=length)
        share = 12 * m.n_layers * m.d_model * length / flops.train_flops_per_token(m)
        shares.append(f"{share:.0%}")
    cells.append((f"S = {length:,}", *shares))
print("\nshare of 12 L d S in all FLOPs")
print(program.table(("", *MODELS), cells))

# %% [markdown]
# So 6 N alone is a fair count for short sequences and large models. For long sequences it
# is wrong by a factor of two or more.
#
# ## This core
#
# Now something real: one core of this CPU, in fp32. What can it reach? A large matmul
# does little else but multiply and add, so it sets the peak (devices.py::measure_peak
# does the same for --peak_tflops=measure). Bandwidth: tensors that no cache can hold,
# copied or added. (The copy's target is read first, too, and that is not counted. The sum
# writes over one of its inputs, so nothing is read unseen. Take the faster of both.)

# %%
turns = 3 if SHORT else 10
n = 1024
a, b = torch.randn(n, n), torch.randn(n, n)
core_peak = 2 * n**3 / seconds(lambda: a @ b, 3 * turns)
source = torch.zeros(2**25)  # 128 MiB
target = torch.zeros(2**25)
copy = 8 * 2**25 / seconds(lambda: target.copy_(source), turns)  # 4 bytes read, 4 written
add = 12 * 2**25 / seconds(lambda: torch.add(source, target, out=target), turns)
core_bandwidth = max(copy, add)
print(f"a matmul of {n} x {n} x {n} reaches {core_peak / 1e9:.0f} GFLOP/s: the peak here")
print(f"a copy reaches {copy / 1e9:.1f} GB/s, a sum of two tensors {add / 1e9:.1f} GB/s")

# %% [markdown]
# A training step is more than one matmul. Model FLOPs utilization is the share of the
# peak that the model's FLOPs make:
#
#     MFU = FLOPs of a token x tokens/s / (devices x peak)          flops.py::mfu
#
# With full activation checkpointing each block computes its forward twice. The hardware
# works more, the model learns no more. Hardware FLOPs utilization counts what is
# recomputed, too:
#
#     HFU = 4/3 MFU with full checkpointing, else MFU               flops.py::hfu
#
# (4/3 is four forwards instead of three. It holds only if nothing is frozen.)
# The project's model, loss and AdamW, with and without checkpointing:

# %%
small = MPTConfig(d_model=256, n_heads=4, n_layers=4, max_seq_len=256, vocab_size=2048)
rows = 2 if SHORT else 4
ids = torch.randint(small.vocab_size, (rows, small.max_seq_len + 1))
inputs, labels = ids[:, :-1], ids[:, 1:]


def training_step(checkpointing: str):
    """A function that does one step of forward, backward and AdamW, in fp32."""
    settings = TrainConfig(activation_checkpointing=checkpointing)
    mpt = model.MPT(small)
    model.init_weights(mpt, seed=0)  # else the loss and its gradients are near 0: slow on a CPU
    parallel.recompute(mpt, settings)
    optimizer = optim.build_optimizer(mpt.named_parameters(), settings)

    def step():
        (mpt(inputs, labels) / labels.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the first one makes Adam's moments
    return step


measured = {}  # {checkpointing: (tokens/s, MFU, HFU)}
for checkpointing in ("none", "full"):
    speed = labels.numel() / seconds(training_step(checkpointing), turns)
    mfu = flops.mfu(small, speed, 1, core_peak)
    measured[checkpointing] = speed, mfu, flops.hfu(small, speed, 1, core_peak, checkpointing)
    hfu = measured[checkpointing][2]
    print(f"checkpointing {checkpointing:5} {speed:7,.0f} tokens/s, MFU {mfu:.1%}, HFU {hfu:.1%}")
assert abs(measured["full"][2] / measured["full"][1] - 4 / 3) < 1e-9

# %% [markdown]
# With checkpointing, tokens/s and MFU fall. HFU hides that loss: it asks how busy the
# device is, MFU how much of that is of use. Choose settings by tokens/s or MFU. (4/3 is a
# convention, too: the project repeats neither a block's last matmul nor the logits, so
# HFU counts a little more than is computed.)
#
# ## The roofline
#
# Why is a step slower than one large matmul? A device computes, and it moves bytes. The
# slower of both sets the pace:
#
#     seconds >= max(FLOPs / peak, bytes / bandwidth)
#     FLOP/s  <= min(peak, intensity x bandwidth)        intensity = FLOPs / bytes
#
# An operation whose intensity is below peak / bandwidth, the ridge, cannot reach the
# peak, however good its kernel is. The counts, each number of b bytes (bf16: 2, fp32: 4):
#
#     matmul (m, k) x (k, n)     2 m k n              b (m k + k n + m n)
#     attention, one head        2 S S D, causal      b 4 S D              q, k, v, o
#       all scores in memory     4 S S D              b (4 S D + 4 S S)    moved four times
#     LayerNorm, a number        about 7              2 b
#     AdamW, a parameter         about 14             28: 4 fp32 numbers read, 3 written


# %%
def matmul_intensity(m: int, k: int, n: int, b: int) -> float:
    """FLOPs a byte, if each matrix is read or written once."""
    return 2 * m * k * n / (b * (m * k + k * n + m * n))


T, D = 4 * 2048, 128  # the tokens of a microbatch, the width of a head
ADAMW, NORM = 14 / 28, 7 / (2 * 2)  # a norm of bf16
intensities = {
    "matmul, 8192 tokens": matmul_intensity(T, d, 4 * d, 2),
    "matmul, 1 token (decoding)": matmul_intensity(1, d, 4 * d, 2),
    "flash attention": 2 * S * S * D / (2 * 4 * S * D),
    "attention, scores stored": 4 * S * S * D / (2 * (4 * S * D + 4 * S * S)),
    "LayerNorm": NORM,
    "AdamW": ADAMW,
}
# An MI250 here is one of the two dies of a card.
kinds = [devices.by_name(name) for name in ("a100", "h100", "mi250")]
ridges = [kind.bf16_tflops * 1e3 / kind.bandwidth_gbs for kind in kinds]
cells = []
for name, intensity in intensities.items():
    reach = [f"{min(1, intensity / ridge):.1%}" for ridge in ridges]
    cells.append((name, f"{intensity:.1f}", *reach))
heads = [f"of {kind.name.split()[0]}'s peak" for kind in kinds]
print(program.table(("operation (S = 2048)", "FLOPs a byte", *heads), cells))
print("the ridges:", ", ".join(f"{ridge:.0f}" for ridge in ridges), "FLOPs a byte")
assert intensities["matmul, 8192 tokens"] > max(ridges)
assert intensities["attention, scores stored"] < min(ridges)

# %% [markdown]
# Read the column of one device from top to bottom. Large matmuls and flash attention may
# reach the peak. Attention that stores its scores may not: that is why flash attention
# exists (lesson 4). A matmul with one token reads each weight for two FLOPs: why text is
# made slowly. Norms and AdamW reach a few percent at best, and it does not matter how the
# kernel is written, only how few bytes move: so such operations are fused.
#
# The same on this core, measured. AdamW: the project's fused one, 8 million parameters.

# %%
wide = torch.nn.Parameter(torch.randn(2**23))
wide.grad = torch.randn(2**23)
adamw = optim.build_optimizer([("wide", wide)], TrainConfig())
adamw.step()  # makes the moments
vector, weight = torch.randn(1, 2048), torch.randn(2048, 8192)  # 64 MiB
tall, flat, product = torch.randn(4096, 16), torch.randn(16, 4096), torch.empty(4096, 4096)

with torch.no_grad():
    points = {  # {name: (FLOPs a byte, FLOP/s)}, all fp32
        "matmul 1024": (matmul_intensity(n, n, n, 4), core_peak),
        "matmul, k = 16": (
            matmul_intensity(4096, 16, 4096, 4),
            2 * 16 * 4096**2 / seconds(lambda: torch.mm(tall, flat, out=product), turns),
        ),
        "matmul, 1 token": (
            matmul_intensity(1, 2048, 8192, 4),
            2 * weight.numel() / seconds(lambda: vector @ weight, turns),
        ),
        "sum of two tensors": (1 / 12, add / 12),
        "AdamW": (ADAMW, 14 * wide.numel() / seconds(adamw.step, turns)),
    }
cells = []
for name, (intensity, rate) in points.items():
    roof = min(core_peak, intensity * core_bandwidth)
    limit = "bandwidth" if roof < core_peak else "computing"
    cells.append((name, f"{intensity:.2f}", f"{rate / 1e9:.1f}", f"{roof / 1e9:.1f}", limit))
print(program.table(("operation", "FLOPs a byte", "GFLOP/s", "its roof", "limited by"), cells))

# %%
figure = Figure(figsize=(6.5, 5), layout="constrained")
axes = figure.subplots()
ridge = core_peak / core_bandwidth
roof = [0.05 * core_bandwidth / 1e9, core_peak / 1e9, core_peak / 1e9]
axes.loglog([0.05, ridge, 4000], roof, color="black", label=f"the roof, ridge {ridge:.0f}")
upper = max("AdamW", "matmul, 1 token", key=lambda name: points[name][1])  # one intensity
for name, (intensity, rate) in points.items():
    marker = "o" if "matmul" in name else "^"
    axes.loglog(intensity, rate / 1e9, marker, color="black", fillstyle="none", markersize=9)
    offset = {"matmul 1024": (-60, -14), upper: (8, 5)}.get(name, (8, -11))  # in points
    at = intensity, rate / 1e9
    axes.annotate(name, at, offset, textcoords="offset points", fontsize=8)
axes.set(title="This CPU: one core, fp32, measured", ylim=(1, 3 * core_peak / 1e9))
axes.set(xlabel="FLOPs a byte of memory", ylabel="GFLOP/s")
axes.grid(alpha=0.3)
axes.legend(fontsize=8, loc="lower right")
pictures.save(figure, "5-roofline")

# %% [markdown]
# On most machines AdamW and the sum lie left of the ridge: memory is their limit. Where the
# ridge is, this machine says: the table above is its own, and it varies from run to run.
#
# A point above a roof shows a wrong count: a cache kept what counts as moved, or the
# measured bandwidth is too low. A point far below its roof has a poor kernel, or too
# little to do.
#
# ## What others published
#
# LLM Foundry's table (bench/results/mpt_single_node_throughput.csv) has 142 runs on nodes
# of 8 A100 or H100. Its MFU must follow from its tokens/s, and it does, in every row. It
# cuts tokens/s to whole numbers, so a row may be off by one token/s.

# %%
with open(pictures.ROOT / "bench/results/mpt_single_node_throughput.csv") as file:
    published = list(csv.DictReader(file))
for row in published:
    N, L, d, S = (int(row[key]) for key in ("params", "layers", "d_model", "seq"))
    of_peak = float(row["peak_tflops"]) * 1e12
    speed = int(row["tokens_s_gpu"])
    low, high = ((6 * N + 12 * L * d * S) * rate / of_peak for rate in (speed, speed + 1))
    assert low - 5e-5 <= float(row["mfu_pct"]) / 100 <= high + 5e-5, row
print(f"{len(published)} of {len(published)} MFUs follow from tokens/s by 6 N + 12 L d S\n")

cells = []
for row in published:
    if row["model"] == "mpt-7b" and row["seq"] in ("1024", "2048", "8192"):
        m = replace(MODELS["7b"], max_seq_len=int(row["seq"]))
        speed, peak = int(row["tokens_s_gpu"]), float(row["peak_tflops"]) * 1e12
        mfu = flops.mfu(m, speed, 1, peak)
        hfu = flops.hfu(m, speed, 1, peak, row["act_ckpt"])
        tflops = speed * flops.train_flops_per_token(m) / 1e12
        name = (row["gpu"], row["seq"], row["act_ckpt"])
        cells.append((*name, f"{speed:,}", f"{tflops:.0f}", f"{mfu:.1%}", f"{hfu:.1%}"))
heads = ("MPT-7B on", "S", "checkpointing", "tokens/s", "TFLOP/s", "MFU", "HFU")
print(program.table(heads, cells))

# %% [markdown]
# On the A100 of 80 GB compare S = 1024 with full checkpointing and S = 2048 without: the
# HFU of the first is higher, and the second does more useful work a second.
#
# MosaicML's second post on AMD, "Training LLMs at Scale with AMD MI250 GPUs" (2023),
# gives TFLOP/s of an MI250 *card* for MPT-7B: 166 on 4 cards, 159 on 128
# (planning/fleet.py::PUBLISHED_MI250). A card holds two dies, and torch sees each as a device,
# so there are two ways to be wrong by a factor of two.

# %%
m = MODELS["7b"]
peak = devices.by_name("mi250").bf16_tflops * 1e12  # of one die
cells = []
for cards, tflops in PUBLISHED_MI250.items():
    of_card = tflops * 1e12 / flops.train_flops_per_token(m)  # tokens/s
    mfu, wrong = flops.mfu(m, of_card, 2, peak), flops.mfu(m, of_card, 1, peak)
    cells.append((cards, f"{of_card:,.0f}", f"{of_card / 2:,.0f}", f"{mfu:.1%}", f"{wrong:.1%}"))
    assert abs(mfu - tflops / 362.1) < 1e-4
heads = ("cards", "tokens/s a card", "a device", "MFU", "a card over the peak of one die: wrong")
print(program.table(heads, cells))

print("\nA card (4 cards, S = 2048) does")
for row in published:
    if row["model"] == "mpt-7b" and row["seq"] == "2048":
        ratio = PUBLISHED_MI250[4] / float(row["tflops_per_gpu"])
        print(f"  {ratio:.2f} times the work of an {row['gpu']}, checkpointing {row['act_ckpt']}")

# %% [markdown]
# Is 45.8 % bad beside the A100's 64 %? A peak on paper is not what matmuls reach.
# Measured alone, large matmuls reach 87 % of an A100's peak and 66 to 77 % of an MI250X
# die's (devices.py, `reachable`; the MI250's row takes the middle).

# %%
for name, mfu in (("a100", 0.642), ("mi250", 0.458)):
    reachable = devices.by_name(name).reachable
    print(f"{name:6} MFU {mfu:.1%} is {mfu / reachable:.0%} of what its matmuls reach")

# %% [markdown]
# ## The argument about "0.8 %"
#
# Llama 3.1 of 405B was finetuned with LoRA on 8 MI300X. In a public thread somebody
# computed its MFU from 16 x 64 tokens in 30 s: 0.8 %. Is that right? The raw numbers are
# kept in tests/test_flops.py::test_the_lora_thread: N = 405e9, and 1.3e15
# FLOP/s a device. The shape: 126 layers of 16,384, 128K tokens, embedding and output
# separate ("The Llama 3 Herd of Models", arXiv 2407.21783). What could one argue about?
#
#     frozen weights    need no gradient of their own: 4 N instead of 6 N
#     attention         12 L d S, or 6 L d S if the masked half does not count; S = 64
#     the embedding     separate from the output, it is a lookup: no FLOPs
#     the peak          1,307.4 TFLOP/s in the datasheet (devices.py) instead of 1,300
#     tokens/s          about 35, or 34.1 = 16 x 64 / 30
#     recomputation     2 N more: HFU, not MFU, and nobody said that it was done

# %%
n_405b, rate = 405e9, 16 * 64 / 30
n_layers, width, vocabulary = 126, 16384, 128256


def share(per_token: float, speed: float = rate, peak: float = 1.3e15) -> float:
    """The share of the peak of 8 devices."""
    return flops.utilization(per_token, speed, 8, peak)


claim = share(6 * n_405b)
l_d_s = n_layers * width * 64
argued = {
    "the claim: 6 N": claim,
    "with attention, 12 L d S": share(6 * n_405b + 12 * l_d_s),
    "with attention, causal": share(6 * n_405b + 6 * l_d_s),
    "no input embedding": share(6 * (n_405b - vocabulary * width)),
    "peak of the datasheet": share(6 * n_405b, peak=devices.by_name("mi300x").bf16_tflops * 1e12),
    "35 tokens/s": share(6 * n_405b, speed=35),
    "frozen weights: 4 N": share(4 * n_405b),
    "HFU if recomputed: 4 N + 2 N": share(6 * n_405b),
}
cells = [(name, f"{x:.3%}", f"{x / claim - 1:+.1%}") for name, x in argued.items()]
print(program.table(("each alone, against the claim", "share", "change"), cells))
assert f"{claim:.2%} {argued['frozen weights: 4 N']:.2%}" == "0.80% 0.53%"

# %% [markdown]
# Settled: the MFU is 0.53 %. LoRA trains no weight of the base, so a third of 6 N is
# never computed (the adapters add 6 FLOPs for each of their few parameters, left out
# here). 0.80 % is right under another name: the HFU of a run that recomputes everything.
# All else moves it by at most 3 %. Attention is not worth an argument at this S and N.
# For MPT-125M at S = 2048 attention is 23 % of the FLOPs.
#
# By either count, 99 % of the peak was not used. The FLOPs take 0.3 s of the 30 at what
# matmuls reach, reading each device's eighth of the bf16 weights twice 0.04 s, gathering all
# of them twice over the links 4.5 s. So with few tokens a step, gathering costs more than
# computing. These numbers cannot tell the rest; a measurement by part can (`python -m bench
# train`).
#
# ## From FLOPs to seconds
#
# Turn it around: predict the speed before you rent the machines. planning/step_time.py
# adds up the parts of a step. For one node, FULL_SHARD and no checkpointing they are
# short enough to do by hand. Each of G devices has K microbatches of T tokens. N, L, d, S
# and V as before:
#
#     matmuls    6 N T / (reachable x peak) x (1 + 1.6e6 / (T d))
#     attention  7 L d S T / (attention_share x peak)    causal: 2 forward, 5 backward
#     memory     ((351 L d + 6 V) T + 30 N) / bandwidth      norms, logits; copies
#     traffic    8 N (G - 1) / G / (0.7 x link)
#     microbatch (compute^1.35 + traffic^1.35)^(1 / 1.35)
#     step       K x microbatch + 30 N / G / bandwidth       AdamW
#
# compute is the sum of the first three. peak, bandwidth and link are those of one device;
# reachable and attention_share are the shares of its peak that matmuls and attention reach.
# 1.6e6 / (T d): a small product leaves part of the device idle at its end. 351, 6 and 30
# are bytes, fitted or counted. Traffic: each microbatch gathers the weights in bf16 twice
# (2 N + 2 N bytes) and reduces gradients in fp32 (4 N); collectives reach 0.7 of a link.
# Some of this hides behind computation: 1.35 says how much. In `step_time.Constants` 0.7,
# 1.35, 351 (`block_bytes`) and the two 30s are there as they stand; 1.6e6 follows from
# `tile` (2.4e6) for MPT's shapes.
#
# MPT-7B on 8 A100 of 80 GB, microbatches of 6 sequences: the first two parts by hand,
# then all parts as the planner has them.

# %%
m = MODELS["7b"]
cfg = TrainConfig(
    sharding="FULL_SHARD", activation_checkpointing="none", microbatch_size=6, global_batch_size=48
)
fleet = fleet_of(FleetArgs(device="a100", devices=8))
c = step_time.Constants()
parts = step_time.StepTime(m, cfg, fleet).parts()

N, L, T, d = flops.n_params(m), 32, 6 * 2048, 4096
peak, reachable, attention_share = 312e12, 0.87, c.attention_a100
print(f"N = {N:,}, L = {L}, d = {d}, S = 2048, T = {T:,}, peak = {peak:.3g} FLOP/s,")
print(f"reachable = {reachable}, attention_share = {attention_share}")
of_matmuls = 6 * N * T / (reachable * peak) * (1 + 1.6e6 / (T * d))
of_attention = 7 * L * d * 2048 * T / (attention_share * peak)
print(f"by hand: matmuls {of_matmuls:.3f} s, attention {of_attention:.3f} s")
in_products = L * 12 * d**2 + m.vocab_size * d
print(f"{1 - in_products / N:.2%} of N (positions, biases, norms) are in no product. The planner")
print("leaves them out, so its matmuls take less:\n")
shares = [(name, f"{s:.3f} s", f"{s / parts['step']:.1%}") for name, s in parts.items() if s]
print(program.table(("part", "seconds", "share"), shares))
assert abs(of_matmuls * in_products / N / parts["matmuls"] - 1) < 0.001
assert abs(of_attention / parts["attention"] - 1) < 0.001
speed = 48 * 2048 / parts["step"] / 8
mfu = flops.mfu(m, speed, 1, peak)
print(f"{speed:,.0f} tokens/s a device, MFU {mfu:.1%}. LLM Foundry's trainer reached 4,641.")

# %% [markdown]
# How sure is it? Published runs of the same kind were this far from their predictions,
# each predicted by constants fitted without the runs of that model
# (planning/answer.py::BANDS). A band is the middle 80 % of such runs; "anything else" was
# not compared, and has the widest. No plan is better than its band. A rule of thumb with
# one constant share of the peak is worse (bench/results/planner.md):

# %%
rule = {}  # {GPU: share of the peak, the median of its runs}
for gpu in sorted({row["gpu"] for row in published}):
    shares = [float(row["mfu_pct"]) / 100 for row in published if row["gpu"] == gpu]
    rule[gpu] = statistics.median(shares)
errors = [abs(rule[row["gpu"]] * 100 / float(row["mfu_pct"]) - 1) for row in published]
tenths = statistics.quantiles(errors, n=10)
print(f"one MFU for each GPU: median error {tenths[4]:.1%}, 90th percentile {tenths[8]:.1%}")
print("the planner:          median error 3.2%, 90th percentile 9.7% (planner.md)\n")
for name in ("a100", "h100", "mi250"):
    of_name = search.evaluate(m, cfg, fleet_of(FleetArgs(device=name, devices=8)))
    low, high, kind = answer.band(of_name)
    print(f"{name}: {low:.2f} to {high:.2f} of the prediction ({kind})")

# %% [markdown]
# An MI250 was not among the fitted devices, so its band is wider. (MPT-7B on 4 cards is
# predicted 14 % too fast: bench/results/planner.md.)
#
# ## A plan
#
# What you rent is a card for an hour. What you need is 20 tokens a parameter (Chinchilla,
# lesson 8):
#
#     days    = tokens / (tokens/s) / 86,400
#     dollars = days x 24 x cards x price of a card
#
# `python plan.py configs/mpt1b.py --device=mi250 --price=0.75` does all of it, over all
# layouts. (Its price is that of a torch device.) A microbatch must fit into memory. By
# hand, for FULL_SHARD without checkpointing, with 8 % of the device left free
# (planning/memory.py counts exactly):
#
#     bytes of a device = 16 N / G + 32 L d T + 4 V d + about 2e9
#
# ## The exercise
#
# `python -m lessons check 5` puts lessons/mine/5_how_fast_is_fast.py there for you. Write in
# it the FLOPs of a token, MFU, the roofline, three published MFUs from their raw numbers, and
# a plan: the largest model that a given node can train for given dollars.
#
# ## Three questions
#
# 1. A colleague turns on full activation checkpointing, doubles the microbatch, and
#    reports that utilization rose from 45 % to 52 %. What do you ask, and what happened
#    to the tokens/s?
# 2. AdamW takes 14 FLOPs a parameter and reaches 0.3 % of an A100's peak. Should you
#    write a better kernel for MPT-1B's training on 8 of them with a batch of 512
#    sequences?
# 3. Two papers report 50 % MFU at S = 32,768 for a model like MPT-1B, one counting 12 L d
#    S and one 6 L d S. Which run is faster, and by how much?
#
# ## What to read next
#
# - "PaLM: Scaling Language Modeling with Pathways", Chowdhery et al., 2022, arXiv
#   2204.02311, appendix B: where MFU comes from.
# - "Reducing Activation Recomputation in Large Transformer Models", Korthikanti et al.,
#   2022, arXiv 2205.05198, appendix A: MFU and HFU side by side.
# - "Roofline: An Insightful Visual Performance Model for Multicore Architectures",
#   Williams, Waterman and Patterson, 2009, Communications of the ACM.
# - "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
#   Narayanan et al., 2021, arXiv 2104.04473, for what many nodes add.
# - Here: planning/README.md, bench/results/planner.md, with the error of every
#   prediction.

# %%
# Scroll on for the answers.

# %% [markdown]
# ## Answers
#
# 1. Ask whether 52 % is MFU or HFU. If it is HFU, full checkpointing made 4/3 of it: the
#    MFU is 39 %, so tokens/s fell by 13 %, although the device is busier. If it is MFU,
#    the larger microbatch paid for the recomputation, and tokens/s rose by 16 %.
# 2. No. The update moves 28 bytes of each parameter that a device holds, an eighth of
#    1.3e9: 4.6 GB, which an A100 reads and writes in 2 ms. The step takes about 6 s. Its
#    kernel is limited by bandwidth already. A share of the peak is no measure of such an
#    operation.
# 3. The one that counts 6 L d S, since it must do more tokens for the same 50 %. For
#    MPT-1B at S = 32,768 6 N is 8.3 GFLOP and 12 L d S 19.3: (8.3 + 19.3) / (8.3 + 9.7) =
#    1.54 times as fast.
