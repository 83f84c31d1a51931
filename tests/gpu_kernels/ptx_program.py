"""PTX as a list of instructions, and the arithmetic that one thread does with its own registers."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Unsupported(Exception):
    """An instruction, or a form of it, that this interpreter does not know."""


# --- Reading


class Address(NamedTuple):
    """[base + offset]: a register, a parameter or the beginning of shared memory; bytes."""

    base: str
    offset: int


class Instruction(NamedTuple):
    """`@%p1 ld.global.v2.b32 {%r1, %r2}, [%rd1 + 8];`"""

    text: str
    guard: str | None  # the predicate of the threads that execute it; None: all do
    negated: bool
    name: str  # ld
    suffixes: list[str]  # global, v2, b32
    operands: list  # names and numbers as text, lists of them, addresses


@dataclass
class Program:
    """A kernel."""

    parameters: list[str] = field(default_factory=list)
    registers: dict[str, np.dtype] = field(default_factory=dict)  # by their prefix: %r, %rd
    labels: dict[str, int] = field(default_factory=dict)  # the instruction that follows
    instructions: list[Instruction] = field(default_factory=list)

    def word(self, space: str) -> int:
        """Bytes of the narrowest access to "global" or "shared" memory, at most 4."""
        accesses = [i for i in self.instructions if i.name in ("ld", "st") and space in i.suffixes]
        return min([TYPES[i.suffixes[-1]].itemsize for i in accesses], default=4)


TYPES = {
    f"{letter}{bits}": np.dtype(f"{kind}{bits // 8}")
    for letter, kind in (("b", "u"), ("u", "u"), ("s", "i"))
    for bits in (8, 16, 32, 64)
}
TYPES |= {"f32": np.dtype("f4"), "f32x2": np.dtype("f4"), "pred": np.dtype(bool)}


@functools.lru_cache(maxsize=32)
def parse(ptx: str) -> Program:
    """The one kernel of a module."""
    program = Program()
    head, _, body = ptx.partition(".visible .entry")[2].partition("\n{")
    program.parameters = re.findall(r"\.param [^,\n]*?(\w+_param_\d+)", head)
    for line in body.partition("\n}")[0].splitlines():
        line = line.partition("//")[0].strip()
        if label := re.fullmatch(r"(\$\w+):", line):
            program.labels[label[1]] = len(program.instructions)
        elif declared := re.fullmatch(r"\.reg \.(\w+)\s+(%\w+?)<\d+>;", line):
            program.registers[declared[2]] = TYPES[declared[1]]
        elif line and not line.startswith((".loc", ".pragma")):
            program.instructions.append(parse_instruction(line))
    return program


def parse_instruction(text: str) -> Instruction:
    """One line."""
    found = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*);", text)
    if not found:
        raise Unsupported(text)
    negation, guard, operation, rest = found.groups()
    name, *suffixes = operation.replace("shared::cta", "shared").split(".")
    operands = []
    for operand in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", rest):
        if operand.startswith("{"):
            operands.append(re.findall(r"[^\s,{}]+", operand))
        elif operand.startswith("["):
            base, _, offset = operand.strip("[ ]").partition("+")
            operands.append(Address(base.strip(), int(offset or 0)))
        else:
            operands.append(operand)
    return Instruction(text, guard, negation == "!", name, suffixes, operands)


# --- Arithmetic: what one thread does with its own registers


def to_fp32(bits, kind: str):
    """16-bit patterns of "bf16" or "f16" as fp32."""
    if kind == "bf16":
        return (bits.astype("u4") << 16).view("f4")
    return bits.view("f2").astype("f4")


def from_fp32(x, kind: str):
    """fp32 as 16-bit patterns: to the nearest, ties to even."""
    if kind == "f16":
        return x.astype("f2").view("u2")
    bits = x.view("u4")
    last_kept = (bits >> 16) & 1
    rounded = ((bits + 0x7FFF + last_kept) >> 16).astype("u2")
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def fma(a, b, c):
    """a * b + c of fp32: the product is exact in fp64."""
    return (a.astype("f8") * b.astype("f8") + c.astype("f8")).astype("f4")


def shift_left(x, count):
    """Zero if the count is at least the width."""
    bits = 8 * x.dtype.itemsize
    shifted = x << np.minimum(count, bits - 1).astype(x.dtype)
    return np.where(count < bits, shifted, np.zeros_like(x))


def shift_right(x, count):
    """Copies of the sign enter if x is signed, else zeros."""
    bits = 8 * x.dtype.itemsize
    if x.dtype.kind == "i":
        return x >> np.minimum(count, bits - 1).astype(x.dtype)
    return np.where(count < bits, x >> np.minimum(count, bits - 1).astype(x.dtype), 0)


def bit_field(x, start, length):
    """`length` bits of x from bit `start` on: 32 bits, with its sign if x is signed."""
    above = np.minimum(start + length, 32)
    wide = x.astype("i8") << (64 - above).astype("i8")  # the field is at the top
    if x.dtype.kind == "u":
        wide = wide.view("u8")
    return (wide >> (64 - above + start).astype(wide.dtype)).astype(x.dtype)


def several(function: Callable) -> Callable:
    """Of two operands, or of three (sm_100 and later)."""
    return lambda *operands: functools.reduce(function, operands)


# Operands and result have one type, but counts of bits are u32.
# fmt: off
ELEMENTWISE = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "fma": fma,
    "min": several(np.fmin), "max": several(np.fmax), "ex2": np.exp2,
    "neg": np.negative, "abs": np.abs, "copysign": lambda sign, x: np.copysign(x, sign),
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "shl": shift_left, "shr": shift_right, "bfe": bit_field, "mov": lambda x: x,
}
COMPARISONS = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal,
    "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal,
}
# fmt: on
COUNTS = {"shl", "shr", "bfe"}


@functools.lru_cache(maxsize=4096)
def constant(text: str, dtype: np.dtype, threads: int):
    """An immediate operand, one entry for each thread. Shared memory begins at address 0."""
    if text == "global_smem":
        return np.zeros(threads, dtype)
    if text.startswith("0f"):
        return np.full(threads, int(text[2:], 16), "u4").view(dtype)
    if not re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
        raise Unsupported(f"the operand {text}")
    value = int(text, 0)
    if dtype.kind == "b":
        return np.full(threads, value != 0)
    return np.full(threads, value % (1 << 8 * dtype.itemsize), f"u{dtype.itemsize}").view(dtype)
