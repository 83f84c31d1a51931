"""Launch settings of the kernels in flash_attention.py for each GPU: plain data, by architecture.

A row of the table is (BLOCK_M, BLOCK_N, num_warps, num_stages), on AMD also waves_per_eu:

    BLOCK_M, BLOCK_N   queries and keys in one block of scores. Larger blocks read k and v less
                       often, but need more registers (accumulators, scores) and more shared
                       memory (the blocks of q, k, v)
    num_warps          groups of 32 threads (NVIDIA, Radeon) or 64 (AMD Instinct) that share the
                       work of a block, and so its registers
    num_stages         blocks in flight between memory and the matrix units; each takes shared
                       memory
    waves_per_eu       wavefronts per SIMD unit that the compiler makes room for: more of them
                       means fewer registers for each. The compiler may cap occupancy below
                       what the registers allow

A kernel that runs out of registers spills them to memory in its inner loop, which is slow. The rows
below spill nothing, or the few bytes that tests/fast/test_launch_table.py allows: the test
compiles each row for its chip and reads the binary. A few architectures take another one's rows
(`SAME_ROWS`), compiled for each of them just the same.

Two rows were the fastest `candidates` on an H200 on 2026-11-28: sm_90, heads of 128, forward and dq
(torch 2.11.0, triton 3.6.0; bf16, causal, ALiBi, 4 x 16 heads x 4,096 tokens). They take 0.770 and
1.004 ms; the rows before them, (128, 64, 8, 3) and (128, 64, 8, 2), took 0.875 and 1.238. That dq
spills 56 bytes, and is faster all the same. The other rows are the largest blocks that passed the
test. sm_90's have run on that H200, but beside no others; the rest was compiled, never timed.
`python -m fast.flash_attention --tune` times candidates, and prints rows for this table.
"""

import functools
import itertools
import sys

import torch

from program import require

PASSES = ("forward", "dq", "dkdv")
ROWS = [  # architecture, largest head dim, and a row for each pass
    # A100
    ("sm_80", 64, (128, 64, 4, 3), (128, 64, 8, 3), (32, 128, 8, 3)),
    ("sm_80", 128, (128, 32, 8, 3), (64, 64, 8, 3), (64, 64, 8, 2)),
    # RTX 3060 to 3090, A10, A40
    ("sm_86", 64, (128, 64, 8, 3), (128, 64, 8, 3), (32, 128, 8, 3)),
    ("sm_86", 128, (128, 32, 8, 3), (64, 64, 8, 2), (64, 64, 8, 2)),
    # H100, H200
    ("sm_90", 64, (128, 128, 8, 3), (128, 64, 8, 3), (64, 128, 8, 2)),
    ("sm_90", 128, (128, 128, 8, 3), (128, 128, 8, 2), (64, 128, 8, 2)),
    # B200
    ("sm_100", 64, (128, 64, 8, 3), (128, 64, 8, 3), (32, 128, 8, 2)),
    ("sm_100", 128, (128, 64, 8, 3), (128, 64, 8, 2), (64, 128, 8, 2)),
    # MI250
    ("gfx90a", 64, (128, 64, 4, 1, 2), (128, 32, 4, 1, 2), (32, 128, 4, 1, 1)),
    ("gfx90a", 128, (128, 32, 4, 1, 2), (128, 32, 4, 1, 1), (32, 128, 4, 1, 1)),
    # MI300X
    ("gfx942", 64, (128, 64, 4, 1, 2), (128, 32, 4, 1, 2), (32, 128, 4, 1, 1)),
    ("gfx942", 128, (128, 32, 4, 1, 2), (128, 32, 8, 1, 2), (32, 128, 4, 1, 1)),
    # MI355X
    ("gfx950", 64, (128, 64, 4, 1, 2), (128, 32, 4, 2, 2), (32, 128, 4, 1, 1)),
    ("gfx950", 128, (128, 64, 8, 1, 2), (128, 32, 8, 1, 2), (32, 128, 4, 1, 1)),
    # Radeon RX 7900. Each half of a wavefront holds a copy of both operands of a matrix
    # instruction, which leaves few registers for the rest.
    ("gfx1100", 64, (128, 64, 8, 1, 1), (128, 32, 8, 1, 1), (16, 128, 8, 1, 1)),
    ("gfx1100", 128, (128, 32, 8, 1, 1), (64, 32, 16, 1, 1), (16, 32, 8, 1, 4)),
]
# {(architecture, largest head dim): {pass: row}}
LAUNCH = {(arch, dim): dict(zip(PASSES, rows, strict=True)) for arch, dim, *rows in ROWS}
# Architectures that take the rows of another one.
SAME_ROWS = {
    "sm_89": "sm_86",  # RTX 4060 to 4090, L4, L40S
    "sm_103": "sm_100",  # B300
    "sm_120": "sm_86",  # RTX 5060 to 5090
    "sm_121": "sm_86",  # DGX Spark
    "gfx908": "gfx90a",  # MI100
    "gfx1101": "gfx1100",  # Radeon RX 7800
    "gfx1102": "gfx1100",  # Radeon RX 7600
    "gfx1200": "gfx1100",  # Radeon RX 9060
    "gfx1201": "gfx1100",  # Radeon RX 9070
}
# The fallback, for unknown GPUs and for fp32. It needs 48 KiB of shared memory, and 72 KiB for fp32
# with heads of 128.
UNKNOWN = (32, 32, 4, 1)
# The forward of a single query, in 16 bits: 16 rows are the fewest that matrix instructions take.
ONE_QUERY = (16, 64, 4, 2)
# GPUs for which Triton has no matrix instructions, by the beginning of their name: its kernels
# would multiply without them and spill kilobytes. NVIDIA before Ampere (V100 and T4 have tensor
# cores, Triton does not use them), AMD before MI100 and before Radeon RX 7000.
WITHOUT_MATRIX_INSTRUCTIONS = (
    *("sm_5", "sm_6", "sm_7"),
    *("gfx8", "gfx900", "gfx902", "gfx906", "gfx909", "gfx90c", "gfx10"),
)


def architecture(device: torch.device) -> str:
    """The table's name for a GPU: sm_90, gfx942, ...; `cpu` for Triton's interpreter."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def has_matrix_instructions(arch: str) -> bool:
    """Whether Triton has matrix instructions for this architecture. If not, says so."""
    if not arch.startswith(WITHOUT_MATRIX_INSTRUCTIONS):
        return True
    print(
        f"Triton has no matrix instructions for this GPU ({arch}), so attention uses sdpa "
        "(flex with a softcap) and the loss PyTorch's operators",
        file=sys.stderr,
    )
    return False


@functools.cache
def rows_of(arch: str) -> dict:
    """The rows of one architecture, {largest head dim: {pass: row}}.

    If it has none, one line on stderr says so, once per process. UserError if Triton has no matrix
    instructions for it.
    """
    require(
        not arch.startswith(WITHOUT_MATRIX_INSTRUCTIONS),
        f"Triton has no matrix instructions for this GPU ({arch}): use attn_impl=sdpa",
    )
    owner = SAME_ROWS.get(arch, arch)
    rows = {dim: passes for (name, dim), passes in LAUNCH.items() if name == owner}
    if not rows and arch != "cpu":
        print(
            f"fast/launch_table.py has no rows for {arch}, so attention uses {UNKNOWN}: "
            "python -m fast.flash_attention --tune measures better ones",
            file=sys.stderr,
        )
    return rows


def row_for(
    arch: str, head_dim: int, pass_name: str, dtype: torch.dtype, n_queries: int | None = None
) -> tuple:
    """The row for one pass ("forward", "dq" or "dkdv") over heads of `head_dim`."""
    rows = rows_of(arch)
    wide_enough = [dim for dim in rows if dim >= head_dim]
    if not wide_enough or dtype == torch.float32:
        return UNKNOWN
    if pass_name == "forward" and n_queries == 1:
        return ONE_QUERY
    return rows[min(wide_enough)][pass_name]


def options(row: tuple) -> dict:
    """A row as the keyword arguments of a kernel launch."""
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "waves_per_eu")
    return dict(zip(names, row, strict=False))  # NVIDIA's rows have four entries


def candidates() -> list[tuple]:
    """The rows that `--tune` measures on this vendor's GPUs."""
    blocks = itertools.product((32, 64, 128), repeat=2)
    if torch.version.hip:
        rest = itertools.product((4, 8), (1, 2), (1, 2))
    else:
        rest = itertools.product((4, 8), (2, 3))
    return [block + settings for block, settings in itertools.product(blocks, rest)]


def fastest(name: str, launch, time_of) -> tuple:
    """The candidate with the shortest time; rows that do not fit this GPU are skipped.

    launch(row) runs the kernel, launch() runs it with the table's row; time_of(function) returns
    milliseconds. UserError if no row runs.
    """
    times = {}
    for row in candidates():
        try:
            times[row] = time_of(functools.partial(launch, row))  # ms
        except Exception as error:
            # Out of registers or shared memory: compilers report it with many types.
            print(f"  {row}: {type(error).__name__}: {str(error)[:80]}", file=sys.stderr)
    require(times, f"{name}: no row runs on this GPU")
    best = min(times, key=times.get)
    in_table = time_of(launch)
    print(
        f"# {name}: {best} takes {times[best]:.3f} ms, the row of the table {in_table:.3f}",
        flush=True,
    )
    return best
