"""Runs the PTX that Triton compiles for an NVIDIA GPU, on a CPU, in NumPy.

    with ptx_interpreter.on("sm_90", flash_attention):
        errors = flash_attention.compare("cpu", torch.bfloat16)

Within this context, every launch of a Triton kernel compiles it for the chip (compiled.for_chip),
and its PTX runs on CPU tensors, one block of threads after another. A register is an array with one
entry for each thread. All threads execute the same instruction at the same time, and copies and
products of matrices are done at once: so nothing depends on the order of warps, and barriers, waits
and fences, which Triton places, do nothing. What a GPU would do silently is a `Fault` here:

    address          outside of the kernel's tensors
    uninitialised    a register or a word of shared memory is read that nothing has written

Limits. It knows what the kernels of attention and of the loss need on sm_80, sm_86, sm_89, sm_90
(wgmma) and sm_120, and refuses other instructions by name (`Unsupported`): no TMA, mbarrier or
tcgen05, no branch at which threads part. It executes PTX, not what ptxas makes of it. A matrix
product is summed in fp64 and rounded once, where a tensor core rounds in its own way; ex2.approx
and div are exact to fp32; .ftz is ignored. A register counts as written if any thread has written
it; the entries of other threads are then NaN.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from unittest import mock

import compiled
import numpy as np
import torch
from ptx_program import ELEMENTWISE, TYPES, Unsupported, constant, from_fp32, join, parse, to_fp32
from triton.runtime.jit import JITFunction


class Fault(Exception):
    """The kernel does what a GPU must not do."""


# --- Shared memory

WORD = 2  # bytes: the narrowest access
WAITS = {"commit_group", "wait_group", "fence"}  # of cp.async and wgmma


class SharedMemory:
    """Of one block. places: indices of words, (n, m)."""

    def __init__(self, size: int):
        self.words = np.zeros(size // WORD, "u2")
        self.is_written = np.zeros(len(self.words), bool)

    def load(self, places):
        """The words."""
        if not self.is_written[places].all():
            raise Fault("shared memory is read that nothing has written")
        return self.words[places]

    def store(self, places, data) -> None:
        """Write the words."""
        self.words[places] = data
        self.is_written[places] = True


# --- Matrices of which each thread of a warp has some elements

WARP = 32  # threads


def gather(values):
    """The matrices (warps, 16, 2 n), fp32, of the threads' elements (n, threads).

    A block of 8 x 8 is spread over a warp: thread 4 g + t has two elements of row g, from column
    2 t on. The blocks follow downwards, then to the right.
    """
    # (columns / 8, upper or lower, even or odd column, warp, g, t)
    parts = values.reshape(-1, 2, 2, values.shape[1] // WARP, 8, 4)
    return parts.transpose(3, 1, 4, 0, 5, 2).reshape(parts.shape[3], 16, -1)


def scatter(matrices):
    """The reverse: (n, threads), fp32."""
    parts = matrices.reshape(len(matrices), 2, 8, -1, 4, 2)
    return parts.transpose(3, 1, 5, 0, 2, 4).reshape(-1, len(matrices) * WARP).astype("f4")


def factor(bits, kind: str):
    """The matrices (warps, 16, 16), fp64, of two numbers in each of four registers (4, threads)."""
    halves = to_fp32(bits.view("u2"), kind).reshape(4, -1, 2)
    return gather(halves.transpose(0, 2, 1).reshape(8, -1)).astype("f8")


def swizzled(descriptor: int, rows: int, transposed: bool):
    """Addresses of the 16-byte pieces of a matrix (rows, 16) of 16-bit numbers in shared memory.

    (rows, 2), pieces of a row; transposed: (rows / 8, 16), pieces of a column. The matrix is
    made of tiles: 8 rows (transposed: columns), each 128 bytes wide, or 64 or 32, one after
    another. In a tile the pieces of a row are permuted: bits 4 to 6 of an address are xored with
    bits 7 to 9. PTX ISA, "Matrix descriptor format" and "Strides".
    """
    begin, leading, stride = (((descriptor >> bit) & 0x3FFF) << 4 for bit in (0, 16, 32))
    mode = descriptor >> 62
    if mode == 0 or (descriptor >> 49) & 7:
        raise Unsupported("a layout of a wgmma's matrix")
    width = 256 >> mode  # 128, 64, 32 bytes
    if transposed:
        across, line = 16 * np.arange(rows // 8)[:, None], np.arange(16)[None, :]
    else:
        across, line = 16 * np.arange(2)[None, :], np.arange(rows)[:, None]
    address = begin + line // 8 * stride + line % 8 * width
    address = address + across // width * leading + across % width
    return address ^ ((address >> 7) % (width // 16) << 4)


# --- A block of threads


class Block:
    """One block: its registers and shared memory, and what each instruction does to them."""

    TYPES = {"%p": "pred", "%rs": "b16", "%r": "b32", "%rd": "b64"}  # by LLVM's names of registers

    def __init__(self, launch: "Launch", position: tuple[int, int, int]):
        self.launch = launch
        self.threads = launch.warps * WARP
        self.warp, self.lane = np.divmod(np.arange(self.threads), WARP)
        self.shared = SharedMemory(launch.shared_bytes)
        self.registers = {"%tid.x": np.arange(self.threads, dtype="u4")}
        for axis, index, blocks in zip("xyz", position, launch.grid, strict=True):
            self.registers[f"%ctaid.{axis}"] = np.full(self.threads, index, "u4")
            self.registers[f"%nctaid.{axis}"] = np.full(self.threads, blocks, "u4")

    def run(self) -> None:
        """Execute the kernel to its end."""
        at = 0
        while at is not None:
            instruction = self.launch.instructions[at]
            try:
                at = self.step(instruction, at + 1)
            except (Fault, Unsupported) as problem:
                raise type(problem)(f"{problem}: {instruction.text[:120]}") from None

    def step(self, instruction, following: int) -> int | None:
        """Execute one instruction. Returns the index of the next one."""
        _, guard, name, suffixes, operands = instruction
        chosen = np.ones(self.threads, bool)
        if guard:
            chosen = self.read(guard.lstrip("!"), "pred") != guard.startswith("!")
        if not chosen.any():
            return following
        if name not in ("ld", "st", "cp") and not chosen.all():
            raise Unsupported("threads of one block part")
        self.executing = np.flatnonzero(chosen)  # indices of threads
        if name == "bra":
            return self.launch.labels[operands[0]]
        if name == "ret":
            return None
        name = suffixes[0] if name == "setp" else name
        if name in ("bar", "fence") or WAITS.intersection(suffixes):
            return following
        if "wide" in suffixes:
            self.multiply_wide(suffixes[-1], *operands)
        elif name in ELEMENTWISE:
            target, *sources = operands
            values = [self.read(source, suffixes[-1]) for source in sources]
            self.write(target, ELEMENTWISE[name](*values))
        else:
            getattr(self, f"do_{name}")(suffixes, *operands)
        return following

    def read(self, operand: str, kind: str):
        """A register or constant as a type of PTX, (threads,)."""
        if not operand.startswith("%"):
            return constant(operand, kind, self.threads)
        if operand not in self.registers:
            raise Fault(f"an uninitialised register is read, {operand}")
        value, dtype = self.registers[operand], TYPES[kind]
        if value.itemsize > dtype.itemsize:
            value = value.astype(f"u{dtype.itemsize}")  # the low bits
        return value.view(dtype)

    def read_all(self, operands: list[str], kind: str):
        """(operands, threads)."""
        return np.stack([self.read(operand, kind) for operand in operands])

    def write(self, register: str, value) -> None:
        """Set a register. A narrow signed value is extended by its sign."""
        if register == "_":
            return
        dtype = TYPES[self.TYPES[register.rstrip("0123456789")]]
        value = value.view(dtype) if value.dtype.kind == "f" else value.astype(dtype)
        self.registers[register] = value.reshape(self.threads)

    # arithmetic that is not elementwise in one type

    def multiply_wide(self, kind: str, target, a, b, c="0") -> None:
        """mul.wide and mad.wide: c and the result have 64 bits."""
        wide = kind.replace("32", "64")
        a, b = (self.read(x, kind).astype(TYPES[wide]) for x in (a, b))
        self.write(target, a * b + self.read(c, wide))

    def do_mov(self, suffixes, target, source) -> None:
        """mov: also several registers side by side in one, or the parts of one."""
        (kind,) = suffixes
        if isinstance(target, list):
            parts = self.read(source, kind).view(f"u{TYPES[kind].itemsize // len(target)}")
            for index, register in enumerate(target):
                self.write(register, parts[index :: len(target)])
        elif isinstance(source, list):
            part = f"b{8 * TYPES[kind].itemsize // len(source)}"
            # LLVM fills a half that it does not need with a register that nothing writes.
            used = [register if register in self.registers else "0" for register in source]
            self.write(target, join([self.read(register, part) for register in used]))
        else:
            self.write(target, self.read(source, kind))

    def do_selp(self, suffixes, target, if_true, if_false, predicate) -> None:
        """selp."""
        values = self.read_all([if_true, if_false], suffixes[0])
        self.write(target, np.where(self.read(predicate, "pred"), *values))

    def do_cvt(self, suffixes, target, *sources) -> None:
        """cvt between integers, and between fp32 and what is narrower."""
        to, kind = suffixes[-2:]
        if kind == "f32":
            values = [self.read(source, "f32") for source in reversed(sources)]
            self.write(target, join([from_fp32(x, to.removesuffix("x2")) for x in values]))
        elif kind in ("bf16", "f16"):
            self.write(target, to_fp32(self.read(sources[0], "b16"), kind))
        else:
            self.write(target, self.read(sources[0], kind).astype(TYPES[to]))

    def do_shfl(self, suffixes, target, source, other, *_) -> None:
        """shfl.sync.bfly and .idx over whole warps."""
        other = self.read(other, "s32")
        lane = self.lane ^ other if suffixes[1] == "bfly" else other
        self.write(target, self.read(source, "b32")[WARP * self.warp + lane % WARP])

    def do_redux(self, suffixes, target, source, _) -> None:
        """redux.sync over whole warps."""
        reduce = {"min": np.min, "max": np.max}[suffixes[1]]
        values = self.read(source, "s32").reshape(-1, WARP)
        self.write(target, np.repeat(reduce(values, 1), WARP))

    # matrix products

    def do_mma(self, suffixes, d, a, b, c) -> None:
        """mma.m16n8k16: d = a b + c, of each warp."""
        kind = suffixes[-2]
        first, second = b  # the halves of a column
        columns = factor(self.read_all([first, first, second, second], "b32"), kind)[:, :8]
        product = factor(self.read_all(a, "b32"), kind) @ columns.transpose(0, 2, 1)
        product += gather(self.read_all(c, "f32"))
        for register, values in zip(d, scatter(product), strict=True):
            self.write(register, values)

    def do_wgmma(self, suffixes, d, a, b, add, *settings) -> None:
        """wgmma.mma_async.m64nNk16: d = a b, or d += a b. a: registers or, as b, a descriptor."""
        kind, rows, columns = suffixes[-1], 64, 2 * len(d)
        transposed = [setting == "1" for setting in settings[2:]]  # each matrix in shared memory
        right = self.described(b, columns, transposed[-1], kind)
        if isinstance(a, list):
            left = factor(self.read_all(a, "b32"), kind).reshape(-1, rows, 16)
        else:
            left = self.described(a, rows, transposed[0], kind)
        total = (left @ right.transpose(0, 2, 1)).reshape(-1, 16, columns)
        adds = self.read(add, "pred")
        if adds.any():
            total += gather(self.read_all(d, "f32")) * adds[::WARP, None, None]
        for register, values in zip(d, scatter(total), strict=True):
            self.write(register, values)

    def described(self, descriptor, rows: int, transposed: bool, kind: str):
        """The matrix (rows, 16) in shared memory of each four warps: (warps / 4, rows, 16)."""
        found = []
        for bits in self.read(descriptor, "b64")[:: 4 * WARP].tolist():
            address = swizzled(bits, rows, transposed)
            places = address.reshape(-1, 1) // WORD + np.arange(8)
            pieces = self.shared.load(places).reshape(*address.shape, 8)
            if transposed:
                pieces = pieces.transpose(0, 2, 1)
            found.append(to_fp32(pieces, kind).reshape(rows, 16))
        return np.stack(found).astype("f8")

    # loads, stores, copies

    def find(self, space: str, address: tuple[str, int], width: int, threads):
        """The memory to which `threads` point, and their words in it, (threads, width / WORD)."""
        base, offset = address
        start = self.read(base, "u64" if base.startswith("%rd") else "u32")
        first = start[threads].astype("i8") + offset
        storages = {0: self.shared.words} if space == "shared" else self.launch.tensors
        for begin, words in storages.items():
            places = (first[:, None] - begin) // WORD + np.arange(width // WORD)
            if ((places >= 0) & (places < len(words))).all():
                return words, places
        owner = "shared memory" if space == "shared" else "the kernel's tensors"
        raise Fault(f"an address is outside of {owner}")

    def do_ldmatrix(self, suffixes, targets, address) -> None:
        """ldmatrix.x4: lane 8 i + r of a warp has the address of row r, 16 bytes, of matrix i."""
        _, places = self.find("shared", address, 16, self.executing)
        matrices = self.shared.load(places).reshape(-1, 4, 8, 8)
        if "trans" in suffixes:
            matrices = matrices.transpose(0, 1, 3, 2)
        for index, register in enumerate(targets):
            pairs = matrices[:, index].reshape(-1, 2)
            self.write(register, join([pairs[:, 0], pairs[:, 1]]))

    def do_stmatrix(self, suffixes, address, sources) -> None:
        """stmatrix.x4: the reverse."""
        _, places = self.find("shared", address, 16, self.executing)
        rows = self.read_all(sources, "b32").reshape(4, -1, WARP).transpose(1, 0, 2)
        self.shared.store(places, rows.copy().view("u2").reshape(places.shape))

    def do_ld(self, suffixes, targets, address) -> None:
        """ld."""
        space, dtype = suffixes[0], TYPES[suffixes[-1]]
        targets = targets if isinstance(targets, list) else [targets]
        if space == "param":
            number = address[0].rpartition("_")[2]  # product_kernel_param_2
            value = self.launch.arguments[int(number)]
            return self.write(targets[0], np.repeat(value.view(dtype)[:1], self.threads))
        width = dtype.itemsize * len(targets)
        memory, places = self.find(space, address, width, self.executing)
        if space == "shared":
            self.shared.load(places)
        loaded = memory[places].view(dtype)
        for index, register in enumerate(targets):
            unwritten = np.full(self.threads, np.iinfo(dtype).max, dtype)  # as a float: NaN
            values = self.registers.get(register, unwritten).copy()
            values[self.executing] = loaded[:, index]
            self.write(register, values)

    def do_st(self, suffixes, address, sources) -> None:
        """st."""
        space, kind = suffixes[0], suffixes[-1]
        sources = sources if isinstance(sources, list) else [sources]
        values = self.read_all(sources, kind)[:, self.executing].transpose()
        words = np.ascontiguousarray(values).view("u2")
        memory, places = self.find(space, address, words.shape[1] * WORD, self.executing)
        if space == "shared":
            self.shared.store(places, words)
        else:
            memory[places] = words

    def do_cp(self, suffixes, target, source, width, size) -> None:
        """cp.async: 0 bytes of the source, or all. The rest of the target becomes 0."""
        width, sizes = int(width, 0), self.read(size, "u32")[self.executing]
        if not np.isin(sizes, (0, width)).all():
            raise Unsupported("a copy of a part")
        words, places = self.find("shared", target, width, self.executing)
        data = np.zeros(places.shape, words.dtype)
        tensor, sources = self.find("global", source, width, self.executing[sizes > 0])
        data[sizes > 0] = tensor[sources]
        self.shared.store(places, data)


# --- Launches

NUMBERS = {"i32": "i4", "i64": "i8", "fp32": "f4"}  # Triton's names of argument types


class Launch:
    """A kernel and what it is given. Each tensor has a region of addresses, far from others."""

    def __init__(self, ptx: str, binary, pairs: Iterator[tuple], grid):
        self.instructions, self.labels = parse(ptx)
        self.grid = grid
        self.warps, self.shared_bytes = binary.metadata.num_warps, binary.metadata.shared
        self.tensors = {}  # their storage in words, by its first address
        self.arguments = [self.argument(*pair) for pair in pairs]

    def argument(self, kind: str, value):
        """As the GPU gets it, (1,)."""
        if not kind.startswith("*"):
            return np.array([value], NUMBERS[kind])
        words = torch.empty(0, dtype=torch.int16).set_(value.untyped_storage())
        begin = (len(self.tensors) + 1) << 40
        self.tensors[begin] = words.numpy().view("u2")
        return np.array([begin + value.storage_offset() * value.element_size()], "u8")

    def run(self) -> None:
        """All blocks, one after another."""
        with np.errstate(all="ignore"):
            for position in np.ndindex(self.grid[::-1]):
                Block(self, position[::-1]).run()


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
            pairs = flat_arguments(kinds, values)
            blocks = grid(bound.arguments) if callable(grid) else grid
            Launch(ptx, binary, pairs, (*blocks, 1, 1)[:3]).run()

        changes.enter_context(mock.patch.object(JITFunction, "run", run))
        for module in modules:
            if hasattr(module, "check"):
                changes.enter_context(mock.patch.object(module, "check", lambda *tensors: None))
        yield binaries
