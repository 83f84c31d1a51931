"""How the kernels of gpu_kernels/flash_attention.py are cut and scheduled on each GPU: plain data, looked up by name.

A row is (BLOCK_M, BLOCK_N, num_warps, num_stages), and on AMD also waves_per_eu:

    BLOCK_M, BLOCK_N   queries and keys of one block of scores. Larger blocks read k and v less often, and need more
                       registers (accumulators, scores) and more shared memory (the blocks of q, k, v)
    num_warps          groups of 32 threads (NVIDIA) or 64 (AMD) that share a block, and with it the registers
    num_stages         blocks in flight between memory and the matrix units; each costs shared memory
    waves_per_eu       how many wavefronts the compiler shall leave room for: fewer registers each, more of them

A kernel that runs out of registers spills them to memory, inside the loop: that is what a bad row
costs. The rows below spill nothing, or the few bytes that tests/gpu_kernels/test_launch_table.py
states: it compiles each for its chip and reads the binary. So they were chosen, among the largest
blocks that fit; none has been timed on a GPU yet. `python -m gpu_kernels.flash_attention --tune`
does that and prints lines for this table; `python -m gpu_kernels.launch_table` shows it. Read next:
loss.py.
"""

import functools
import itertools
import sys

import torch

from config import arguments, require, run

# (architecture, largest head dim): the row of each pass
LAUNCH = {
    ("sm_80", 64): {
        "forward": (128, 64, 4, 3),
        "dq": (128, 64, 8, 3),
        "dkdv": (32, 128, 8, 3),
    },  # A100
    ("sm_80", 128): {"forward": (128, 32, 8, 3), "dq": (64, 64, 8, 3), "dkdv": (64, 64, 8, 2)},
    ("sm_90", 64): {
        "forward": (128, 128, 8, 3),
        "dq": (128, 64, 8, 3),
        "dkdv": (64, 128, 8, 2),
    },  # H100, H200
    ("sm_90", 128): {"forward": (128, 64, 8, 3), "dq": (128, 64, 8, 2), "dkdv": (64, 128, 8, 2)},
    ("gfx90a", 64): {
        "forward": (128, 64, 4, 1, 2),
        "dq": (128, 32, 4, 1, 2),
        "dkdv": (32, 128, 4, 1, 1),
    },  # MI250
    ("gfx90a", 128): {
        "forward": (128, 32, 4, 1, 2),
        "dq": (128, 32, 4, 1, 1),
        "dkdv": (32, 128, 4, 1, 1),
    },
    ("gfx942", 64): {
        "forward": (128, 64, 4, 1, 2),
        "dq": (128, 32, 4, 1, 2),
        "dkdv": (32, 128, 4, 1, 1),
    },  # MI300X
    ("gfx942", 128): {
        "forward": (128, 32, 4, 1, 2),
        "dq": (128, 32, 8, 1, 2),
        "dkdv": (32, 128, 4, 1, 1),
    },
    ("gfx950", 64): {
        "forward": (128, 64, 4, 1, 2),
        "dq": (128, 32, 4, 2, 2),
        "dkdv": (32, 128, 4, 1, 1),
    },  # MI355X
    ("gfx950", 128): {
        "forward": (128, 64, 8, 1, 2),
        "dq": (128, 32, 8, 1, 2),
        "dkdv": (32, 128, 4, 1, 1),
    },
}
UNKNOWN = (
    32,
    32,
    4,
    1,
)  # 48 KiB of shared memory; fp32 takes it on every GPU: 72 KiB with heads of 128


def architecture(device: torch.device) -> str:
    """sm_90, gfx942, ...: the name by which the table knows a GPU; `cpu` for Triton's interpreter."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


@functools.cache
def rows_of(arch: str) -> dict:
    """The rows of one architecture, {head dim: {pass: row}}. If there are none it says so once, on stderr."""
    rows = {dim: passes for (name, dim), passes in LAUNCH.items() if name == arch}
    if not rows and arch != "cpu":
        advice = "python -m gpu_kernels.flash_attention --tune measures better ones"
        print(
            f"gpu_kernels/launch_table.py has no rows for {arch}, so attention takes {UNKNOWN}: {advice}",
            file=sys.stderr,
        )
    return rows


def row_for(arch: str, head_dim: int, what: str, dtype: torch.dtype) -> tuple:
    """The row for one pass ("forward", "dq" or "dkdv") over heads of `head_dim`."""
    wide_enough = [dim for dim in rows_of(arch) if dim >= head_dim]
    return (
        rows_of(arch)[min(wide_enough)][what] if wide_enough and dtype != torch.float32 else UNKNOWN
    )


def options(row: tuple) -> dict:
    """A row as the keyword arguments of a kernel launch."""
    return dict(
        zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "waves_per_eu"), row, strict=False)
    )


def candidates() -> list[tuple]:
    """Rows worth measuring on this vendor's GPUs."""
    blocks = [(m, n) for m, n in itertools.product((32, 64, 128), repeat=2)]
    rest = (
        itertools.product((4, 8), (1, 2), (1, 2))
        if torch.version.hip
        else itertools.product((4, 8), (2, 3))
    )
    return [block + more for block, more in itertools.product(blocks, rest)]


def fastest(name: str, launch, time_of) -> tuple:
    """The candidate `row` with the least `time_of(lambda: launch(row))`; rows that do not fit this GPU are left out."""
    times = {}
    for row in candidates():
        try:
            times[row] = time_of(functools.partial(launch, row))  # ms
        except (
            Exception
        ) as error:  # too many registers, too much shared memory: compilers say it in many ways
            print(f"  {row}: {type(error).__name__}: {str(error)[:80]}", file=sys.stderr)
    require(times, f"{name}: no row runs on this GPU")
    best = min(times, key=times.get)
    print(
        f"# {name}: {best} takes {times[best]:.3f} ms, the row of the table {time_of(launch):.3f}",
        flush=True,
    )
    return best


def demonstrate(argv) -> None:
    arguments(argv)
    for (arch, dim), passes in LAUNCH.items():
        print(
            f"{arch:7s} heads up to {dim:3d}  "
            + "  ".join(f"{what} {row}" for what, row in passes.items())
        )


if __name__ == "__main__":
    run(demonstrate)
