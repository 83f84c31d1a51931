"""first_use.py: a kernel that is wrong or fails is not used. In Triton's interpreter."""

import contextlib
import io
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from fast import cross_entropy, first_use, flash_attention  # noqa: E402

CPU = torch.device("cpu")


@contextlib.contextmanager
def planted(fault: str):
    """Kernels with a fault, and a comparison of few tokens: the interpreter is slow."""
    attend, loss = flash_attention.flash_attention, cross_entropy.cross_entropy_gradient_

    def steeper(*qkv, alibi_slopes, **settings):
        return attend(*qkv, alibi_slopes=1.1 * alibi_slopes, **settings)

    def not_finite(logits, *rest):
        losses, log_z = loss(logits, *rest)
        return losses.fill_(torch.nan), log_z

    def not_capped(*qkv, softcap, **settings):
        return attend(*qkv, **settings)

    module, name, replacement = {
        "none": (first_use, "LIMIT", first_use.LIMIT),
        "steeper": (flash_attention, "flash_attention", steeper),
        "not capped": (flash_attention, "flash_attention", not_capped),
        "not finite": (cross_entropy, "cross_entropy_gradient_", not_finite),
        "fails": (flash_attention, "flash_attention", lambda *_, **__: 1 / 0),
    }[fault]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_use, "TOKENS", 70)
        patch.setattr(module, name, replacement)
        first_use.is_right.cache_clear()
        yield
    first_use.is_right.cache_clear()


def answers(world, fault, head_dim, softcap):
    """(two answers, stderr, a random number after them), asked where a model asks."""
    said, found = io.StringIO(), []

    def layer(x):
        found.append(first_use.suits(CPU, head_dim, softcap=softcap))
        return x.sin().exp()

    with planted(fault), contextlib.redirect_stderr(said):
        torch.manual_seed(5)
        x = torch.ones(3, requires_grad=True)
        with torch.autocast("cpu", torch.float16):
            checkpoint(layer, x, use_reentrant=False).sum().backward()
        number = torch.rand(())
    return found, said.getvalue(), number


@pytest.mark.parametrize(
    "fault, head_dim, softcap, words",
    [
        ("none", 0, False, ""),
        ("none", 128, False, ""),
        ("none", 64, True, ""),
        ("steeper", 64, False, "attention uses sdpa"),
        ("steeper", 0, False, ""),
        ("not capped", 64, False, ""),
        ("not capped", 64, True, "attention uses flex"),
        ("not finite", 0, False, "the loss uses PyTorch's operators.* nan"),
        ("fails", 128, False, "attention uses sdpa.* division by zero"),
    ],
)
def test_a_kernel_with_a_fault_is_not_used(interpreted, fault, head_dim, softcap, words):
    """One line says so. The caller's autocast, recomputation and random numbers do no harm."""
    found, said, number = interpreted(answers, fault, head_dim, softcap)[0]
    assert found == [not words] * 2  # forward, and again in the backward
    assert said.count("\n") == bool(words) and re.match(words, said)
    assert number == torch.rand((), generator=torch.Generator().manual_seed(5))


def compiled(world):
    """An answer within a compiled function, which is asked while it is traced."""
    with planted("none"):
        torch._dynamo.reset()
        function = torch.compile(
            lambda x: x if first_use.suits(CPU) else -x, backend="eager", fullgraph=True
        )
        return function(torch.ones(())).item(), first_use.is_right.cache_info().misses


def test_a_compiler_traces_none_of_it(interpreted):
    assert interpreted(compiled)[0] == (1, 1)
