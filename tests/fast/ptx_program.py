"""PTX as a list of instructions, and the arithmetic that one thread does with its own registers."""

import functools
import re
from typing import NamedTuple

import numpy as np
import torch


class Unsupported(Exception):
    """An instruction, or a form of it, that this interpreter does not know."""


# --- Arithmetic

TYPES = {
    f"{letter}{bits}": np.dtype(f"{kind}{bits // 8}")
    for letter, kind in (("b", "u"), ("u", "u"), ("s", "i"))
    for bits in (16, 32, 64)
}
TYPES |= {"f32": np.dtype("f4"), "f32x2": np.dtype(("f4", 2)), "pred": np.dtype(bool)}
HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


def to_fp32(bits, kind: str):
    """16-bit patterns of "bf16" or "f16" as fp32."""
    return torch.from_numpy(bits.view("i2")).view(HALVES[kind]).float().numpy()


def from_fp32(x, kind: str):
    """fp32 as 16-bit patterns: to the nearest, ties to even."""
    return torch.from_numpy(x).to(HALVES[kind]).view(torch.int16).numpy().view("u2")


def fma(a, b, c):
    """a * b + c of fp32: the product is exact in fp64."""
    return (a.astype("f8") * b.astype("f8") + c.astype("f8")).astype("f4")


def bit_field(x, start, length):
    """`length` bits of x from bit `start` on, with their sign if x is signed."""
    bits = 8 * x.itemsize
    return x << (bits - start - length) >> (bits - length)


# Operands and result have one type. min and max of floats ignore NaN.
# fmt: off
ELEMENTWISE = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "fma": fma,
    "min": np.fmin, "max": lambda *operands: functools.reduce(np.fmax, operands),
    "neg": np.negative, "abs": np.abs, "copysign": lambda sign, x: np.copysign(x, sign),
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "shl": np.left_shift, "shr": np.right_shift, "bfe": bit_field, "ex2": np.exp2,
    "mad": lambda a, b, c: a * b + c,  # and those of setp:
    "eq": np.equal, "lt": np.less, "le": np.less_equal,
    "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal,
}
# fmt: on


@functools.lru_cache(maxsize=4096)
def constant(text: str, kind: str, threads: int):
    """An immediate operand, one entry for each thread."""
    dtype = TYPES[kind]
    if text.startswith("0f"):
        return np.full(threads, int(text[2:], 16), "u4").view(dtype)
    value = int(text, 0) % (1 << 8 * dtype.itemsize)
    return np.full(threads, value, f"u{dtype.itemsize}").view(dtype)


def join(parts: list):
    """Numbers of the same width side by side in one, the first in the low bits."""
    return np.stack(parts, 1).view(f"u{len(parts) * parts[0].itemsize}")[:, 0]


# --- Reading PTX

# What this interpreter can execute: operations, and operands where they matter.
INTEGER = "[bsu](16|32|64)"
KNOWN = [
    r"(add|sub|mul|fma)(\.rn)?(\.ftz)?\.f32(x2)?",
    r"(min|max|neg|abs|copysign|div\.(full|approx)|ex2\.approx(\.ftz)?)\.f32",
    rf"(add|sub|min|max|neg|abs|shl|shr|bfe|mul\.lo|mad\.lo)\.{INTEGER}",
    rf"(and|or|xor|not|mov|selp)\.({INTEGER}|f32|pred)",
    r"(mul|mad)\.wide\.[su]32",
    rf"setp\.((eq|ne|lt|le|gt|ge)\.{INTEGER}|(eq|lt|le|gt|ge)\.f32)",
    rf"cvt\.({INTEGER}\.{INTEGER}|rn\.f32\.{INTEGER}|f32\.b?f16|rn\.b?f16(x2)?\.f32)",
    r"shfl\.sync\.(bfly|idx)\.b32 [^|]+, 31, -1",
    r"redux\.sync\.(min|max)\.s32",
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16\.bf16|f16\.f16)\.f32",
    r"(ldmatrix|stmatrix)\.sync\.aligned\.m8n8\.x4\.shared\.b16",
    r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans\.shared\.b16",
    r"wgmma\.(fence|commit_group|wait_group)\.sync\.aligned",
    r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.(bf16\.bf16|f16\.f16) .+, 1, 1(, [01])+",
    rf"(ld\.param|(ld|st)\.(global|shared)(\.v[24])?)\.{INTEGER}",
    r"cp\.async\.(c[ag]\.shared\.global|commit_group|wait_group)",
    r"bar\.sync 0|fence\.proxy\.async\.shared|bra(\.uni)?|ret",
]


class Instruction(NamedTuple):
    """`@%p1 ld.global.v2.b32 {%r1, %r2}, [%rd1 + 8];`"""

    text: str
    guard: str | None  # %p1, or !%p1: which threads execute it; None: all do
    name: str  # ld
    suffixes: list[str]  # global, v2, b32
    operands: list  # ["%r1", "%r2"], ("%rd1", 8)


@functools.lru_cache(maxsize=32)
def parse(ptx: str) -> tuple[list[Instruction], dict[str, int]]:
    """The one kernel of a module, and which instruction follows each label."""
    instructions, labels = [], {}
    body = ptx.partition(".visible .entry")[2].partition("\n{")[2].partition("\n}")[0]
    for line in body.splitlines():
        line = line.partition("//")[0].strip()
        if label := re.fullmatch(r"(\$\w+):", line):
            labels[label[1]] = len(instructions)
        elif line and not line.startswith((".reg", ".loc", ".pragma")):
            instructions.append(parse_instruction(line))
    return instructions, labels


def parse_instruction(text: str) -> Instruction:
    """One line. Unsupported if it is not known."""
    spaced = re.sub(r"\s+", " ", text.replace("shared::cta", "shared"))
    spaced = spaced.replace("global_smem", "0")  # the address at which shared memory begins
    found = re.fullmatch(r"(?:@(!?%\w+) )?([^ ;]+) ?(.*);", spaced)
    guard, operation, rest = found.groups() if found else (None, "", "")
    if not re.fullmatch(f"({'|'.join(KNOWN)})( .*)?", f"{operation} {rest}".strip()):
        raise Unsupported(text)
    name, *suffixes = operation.split(".")
    operands = []
    for operand in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", rest):
        if operand.startswith("{"):
            operands.append(re.findall(r"[^\s,{}]+", operand))
        elif operand.startswith("["):  # a register, a parameter or a number, and bytes
            base, _, offset = operand.strip("[ ]").partition("+")
            operands.append((base.strip(), int(offset or 0)))
        else:
            operands.append(operand)
    return Instruction(text, guard, name, suffixes, operands)
