"""Before a process uses these kernels on a GPU, it compares them there with float64, once.

A kernel that is wrong on some GPU would train a wrong model without a word. If one differs or
fails, attention and loss take PyTorch's operators, and one line says so. The comparison costs the
compilation of five small kernels, which Triton keeps on disk for the next process.
"""

import functools
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from gpu_kernels import launch_table
from program import one_line

LIMIT = 2e-2  # of the errors in bf16: attention's are relative to the largest exact value
TOKENS = 300  # several blocks of queries and of keys


@torch.compiler.assume_constant_result  # torch.compile calls it, and does not trace it
def suits(device: torch.device) -> bool:
    """Whether Triton's kernels are fast and right on this device.

    If not, one line on stderr says so, once per process.
    """
    arch = launch_table.architecture(device)
    return launch_table.has_matrix_instructions(arch) and are_right(device)


@functools.cache
def are_right(device: torch.device) -> bool:
    """Whether both kernels agree with float64 on this device. If not, says so."""
    # A new thread has nothing that the caller may have set: no autocast, no no_grad, no hooks of
    # activation checkpointing, no compiler that traces.
    with ThreadPoolExecutor(1) as thread:
        fault = thread.submit(fault_on, device).result()
    if fault:
        print(
            f"Triton's kernels cannot be trusted on {device}, so attention uses sdpa "
            f"and the loss PyTorch's operators: {fault}",
            file=sys.stderr,
        )
    return not fault


def fault_on(device: torch.device) -> str:
    """What is wrong with the kernels on this device, "" if nothing is."""
    from gpu_kernels import cross_entropy, flash_attention  # they need Triton

    gpus = [device] if device.type == "cuda" else []
    for gpu in gpus:
        torch.cuda.set_device(gpu)  # in this thread
    errors = {}
    try:
        with torch.random.fork_rng(gpus):  # the caller's random numbers stay as they are
            errors["attention"] = flash_attention.compare(
                device, torch.bfloat16, n_queries=TOKENS, n_keys=TOKENS
            )
            errors["loss"] = cross_entropy.compare(device, torch.bfloat16)
    except Exception as error:  # compilers and drivers report with many types
        return one_line(error) or type(error).__name__
    for name, found in errors.items():
        if not all(error < LIMIT for error in found):  # NaN is not below it, either
            return f"{name} has errors of {max(found):.1e}"
    return ""
