"""Runs the PTX that Triton compiles for an NVIDIA GPU, on a CPU, in NumPy.

    with ptx_interpreter.on("sm_90", flash_attention):
        errors = flash_attention.compare("cpu", torch.bfloat16)

Within this context, every launch of a Triton kernel compiles it for the chip (compiled.for_chip),
and its PTX runs on the data of CPU tensors, one block of threads after another. A register is an
array with one entry for each thread of the block. All threads execute the same instruction at the
same time, so nothing depends on the order of warps. Instead, memory notes which warp read and wrote
each word, and after how many barriers. What a GPU would do silently is a `Fault` here:

    race             two warps use a word, one of them writes, and no barrier is between them. Words
                     of global memory: also two blocks
    before a wait    shared memory is read before its cp.async is waited for; a result of a wgmma
                     is read, or what it reads is overwritten, before the wgmma is waited for
    proxy            wgmma reads what ordinary instructions stored, with no fence.proxy.async since
    register fence   wgmma reads a register that was written since the last wgmma.fence
    address          outside of the kernel's tensors, or not a multiple of the access's width
    uninitialised    a register, or a word of shared memory, that nothing has written decides on a
                     result: as an address, a predicate, a stored value, a factor of a product
                     (not if it is packed beside another: LLVM does that with what it ignores)

Limits. It knows the instructions that attention's and the loss's kernels need on sm_80, sm_86,
sm_89, sm_90 (wgmma) and sm_120, and refuses others by name (`Unsupported`): no TMA, mbarrier or
tcgen05, no branch at which threads part. It executes PTX, not what ptxas makes of it. It says
nothing about speed. A matrix product is summed in fp64 and rounded once, where a tensor core rounds
in its own way; ex2.approx and div.full are exact to fp32; .ftz is ignored. It finds the races of
the paths that the data takes, not of others. Barriers and fences have their full effect at once: of
a memory model there is no more than the list above.

cp.async writes shared memory by the generic proxy, so by the letter wgmma needs a fence.proxy.async
after the wait. In the loop of attention's dk and dv on sm_90, Triton 3.6.0 has none, 3.7.1 and
3.8.0 lack some (3.7.1 the one for `do`), 3.9.0 has one after each wait. Nothing wrong was seen on
an H200 (3.6.0). So a missing one is a Fault only with `copies_need_fence=True`.
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import numpy as np
from ptx_memory import Clock, Fault, GlobalMemory, Memory, SharedMemory, swizzled
from ptx_program import (
    COMPARISONS,
    COUNTS,
    ELEMENTWISE,
    TYPES,
    Address,
    Instruction,
    Unsupported,
    constant,
    from_fp32,
    parse,
    to_fp32,
)
from triton.runtime.jit import JITFunction

from gpu_kernels import compiled

WARP = 32  # threads

# --- A block of threads


class Product(NamedTuple):
    """A wgmma in flight."""

    results: list[str]  # registers that it writes
    factors: list[str]  # registers that it reads
    places: list  # words of shared memory that it reads


class Block:
    """One block: its registers and shared memory, and what each instruction does to them."""

    def __init__(self, launch: "Launch", position: tuple[int, int, int]):
        self.program, self.arguments = launch.program, launch.arguments
        self.memory, self.clock = launch.memory, launch.clock
        self.copies_need_fence = launch.copies_need_fence
        self.threads = launch.warps * WARP
        self.warp, self.lane = np.divmod(np.arange(self.threads), WARP)
        word = self.program.word("shared")
        self.shared = SharedMemory(launch.shared_bytes, word, self.clock)
        self.registers = {"%tid.x": np.arange(self.threads, dtype="u4")}
        for axis, index in zip("xyz", position, strict=True):
            self.registers[f"%ctaid.{axis}"] = np.full(self.threads, index, "u4")
        for axis, blocks in zip("xyz", launch.grid, strict=True):
            self.registers[f"%nctaid.{axis}"] = np.full(self.threads, blocks, "u4")
        self.undefined = {}  # the threads, (threads,) bool, whose entry nothing has written
        self.active = None  # the threads that execute the instruction; None: all
        self.doubtful = None  # those that have read an undefined entry in it; None: none
        self.copies, self.copy_groups = [], []  # cp.async: since the last commit; in flight
        self.products, self.product_groups = [], []  # the same of wgmma
        self.results_in_flight, self.factors_in_flight = set(), set()  # registers of these
        self.since_fence = set()  # registers written since the last wgmma.fence

    def run(self) -> None:
        """Execute the kernel to its end."""
        at = 0
        while at is not None:
            instruction = self.program.instructions[at]
            try:
                at = self.step(instruction, at + 1)
            except (Fault, Unsupported) as problem:
                raise type(problem)(f"{problem}: {instruction.text[:120]}") from None

    def step(self, instruction: Instruction, following: int) -> int | None:
        """Execute one instruction. Returns the index of the next one."""
        self.active = self.doubtful = None
        if instruction.guard:
            chosen = self.read(instruction.guard, bool) != instruction.negated
            self.demand("a predicate")
            if not chosen.any():
                return following
            self.active = None if chosen.all() else chosen
        name = instruction.name
        if name in ("bra", "ret", "bar") and self.active is not None:
            raise Unsupported("threads of one block part")
        if name == "bra":
            return self.program.labels[instruction.operands[0]]
        if name == "ret":
            return None
        if name in ELEMENTWISE:
            self.elementwise(instruction)
        else:
            getattr(self, f"do_{name}")(instruction.suffixes, *instruction.operands)
        return following

    # registers

    def read(self, operand: str, dtype):
        """A register or constant as `dtype`, (threads,)."""
        dtype = np.dtype(dtype)
        if not operand.startswith("%"):
            return constant(operand, dtype, self.threads)
        if operand in self.results_in_flight:
            raise Fault(f"{operand} is read before the wgmma that writes it was waited for")
        value = self.registers.get(operand)
        if value is None or operand in self.undefined:
            undefined = self.undefined.get(operand, np.ones(self.threads, bool))
            self.doubtful = undefined if self.doubtful is None else self.doubtful | undefined
            value = np.zeros(self.threads, self.type_of(operand)) if value is None else value
        if value.dtype.itemsize == dtype.itemsize:
            return value.view(dtype)
        return value.astype(f"u{dtype.itemsize}").view(dtype)  # the low bits

    def type_of(self, register: str) -> np.dtype:
        """As it was declared."""
        return self.program.registers[register.rstrip("0123456789")]

    def write(self, register: str, value) -> None:
        """Set the entries of the active threads. A narrow signed value is extended by its sign."""
        if register == "_":
            return
        if register in self.results_in_flight or register in self.factors_in_flight:
            raise Fault(f"{register} is written before the wgmma that uses it was waited for")
        if value.dtype.kind == "f":
            value = value.view(f"u{value.dtype.itemsize}")
        value = value.astype(self.type_of(register))
        undefined = self.doubtful
        if self.active is not None:
            before = self.registers.get(register)
            unknown = before is None
            undefined_before = self.undefined.get(register, np.full(self.threads, unknown))
            value = value if unknown else np.where(self.active, value, before)
            undefined = np.where(self.active, self.doubtful or False, undefined_before)
        self.registers[register] = value
        self.since_fence.add(register)
        if undefined is not None and undefined.any():
            self.undefined[register] = undefined
        else:
            self.undefined.pop(register, None)

    def demand(self, use: str) -> None:
        """A Fault if an active thread has read an undefined entry in this instruction."""
        if self.doubtful is not None:
            active = True if self.active is None else self.active
            if (self.doubtful & active).any():
                raise Fault(f"an uninitialised register is {use}")

    # arithmetic

    def elementwise(self, instruction: Instruction) -> None:
        """Operations of one type."""
        name, suffixes, (target, *sources) = instruction[3:]
        if isinstance(target, list) or isinstance(sources[0], list):
            return self.pack(suffixes, target, sources[0])
        if suffixes[-1] not in TYPES:
            raise Unsupported("a type")
        if name == "mul" and "wide" in suffixes:
            return self.do_mad(suffixes, target, *sources, "0")
        dtype = TYPES[suffixes[-1]]
        if suffixes[-1] == "f32x2":  # two numbers in 64 bits
            values = [self.read(source, "u8").view("f4") for source in sources]
            return self.write(target, ELEMENTWISE[name](*values).view("u8"))
        if name == "mov" and sources[0].startswith("%") and "." in sources[0]:
            return self.write(target, self.registers[sources[0]])
        values = [self.read(source, dtype) for source in sources]
        if name in COUNTS:
            values[1:] = [self.read(source, "u4") for source in sources[1:]]
        if name == "mul" and dtype.kind != "f" and "lo" not in suffixes:
            raise Unsupported("a form of mul")
        self.write(target, ELEMENTWISE[name](*values).astype(dtype))

    def pack(self, suffixes, target, source) -> None:
        """mov: several registers side by side in one, or the parts of one."""
        if isinstance(target, list):
            width = TYPES[suffixes[0]].itemsize // len(target)
            parts = self.read(source, TYPES[suffixes[0]]).view(f"u{width}")
            for index, register in enumerate(target):
                self.write(register, parts[index :: len(target)])
        else:
            width = TYPES[suffixes[0]].itemsize // len(source)
            # LLVM fills a half that it does not need with a register that nothing writes.
            used = [part if part in self.registers else "0" for part in source]
            parts = np.stack([self.read(part, f"u{width}") for part in used], 1)
            self.write(target, parts.view(TYPES[suffixes[0]])[:, 0])

    def do_mad(self, suffixes, target, a, b, c) -> None:
        """mad.lo, mad.wide and mul.wide of integers."""
        dtype = TYPES[suffixes[-1]]
        a, b = self.read(a, dtype), self.read(b, dtype)
        if suffixes[0] == "wide":
            dtype = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
        elif suffixes[0] != "lo":
            raise Unsupported("a form of mad")
        self.write(target, a.astype(dtype) * b.astype(dtype) + self.read(c, dtype))

    def do_setp(self, suffixes, target, a, b) -> None:
        """setp. Comparisons with NaN are false."""
        if len(suffixes) != 2 or suffixes[0] not in COMPARISONS:
            raise Unsupported("a form of setp")
        comparison, dtype = suffixes
        a, b = self.read(a, TYPES[dtype]), self.read(b, TYPES[dtype])
        result = COMPARISONS[comparison](a, b)
        if comparison == "ne" and a.dtype.kind == "f":
            result &= ~np.isnan(a) & ~np.isnan(b)
        self.write(target, result)

    def do_selp(self, suffixes, target, if_true, if_false, predicate) -> None:
        """selp. Undefined is only what is selected."""
        chosen = self.read(predicate, bool)
        undefined = self.doubtful
        values = []
        for operand, taken in ((if_true, chosen), (if_false, ~chosen)):
            self.doubtful = None
            values.append(self.read(operand, TYPES[suffixes[-1]]))
            if self.doubtful is not None:
                undefined = (self.doubtful & taken) | (False if undefined is None else undefined)
        self.doubtful = undefined
        self.write(target, np.where(chosen, *values))

    def do_cvt(self, suffixes, target, *sources) -> None:
        """cvt between integers, and between fp32 and what is narrower."""
        to, source = suffixes[-2:]
        halves = ("bf16", "f16")
        if to in ("bf16x2", "f16x2") and source == "f32":
            high, low = (from_fp32(self.read(x, "f4"), to[:-2]).astype("u4") for x in sources)
            self.write(target, high << 16 | low)
        elif to in halves and source == "f32":
            self.write(target, from_fp32(self.read(sources[0], "f4"), to))
        elif to == "f32" and source in halves:
            self.write(target, to_fp32(self.read(sources[0], "u2"), source))
        elif to in TYPES and source in TYPES and TYPES[source].kind != "f":
            self.write(target, self.read(sources[0], TYPES[source]).astype(TYPES[to]))
        else:
            raise Unsupported("a form of cvt")

    # across the threads of a warp

    def do_shfl(self, suffixes, target, source, other, limits, _) -> None:
        """shfl.sync.bfly and .idx over whole warps."""
        if "|" in target or limits != "31" or suffixes[1] not in ("bfly", "idx"):
            raise Unsupported("a form of shfl")
        other = self.read(other, "u4").astype("i8")
        lane = self.lane ^ other if suffixes[1] == "bfly" else other
        thread = WARP * self.warp + lane % WARP
        self.doubtful = None
        value = self.read(source, "u4")[thread]
        self.doubtful = None if self.doubtful is None else self.doubtful[thread]
        self.write(target, value)

    def do_redux(self, suffixes, target, source, _) -> None:
        """redux.sync over whole warps."""
        dtype = TYPES[suffixes[-1]]
        function = {"min": np.min, "max": np.max, "add": np.sum}[suffixes[1]]
        values = self.read(source, dtype)
        self.demand("a term of a reduction")
        result = function(values.reshape(-1, WARP), 1).astype(dtype)
        self.write(target, np.repeat(result, WARP))

    # matrix products. Thread 4 g + t of a warp has, of a matrix of 8 x 8, elements 2 t and 2 t + 1
    # of row g: a fragment.

    def halves(self, registers: list[str], kind: str):
        """Fragments of 16-bit numbers, fp32: (registers, warps, 8, 8)."""
        bits = np.stack([self.read(register, "u4") for register in registers])
        self.demand("a factor of a matrix product")
        return to_fp32(bits.view("u2"), kind).reshape(len(registers), -1, 8, 8)

    def left_factor(self, registers: list[str], kind: str):
        """(warps, 16, 16): fragments above and below each other, then the two to their right."""
        (a, b, c, d) = self.halves(registers, kind)
        return np.concatenate([np.concatenate([a, b], 1), np.concatenate([c, d], 1)], 2)

    def accumulator(self, registers: list[str]):
        """(warps, 16, n), of n / 2 registers: fragments of 8 columns, rows 0 to 7 and 8 to 15."""
        values = np.stack([self.read(register, "f4") for register in registers])
        self.demand("a term of a matrix product")
        parts = values.reshape(-1, 2, 2, self.threads // WARP, 8, 4)
        # (columns / 8, upper or lower, even or odd column, warp, g, t)
        return parts.transpose(3, 1, 4, 0, 5, 2).reshape(self.threads // WARP, 16, -1)

    def fragments(self, matrix):
        """The reverse: (n / 2, threads) fp32."""
        parts = matrix.reshape(self.threads // WARP, 2, 8, -1, 4, 2)
        return parts.transpose(3, 1, 5, 0, 2, 4).reshape(-1, self.threads).astype("f4")

    def do_mma(self, suffixes, d, a, b, c) -> None:
        """mma.m16n8k16: d = a b + c, of each warp."""
        kind = suffixes[-2]
        forms = [f"sync.aligned.m16n8k16.row.col.f32.{x}.{x}.f32" for x in ("bf16", "f16")]
        if ".".join(suffixes) not in forms:
            raise Unsupported("a form of mma")
        right = np.concatenate(self.halves(b, kind), 2)  # (warps, n, k)
        product = self.left_factor(a, kind).astype("f8") @ right.astype("f8").transpose(0, 2, 1)
        result = self.fragments(product + self.accumulator(c))
        for register, values in zip(d, result, strict=True):
            self.write(register, values)

    def do_ldmatrix(self, suffixes, targets, address) -> None:
        """ldmatrix: lane 8 i + r of a warp has the address of row r, 16 bytes, of matrix i."""
        count = len(targets)
        rows = self.lane < 8 * count
        places = self.shared.places(self.read_address(address)[rows], 16)
        words = self.shared.load(places, self.warp[rows])
        matrices = words.view("u2").reshape(-1, count, 8, 8)
        if "trans" in suffixes:
            matrices = matrices.transpose(0, 1, 3, 2)
        for index, register in enumerate(targets):
            fragment = np.ascontiguousarray(matrices[:, index])
            self.write(register, fragment.reshape(-1).view("u4"))

    def do_stmatrix(self, suffixes, address, sources) -> None:
        """stmatrix: the reverse."""
        if "trans" in suffixes:
            raise Unsupported("a form of stmatrix")
        rows = self.lane < 8 * len(sources)
        places = self.shared.places(self.read_address(address)[rows], 16)
        values = np.stack([self.read(source, "u4").reshape(-1, WARP) for source in sources], 1)
        self.demand("stored")
        words = values.reshape(len(places), 4).view(self.shared.words.dtype)
        self.shared.store(places, self.warp[rows], words)

    # wgmma: a group of four warps multiplies matrices that lie in shared memory

    def do_wgmma(self, suffixes, *operands) -> None:
        """Fences, groups and waits; products."""
        if suffixes[0] == "fence":
            self.since_fence.clear()
        elif suffixes[0] == "commit_group":
            self.product_groups.append(self.products)
            self.products = []
        elif suffixes[0] == "wait_group":
            while len(self.product_groups) > int(operands[0]):
                for product in self.product_groups.pop(0):
                    for places in product.places:
                        self.shared.end_product(places)
        else:
            self.start_product(suffixes, *operands)
        in_flight = sum(self.product_groups, self.products)
        self.results_in_flight = {name for product in in_flight for name in product.results}
        self.factors_in_flight = {name for product in in_flight for name in product.factors}

    def start_product(self, suffixes, d, a, b, add, *rest) -> None:
        """wgmma.mma_async.m64nNk16: d = a b, or d += a b. a: registers, or as b a descriptor."""
        n, kind = int(re.fullmatch(r"m64n(\d+)k16|.*", suffixes[3])[1] or 0), suffixes[-1]
        scales, transposed = rest[:2], [word == "1" for word in rest[2:]]
        if n == 0 or suffixes[4:] not in (["f32", x, x] for x in ("bf16", "f16")):
            raise Unsupported("a form of wgmma")
        if scales != ("1", "1") or self.active is not None:
            raise Unsupported("a form of wgmma")
        factors = a if isinstance(a, list) else []
        if self.since_fence & {*d, *factors}:
            raise Fault("wgmma uses a register that was written since the last wgmma.fence")
        product = Product(d, factors, [])
        right = self.matrices(b, n, transposed[-1], kind, product).transpose(0, 2, 1)
        if factors:
            left = self.left_factor(a, kind).reshape(-1, 64, 16)
        else:
            left = self.matrices(a, 64, transposed[0], kind, product)
        total = (left.astype("f8") @ right.astype("f8")).reshape(-1, 16, n)
        adds = self.read(add, bool)
        self.demand("a predicate")
        if adds.any():
            self.results_in_flight -= set(d)  # products that add to the same sums are in order
            total += self.accumulator(d) * adds.reshape(-1, WARP, 1)[:, :1]
        self.products.append(product)
        for register, values in zip(d, self.fragments(total), strict=True):
            self.registers[register] = values.view("u4")
            self.undefined.pop(register, None)

    def matrices(self, descriptor, rows: int, transposed: bool, kind: str, product: Product):
        """The matrix (rows, 16) of each group of four warps, fp32: (groups, rows, 16)."""
        descriptors = self.read(descriptor, "u8").reshape(-1, 4 * WARP)
        self.demand("an address")
        if (descriptors != descriptors[:, :1]).any():
            raise Fault("the threads of a wgmma have different descriptors")
        found = []
        for word in descriptors[:, 0].tolist():
            address = swizzled(word, rows, transposed).astype("u8")
            places = self.shared.places(address.reshape(-1), 16)
            words = self.shared.begin_product(places, self.copies_need_fence)
            product.places.append(places)
            pieces = words.view("u2").reshape(*address.shape, 8)
            if transposed:
                pieces = pieces.transpose(0, 2, 1)
            found.append(to_fp32(pieces, kind).reshape(rows, 16))
        return np.stack(found)

    # loads, stores, copies

    def read_address(self, address: Address):
        """(threads,) u8. Those of active threads are checked."""
        start = self.read(address.base, "u8" if address.base.startswith("%rd") else "u4")
        self.demand("an address")
        return (start.astype("i8") + address.offset).view("u8")

    def executing(self):
        """The indices of the active threads."""
        return np.arange(self.threads) if self.active is None else np.flatnonzero(self.active)

    def memory_of(self, suffixes) -> Memory:
        """The memory that an instruction names."""
        if suffixes[0] not in ("shared", "global"):
            raise Unsupported("a state space")
        return self.shared if suffixes[0] == "shared" else self.memory

    def do_ld(self, suffixes, targets, address: Address) -> None:
        """ld."""
        dtype = TYPES[suffixes[-1]]
        targets = targets if isinstance(targets, list) else [targets]
        if suffixes[0] == "param":
            value = self.arguments[self.program.parameters.index(address.base)]
            bits = np.frombuffer(value.tobytes()[: dtype.itemsize], dtype)
            return self.write(targets[0], np.repeat(bits, self.threads))
        memory, threads = self.memory_of(suffixes), self.executing()
        width = dtype.itemsize * len(targets)
        places = memory.places(self.read_address(address)[threads], width)
        loaded = memory.load(places, self.warp[threads]).view(dtype)
        for index, register in enumerate(targets):
            values = np.zeros(self.threads, dtype)
            values[threads] = loaded[:, index]
            self.write(register, values)

    def do_st(self, suffixes, address: Address, sources) -> None:
        """st."""
        dtype = TYPES[suffixes[-1]]
        sources = sources if isinstance(sources, list) else [sources]
        memory, threads = self.memory_of(suffixes), self.executing()
        places = memory.places(self.read_address(address)[threads], dtype.itemsize * len(sources))
        unsigned = f"u{dtype.itemsize}"
        values = np.stack([self.read(source, unsigned)[threads] for source in sources], 1)
        self.demand("stored")
        memory.store(places, self.warp[threads], values.view(memory.words.dtype))

    def do_cp(self, suffixes, *operands) -> None:
        """cp.async. The data arrives when it is waited for, as late as it may."""
        if suffixes[1] == "commit_group":
            self.copy_groups.append(self.copies)
            self.copies = []
        elif suffixes[1] == "wait_group":
            while len(self.copy_groups) > int(operands[0]):
                for copy in self.copy_groups.pop(0):
                    self.shared.end_copy(*copy)
        elif suffixes[1:] in (["cg", "shared", "global"], ["ca", "shared", "global"]):
            self.start_copy(*operands)
        else:
            raise Unsupported("a form of cp")

    def start_copy(self, target: Address, source: Address, width, size=None) -> None:
        """width bytes, or zeros where size is 0."""
        width, threads = int(width, 0), self.executing()
        sizes = self.read(size, "u4")[threads] if size else np.full(len(threads), width)
        if not np.isin(sizes, (0, width)).all():
            raise Unsupported("a copy of a part")
        places = self.shared.places(self.read_address(target)[threads], width)
        address, full = self.read_address(source)[threads], sizes > 0
        data = np.zeros(places.shape, self.shared.words.dtype)
        sources = self.memory.places(address[full], width)
        words = self.memory.load(sources, self.warp[threads][full])
        data[full] = words.view(data.dtype)
        self.shared.begin_copy(places, self.warp[threads])
        self.copies.append((places, self.warp[threads], data))

    def do_bar(self, suffixes, number) -> None:
        """bar.sync 0, of all threads."""
        if suffixes != ["sync"] or number != "0":
            raise Unsupported("a form of bar")
        self.clock.barriers += 1

    def do_fence(self, suffixes) -> None:
        """fence.proxy.async."""
        if suffixes[:2] != ["proxy", "async"]:
            raise Unsupported("a form of fence")
        self.shared.fence_proxy()


# --- Launches


NUMBERS = {"i32": "i4", "i64": "i8", "fp32": "f4"}  # Triton's names of argument types


class Launch:
    """A kernel and what it is given. arguments: its numbers; pointers are u8."""

    def __init__(self, ptx: str, binary, pairs: list[tuple], grid, copies_need_fence: bool):
        self.program, self.clock, self.grid = parse(ptx), Clock(), grid
        for instruction in self.program.instructions:
            name = instruction.name
            if name not in (*ELEMENTWISE, "bra", "ret") and not hasattr(Block, f"do_{name}"):
                raise Unsupported(instruction.text)
        self.warps, self.shared_bytes = binary.metadata.num_warps, binary.metadata.shared
        self.copies_need_fence = copies_need_fence
        tensors = [value for kind, value in pairs if kind.startswith("*")]
        self.memory = GlobalMemory(tensors, self.program.word("global"), self.clock)
        self.arguments = [self.argument(kind, value) for kind, value in pairs]

    def argument(self, kind: str, value):
        """As the GPU gets it."""
        if kind.startswith("*"):
            return np.uint64(self.memory.pointer(value))
        return np.dtype(NUMBERS[kind]).type(value)

    def run(self) -> None:
        """All blocks, one after another."""
        with np.errstate(all="ignore"):
            for position in np.ndindex(self.grid[::-1]):
                self.clock.barriers += 1
                self.clock.block_began = self.clock.barriers
                Block(self, position[::-1]).run()
        self.memory.copy_back()


def flat_arguments(kind, value) -> Iterator[tuple]:
    """(type, value) of each argument that is not known at compile time."""
    if isinstance(kind, tuple | list):
        for inner_kind, inner in zip(kind, value, strict=True):
            yield from flat_arguments(inner_kind, inner)
    elif kind != "constexpr":
        yield kind, value


@contextlib.contextmanager
def on(
    arch: str,
    *modules,
    change: Callable[[str, str], str] = lambda name, ptx: ptx,
    copies_need_fence: bool = False,
) -> Iterator[dict]:
    """Within this context, Triton's kernels are compiled for `arch`, and their PTX runs here.

    Yields {name of a kernel: its binary}. modules: those whose choices depend on the chip, and
    whose `check` refuses CPU tensors. change(name, ptx): another PTX to run, with a planted fault.
    """
    with contextlib.ExitStack() as changes:
        by_chip = [module for module in modules if hasattr(module, "architecture")]
        binaries = changes.enter_context(compiled.for_chip(arch, *by_chip))
        compile_only = JITFunction.run

        def run(kernel, *args, grid, warmup, **settings):
            compile_only(kernel, *args, grid=grid, warmup=warmup, **settings)
            binary = binaries[kernel.__name__]
            named = {name: x for name, x in settings.items() if name in kernel.arg_names}
            bound = inspect.signature(kernel.fn).bind(*args, **named)
            bound.apply_defaults()
            ptx = change(kernel.__name__, binary.asm["ptx"])
            kinds = [binary.src.signature[name] for name in kernel.arg_names]
            values = [bound.arguments[name] for name in kernel.arg_names]
            pairs = list(flat_arguments(kinds, values))
            blocks = grid(bound.arguments) if callable(grid) else grid
            blocks = (*blocks, 1, 1)[:3]
            Launch(ptx, binary, pairs, blocks, copies_need_fence).run()

        changes.enter_context(mock.patch.object(JITFunction, "run", run))
        for module in modules:
            if hasattr(module, "check"):
                changes.enter_context(mock.patch.object(module, "check", lambda *tensors: None))
        yield binaries
