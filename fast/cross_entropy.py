"""Cross-entropy in Triton: logits in, losses out, and the logits become their own gradient.

For one row of logits x (V,), and its label:

    s      = scale * x
    log_z  = logsumexp(s)
    loss   = log_z - s[label] + z_loss * log_z^2
    d loss / d s = (1 + 2 * z_loss * log_z) * softmax(s) - onehot(label)

A row of 50,368 logits does not fit in the registers of a program, so one program passes over its
row twice, a block of columns at a time:

    1. m = the largest s so far, l = sum of exp(s - m)     online, as in flash_attention.py
       log_z = m + log l
    2. write exp(s - m) * (1 + 2 * z_loss * log_z) / l - onehot(label) over the logits

So nothing else is as wide as the vocabulary: in bf16 a logit takes 2 bytes, where PyTorch's own
operators take 10 (the logits, their fp32 copy, the log-probabilities). All arithmetic is in fp32,
and only the gradient is rounded. Each row has one owner and one order of sums: two runs are equal
bit for bit. The caller multiplies the gradient by `scale`, which d s / d x lacks here.

    python -m fast.cross_entropy     compare with float64; on a GPU also the speed

Without a GPU the comparison runs in Triton's interpreter. An H200 has run it. loss.py decides when
these kernels run.

Milakov and Gimelshein, Online normalizer calculation for softmax (2018), algorithm 3; the z-loss:
PaLM (2022), section 5.
"""

import os
import sys

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import program
from program import require

try:
    import triton
    import triton.language as tl
except ImportError as missing:
    raise ImportError(
        "fast/cross_entropy.py needs triton, which comes with PyTorch for CUDA and ROCm; "
        "on a Linux CPU: pip install 'triton>=3.4'"
    ) from missing

IGNORE = tl.constexpr(-100)  # a label that does not count, as in loss.py
# Columns of a block, and warps that share it. On every chip each thread has at least 8 columns:
# were there fewer columns than threads, threads would hold copies of each other's.
BLOCK = 4096
NUM_WARPS = 8
ROWS = 4096  # of a product that is rounded before it is added, made at a time
# Whether PyTorch's addmm adds a product of 16-bit matrices to an fp32 one: 2.11 does, 2.9 refuses.
ADDS_IN_FP32 = torch.__version__ >= (2, 11)
# With TRITON_INTERPRET=1 kernels run in NumPy, on the CPU.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def load_scaled(row, begin, vocab_size, scale, BLOCK: tl.constexpr):
    """scale * logits of the columns begin .. begin + BLOCK, fp32; -inf beyond the vocabulary.

    Returns (scaled logits, pointers, exists), (BLOCK,) each.
    """
    column = tl.arange(0, BLOCK)
    pointers = row + begin + column
    exists = column < vocab_size - begin
    s = tl.load(pointers, mask=exists, other=0.0).to(tl.float32) * scale
    return tl.where(exists, s, -float("inf")), pointers, exists


@triton.jit
def cross_entropy_kernel(
    logits, labels, losses, log_zs, row_stride, vocab_size, scale, z_loss,
    WRITE_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """loss and log_z of one row; WRITE_GRADIENT: also its gradient, over its logits. Grid: (rows,).

    A label that does not count has no loss and no gradient. Of another label outside of the
    vocabulary both are NaN: there is no logit to read.
    """
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * row_stride
    label = tl.load(labels + index)
    counts = label != IGNORE
    exists = (label >= 0) & (label < vocab_size)
    label_logit = tl.load(row + label, mask=exists, other=float("nan")).to(tl.float32) * scale

    m = -float("inf")
    l = tl.zeros([BLOCK], tl.float32)  # noqa: E741 (one sum for each lane; they are added up below)
    for begin in range(0, vocab_size, BLOCK):
        s, _, _ = load_scaled(row, begin, vocab_size, scale, BLOCK)
        m_new = tl.maximum(m, tl.max(s, 0))
        l = l * tl.exp(m - m_new) + tl.exp(s - m_new)  # noqa: E741
        m = m_new
    total = tl.sum(l, 0)
    log_z = m + tl.log(total)
    loss = (m - label_logit) + tl.log(total) + z_loss * log_z * log_z
    tl.store(losses + index, tl.where(counts, loss, 0.0))
    tl.store(log_zs + index, log_z)

    if WRITE_GRADIENT:
        tl.debug_barrier()  # all threads have read the label's logit before one overwrites it
        factor = tl.where(exists, (1 + 2 * z_loss * log_z) / total, float("nan"))
        for begin in range(0, vocab_size, BLOCK):
            s, pointers, in_row = load_scaled(row, begin, vocab_size, scale, BLOCK)
            is_label = begin + tl.arange(0, BLOCK) == label
            grad = tl.exp(s - m) * factor - tl.where(is_label, 1.0, 0.0)
            grad = tl.where(counts, grad, 0.0)
            tl.store(pointers, grad.to(logits.dtype.element_ty), mask=in_row)


def launch(logits, labels, scale: float, z_loss: float, write_gradient: bool):
    """Run the kernel on every row. Returns (losses, log_z), (rows,) fp32 each."""
    check(logits, labels)
    rows, vocab_size = logits.shape
    losses, log_zs = empty_results(logits)
    if rows > 0:
        with torch.cuda.device_of(logits):
            cross_entropy_kernel[(rows,)](
                logits, labels.contiguous(), losses, log_zs, logits.stride(0), vocab_size,
                float(scale), float(z_loss), WRITE_GRADIENT=write_gradient, BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )  # fmt: skip
    return losses, log_zs


def check(logits, labels) -> None:
    """UserError for inputs that the kernel cannot take."""
    supported = logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
    require(supported, f"logits must be bf16, fp16 or fp32, not {logits.dtype}: cast them")
    matrix = logits.ndim == 2 and logits.stride(1) == 1 and labels.shape == logits.shape[:1]
    require(
        matrix,
        f"cross_entropy needs logits (rows, V), contiguous in V, and labels (rows,), not "
        f"{tuple(logits.shape)} and {tuple(labels.shape)}",
    )
    runs = (logits.is_cuda or INTERPRETED.value) and labels.device == logits.device
    require(
        runs,
        f"cross_entropy runs on CUDA and ROCm GPUs, not on {logits.device} with labels on "
        f"{labels.device}: use loss.chunk_loss, or set TRITON_INTERPRET=1",
    )


def empty_results(logits):
    """(losses, log_z) without values: (rows,) fp32 each."""
    losses = logits.new_empty(logits.shape[:1], dtype=torch.float32)
    return losses, torch.empty_like(losses)


# --- the operators of the kernel: one node each for torch.compile, and for tensors without data


@torch.library.custom_op("mpt::cross_entropy", mutates_args=())
def cross_entropy(
    logits: Tensor, labels: Tensor, scale: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """(losses, log_z), (rows,) fp32 each, of logits (rows, V) and labels (rows,) int64.

    logits: bf16, fp16 or fp32. The loss is 0 for the label IGNORE, and NaN for other labels outside
    of the vocabulary. Without gradient. Raises UserError, a ValueError.
    """
    return launch(logits, labels, scale, z_loss, write_gradient=False)


@torch.library.custom_op("mpt::cross_entropy_gradient_", mutates_args=("logits",))
def cross_entropy_gradient_(
    logits: Tensor, labels: Tensor, scale: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """The same, and the logits become the gradient of their row's loss by scale * logits."""
    return launch(logits, labels, scale, z_loss, write_gradient=True)


@cross_entropy.register_fake
@cross_entropy_gradient_.register_fake
def shapes(logits, labels, scale, z_loss):
    """Shapes and dtypes of the results of both, for the compiler."""
    return empty_results(logits)


# --- the gradient of the output layer's weight, by PyTorch's matmul
#
# An operator too: PyTorch cannot run addmm with another output dtype on tensors without data before
# 2.13, and FlopCounterMode cannot count it.


@torch.library.custom_op("mpt::add_product_", mutates_args=("total",))
def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in one matmul. total: (M, N) fp32; a: (M, K), b: (K, N), of one dtype.

    Sums are fp32, and nothing is allocated. Before PyTorch 2.11 a product of 16-bit matrices is
    rounded to 16 bits before it is added, and made for ROWS rows at a time.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif ADDS_IN_FP32:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        for begin in range(0, len(total), ROWS):
            rows = slice(begin, begin + ROWS)
            total[rows] += a[rows] @ b


@add_product_.register_fake
def add_product_shapes(total, a, b):
    """It returns nothing."""


@register_flop_formula(torch.ops.mpt.add_product_)
def add_product_flops(total_shape, a_shape, b_shape, *args, **kwargs) -> int:
    """One matmul."""
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]


# --- the obvious version, and measurements


def reference_cross_entropy(logits, labels, scale=1.0, z_loss=0.0):
    """(losses, log_z, gradient) with PyTorch's operators, in the dtype of the logits."""
    s = scale * logits
    counts = labels != IGNORE.value
    label = labels.clamp(min=0)[:, None]
    log_z = s.logsumexp(1)
    losses = log_z - s.gather(1, label)[:, 0] + z_loss * log_z.square()
    onehot = torch.zeros_like(s).scatter_(1, label, 1.0)
    grad = (1 + 2 * z_loss * log_z)[:, None] * s.softmax(1) - onehot
    return losses * counts, log_z, grad * counts[:, None]


def compare(device, dtype, rows=40, vocab_size=9001, scale=0.5, z_loss=0.01):
    """The largest errors of losses, log_z and gradient against float64."""
    torch.manual_seed(0)
    logits = (8 * torch.randn(rows, vocab_size)).to(device, dtype)
    labels = torch.randint(0, vocab_size, (rows,), device=device)
    labels[::5] = IGNORE.value
    exact = reference_cross_entropy(logits.double(), labels, scale, z_loss)
    losses, log_z = cross_entropy_gradient_(logits, labels, scale, z_loss)
    found = (losses, log_z, logits)
    return [(a - b).abs().max().item() for a, b in zip(found, exact, strict=True)]


def demonstrate(device) -> None:
    """Print errors against float64; UserError if one is too large."""
    print(f"largest error of   losses    log z     gradient   ({device})")
    for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)):
        errors = compare(device, dtype)
        print(f"{str(dtype)[6:]:18s}", *(f"{e:.1e}  " for e in errors))
        require(max(errors) < limit, f"cross_entropy is wrong in {dtype}: errors {errors}")


def print_speed(rows=4096, vocab_size=50368) -> None:
    """Milliseconds and GB/s of a chunk of the loss in bf16, on this GPU."""
    logits = torch.randn(rows, vocab_size, device="cuda").bfloat16()
    labels = torch.randint(0, vocab_size, (rows,), device="cuda")
    ms = triton.testing.do_bench(lambda: cross_entropy_gradient_(logits, labels, 1.0, 0.0))
    moved = 2 * logits.numel() * logits.element_size()  # each logit is read and written
    print(f"{rows} x {vocab_size} in bf16: {ms:.3f} ms, {moved / ms / 1e6:.0f} GB/s")


def main(argv) -> None:
    """Compare with float64, in the interpreter if there is no GPU."""
    program.arguments(argv)
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not INTERPRETED.value:
        # Triton reads the variable when a kernel is decorated, so the program starts again.
        restart = [sys.executable, "-m", "fast.cross_entropy"]
        os.execve(sys.executable, restart, os.environ | {"TRITON_INTERPRET": "1"})
    demonstrate("cuda" if has_gpu else "cpu")
    if has_gpu and not INTERPRETED.value:
        print_speed()


if __name__ == "__main__":
    program.run(main)
