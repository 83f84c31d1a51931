"""Before a process uses a kernel on a GPU, it compares it there with float64, once.

A kernel that is wrong on some GPU would train a wrong model without a word. If one differs or
fails, one line says so: `attn_impl=auto` takes another way, and the loss PyTorch's operators.
Compared are attention (causal, ALiBi, a softcap if the model has one; with the launch rows for the
model's heads), the same for the single query of a decoder's step, and the loss, in bf16. It costs
the compilation of a few small kernels, which Triton keeps on disk for the next process.
"""

import functools
import importlib.util
import os
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor

import torch

from fast import launch_table
from program import one_line

LIMIT = 2e-2  # of the errors in bf16: attention's are relative to the largest exact value
TOKENS = 300  # several blocks of queries and of keys


@torch.compiler.assume_constant_result  # torch.compile calls it, and does not trace it
def suits(
    device: torch.device, head_dim: int = 0, one_query: bool = False, softcap: bool = False
) -> bool:
    """Is Triton's kernel fast and right on this device? The loss's; with a head_dim, attention's.

    one_query: attention's launch row for a single query, which sees a part of the keys. softcap:
    whether attention has one.

    If not, one line on stderr says so, once per process; none if Triton is not there, or has no
    matrix instructions for this device.
    """
    if not can_build():
        return False
    if not launch_table.has_matrix_instructions(launch_table.architecture(device)):
        return False
    if head_dim:
        head_dim = 64 if head_dim <= 64 else 128  # each has launch rows of its own
    return is_right(device, head_dim, one_query, softcap)


@functools.cache
def can_build() -> bool:
    """Whether Triton is here, and what builds the launchers of its kernels: a C compiler, Python.h.

    PyTorch for CUDA and ROCm brings Triton; some containers lack the others.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    return bool(importlib.util.find_spec("triton") and compiler and os.path.exists(header))


@functools.cache
def is_right(
    device: torch.device, head_dim: int, one_query: bool = False, softcap: bool = False
) -> bool:
    """Whether the kernel agrees with float64 on this device. If not, says so."""
    # A new thread has nothing that the caller may have set: no autocast, no no_grad, no hooks of
    # activation checkpointing, no compiler that traces.
    with ThreadPoolExecutor(1) as thread:
        fault = thread.submit(fault_on, device, head_dim, one_query, softcap).result()
    if fault:
        way = "flex" if softcap else "sdpa"
        instead = f"attention uses {way}" if head_dim else "the loss uses PyTorch's operators"
        print(f"{instead}, since Triton's kernel fails on {device}: {fault}", file=sys.stderr)
    return not fault


def fault_on(device: torch.device, head_dim: int, one_query: bool, softcap: bool) -> str:
    """What is wrong with a kernel on this device, "" if nothing is."""
    from fast import cross_entropy, flash_attention  # they need Triton

    gpus = [device] if device.type == "cuda" else []
    try:
        if device.index is not None and gpus:
            torch.cuda.set_device(device)  # in this thread
        with torch.random.fork_rng(gpus):  # the caller's random numbers stay as they are
            if head_dim:
                size = {"n_queries": TOKENS, "n_keys": TOKENS, "D": head_dim}
                if one_query:
                    size |= {"n_queries": 1, "documents": True}
                if softcap:
                    size["softcap"] = 2.0
                errors = flash_attention.compare(device, torch.bfloat16, **size)
            else:
                errors = cross_entropy.compare(device, torch.bfloat16)
    except Exception as error:  # compilers and drivers report with many types
        return one_line(error) or type(error).__name__
    is_close = all(error < LIMIT for error in errors)  # NaN is not
    return "" if is_close else f"errors of {', '.join(f'{error:.1e}' for error in errors)}"
