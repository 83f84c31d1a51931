"""What one accelerator can do: the peak that MFU divides by, looked up per torch device.

    MFU = FLOP/s of the model / (number of torch devices x peak FLOP/s of one torch device)

The table gives dense bf16 matrix peaks with fp32 accumulation (no sparsity), memory and bandwidth. They are the
vendors' figures (NVIDIA's datasheets and whitepapers, AMD's product pages), and each peak equals compute units x clock
x FLOPs per clock and unit within 0.5 %. One row is one *torch device*: an MI250 or MI250X card holds two dies (GCDs),
torch sees two devices, so a row has half of the card's 362.1 or 383 TFLOP/s.

A device tells its name, and on ROCm the name is not reliable: `AMD Instinct MI250X/MI250` for both, an empty text
before ROCm 6, `AMD Radeon Graphics` for many. So `lookup` goes by name (longest match) if the compute units agree,
then by architecture and compute units, then by units x clock x FLOPs per clock, and then gives up: no peak is better
than a wrong one.

Run `python devices.py` for the table and for what this machine has. Read next: flops.py.
"""

import difflib
import re
import time
from dataclasses import dataclass, replace

import torch

from config import UserError


@dataclass(frozen=True)
class Device:
    """One torch device."""

    name: str  # its words also serve as names on a command line: mi250, h100-pcie
    arch: str  # ROCm: gcnArchName; CUDA: compute capability
    units: int  # compute units or streaming multiprocessors
    bf16_tflops: float | None  # dense bf16 peak, TFLOP/s; None: it has no bf16 matrix units
    memory_gb: float  # GiB in truth; vendors write GB
    bandwidth_gbs: float  # memory, GB/s
    reports: tuple[str, ...]  # what its reported name contains, in lower case


# A family's first row is what its bare name means: h100 is the H100 SXM.
TABLE = [
    Device("V100 SXM 16GB", "7.0", 80, None, 16, 900, ("v100-sxm2-16gb",)),
    Device("V100 SXM 32GB", "7.0", 80, None, 32, 900, ("v100-sxm2-32gb",)),
    Device("A100 SXM 80GB", "8.0", 108, 312, 80, 2039, ("a100-sxm4-80gb",)),
    Device("A100 SXM 40GB", "8.0", 108, 312, 40, 1555, ("a100-sxm4-40gb",)),
    Device("A100 PCIe 80GB", "8.0", 108, 312, 80, 1935, ("a100 80gb pcie",)),
    Device("A100 PCIe 40GB", "8.0", 108, 312, 40, 1555, ("a100-pcie-40gb",)),
    Device("H100 SXM", "9.0", 132, 989.4, 80, 3350, ("h100 80gb hbm3",)),
    Device("H100 PCIe", "9.0", 114, 756.5, 80, 2000, ("h100 pcie",)),
    Device("H100 NVL", "9.0", 132, 835.5, 94, 3900, ("h100 nvl",)),
    Device("GH200 96GB", "9.0", 132, 989.4, 96, 4000, ("gh200 480gb", "gh200 120gb")),
    Device("GH200 144GB", "9.0", 132, 989.4, 144, 4000, ("gh200 144g hbm3e",)),
    Device("H200 SXM", "9.0", 132, 989.4, 141, 4800, ("h200",)),
    Device("H200 NVL", "9.0", 132, 836, 141, 4800, ("h200 nvl",)),
    Device("B200", "10.0", 148, 2250, 180, 8000, ("b200",)),
    Device("GB200", "10.0", 152, 2500, 186, 8000, ("gb200",)),
    Device("B300", "10.3", 148, 2250, 288, 8000, ("b300",)),
    Device("L40S", "8.9", 142, 362.05, 48, 864, ("l40s",)),
    Device("RTX 3090", "8.6", 82, 71, 24, 936, ("rtx 3090",)),
    Device("RTX 4090", "8.9", 128, 165.2, 24, 1008, ("rtx 4090",)),
    Device("RTX 5090", "12.0", 170, 209.5, 32, 1792, ("rtx 5090",)),
    Device("MI100", "gfx908", 120, 92.3, 32, 1229, ("mi100",)),  # bf16 at half the rate of fp16
    Device("MI250 GCD", "gfx90a", 104, 181.05, 64, 1638.4, ("mi250", "mi250x/mi250")),
    Device("MI250X GCD", "gfx90a", 110, 191.5, 64, 1638.4, ("mi250x", "mi250x/mi250")),
    Device("MI210", "gfx90a", 104, 181.0, 64, 1638, ("mi210",)),
    Device("MI300A", "gfx942", 228, 980.6, 128, 5300, ("mi300a",)),
    Device("MI300X", "gfx942", 304, 1307.4, 192, 5300, ("mi300x",)),
    Device("MI325X", "gfx942", 304, 1307.4, 256, 6000, ("mi325x",)),
    Device("MI350X", "gfx950", 256, 2306.9, 288, 8000, ("mi350x",)),
    Device("MI355X", "gfx950", 256, 2516.6, 288, 8000, ("mi355x",)),
    Device("RX 7900 XTX", "gfx1100", 96, 122.9, 24, 960, ("radeon rx 7900 xtx",)),
    Device("PRO W7900", "gfx1100", 96, 122.6, 48, 864, ("radeon pro w7900",)),
    Device("RX 9070 XT", "gfx1201", 64, 195, 16, 640, ("radeon rx 9070 xt",)),
    Device("AI PRO R9700", "gfx1201", 64, 191, 32, 640, ("radeon ai pro r9700", "radeon r9700")),
]

# AMD: dense bf16 FLOPs per clock and compute unit, and the peak clock in MHz where all products share it.
PER_CLOCK = {
    "gfx908": (512, 1502),
    "gfx90a": (1024, 1700),
    "gfx942": (2048, 2100),
    "gfx950": (4096, None),
    "gfx110": (512, None),  # and below: by the first six characters
    "gfx115": (512, None),
    "gfx120": (1024, None),
}


def lookup(name: str, arch: str, units: int, memory_gb: float | None = None, clock_mhz=None) -> Device | None:
    """The `Device` with this reported name, architecture, unit count and (where those leave a doubt) memory, or None.

    `arch` may carry ROCm's features (`gfx90a:sramecc+:xnack-`). `clock_mhz` is the driver's peak clock: it is used for
    an AMD device that the table lacks.
    """
    arch = arch.split(":")[0]
    found = by_reported_name(name, units) or by_arch(arch, units, memory_gb)
    return found or derived(arch, units, memory_gb, clock_mhz)


def by_reported_name(name: str, units: int) -> Device | None:
    """The row with the longest text that stands in `name` as whole words, if the units agree: no laptop's 4090."""
    name = re.sub(r"\s*/\s*", "/", " ".join(name.lower().split()))
    found = [
        (len(text), part)
        for row in TABLE
        for text in row.reports
        if re.search(rf"(?<!\w){re.escape(text)}(?!\w)", name) and (part := partition(row, units))
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def partition(row: Device, units: int) -> Device | None:
    """`row` itself if it has `units`, its share if it can be cut so (an MI300X in CPX mode is 8 devices), or None."""
    if units == row.units or (is_rdna(row.arch) and 2 * units == row.units):
        return row
    if row.arch not in ("gfx942", "gfx950") or units <= 0 or row.units % units:
        return None
    n = row.units // units
    name, peak, memory, bandwidth = f"1/{n} {row.name}", row.bf16_tflops / n, row.memory_gb / n, row.bandwidth_gbs / n
    return replace(row, name=name, units=units, bf16_tflops=peak, memory_gb=memory, bandwidth_gbs=bandwidth)


def is_rdna(arch: str) -> bool:
    """Radeon names: torch's multi_processor_count is work-group processors there, of two compute units each."""
    return arch.startswith(("gfx110", "gfx115", "gfx120"))


def by_arch(arch: str, units: int, memory_gb: float | None) -> Device | None:
    """The AMD row with this architecture and unit count (and memory within 10 %), if all such rows have one peak.

    Not for NVIDIA: an L40 and an L40S share capability, units and memory, and differ by two in the peak.
    """
    units = 2 * units if is_rdna(arch) else units
    rows = [row for row in TABLE if arch.startswith("gfx") and (row.arch, row.units) == (arch, units)]
    if memory_gb:
        rows = [row for row in rows if abs(memory_gb / row.memory_gb - 1) < 0.1]
    peaks = [row.bf16_tflops for row in rows]
    return rows[0] if rows and max(peaks) < 1.005 * min(peaks) else None


def derived(arch: str, units: int, memory_gb: float | None, clock_mhz: float | None) -> Device | None:
    """compute units x clock x FLOPs per clock, for an AMD architecture that we know, or None."""
    per_clock, clock = PER_CLOCK.get(arch) or PER_CLOCK.get(arch[:6]) or (None, None)
    clock = clock or clock_mhz
    if not (per_clock and clock):
        return None
    units = 2 * units if is_rdna(arch) else units
    tflops = units * clock * per_clock / 1e6  # MHz -> TFLOP/s
    return Device(f"{arch}, {units} units at {clock:g} MHz", arch, units, tflops, memory_gb or 0, 0, ())  # 0: unknown


def of(device: torch.device) -> Device | None:
    """What `device` is, or None for a CPU and for whatever the table does not know."""
    if device.type != "cuda":  # ROCm devices are "cuda" too
        return None
    p = torch.cuda.get_device_properties(device)
    arch = p.gcnArchName if torch.version.hip else f"{p.major}.{p.minor}"
    clock_mhz = getattr(p, "clock_rate", 0) / 1000  # kHz; older torch does not tell
    return lookup(p.name, arch, p.multi_processor_count, p.total_memory / 2**30, clock_mhz)


def describe(device: torch.device) -> str:
    """The name of a device, as it says itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def by_name(text: str) -> Device:
    """The row that a person means by `mi250`, `h100-nvl`, `A100 40GB`. UserError names the nearest ones otherwise."""
    wanted = set(re.split(r"[\s_-]+", text.strip().lower()))
    for row in TABLE:
        if wanted <= set(row.name.lower().split()):
            return row
    words = dict.fromkeys(word for row in TABLE for word in row.name.lower().split() if re.search(r"\d", word))
    near = difflib.get_close_matches(text.lower(), words, n=3) or list(words)
    raise UserError(f"no accelerator {text!r} in devices.py, did you mean {' or '.join(near)}?")


def peak_flops(setting: float | str, device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that are 100 %. setting: `--peak_tflops`, so TFLOP/s, "measure" or "auto" (the table). None: unknown."""
    if setting == "measure":
        return measure_peak(device, dtype)
    if setting != "auto":
        return setting * 1e12
    found = of(device)
    return found.bf16_tflops * 1e12 if found and found.bf16_tflops else None


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest square matmul within 0.4 s: what is reachable, less than a datasheet's peak."""
    n = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < 0.4:
        before = time.perf_counter()
        a @ b
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - before)
    return 2 * n**3 / best


def main() -> None:
    print(f"{'torch device':<16} {'arch':<8} {'units':>5} {'bf16 TFLOP/s':>12} {'GB':>5} {'GB/s':>6}  name contains")
    for row in TABLE:
        peak = "none" if row.bf16_tflops is None else f"{row.bf16_tflops:g}"
        print(
            f"{row.name:<16} {row.arch:<8} {row.units:>5} {peak:>12} {row.memory_gb:>5g} {row.bandwidth_gbs:>6g}"
            f"  {', '.join(row.reports)}"
        )
    if not torch.cuda.is_available():
        print("\nthis machine: no CUDA or ROCm device, MFU n/a: set --peak_tflops=NUMBER or --peak_tflops=measure")
    for i in range(torch.cuda.device_count()):
        found = of(torch.device("cuda", i))
        known = f"{found.name}, bf16 TFLOP/s {found.bf16_tflops}" if found else "n/a: set --peak_tflops=NUMBER"
        print(f"\nthis machine's cuda:{i}: {torch.cuda.get_device_name(i)!r}: {known}")


if __name__ == "__main__":
    main()
