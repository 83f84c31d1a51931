"""What one accelerator can do: the peak that MFU divides by, looked up per torch device.

    MFU = FLOP/s of the model / (number of torch devices x peak FLOP/s of one torch device)

The table has dense matrix peaks with fp32 accumulation (no sparsity), memory, power and links, as
the vendors give them: NVIDIA's datasheets and whitepapers, AMD's product pages, Google Cloud's
documents. Each GPU's peak equals compute units x clock x FLOPs per clock and unit within 0.5 %.

One row is one *torch device*. An MI250 or MI250X card holds two dies (GCDs), which torch sees as
two devices, so their rows have half of the card's 362.1 or 383 TFLOP/s, and half of its power.

A device reports its name, but on ROCm the name is not reliable: `AMD Instinct MI250X/MI250` for
both, an empty text before ROCm 6, `AMD Radeon Graphics` for many. So `lookup` goes by name (the
longest match) if the number of compute units agrees, then by architecture and compute units, and
else gives up: no peak beats a wrong one.

`open_gpu` and `note_unused_gpu` say in one line why a GPU cannot be used: no driver that fits, no
kernels for it, no memory.

Below, `device` is a torch.device and `dtype` a torch.dtype. torch is imported only to ask what this
machine has. Run `python devices.py` for the table and for what this machine has.
"""

import contextlib
import ctypes
import difflib
import glob
import os
import re
import time
import warnings
from dataclasses import dataclass, replace

import config
import program
from program import UserError, require


@dataclass(frozen=True)
class Device:
    """One torch device. None: unknown, or it has none."""

    name: str  # its words also serve as names on a command line: mi250, h100-pcie
    arch: str  # ROCm: gcnArchName; CUDA: compute capability; "-": torch.cuda never sees it
    units: int  # compute units or streaming multiprocessors
    bf16_tflops: float | None  # dense bf16 peak, TFLOP/s; None: it has no bf16 matrix units
    fp16_tflops: float | None  # the same in fp16
    memory_gb: float  # in GiB, though vendors write GB
    bandwidth_gbs: float  # memory, GB/s
    watts: float | None  # board power; of a range the upper end
    # GB/s each way to a neighbour in the node: NVLink or Infinity Fabric, else PCIe
    link_gbs: float | None
    reports: tuple[str, ...]  # lower-case texts, one of which is in the name that it reports
    reachable: float | None = None  # share of the bf16 peak that large matmuls reach, if measured
    per_card: int = 1  # torch devices of one card
    # What no row has, since it depends on the software. planning/fleet.py sets it from flags and
    # measurements.
    attention: float | None = None  # share of the bf16 peak that attention kernels reach


# The first row of a family is what its bare name means: h100 is the H100 SXM.
# link_gbs of a GCD: 200 GB/s to its twin on the card, 50 to 100 to others; 100 stands for all.
# reachable: measured matmul peaks. A100 SXM 0.87, H100 SXM 0.80, MI300X about 0.51; a GCD of MI250X
# 0.66 to 0.77, here the middle. Other rows of a family take the figure of the measured one.
# Columns: name, arch, units, bf16 and fp16 TFLOP/s, GiB, memory GB/s, watts, link GB/s, reports,
# reachable, per_card.
# fmt: off
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
    Device("GH200 96GB", "9.0", 132, 989.4, 989.4, 96, 4000, 900, 450,
           ("gh200 480gb", "gh200 120gb"), 0.80),
    Device("GH200 144GB", "9.0", 132, 989.4, 989.4, 144, 4000, 900, 450,
           ("gh200 144g hbm3e",), 0.80),
    Device("H200 SXM", "9.0", 132, 989.4, 989.4, 141, 4800, 700, 450, ("h200",), 0.80),
    Device("H200 NVL", "9.0", 132, 836, 836, 141, 4800, 600, 450, ("h200 nvl",), 0.80),
    Device("B200", "10.0", 148, 2250, 2250, 180, 8000, 1000, 900, ("b200",)),
    Device("GB200", "10.0", 152, 2500, 2500, 186, 8000, 1200, 900, ("gb200",)),
    Device("B300", "10.3", 148, 2250, 2250, 288, 8000, 1400, 900, ("b300",)),
    Device("L40S", "8.9", 142, 362.05, 362.05, 48, 864, 350, 32, ("l40s",)),
    Device("RTX 3090", "8.6", 82, 71, 71, 24, 936, 350, 56, ("rtx 3090",)),
    Device("RTX 4090", "8.9", 128, 165.2, 165.2, 24, 1008, 450, 32, ("rtx 4090",)),
    Device("RTX 5090", "12.0", 170, 209.5, 209.5, 32, 1792, 575, 64, ("rtx 5090",)),
    Device("MI100", "gfx908", 120, 92.3, 184.6, 32, 1229, 300, 138,
           ("mi100",)),  # bf16: half of fp16
    Device("MI250 GCD", "gfx90a", 104, 181.05, 181.05, 64, 1638.4, 280, 100,
           ("mi250", "mi250x/mi250"), 0.72, 2),
    Device("MI250X GCD", "gfx90a", 110, 191.5, 191.5, 64, 1638.4, 280, 100,
           ("mi250x", "mi250x/mi250"), 0.72, 2),
    Device("MI210", "gfx90a", 104, 181.0, 181.0, 64, 1638, 300, 150, ("mi210",), 0.72),
    Device("MI300A", "gfx942", 228, 980.6, 980.6, 128, 5300, 760, 384, ("mi300a",), 0.51),
    Device("MI300X", "gfx942", 304, 1307.4, 1307.4, 192, 5300, 750, 448, ("mi300x",), 0.51),
    Device("MI325X", "gfx942", 304, 1307.4, 1307.4, 256, 6000, 1000, 448, ("mi325x",), 0.51),
    Device("MI350X", "gfx950", 256, 2306.9, 2306.9, 288, 8000, 1000, 537.5, ("mi350x",)),
    Device("MI355X", "gfx950", 256, 2516.6, 2516.6, 288, 8000, 1400, 537.5, ("mi355x",)),
    Device("RX 7900 XTX", "gfx1100", 96, 122.9, 122.9, 24, 960, 355, 32, ("radeon rx 7900 xtx",)),
    Device("PRO W7900", "gfx1100", 96, 122.6, 122.6, 48, 864, 295, 32, ("radeon pro w7900",)),
    Device("RX 9070 XT", "gfx1201", 64, 195, 195, 16, 640, 304, 64, ("radeon rx 9070 xt",)),
    Device("AI PRO R9700", "gfx1201", 64, 191, 191, 32, 640, 300, 64,
           ("radeon ai pro r9700", "radeon r9700")),
    Device("TPU v4", "-", 0, 275, None, 32, 1228, 192, 150, ()),  # TPUs: for published figures only
    Device("TPU v5p", "-", 0, 459, None, 95, 2765, None, 600, ()),
    Device("TPU v3", "-", 0, 123, None, 32, 900, 220, None, ()),
]
# fmt: on

# AMD architectures whose name begins so have no bf16 instructions. torch emulates them.
NO_BF16 = ("gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c", "gfx101", "gfx103")

# Ends the message about a GPU that cannot be used. Works for all programs; ROCm reads it too.
OR_CPU = ", or use the CPU: CUDA_VISIBLE_DEVICES=-1"

# Names of a torch device in a training config: they name no accelerator of the table.
THIS_MACHINE = ("auto", "cpu", "cuda", "mps")

# Words in the names that drivers report that do not tell models apart: makers, brands, forms.
OTHER_WORDS = set("nvidia tesla geforce amd instinct radeon gpu oam vf hf sxm6 ac".split())


# --------------------------------------------------------------------------------------------------
# The row of a device that torch reports


def lookup(name: str, arch: str, units: int, memory_gb: float | None = None) -> Device | None:
    """The `Device` that reports this name, architecture and number of units, or None.

    arch may carry ROCm's features (`gfx90a:sramecc+:xnack-`). memory_gb, in GiB, breaks ties.
    """
    arch = arch.split(":")[0]
    return by_reported_name(name, units) or by_arch(arch, units, memory_gb)


def by_reported_name(name: str, units: int) -> Device | None:
    """The row with the longest text that is in `name` as whole words, if the units agree.

    The units tell an RTX 4090 from a laptop's RTX 4090.
    """
    name = normal(name)
    longest, best = 0, None
    for row in TABLE:
        for text in row.reports:
            is_in_name = re.search(rf"(?<!\w){re.escape(text)}(?!\w)", name)
            device = partition(row, units)
            if is_in_name and device and len(text) > longest:
                longest, best = len(text), device
    return best


def normal(name: str) -> str:
    """A reported name in lower case with single spaces, and none around a slash."""
    name = " ".join(name.lower().split())
    return re.sub(r"\s*/\s*", "/", name)  # MI250X / MI250


def partition(row: Device, units: int) -> Device | None:
    """The part of `row` with this many units: all of it, an allowed share, or None.

    An MI300X in CPX mode is eight devices, for example.
    """
    if units == row.units or (is_rdna(row.arch) and 2 * units == row.units):
        return row
    can_split = row.arch in ("gfx942", "gfx950") and units > 0 and row.units % units == 0
    if not can_split:
        return None
    n = row.units // units
    divided = ("bf16_tflops", "fp16_tflops", "memory_gb", "bandwidth_gbs", "watts")
    share = {field: getattr(row, field) / n for field in divided}
    return replace(row, name=f"1/{n} {row.name}", units=units, link_gbs=None, per_card=n, **share)


def is_rdna(arch: str) -> bool:
    """Is this a Radeon? There torch's multi_processor_count counts pairs of compute units."""
    return arch.startswith(("gfx110", "gfx115", "gfx120"))


def by_arch(arch: str, units: int, memory_gb: float | None) -> Device | None:
    """The AMD row with this architecture and units (and memory within 10 %), or None.

    None also if such rows differ in their peak. Not for NVIDIA: an L40 and an L40S share
    capability, units and memory, and the peak of one is twice that of the other.
    """
    if not arch.startswith("gfx"):
        return None
    units = 2 * units if is_rdna(arch) else units
    rows = [row for row in TABLE if row.arch == arch and row.units == units]
    if memory_gb:
        rows = [row for row in rows if abs(memory_gb / row.memory_gb - 1) < 0.1]
    peaks = [row.bf16_tflops for row in rows]
    one_peak = rows and max(peaks) < 1.005 * min(peaks)
    return rows[0] if one_peak else None


def identify(device) -> Device | None:
    """The row of `device`, or None for a CPU and for accelerators that the table does not know."""
    if device.type != "cuda":  # ROCm devices are "cuda" too
        return None
    import torch

    properties = torch.cuda.get_device_properties(device)
    arch = arch_of(properties)
    memory_gb = properties.total_memory / 2**30
    return lookup(properties.name, arch, properties.multi_processor_count, memory_gb)


def arch_of(properties) -> str:
    """The architecture in what torch tells of a GPU: `9.0`, or `gfx90a` without ROCm's features."""
    import torch

    if torch.version.hip is not None:
        return properties.gcnArchName.split(":")[0]
    return f"{properties.major}.{properties.minor}"


def describe(device) -> str:
    """The name that a device reports."""
    if device.type != "cuda":
        return device.type
    import torch

    return torch.cuda.get_device_name(device)


# --------------------------------------------------------------------------------------------------
# The row of a name on a command line


def by_name(text: str) -> Device:
    """The row that a person means by `mi250`, `h100-nvl` or `A100 40GB`.

    It may be the name that a driver reports, too (`NVIDIA H100 80GB HBM3`). Of several rows, the
    first. Raises UserError with the nearest names if there is none.
    """
    require(
        text not in THIS_MACHINE,
        f"which device? --device=mi250, not {text} (python devices.py lists them)",
    )
    words = words_of(text)
    if row := row_with(words):
        return row
    models = [word for row in TABLE for word in row.name.lower().split() if is_model(word)]
    near = [match for word in words for match in difflib.get_close_matches(word, models, n=3)]
    guess = " or ".join(dict.fromkeys(near or models))
    raise UserError(f"no accelerator {program.quote(text)} in devices.py, did you mean {guess}?")


def words_of(name: str) -> set[str]:
    """The words of a name that tell models apart: `Tesla V100-SXM2` -> {v100, sxm2}"""
    return set(re.split(r"[\s_-]+", normal(name))) - OTHER_WORDS


def row_with(words: set[str]) -> Device | None:
    """The first row with all these words, a model among them, in its name or one it reports."""
    if not any(is_model(word) for word in words):
        return None
    for row in TABLE:
        if any(words <= words_of(name) for name in (row.name, *row.reports)):
            return row
    return None


def is_model(word: str) -> bool:
    """Does this word of a name tell models apart? It has a digit and is no memory size."""
    return any(map(str.isdigit, word)) and not word.endswith("gb")


# --------------------------------------------------------------------------------------------------
# Peaks


def peak_flops(setting: float | str, device, dtype) -> float | None:
    """The peak FLOP/s in `dtype`, which count as 100 %, or None if unknown (MFU is n/a then).

    setting: the value of `--peak_tflops`: TFLOP/s, "measure", or "auto" for the table, which has
    bf16 and fp16.
    """
    if setting == "measure":
        return measure_peak(device, dtype)
    if setting != "auto":
        return setting * 1e12
    field = {"torch.bfloat16": "bf16_tflops", "torch.float16": "fp16_tflops"}.get(str(dtype))
    tflops = field and getattr(identify(device), field, None)
    return tflops and tflops * 1e12


def measure_peak(device, dtype, seconds: float = 0.4) -> float:
    """FLOP/s of the fastest of the square matmuls done in so many seconds: what is reachable.

    That is less than a datasheet's peak.
    """
    import torch

    n = 1024 if device.type == "cpu" else 8192
    a = torch.randn(n, n, device=device, dtype=dtype)
    b = torch.randn(n, n, device=device, dtype=dtype)
    best = float("inf")  # seconds
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        before = time.perf_counter()
        a @ b
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - before)
    return 2 * n**3 / best


# --------------------------------------------------------------------------------------------------
# The precision that suits a device


def choose_precision(cfg: config.TrainConfig, device, saved: str | None = None) -> tuple[str, str]:
    """bf16 or fp32, and the reason in words: the setting, or for `auto` what suits the device.

    saved: the precision of the checkpoint that a run resumes from, which `auto` keeps.
    """
    if cfg.precision == "auto" and not saved:
        if computes_in_bf16(device):
            return "bf16", "this device supports it"
        return "fp32", "bf16 is not known to be fast on this device"
    precision, reason = saved, "as in the checkpoint"
    if cfg.precision != "auto":
        precision, reason = cfg.precision, "as set"
    if precision == "bf16" and not computes_in_bf16(device):
        doubt = "though bf16 is not known to be fast on this device"
        reason += f", {doubt}: consider --precision=fp32"
    return precision, reason


def computes_in_bf16(device) -> bool:
    """Does a device have instructions for bf16? V100, MI50, RX 6000 and many CPUs emulate it."""
    import torch

    if device.type == "cpu":  # PyTorch says so since 2.11
        features = getattr(torch.cpu, "get_capabilities", dict)()
        return any(features.get(name) for name in ("amx_bf16", "avx512_bf16"))
    if device.type != "cuda":
        return True
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return False
    if torch.version.hip is None:
        return True  # on ROCm torch says so of every GPU
    return not arch_of(torch.cuda.get_device_properties(device)).startswith(NO_BF16)


# --------------------------------------------------------------------------------------------------
# A GPU that cannot be used


def note_unused_gpu(device_type: str, size: int) -> None:
    """Call it if torch finds no accelerator. Says so if this machine has a GPU all the same.

    device_type: cuda or auto; size: the number of ranks. Raises UserError if the GPU was asked for,
    or if its driver fails in a run of several ranks: on other machines it may not, and ranks on
    GPUs cannot work with ranks on CPUs.
    """
    import torch

    why, has_its_build = unused_gpu("/dev", torch.version.cuda, torch.version.hip)
    goes_on = device_type == "auto" and (size == 1 or not has_its_build)
    require(not why or goes_on, why + OR_CPU)
    if why:
        program.say_once("note", f"using the CPU: {why}")


def unused_gpu(dev: str, cuda: str | None, hip: str | None) -> tuple[str, bool]:
    """Why torch finds no GPU though one is here, with the fix; and is torch's build for that GPU?

    dev: the folder of device files. cuda, hip: the versions that torch was built with. The text is
    empty if there is no GPU, or if a variable hides it.
    """
    variables = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    is_hidden = any(os.environ.get(name) in ("", "-1") for name in variables)
    is_nvidia = bool(glob.glob(f"{dev}/nvidia[0-9]*"))
    kfd = f"{dev}/kfd"  # AMD's driver
    is_amd = os.path.exists(kfd)
    if is_hidden or not (is_nvidia or is_amd):
        return "", False

    if hip and is_amd and not os.access(kfd, os.R_OK | os.W_OK):
        return (
            f"you may not open {kfd}: sudo usermod -aG render,video $USER, then log in again",
            True,
        )
    if (cuda and is_nvidia) or (hip and is_amd):
        platform, version, tool = (
            ("CUDA", cuda, "nvidia-smi") if cuda else ("ROCm", hip, "rocminfo")
        )
        why = (
            f"torch for {platform} {version} cannot use the GPU ({driver_error()}): repair the "
            f"driver if {tool} fails, else update it or install torch for its {platform}"
        )
        return why, True
    built_for = "NVIDIA" if cuda else "AMD" if hip else "CPUs"
    vendor = "NVIDIA" if is_nvidia else "AMD"
    return f"the GPU is {vendor}'s, but torch is built for {built_for}: see INSTALL.md", False


def driver_error() -> str:
    """The first sentence of what torch says when it tries to use a GPU and fails."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return program.one_line(error).split(". ")[0]
    return "no reason given"


def open_gpu(device) -> None:
    """Make `device` this process's GPU.

    Raises UserError if torch has no kernels for it, or cannot open it, as when it is full.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says in many lines what we say in one
        properties = torch.cuda.get_device_properties(device)
    name = f"{device} ({properties.name})"
    try:
        torch.cuda.set_device(device)
        torch.ones(1, device=device)  # starts a kernel: is there one for this architecture?
    except RuntimeError as error:
        raise UserError(cannot_open(name, str(error).split("\n")[0])) from error


def keep_freed_memory() -> None:
    """Tell glibc to keep the buffers that a process on a CPU has freed.

    Otherwise each step returns its memory to the kernel, and faults it in again.
    """
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def cannot_open(name: str, reason: str) -> str:
    """What to say of a GPU that torch fails to open. reason: torch's error."""
    import torch

    tool = "rocm-smi --showpids" if torch.version.hip else "nvidia-smi"
    if "out of memory" in reason:
        fix = f"end the processes that hold it ({tool} lists them), or use another GPU"
        return f"{name} has no memory free: {fix}"
    if "no kernel image" in reason or "invalid device function" in reason:  # of CUDA, of HIP
        fix = f"install a build that has (INSTALL.md){OR_CPU}"
        return f"torch {torch.__version__} has no kernels for {name}: {fix}"
    return f"{name} cannot be opened ({reason}): see {tool}, or use another GPU"


# --------------------------------------------------------------------------------------------------
# The program


def table() -> str:
    """All rows, for a person to read."""
    heads = "torch device,arch,units,bf16 TFLOP/s,fp16,GB,GB/s,watts,link GB/s,matmuls reach"
    rows = []
    for row in TABLE:
        figures = [row.units, row.bf16_tflops, row.fp16_tflops, row.memory_gb, row.bandwidth_gbs]
        figures += [row.watts, row.link_gbs]
        cells = [f"{figure:g}" if figure else "-" for figure in figures]
        reachable = f"{row.reachable:.0%}" if row.reachable else "-"
        rows.append([row.name, row.arch, *cells, reachable])
    return program.table(heads.split(","), rows)


def main(argv: list[str]) -> None:
    """Print the table, and which rows the devices of this machine have."""
    program.arguments(argv)
    import torch

    print(table())
    if not torch.cuda.is_available():
        fix = "set --peak_tflops=NUMBER or --peak_tflops=measure"
        print(f"\nthis machine: no CUDA or ROCm device, MFU n/a: {fix}")
        note_unused_gpu("auto", 1)
    for i in range(torch.cuda.device_count()):
        row = identify(torch.device("cuda", i))
        known = "n/a: set --peak_tflops=NUMBER"
        if row:
            known = f"{row.name}, bf16 TFLOP/s {row.bf16_tflops}"
        print(f"\nthis machine's cuda:{i}: {torch.cuda.get_device_name(i)!r}: {known}")


if __name__ == "__main__":
    program.run(main)
