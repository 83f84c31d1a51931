"""What the compiled attention kernels hold on every chip: registers, shared memory, occupancy.

    python -m bench chips                                    all chips, heads of 64 and 128
    python -m bench chips --chips=sm_90,gfx90a --head_dim=128
    python -m bench chips --json                             the same as JSON
    python -m bench chips --out=bench/results/kernels.md     write the page with these tables

Each row of gpu_kernels/launch_table.py is compiled for its chip without that chip, as training
launches it: bf16, causal, with ALiBi. Nothing runs, so the table says what limits a kernel, not how
fast it is.

Occupancy: the warps resident on a unit, as a share of the warps it has room for. A unit is what
runs a block of threads: an SM of NVIDIA's, a compute unit (CU) of an AMD Instinct, a workgroup
processor (WGP) of a Radeon. Each has four SIMDs, and a warp stays on one of them. So

    warps by registers         = 4 x floor(SIMD's registers / registers that a thread takes)
    blocks by registers        = warps by registers / warps of a block
    blocks by shared memory    = unit's shared memory / (shared memory of a block + reserved)
    blocks by threads          = 4 x SIMD's warps / warps of a block
    blocks by tensor memory    = unit's columns / columns of a block
    occupancy                  = fewest blocks x warps of a block / (4 x SIMD's warps)

each rounded down; what a block takes is rounded up to the steps in which it is given out. With one
block on a unit, nothing runs while its warps wait for each other.

bench/compiled.py compiles the kernels, bench/inner_loop.py counts their instructions.
"""

import datetime
import itertools
import json
import multiprocessing
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import torch

import config
import devices
from bench import compiled, inner_loop
from bench.compiled import Facts
from bench.facts import cpus, triton_version
from config import UserError, require
from gpu_kernels import flash_attention, launch_table

# --- What a chip has room for


@dataclass(frozen=True)
class Limits:
    """What one unit of a chip has room for. A unit has four SIMDs."""

    unit: str  # SM, CU or WGP
    warps: int  # of a SIMD
    registers: int  # of a SIMD, 32 bits for each thread of a warp
    register_step: int  # a thread's registers are given out in multiples of it
    shared: int  # bytes of a unit
    shared_block: int  # bytes that one block may take
    shared_step: int  # a block's bytes are given out in multiples of it
    reserved: int  # bytes of a block that the system takes
    blocks: int  # of a unit
    tensor_memory: int = 0  # columns


KB = 1024
# NVIDIA: CUDA C++ Programming Guide, "Technical specifications per compute capability"; an SM has
# 65,536 registers, 65,536 / 4 SIMDs / 32 threads = 512, in steps of 256 a warp.
# AMD: AMD GPU specifications in ROCm's documentation (sizes of LDS and of registers); LLVM's
# AMDGPUBaseInfo.cpp (steps, warps, blocks). MI100 (gfx908) has 256 registers of each of two kinds.
# fmt: off
LIMITS = {
    "sm_80": Limits("SM", 16, 512, 8, 164 * KB, 163 * KB, 128, 1 * KB, 32),
    "sm_86": Limits("SM", 12, 512, 8, 100 * KB, 99 * KB, 128, 1 * KB, 16),
    "sm_89": Limits("SM", 12, 512, 8, 100 * KB, 99 * KB, 128, 1 * KB, 24),
    "sm_90": Limits("SM", 16, 512, 8, 228 * KB, 227 * KB, 128, 1 * KB, 32),
    "sm_100": Limits("SM", 16, 512, 8, 228 * KB, 227 * KB, 128, 1 * KB, 32, 512),
    "sm_103": Limits("SM", 16, 512, 8, 228 * KB, 227 * KB, 128, 1 * KB, 32, 512),
    "sm_120": Limits("SM", 12, 512, 8, 100 * KB, 99 * KB, 128, 1 * KB, 24),
    "sm_121": Limits("SM", 12, 512, 8, 100 * KB, 99 * KB, 128, 1 * KB, 24),
    "gfx908": Limits("CU", 10, 256, 4, 64 * KB, 64 * KB, 512, 0, 16),
    "gfx90a": Limits("CU", 8, 512, 8, 64 * KB, 64 * KB, 512, 0, 16),
    "gfx942": Limits("CU", 8, 512, 8, 64 * KB, 64 * KB, 512, 0, 16),
    "gfx950": Limits("CU", 8, 512, 8, 160 * KB, 160 * KB, 1280, 0, 16),
    "gfx1100": Limits("WGP", 16, 1536, 24, 128 * KB, 64 * KB, 512, 0, 32),
    "gfx1101": Limits("WGP", 16, 1536, 24, 128 * KB, 64 * KB, 512, 0, 32),
    "gfx1102": Limits("WGP", 16, 1024, 16, 128 * KB, 64 * KB, 512, 0, 32),
    "gfx1200": Limits("WGP", 16, 1536, 24, 128 * KB, 64 * KB, 512, 0, 32),
    "gfx1201": Limits("WGP", 16, 1536, 24, 128 * KB, 64 * KB, 512, 0, 32),
}
# fmt: on
SIMDS = 4  # of a unit, on all of them
# FLOPs that an SM can do in a cycle, bf16 with fp32 sums: NVIDIA's whitepapers of A100 and H100.
# Products with sm_86, sm_89 or sm_120 differ. devices.py has the figures of AMD's compute units.
PER_CLOCK = {"sm_80": 2048, "sm_90": 4096}


def flops_per_cycle(arch: str) -> int | None:
    """What the matrix unit of a SIMD can do in a cycle, bf16 with fp32 sums. None: unknown."""
    of_unit = PER_CLOCK.get(arch)
    if arch.startswith("gfx"):
        of_cu, _ = devices.PER_CLOCK.get(arch) or devices.PER_CLOCK[arch[:6]]
        of_unit = 2 * of_cu if LIMITS[arch].unit == "WGP" else of_cu
    return of_unit and of_unit // SIMDS


@dataclass
class Occupancy:
    """The blocks that a unit can hold at once."""

    blocks: int
    limited_by: str  # what runs out first: registers, shared memory, ...
    share: float  # of the warps that a unit has room for


def warps_by_registers(limits: Limits, registers: int) -> int:
    """The warps that a SIMD has registers for, at so many a thread."""
    return limits.registers // round_up(max(registers, 1), limits.register_step)


def occupancy(limits: Limits, facts: Facts) -> Occupancy:
    """By the formula above. 0 blocks if one does not fit."""
    by_registers = SIMDS * warps_by_registers(limits, facts.taken)
    shared = round_up(facts.shared + limits.reserved, limits.shared_step)
    room = {
        "registers": by_registers // facts.warps,
        "shared memory": limits.shared // shared if shared else limits.blocks,
        "threads": SIMDS * limits.warps // facts.warps,
        "blocks": limits.blocks,
    }
    if facts.tensor_memory:
        room["tensor memory"] = limits.tensor_memory // facts.tensor_memory
    if facts.shared > limits.shared_block:
        room["shared memory"] = 0
    blocks = min(room.values())
    scarce = [name for name, fit in room.items() if fit == blocks]
    return Occupancy(blocks, ", ".join(scarce), blocks * facts.warps / (SIMDS * limits.warps))


def round_up(n: int, step: int) -> int:
    """The smallest multiple of `step` that is at least n."""
    return -(-n // step) * step


# --- Attention's kernels

# Matmuls that a pass needs for each tile of scores: see gpu_kernels/flash_attention.py.
MATMULS = {"forward": 2, "dq": 3, "dkdv": 4}


def attention_binary(
    arch,
    D,
    pass_name,
    alibi=True,
    causal=True,
    documents=False,
    group=1,
    dtype="bfloat16",
    lengths=(256, 256),
):
    """The binary of one pass ("forward", "dq" or "dkdv") over 4 heads of D on `arch`.

    group: query heads that share a key head. lengths: of queries and of keys.
    """
    q, k = (torch.empty(1, T, 4, D, dtype=getattr(torch, dtype)).transpose(1, 2) for T in lengths)
    k = k[:, ::group]
    slopes = torch.ones(4) if alibi else None
    bounds = torch.zeros(1, 2, lengths[1], dtype=torch.int32) if documents else None
    name = flash_attention.KERNELS[pass_name].__name__
    with compiled.for_chip(arch, flash_attention, only=name) as binaries:
        out, lse = flash_attention.forward_operator(q, k, k, slopes, bounds, causal, 0.125)
        flash_attention.backward_operator(out, q, k, k, out, lse, slopes, bounds, causal, 0.125)
    return binaries[name]


def empty_row(arch: str, head_dim: int, pass_name: str, error: str) -> dict:
    """A row without figures."""
    launch = launch_table.row_for(arch, head_dim, pass_name, torch.bfloat16)
    row = {"chip": arch, "head_dim": head_dim, "pass": pass_name}
    row |= {"launch": launch_table.options(launch), "error": error[:200]}
    return row | dict.fromkeys(FIGURES)


def kernel_row(arch: str, head_dim: int, pass_name: str) -> dict:
    """A row of the table. None for what the compiler does not give.

    UserError for what no chip could compile.
    """
    try:
        binary = attention_binary(arch, head_dim, pass_name)
    except UserError:
        raise
    except Exception as error:  # compilers report what they cannot do with many types
        return empty_row(arch, head_dim, pass_name, f"{type(error).__name__}: {error}")

    facts = compiled.facts(binary)
    held = occupancy(LIMITS[arch], facts) if facts.taken is not None else None
    text = compiled.assembly(binary)
    loop = inner_loop.find(text) if text else None
    row = empty_row(arch, head_dim, pass_name, error="")
    figures = [facts.registers, facts.taken, facts.spilled, facts.shared, facts.tensor_memory]
    figures += [held.blocks, held.limited_by, held.share] if held else [None] * 3
    figures += [loop.instructions, loop.matrix, loop.share] if loop else [None] * 3
    figures += [loop.flops_per_instruction, work(row, loop)] if loop else [None] * 2
    return row | dict(zip(FIGURES, figures, strict=True))


# What a row says of its binary.
FIGURES = """
    registers registers_taken spilled_bytes shared_bytes tensor_memory_columns
    blocks limited_by occupancy
    loop_instructions loop_matrix matrix_share flops_per_instruction work
""".split()


def work(row: dict, loop: inner_loop.Loop) -> float | None:
    """FLOPs that the matrix units do in one turn of the loop, over those that the pass needs.

    1 if each warp has its own part of every product. More if a tile of scores has fewer pieces, of
    the size of a matrix instruction, than there are warps: then several compute the same piece.
    Also more for heads that are padded.
    """
    launch = row["launch"]
    scores = launch["BLOCK_M"] * launch["BLOCK_N"]
    needed = MATMULS[row["pass"]] * 2 * scores * row["head_dim"]
    return None if loop.flops is None else loop.flops * launch["num_warps"] / needed


def rows_of_chip(arch: str, head_dims: tuple[int, ...]) -> list[dict]:
    """The rows of one chip."""
    return [kernel_row(arch, *shape) for shape in itertools.product(head_dims, MATMULS)]


def all_rows(archs: list[str], head_dims: tuple[int, ...]) -> list[dict]:
    """The rows of several chips, compiled by as many processes as there are cores.

    A compiler that does not know a chip may abort its process, and the others with it. Then each
    chip gets processes of its own, and the rows of that chip stay empty.
    """
    try:
        return in_processes(archs, head_dims)
    except BrokenProcessPool:
        if len(archs) > 1:
            return [row for arch in archs for row in all_rows([arch], head_dims)]
        error = "the compiler aborted: does this version of Triton know the chip?"
        shapes = itertools.product(head_dims, MATMULS)
        return [empty_row(archs[0], *shape, error) for shape in shapes]


def in_processes(archs: list[str], head_dims: tuple[int, ...]) -> list[dict]:
    """The rows; BrokenProcessPool if a process died."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(cpus(), len(archs)), mp_context=spawn) as pool:
        of_chips = pool.map(rows_of_chip, archs, [head_dims] * len(archs))
        return [row for rows in of_chips for row in rows]


# --- The page

PAGE = """# What the compiled attention kernels hold

`python -m bench chips`, {date}, Python {python}, torch {torch}, triton {triton}. **Compiled, not
run**: no GPU took part, and nothing here is a speed.

The rows of `gpu_kernels/launch_table.py`, bf16, causal, with ALiBi, one key head for each query
head. The figures change with the version of triton.

- **registers** that a thread uses. `214 (257)`: because of `waves_per_eu`, AMD's compiler lets it
  take 257, so that fewer wavefronts fit on a SIMD
- **spilled** bytes of a thread, **shared** memory of a block in KB
- **tile**: queries x keys of one turn of the loop
- **resident blocks** of threads that a unit (an SM, a CU, or a WGP of two CUs) can hold at once,
  what **limits** that, and the **occupancy**: the warps of these blocks, as a share of those that
  the unit has room for
- **loop**: instructions of the innermost loop that has matrix instructions (of several such loops
  the one with the largest share: the one without a mask). All of them count, those too that most
  turns skip: dkdv's mask is behind a branch.
- **matrix**: matrix instructions among them. Their size differs from chip to chip, so only kernels
  of one chip compare by it.
- **FLOPs an instruction**: what the matrix units do for each instruction of the loop, for one warp.
  A SIMD of NVIDIA's or of a Radeon starts one instruction a cycle, a SIMD of an Instinct one vector
  instruction every 4 cycles. The last table has the FLOPs of its matrix unit in a cycle. Where a
  kernel has fewer FLOPs an instruction than that (Instinct: than 4 times that), starting
  instructions takes longer than multiplying. On sm_100 and sm_103 one thread starts the matrix
  instructions, and their text does not have the size: n/a.
- **work**: the FLOPs that all warps do in that turn, over those that the pass needs: 2 matmuls of a
  tile of scores in the forward, 3 for dq, 4 for dkdv. Above 1 a tile has fewer pieces of the size
  of a matrix instruction than there are warps, and several warps compute the same piece.

{kernels}

## What the chips have room for

{limits}

A unit has four SIMDs. Registers are those of a SIMD for each thread of a warp, and the steps in
which a thread gets them. FLOPs a cycle are those of a SIMD's matrix unit, bf16 with fp32 sums; n/a
where products with that chip differ, or where we know no figure. From NVIDIA's CUDA C++ Programming
Guide (technical specifications per compute capability) and its whitepapers of A100 and H100, the
GPU specifications in AMD's ROCm documentation, and LLVM's `AMDGPUBaseInfo.cpp`. `bench/chips.py`
has the formula of the occupancy.
"""


def table(head: list[str], rows: list[list]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def or_na(value, form: str = "") -> str:
    """The formatted value, or n/a."""
    return "n/a" if value is None else format(value, form)


def kernel_table(rows: list[dict]) -> str:
    """The rows of the kernels."""
    head = "chip, heads of, pass, tile, warps, registers, spilled, shared, resident blocks"
    head += ", limited by, occupancy, loop, matrix, FLOPs an instruction, work"
    lines = []
    for row in rows:
        launch = row["launch"]
        line = [row["chip"], row["head_dim"], row["pass"]]
        line += [f"{launch['BLOCK_M']} x {launch['BLOCK_N']}", launch["num_warps"]]
        line += [registers_text(row), or_na(row["spilled_bytes"])]
        line += ["n/a" if row["shared_bytes"] is None else f"{row['shared_bytes'] / KB:.4g}"]
        line += [or_na(row["blocks"]), or_na(row["limited_by"]), or_na(row["occupancy"], ".1%")]
        line += [or_na(row["loop_instructions"]), or_na(row["matrix_share"], ".1%")]
        line += [or_na(row["flops_per_instruction"], ",.0f"), or_na(row["work"], ".3g")]
        lines.append(line)
    return table(head.split(", "), lines)


def registers_text(row: dict) -> str:
    """`214`, or `214 (257)` if a thread takes more than it uses."""
    used, taken = row["registers"], row["registers_taken"]
    return or_na(used) if used == taken else f"{used} ({taken})"


def limits_table(archs: list[str]) -> str:
    """The limits of the chips."""
    head = "chip, unit, warps of a SIMD, registers, steps, shared, of a block, resident blocks"
    head += ", FLOPs a cycle"
    lines = []
    for arch in archs:
        limits = LIMITS[arch]
        line = [arch, limits.unit, limits.warps, limits.registers, limits.register_step]
        line += [f"{limits.shared // KB} KB", f"{limits.shared_block // KB} KB", limits.blocks]
        line += [or_na(flops_per_cycle(arch), ",")]
        lines.append(line)
    return table(head.split(", "), lines)


def page(rows: list[dict]) -> str:
    """The page of these rows."""
    return PAGE.format(
        date=datetime.date.today(),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=triton_version(),
        kernels=kernel_table(rows),
        limits=limits_table(list(dict.fromkeys(row["chip"] for row in rows))),
    )


# --- The program


@dataclass
class ChipArgs:
    """Which kernels, and how to print them."""

    chips: str = ""  # some of LIMITS, separated by commas (empty: all)
    head_dim: int = 0  # width of a head (0: 64 and 128)
    json: bool = False  # print JSON in place of the page
    out: str = ""  # also write the page to this file

    def check(self) -> None:
        """Raise UserError for an unknown chip or a width that the kernels do not take."""
        for arch in filter(None, self.chips.split(",")):
            known = ", ".join(LIMITS)
            require(arch in LIMITS, f"no chip {config.shown(arch)}: choose from {known}")
        require(0 <= self.head_dim <= 128, f"head_dim is {self.head_dim}, expected 1 to 128")


def main(argv: list[str]) -> None:
    """Compile the kernels, and print what they hold."""
    (args,) = config.load(argv, ChipArgs)
    archs = [name for name in args.chips.split(",") if name] or list(LIMITS)
    head_dims = (args.head_dim,) if args.head_dim else (64, 128)
    n_kernels = len(archs) * len(head_dims) * len(MATMULS)
    print(f"compiling {n_kernels} kernels, a few seconds each", file=sys.stderr)

    rows = all_rows(archs, head_dims)
    for row in rows:
        if row["error"]:
            print(f"{row['chip']}, {row['pass']}: {row['error']}", file=sys.stderr)
    some = any(not row["error"] for row in rows)
    require(some, "Triton could compile none of these kernels, see above: there is nothing to show")
    print(json.dumps(rows, indent=1) if args.json else page(rows))
    if args.out:
        Path(args.out).write_text(page(rows))


if __name__ == "__main__":
    config.run(main)
