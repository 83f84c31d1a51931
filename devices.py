"""What one accelerator can do: the peak that MFU divides by, looked up per torch device.

    MFU = FLOP/s of the model / (number of torch devices x peak FLOP/s of one torch device)

The table gives dense matrix peaks with fp32 accumulation (no sparsity), memory, power and links. They are the vendors'
figures (NVIDIA's datasheets and whitepapers, AMD's product pages, Google Cloud's documents), and each GPU's peak equals
compute units x clock x FLOPs per clock and unit within 0.5 %. One row is one *torch device*: an MI250 or MI250X card
holds two dies (GCDs), torch sees two devices, so a row has half of the card's 362.1 or 383 TFLOP/s and of its power.

A device tells its name, and on ROCm the name is not reliable: `AMD Instinct MI250X/MI250` for both, an empty text
before ROCm 6, `AMD Radeon Graphics` for many. So `lookup` goes by name (longest match) if the compute units agree,
then by architecture and compute units, then by units x clock x FLOPs per clock, and then gives up: no peak is better
than a wrong one.

`device` is a torch.device and `dtype` a torch.dtype below; torch is imported only to ask what this machine has.
Run `python devices.py` for the table and for what this machine has. Read next: flops.py.
"""

import difflib
import re
import time
from dataclasses import dataclass, replace

import config
from config import UserError, require


@dataclass(frozen=True)
class Device:
    """One torch device. None: unknown, or it has none."""

    name: str  # its words also serve as names on a command line: mi250, h100-pcie
    arch: str  # ROCm: gcnArchName; CUDA: compute capability; "-": torch.cuda never sees it
    units: int  # compute units or streaming multiprocessors
    bf16_tflops: float | None  # dense bf16 peak, TFLOP/s; None: it has no bf16 matrix units
    fp16_tflops: float | None  # the same in fp16
    memory_gb: float  # GiB in truth; vendors write GB
    bandwidth_gbs: float  # memory, GB/s
    watts: float | None  # board power, of a range the upper end
    link_gbs: (
        float | None
    )  # GB/s each way to a neighbour in the node (NVLink, Infinity Fabric, else PCIe)
    reports: tuple[str, ...]  # what its reported name contains, in lower case
    reachable: float | None = (
        None  # share of the bf16 peak that large matmuls reach; None: never measured
    )
    per_card: int = 1  # torch devices of one card


# A family's first row is what its bare name means: h100 is the H100 SXM.
# link_gbs of a GCD: 200 GB/s to its twin on the card, 50 to 100 to others: 100 stands for all.
# reachable: measured matmul peaks. A100 SXM 0.87, H100 SXM 0.80, MI300X about 0.51; a GCD of MI250X 0.66 to 0.77, here
# the middle. The family's other rows take the figure of the one that was measured.
TABLE = [
    Device("V100 SXM 16GB", "7.0", 80, None, 125, 16, 900, 300, 150, ("v100-sxm2-16gb",)),
    Device("V100 SXM 32GB", "7.0", 80, None, 125, 32, 900, 300, 150, ("v100-sxm2-32gb",)),
    Device("A100 SXM 80GB", "8.0", 108, 312, 312, 80, 2039, 400, 300, ("a100-sxm4-80gb",), 0.87),
    Device("A100 SXM 40GB", "8.0", 108, 312, 312, 40, 1555, 400, 300, ("a100-sxm4-40gb",), 0.87),
    Device("A100 PCIe 80GB", "8.0", 108, 312, 312, 80, 1935, 300, 32, ("a100 80gb pcie",), 0.87),
    Device("A100 PCIe 40GB", "8.0", 108, 312, 312, 40, 1555, 250, 32, ("a100-pcie-40gb",), 0.87),
    Device("H100 SXM", "9.0", 132, 989.4, 989.4, 80, 3350, 700, 450, ("h100 80gb hbm3",), 0.80),
    Device("H100 PCIe", "9.0", 114, 756.5, 756.5, 80, 2000, 350, 64, ("h100 pcie",), 0.80),
    Device("H100 NVL", "9.0", 132, 835.5, 835.5, 94, 3900, 400, 300, ("h100 nvl",), 0.80),
    Device(
        "GH200 96GB",
        "9.0",
        132,
        989.4,
        989.4,
        96,
        4000,
        900,
        450,
        ("gh200 480gb", "gh200 120gb"),
        0.80,
    ),
    Device(
        "GH200 144GB", "9.0", 132, 989.4, 989.4, 144, 4000, 900, 450, ("gh200 144g hbm3e",), 0.80
    ),
    Device("H200 SXM", "9.0", 132, 989.4, 989.4, 141, 4800, 700, 450, ("h200",), 0.80),
    Device("H200 NVL", "9.0", 132, 836, 836, 141, 4800, 600, 450, ("h200 nvl",), 0.80),
    Device("B200", "10.0", 148, 2250, 2250, 180, 8000, 1000, 900, ("b200",)),
    Device("GB200", "10.0", 152, 2500, 2500, 186, 8000, 1200, 900, ("gb200",)),
    Device("B300", "10.3", 148, 2250, 2250, 288, 8000, 1400, 900, ("b300",)),
    Device("L40S", "8.9", 142, 362.05, 362.05, 48, 864, 350, 32, ("l40s",)),
    Device("RTX 3090", "8.6", 82, 71, 71, 24, 936, 350, 56, ("rtx 3090",)),
    Device("RTX 4090", "8.9", 128, 165.2, 165.2, 24, 1008, 450, 32, ("rtx 4090",)),
    Device("RTX 5090", "12.0", 170, 209.5, 209.5, 32, 1792, 575, 64, ("rtx 5090",)),
    Device(
        "MI100", "gfx908", 120, 92.3, 184.6, 32, 1229, 300, 138, ("mi100",)
    ),  # bf16 at half the rate of fp16
    Device(
        "MI250 GCD",
        "gfx90a",
        104,
        181.05,
        181.05,
        64,
        1638.4,
        280,
        100,
        ("mi250", "mi250x/mi250"),
        0.72,
        2,
    ),
    Device(
        "MI250X GCD",
        "gfx90a",
        110,
        191.5,
        191.5,
        64,
        1638.4,
        280,
        100,
        ("mi250x", "mi250x/mi250"),
        0.72,
        2,
    ),
    Device("MI210", "gfx90a", 104, 181.0, 181.0, 64, 1638, 300, 150, ("mi210",), 0.72),
    Device("MI300A", "gfx942", 228, 980.6, 980.6, 128, 5300, 760, 384, ("mi300a",), 0.51),
    Device("MI300X", "gfx942", 304, 1307.4, 1307.4, 192, 5300, 750, 448, ("mi300x",), 0.51),
    Device("MI325X", "gfx942", 304, 1307.4, 1307.4, 256, 6000, 1000, 448, ("mi325x",), 0.51),
    Device("MI350X", "gfx950", 256, 2306.9, 2306.9, 288, 8000, 1000, 537.5, ("mi350x",)),
    Device("MI355X", "gfx950", 256, 2516.6, 2516.6, 288, 8000, 1400, 537.5, ("mi355x",)),
    Device("RX 7900 XTX", "gfx1100", 96, 122.9, 122.9, 24, 960, 355, 32, ("radeon rx 7900 xtx",)),
    Device("PRO W7900", "gfx1100", 96, 122.6, 122.6, 48, 864, 295, 32, ("radeon pro w7900",)),
    Device("RX 9070 XT", "gfx1201", 64, 195, 195, 16, 640, 304, 64, ("radeon rx 9070 xt",)),
    Device(
        "AI PRO R9700",
        "gfx1201",
        64,
        191,
        191,
        32,
        640,
        300,
        64,
        ("radeon ai pro r9700", "radeon r9700"),
    ),
    Device("TPU v4", "-", 0, 275, None, 32, 1228, 192, 150, ()),  # TPUs: for published figures only
    Device("TPU v5p", "-", 0, 459, None, 95, 2765, None, 600, ()),
    Device("TPU v3", "-", 0, 123, None, 32, 900, 220, None, ()),
]

# MosaicML, "Training LLMs at Scale with AMD MI250 GPUs" (2023): MPT-7B on nodes of 4 cards, with a
# global batch of 1536 sequences. {MI250 cards: TFLOP/s of one card, which is two torch devices}
PUBLISHED_MI250 = {4: 166, 128: 159}

# Rated watts of a published node / its torch devices (4 cards of two, 8 and 8 GPUs), by how the name
# of a row begins.
NODE_WATTS = {"MI250": 3000 / 8, "A100 SXM": 6500 / 8, "H100 SXM": 10200 / 8}
NODE_OVER_BOARD = 1.7  # node / board power elsewhere: the mean of these three

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


def lookup(
    name: str, arch: str, units: int, memory_gb: float | None = None, clock_mhz=None
) -> Device | None:
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
    shared = ("bf16_tflops", "fp16_tflops", "memory_gb", "bandwidth_gbs", "watts")
    parts = {field: getattr(row, field) / n for field in shared}
    return replace(row, name=f"1/{n} {row.name}", units=units, link_gbs=None, per_card=n, **parts)


def is_rdna(arch: str) -> bool:
    """Radeon names: torch's multi_processor_count is work-group processors there, of two compute units each."""
    return arch.startswith(("gfx110", "gfx115", "gfx120"))


def by_arch(arch: str, units: int, memory_gb: float | None) -> Device | None:
    """The AMD row with this architecture and unit count (and memory within 10 %), if all such rows have one peak.

    Not for NVIDIA: an L40 and an L40S share capability, units and memory, and differ by two in the peak.
    """
    units = 2 * units if is_rdna(arch) else units
    rows = [
        row for row in TABLE if arch.startswith("gfx") and (row.arch, row.units) == (arch, units)
    ]
    if memory_gb:
        rows = [row for row in rows if abs(memory_gb / row.memory_gb - 1) < 0.1]
    peaks = [row.bf16_tflops for row in rows]
    return rows[0] if rows and max(peaks) < 1.005 * min(peaks) else None


def derived(
    arch: str, units: int, memory_gb: float | None, clock_mhz: float | None
) -> Device | None:
    """compute units x clock x FLOPs per clock, for an AMD architecture that we know, or None."""
    per_clock, clock = PER_CLOCK.get(arch) or PER_CLOCK.get(arch[:6]) or (None, None)
    clock = clock or clock_mhz
    if not (per_clock and clock):
        return None
    units = 2 * units if is_rdna(arch) else units
    tflops = units * clock * per_clock / 1e6  # MHz -> TFLOP/s
    fp16 = 2 * tflops if arch == "gfx908" else tflops
    name = f"{arch}, {units} units at {clock:g} MHz"
    return Device(name, arch, units, tflops, fp16, memory_gb or 0, 0, None, None, ())  # 0: unknown


def of(device) -> Device | None:
    """What `device` is, or None for a CPU and for whatever the table does not know."""
    if device.type != "cuda":  # ROCm devices are "cuda" too
        return None
    import torch

    p = torch.cuda.get_device_properties(device)
    arch = p.gcnArchName if torch.version.hip else f"{p.major}.{p.minor}"
    clock_mhz = getattr(p, "clock_rate", 0) / 1000  # kHz; older torch does not tell
    return lookup(p.name, arch, p.multi_processor_count, p.total_memory / 2**30, clock_mhz)


def describe(device) -> str:
    """The name of a device, as it says itself."""
    if device.type != "cuda":
        return device.type
    import torch

    return torch.cuda.get_device_name(device)


def by_name(text: str) -> Device:
    """The row that a person means by `mi250`, `h100-nvl`, `A100 40GB`. UserError names the nearest ones otherwise."""
    here = text in ("auto", "cpu", "cuda", "mps")  # what a training config says
    require(not here, f"which device? --device=mi250, not {text} (python devices.py lists them)")
    wanted = set(re.split(r"[\s_-]+", text.strip().lower()))
    for row in TABLE:
        if any(map(is_model, wanted)) and wanted - {"card"} <= set(row.name.lower().split()):
            two = f"{text!r} is {row.per_card} torch devices: say {row.name.split()[0].lower()} and count each of them"
            require("card" not in wanted or row.per_card == 1, two)
            return row
    words = dict.fromkeys(filter(is_model, " ".join(row.name for row in TABLE).lower().split()))
    near = difflib.get_close_matches(text.lower(), words, n=3) or list(words)
    raise UserError(
        f"no accelerator {config.shown(text)} in devices.py, did you mean {' or '.join(near)}?"
    )


def is_model(word: str) -> bool:
    """Whether the word of a name tells one model from another, as a number does that is not the memory's size."""
    return any(map(str.isdigit, word)) and not word.endswith("gb")


def peak_flops(setting: float | str, device, dtype) -> float | None:
    """FLOP/s that are 100 % in `dtype`. setting: `--peak_tflops`, so TFLOP/s, "measure" or "auto": the table, which
    has bf16 and fp16. None: unknown, MFU is n/a."""
    if setting == "measure":
        return measure_peak(device, dtype)
    if setting != "auto":
        return setting * 1e12
    field = {"torch.bfloat16": "bf16_tflops", "torch.float16": "fp16_tflops"}.get(str(dtype))
    tflops = field and getattr(of(device), field, None)
    return tflops and tflops * 1e12


def measure_peak(device, dtype) -> float:
    """FLOP/s of the fastest square matmul within 0.4 s: what is reachable, less than a datasheet's peak."""
    import torch

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


def table() -> str:
    """All rows, as a person reads them."""
    columns = (
        "torch device,arch,units,bf16 TFLOP/s,fp16,GB,GB/s,watts,link GB/s,matmuls reach".split(",")
    )
    lines = ["{:<15} {:<8} {:>5} {:>12} {:>7} {:>4} {:>6} {:>6} {:>9} {:>13}".format(*columns)]
    for row in TABLE:
        reach = f"{row.reachable:.0%}" if row.reachable else "-"
        numbers = [
            row.bf16_tflops,
            row.fp16_tflops,
            row.memory_gb,
            row.bandwidth_gbs,
            row.watts,
            row.link_gbs,
        ]
        cells = [
            row.name,
            row.arch,
            row.units or "-",
            *("-" if n is None else f"{n:g}" for n in numbers),
            reach,
        ]
        lines.append(
            "{:<15} {:<8} {:>5} {:>12} {:>7} {:>4} {:>6} {:>6} {:>9} {:>13}".format(*cells)
        )
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    config.arguments(argv)
    import torch

    print(table())
    if not torch.cuda.is_available():
        print(
            "\nthis machine: no CUDA or ROCm device, MFU n/a: set --peak_tflops=NUMBER or --peak_tflops=measure"
        )
    for i in range(torch.cuda.device_count()):
        found = of(torch.device("cuda", i))
        known = (
            f"{found.name}, bf16 TFLOP/s {found.bf16_tflops}"
            if found
            else "n/a: set --peak_tflops=NUMBER"
        )
        print(f"\nthis machine's cuda:{i}: {torch.cuda.get_device_name(i)!r}: {known}")


if __name__ == "__main__":
    config.run(main)
