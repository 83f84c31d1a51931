"""Lesson 4. FlashAttention: attention without the T x T scores."""

# %% [markdown]
# # Lesson 4. FlashAttention: attention without the T x T scores
#
# Attention compares each of T queries with each of T keys. The obvious program writes all
# T x T scores to memory, reads them for the softmax, writes the probabilities and reads
# those again. FlashAttention computes the same numbers and stores none of them. You will
# see the idea on paper and in NumPy, count the bytes that both move, and run a Triton kernel
# of thirty lines and the project's, without a GPU.
#
# An hour; the kernel of the exercise is for a second one. Beside this lesson, open
# fast/flash_attention.py: its docstring is the algorithm, `forward_kernel` is the
# code. attention.py has the obvious version, `reference_attention`.

# %%
import sys

sys.path += [".", ".."]  # the project: an editor may start cells in the file's folder
SHORT = "--short" in sys.argv  # fewer and smaller runs, for a first look and for the tests

# ruff: noqa: E402, E741 (imports follow the path; `l` is the name in the papers)
import importlib.util
import math
import subprocess

import numpy as np
import torch

import devices
import program
from fast import launch_table
from lessons import pictures

# %% [markdown]
# ## Why a softmax wants to see everything first
#
# The output of one query is a mean of the values v_j, weighted by a softmax of the scores
# s_j:
#
#     out = sum_j exp(s_j) v_j / sum_j exp(s_j)
#
# exp(89) is too large for fp32, exp(710) for fp64. So every softmax subtracts the largest
# score:
#
#     m = max_j s_j        p_j = exp(s_j - m)        out = sum_j p_j v_j / sum_j p_j
#
# Nothing changes, since exp(-m) cancels, and no p_j is larger than 1. But m is known only
# after the last score. So the obvious program keeps all scores, and reads them again.

# %%
large = np.array([9_999.0, 10_000.0])
with np.errstate(over="ignore", invalid="ignore"):
    print(f"scores {large}: exp(s) / sum exp(s) = {np.exp(large) / np.exp(large).sum()}")
safe = np.exp(large - large.max())
print("with the largest subtracted", (safe / safe.sum()).round(4))
assert np.allclose(safe / safe.sum(), [1 / (1 + math.e), math.e / (1 + math.e)])

# %% [markdown]
# ## On paper: one pass over four numbers
#
# The online softmax starts with m = -inf and l = 0, and does this for each score s:
#
#     m' = max(m, s)                           the largest so far
#     l  = l * exp(m - m') + exp(s - m')       the sum of exp(score - m') so far
#     m  = m'
#
# When a larger score comes, every old term exp(score - m) must become exp(score - m'). All
# of them need the same factor, exp(m - m'), so it is enough to multiply their sum. Take a
# pencil and do it for the scores 1, 3, 2, 5, before you look:

# %%
scores = [1.0, 3.0, 2.0, 5.0]
m, l = -math.inf, 0.0
cells = []
for s in scores:
    m_new = max(m, s)
    factor, term = math.exp(m - m_new), math.exp(s - m_new)
    l = l * factor + term
    m = m_new
    cells.append((f"{s:.0f}", f"{m:.0f}", f"{factor:.6f}", f"{term:.6f}", f"{l:.6f}"))
print(program.table(("s", "m'", "factor exp(m - m')", "new term exp(s - m')", "l"), cells))

in_two_passes = sum(math.exp(s - max(scores)) for s in scores)
print(f"\nin two passes: sum of exp(s - {max(scores):.0f}) = {in_two_passes:.6f}")
assert math.isclose(l, in_two_passes, rel_tol=1e-12)

# %% [markdown]
# The factor was 1 when 2 came, because the maximum stayed. It was 0 when 1 came: exp(-inf)
# = 0 removes the sum of nothing.
#
# A pair (m, l) stands for a set of scores. Two sets join by the same rule:
#
#     m = max(m1, m2)        l = l1 * exp(m1 - m) + l2 * exp(m2 - m)
#
# So the scores can be cut into blocks of any size, and the blocks can be joined in any
# order.

# %%


def pair(block):
    """(m, l) of some scores."""
    return block.max(), np.exp(block - block.max()).sum()


def join(first, second):
    """(m, l) of two sets of scores together."""
    (m1, l1), (m2, l2) = first, second
    m = max(m1, m2)
    return m, l1 * math.exp(m1 - m) + l2 * math.exp(m2 - m)


many = np.random.default_rng(0).normal(scale=5, size=12)
whole = pair(many)
for cut in range(1, len(many)):
    assert np.allclose(join(pair(many[:cut]), pair(many[cut:])), whole, rtol=1e-12)
    assert np.allclose(join(pair(many[cut:]), pair(many[:cut])), whole, rtol=1e-12)
print(f"12 scores: m = {whole[0]:.4f}, l = {whole[1]:.4f}, for every cut, in both orders")

# %% [markdown]
# ## In NumPy: one query, its keys block by block
#
# The weighted sum of the values is one more sum of terms with the factor exp(score - m).
# Keep it unnormalised, rescale it like l, and divide once, at the end:
#
#     s  = K q * scale                         scores of one block of keys, (n,)
#     m' = max(m, max(s))
#     p  = exp(s - m')
#     l  = l * exp(m - m') + sum(p)
#     o  = o * exp(m - m') + p V               (D,)
#     ...
#     out = o / l
#
# Between two blocks, the program holds m, l and o: D + 2 numbers, however many keys there
# are. If every score so far is -inf, exp(m - m') is exp(nan): decide what m' is
# then. (In this cell no score is -inf. In the exercise some are.)

# %%


def one_query(q, k, v, block, dtype):
    """softmax(k q / sqrt(D)) v in one pass over blocks of keys. q (D,), k and v (T, D)."""
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    scale = dtype(1 / math.sqrt(len(q)))
    m, l, o = dtype(-np.inf), dtype(0), np.zeros_like(q)
    for start in range(0, len(k), block):
        s = k[start : start + block] @ q * scale
        m_new = max(m, s.max())
        factor = np.exp(m - m_new)
        p = np.exp(s - m_new)
        l = l * factor + p.sum()
        o = o * factor + p @ v[start : start + block]
        m = m_new
    return o / l


def two_passes(q, k, v, dtype):
    """The same with all scores in memory."""
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    s = k @ q * dtype(1 / math.sqrt(len(q)))
    p = np.exp(s - s.max())
    return p @ v / p.sum()


T, D = (512, 64) if SHORT else (4096, 64)
random = np.random.default_rng(1)
q = random.normal(size=D)
k, v = random.normal(size=(2, T, D))
exact = two_passes(q, k, v, np.float64)
size = np.abs(exact).max()

print(f"one query, {T:,} keys of width {D}, in blocks of 64; errors relative to the largest output")
cells = []
for dtype, limit in ((np.float64, 1e-13), (np.float32, 1e-5), (np.float16, 2e-2)):
    obvious = np.abs(two_passes(q, k, v, dtype) - exact).max() / size
    blocks = np.abs(one_query(q, k, v, 64, dtype) - exact).max() / size
    cells.append((np.dtype(dtype).name, f"{obvious:.1e}", f"{blocks:.1e}"))
    assert blocks < limit
print(program.table(("", "two passes", "in blocks"), cells))

# %% [markdown]
# The blocks are no approximation: both programs round, and to the same precision. GPU
# kernels read q, k and v in 16 bits, but keep m, l and o in fp32, so their error is that of
# the inputs.
#
# ## What is moved: T x T scores against blocks
#
# A GPU computes much faster than it reads its memory. So count the bytes, for one head, in
# bf16 (2 bytes a number). The obvious program runs three operations, each from memory to
# memory:
#
#     scores = q k^T            reads 2 T D, writes T^2
#     probs  = softmax(scores)  reads T^2, writes T^2
#     out    = probs v          reads T^2 + T D, writes T D
#
# FlashAttention starts one program for each block of BLOCK_M queries. It reads its queries
# once, walks over blocks of BLOCK_N keys, and writes its outputs once, with 4 bytes a row
# for the backward: m + log l, `lse` in the code. Causality helps: a block of scores that
# lies in the future is skipped, and only blocks that the diagonal crosses need a mask.
# fast/flash_attention.py::visible_keys draws these borders. Below, BLOCK_M and
# BLOCK_N are those of fast/launch_table.py for an MI250.

# %%
BYTES = 2  # of a number in bf16
ROW = launch_table.row_for("gfx90a", D, "forward", torch.bfloat16)
BLOCK_M, BLOCK_N = launch_table.options(ROW)["BLOCK_M"], launch_table.options(ROW)["BLOCK_N"]


def walk(T):
    """(first query, first key, kind) of each block of scores. kind: full, diagonal or skipped."""
    for start in range(0, T, BLOCK_M):
        mask_from = (start + 1) // BLOCK_N * BLOCK_N  # the first query sees all keys before this
        end = start + BLOCK_M  # the last query sees no key from here on
        for at in range(0, T, BLOCK_N):
            kind = "skipped" if at >= end else "diagonal" if at >= mask_from else "full"
            yield start, at, kind


def bytes_in_blocks(T):
    """What the programs of one head read and write."""
    visited = sum(kind != "skipped" for _, _, kind in walk(T))
    queries_and_outputs = 2 * T * D * BYTES + 4 * T
    return queries_and_outputs + visited * 2 * BLOCK_N * D * BYTES  # a block of k, one of v


def bytes_obvious(T):
    """What the three operations of one head read and write."""
    return (4 * T * D + 4 * T**2) * BYTES


kinds = [kind for _, _, kind in walk(1024)]
print(f"1,024 tokens, blocks of {BLOCK_M} queries x {BLOCK_N} keys: {len(kinds)} blocks,")
print(", ".join(f"{kinds.count(kind)} {kind}" for kind in ("full", "diagonal", "skipped")))
assert kinds.count("diagonal") == 1024 // BLOCK_M * (BLOCK_M // BLOCK_N)

LENGTHS = [512 * 2**n for n in range(7)]
MB = 1e6
cells = []
for T in LENGTHS:
    obvious, blocks = bytes_obvious(T), bytes_in_blocks(T)
    held = f"{T * T * BYTES / MB:,.2f} MB", f"{4 * T / MB:.3f} MB"
    moved = f"{obvious / MB:,.1f} MB", f"{blocks / MB:,.1f} MB"
    cells.append((f"{T:,}", *held, *moved, f"{obvious / blocks:.1f}"))
    # Half of all blocks, and the half of each row of blocks that the diagonal adds.
    in_a_formula = 2 * T * D * BYTES + 4 * T + T * (T + BLOCK_M) / BLOCK_M * D * BYTES
    assert blocks == in_a_formula
print(f"\none head of {D}, causal: memory held, then bytes read and written")
heads = ("tokens", "held: scores", "m + log l", "moved: obvious", "in blocks", "ratio")
print(program.table(heads, cells))

# %% [markdown]
# Both columns grow as T^2: in blocks, k and v are read again for each block of queries,
#
#     T / BLOCK_M blocks of queries; each reads k and v, 2 T D numbers, and on average half
#     of them:   T^2 * D / BLOCK_M
#
# where the obvious program moves 4 T^2 numbers. So it is 4 * BLOCK_M / D times less: more
# queries in a block, fewer bytes. Half of this factor is causality: the obvious program
# computes and moves the future, too. Most of the reads in blocks are cheap: k and v of one
# head (2 MB at 8,192 tokens) fit into the GPU's cache, which the T x T scores do not. What
# no cache gives back is memory: the scores of one head at 32,768 tokens take 2 GB; in
# blocks, m + log l takes 0.13 MB.
#
# Now divide by what the chips can do. Figures of devices.py: the peak of the matrix units
# in bf16 and the speed of the memory; an MI250 is two devices, one of them counts here.

# %%
T = 8192
flops = 4 * D * T**2 / 2  # two matmuls, 2 operations a product; causality leaves half
print(f"one head of {D}, {T:,} tokens, causal; microseconds at the peak of each. To multiply: half")
print("of the scores; the obvious program multiplies all, twice as long.")
cells = []
for name in ("mi250", "h100"):
    chip = devices.by_name(name)
    compute = flops / (chip.bf16_tflops * 1e12) * 1e6  # microseconds
    rate = chip.bandwidth_gbs * 1e9  # bytes a second
    moves = [count(T) / rate * 1e6 for count in (bytes_obvious, bytes_in_blocks)]
    cells.append((name, f"{compute:.0f}", f"{moves[0]:.0f}", f"{moves[1]:.0f}"))
    assert moves[0] > 3 * compute
print(program.table(("", "to multiply", "to move, obvious", "to move, in blocks"), cells))

# %% [markdown]
# The obvious program waits for memory most of the time. In blocks, moving takes about as
# long as multiplying on the MI250, and twice as long on the H100, before the cache helps.
#
# The picture: the walk over blocks.

# %%
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

figure = Figure(figsize=(5.5, 4.8), layout="constrained")
axes = figure.subplots()
looks = {
    "full": {"facecolor": "0.75", "label": "computed without a mask"},
    "diagonal": {"facecolor": "0.35", "label": "computed with a mask"},
    "skipped": {"facecolor": "white", "hatch": "//", "label": "skipped: in the future"},
}
for start, at, kind in walk(1024):
    axes.add_patch(Rectangle((at, start), BLOCK_N, BLOCK_M, edgecolor="0.55", **looks[kind]))
axes.set(xlim=(0, 1024), ylim=(1024, 0), aspect="equal")
axes.set(xticks=range(0, 1025, 256), yticks=range(0, 1025, 256))
axes.set(xlabel="key (position)", ylabel="query (position)")
axes.set_title(f"1,024 tokens in blocks of {BLOCK_M} x {BLOCK_N}, a program for each line")
patches = [Patch(edgecolor="0.55", **look) for look in looks.values()]
axes.legend(handles=patches, loc="upper right", fontsize=8, framealpha=1)
pictures.save(figure, "4-flash-attention")

# %% [markdown]
# ## The same loop as a GPU kernel
#
# A Triton kernel is a Python function that describes one program of many. It works on
# blocks, not on single numbers, and the compiler spreads a block over the threads of the
# GPU:
#
#     tl.arange(0, 64)            the numbers 0 .. 63, one block
#     tl.load(pointers, mask)     a block of numbers from memory; the mask says which exist
#     tl.dot(a, b)                a product of two blocks, on the matrix units
#     tl.max(s, 1), tl.sum(p, 1)  over each row
#     tl.store(pointers, block)   the way back
#     tl.full, tl.zeros           a block filled with one number; tl.trans(a) transposes one
#     tl.where, tl.maximum        element by element, as in NumPy
#
# other=0.0 is what stands where the mask is false. input_precision="ieee" multiplies fp32
# as fp32, not as TF32 (10 bits after the point). kernel[(n,)](...) starts n programs.
#
# A pointer plus a block of integers is a block of pointers. `k + j[:, None] * D + d[None,
# :]` are the addresses of rows j and columns d of a matrix whose rows have D numbers.
# `tl.constexpr` marks what is known when the kernel is compiled; a block's sizes must be,
# and are powers of two.
#
# This is lessons/one_block.py::one_block_kernel. Find the six lines of the formula above:

# %%
source = (pictures.ROOT / "lessons" / "one_block.py").read_text(encoding="utf-8")
print("@triton.jit" + source.split("@triton.jit")[1].split("\n\n\n")[0])

# %% [markdown]
# ## In Triton's interpreter
#
# With TRITON_INTERPRET=1, Triton does not compile a kernel but runs it in NumPy, one
# program after another, on CPU tensors. It is slow, and it is where to find mistakes:
# `print` works inside a kernel. Triton reads the variable when a kernel is defined, so the
# lesson starts `python -m lessons.one_block` as a process of its own.
#
# It runs the kernel above, then the project's: fast/flash_attention.py, forward and
# backward, against the obvious version in float64. Triton has no version for macOS. There,
# the lesson shows what was stored in lessons/4_triton.txt. The first line of each output
# names the versions it was made with.

# %%


def show(part, *words, reason=""):
    """Print what `python -m lessons.one_block` says here, or what it said elsewhere.

    It fails if its own claims do not hold. reason: why it cannot run here.
    """
    if reason:
        text = (pictures.ROOT / "lessons" / "4_triton.txt").read_text(encoding="utf-8")
        stored = text.split(f"== {part}\n")[1].split("\n== ")[0].strip()
        print(f"Not run here: {reason}.\nStored output, lessons/4_triton.txt:\n\n{stored}")
        return
    command = [sys.executable, "-m", "lessons.one_block", *words]
    done = subprocess.run(command, cwd=pictures.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout.strip())


show("interpreter", reason=pictures.why_no_interpreter())

# %% [markdown]
# fp32 agrees to a few parts in ten million. The errors in 16 bits are those of 16-bit
# inputs and of p, which is rounded before it is multiplied by v. (The interpreter would
# multiply the bits of bf16 as if they were integers; `flash_attention.py::dot` converts
# them first.)
#
# The project's kernel has the same loop. What it adds: heads and sequences (a grid of
# programs), any strides, ALiBi (lesson 1) as a vector over the keys, several texts in one
# row, exp2 in place of exp (a GPU has an instruction for it), and two loops, one for blocks
# without a mask and one for the others.
#
# ## Compiled for an MI250 and an H100
#
# A compiler needs no GPU. Triton's wheel holds those of AMD (LLVM) and NVIDIA (ptxas), and
# `triton.compile` takes the name of a chip. This is one_block_kernel for two of them: its
# two `tl.dot` become matrix instructions of the chip, an mfma on AMD's, a wgmma on the H100.

# %%
missing = "" if importlib.util.find_spec("triton") else "Triton is not installed"
show("compiled", "compile", reason=missing)

# %% [markdown]
# A binary also says what it takes. Two things are scarce on a chip:
#
#   registers       each thread keeps its part of q, o, m, l, s and p there. If they do not
#                   suffice, the compiler spills: it moves some to memory, in the inner loop
#   shared memory   blocks of k and v lie there before the matrix units read them. A unit of
#                   an MI250 has 64 KB, one of an H100 gives a block of threads 227 KB
#
# One program runs on one block of threads ("block" is NVIDIA's word here; AMD says
# workgroup). The last column says how many of them a unit of the chip (a CU of AMD's, an SM
# of NVIDIA's) can hold at once. While one waits for memory, another can compute. The
# project's forward, bf16, heads of 64, compiled by Triton 3.7.1:
#
#     queries x keys       registers  spilled bytes   KB shared  blocks of a unit
#     MI250: 128 x 64            235              0    16 of 64                 2
#     H100: 128 x 128            234              0  112 of 227                 1
#     MI250: 128 x 128           256            392    96 of 64                 0
#
# One source, two chips, and different block sizes: that is what fast/launch_table.py
# is for. With the H100's 128 x 128 (the last line), the MI250 lacks registers (it takes all
# 256 of a thread and spills 392 bytes) and shared memory (96 KB of 64: the kernel could not
# start).
#
# More registers a thread mean fewer blocks of threads on a unit. That is a choice, not a
# fault: a large block of queries reads k and v less often, and several stages (blocks of k
# and v on their way while another is multiplied) hide the memory from a single block of
# threads, too. The H100's settings do that; the MI250's have one stage and rely on the
# second block of threads. bench/results/kernels.md has these figures of all three kernels on
# every chip, and tests/fast/compiled.py is how the tests read them from a binary.
#
# What you have not seen: speed. The interpreter shows no race between threads; a compiled
# kernel tells what limits it, not how long it takes. The docstring of launch_table.py says
# how its rows were chosen, and whether any has been timed. Times need the GPU: `python -m
# bench attention` there.
#
# ## The exercise
#
# `python -m lessons check 4` puts a stub in lessons/mine/4_flash_attention.py. Write there,
# in NumPy, the online softmax of many rows at once and attention over an iterator of blocks,
# whose bias may be -inf for whole blocks and for whole rows. For a second hour: a Triton
# kernel for one block of queries, causal, with ALiBi. It runs in the interpreter where
# Triton is installed, and is skipped elsewhere.
#
# ## Three questions
#
#   1. The formula takes m' = max(m, max(s)). Would the result be right with another m', for
#      example m' = 0 always, or m' = max(m, max(s)) + 1 at each block? What goes wrong, and
#      when?
#   2. Twice as many queries in a block halve the reads of k and v. What do the figures of
#      the compiled kernels say against BLOCK_M = 1,024?
#   3. The backward needs the probabilities P = p / l again, T x T of them. What does the
#      forward keep for it, and what does that cost?
#
# ## What to read next
#
#   - Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018,
#     arXiv:1805.02867: the running maximum and sum
#   - Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021, arXiv:2112.05682
#   - Dao, Fu, Ermon, Rudra and Re, "FlashAttention: Fast and Memory-Efficient Exact
#     Attention with IO-Awareness", 2022, arXiv:2205.14135: the count of bytes, as a theorem
#   - Dao, "FlashAttention-2", 2023, arXiv:2307.08691: the loops of the project's kernel
#   - Tillet, Kung and Cox, "Triton: An Intermediate Language and Compiler for Tiled Neural
#     Network Computations", 2019
#   - in the project: fast/flash_attention.py::dq_kernel and dkdv_kernel, the
#     backward; tests/fast/test_flash_attention.py, how kernels are tested
#
# The answers: `python -m lessons 4 --answers`.

# %%
# Scroll on for the answers.

# %% [markdown]
# ## Answers
#
# 1. In exact arithmetic every m' gives the same result: exp(-m') stands above and below,
#    and cancels. In floating point, m' = 0 overflows for scores above 88 (fp32). For scores
#    below -104 every exp underflows to 0, and 0 / 0 is NaN. With + 1 at each block, m'
#    climbs by 1 with every block, and l and o shrink by 1 / e: after about a hundred blocks
#    all of them are 0. With the maximum, the largest term is exactly 1. The project's
#    kernel starts at m = -1e30 and not at -inf, so that the scores of a block that is
#    masked altogether give -inf - m = -inf, not NaN.
# 2. o alone has BLOCK_M x D numbers in fp32: with 1,024 x 64 that is 256 KB, and the scores
#    of a block with 64 keys are as many again. All registers of a unit of an H100 are 256
#    KB (65,536 registers of 4 bytes), those of a unit of an MI250 512 KB, for all blocks of
#    threads together. The compiler would spill: with blocks of 128 queries, threads already
#    take about 200 registers or more.
# 3. m + log l, one fp32 number a row. The backward computes S = scale * q k^T again, block
#    by block, and has P = exp(S - (m + log l)) at once, normalised and without a running
#    maximum. That costs matmuls in place of memory: the formulas of the backward have four
#    (dv, dP, dq, dk), and S makes five. The project's two kernels compute S and dP twice,
#    so seven; in exchange no two programs add to the same number, and two runs are equal
#    bit for bit.
