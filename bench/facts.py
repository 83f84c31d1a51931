"""The facts of this machine: GPUs, driver, versions of torch, Triton and NCCL or RCCL.

    python -m bench facts                prints them
    python -m bench facts facts.json     and writes them

facts.json:
    gpus       [{"name", "arch", "memory_gb", "units", "known_as"}, ...]; arch: 9.0 or gfx90a, as
               ROCm reports it; memory_gb: GiB; known_as: its row of devices.py, or null
    computes_in_bf16    whether the GPUs have bf16 instructions (V100 and older have none)
    amd        whether torch is built for ROCm
    driver     of the GPUs, as its kernel module reports it, or null
    triton, nccl        versions (nccl is RCCL's on ROCm), null if absent
    cpus       cores that this process may use
    time, host, platform, python, torch, cuda, rocm     as runlog.versions has them
"""

import importlib.metadata
import json
import os
import re
from pathlib import Path

import torch

import config
import devices
from lifecycle import runlog
from storage import files

# Where the kernel modules of NVIDIA and AMD tell their versions.
DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")


def gpu(index: int) -> dict:
    """What torch and devices.py know of one GPU."""
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    row = devices.identify(device)
    capability = f"{properties.major}.{properties.minor}"
    return {
        "name": properties.name,
        "arch": properties.gcnArchName if torch.version.hip else capability,
        "memory_gb": properties.total_memory / 2**30,
        "units": properties.multi_processor_count,
        "known_as": row and row.name,
    }


def driver() -> str | None:
    """The version of the GPUs' driver, or None: no such module, or a container that hides it."""
    for path in DRIVERS:
        if os.path.exists(path):
            text = Path(path).read_text(errors="replace")
            number = re.search(r"\d+(\.\d+)+", text)
            return number and number[0]
    return None


def nccl_version() -> str | None:
    """The version of NCCL, or of RCCL on ROCm; None if torch has neither."""
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def triton_version() -> str | None:
    """The version of the Triton that is installed, under any of its names, or None."""
    packages = importlib.metadata.packages_distributions().get("triton", [])
    return importlib.metadata.version(packages[0]) if packages else None


def cpus() -> int:
    """The CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on a Mac
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def facts() -> dict:
    """The contents of facts.json."""
    gpus = [gpu(index) for index in range(torch.cuda.device_count())]
    has_bf16 = [devices.computes_in_bf16(torch.device("cuda", i)) for i in range(len(gpus))]
    return {
        "gpus": gpus,
        "computes_in_bf16": bool(gpus) and all(has_bf16),
        "amd": torch.version.hip is not None,
        "driver": driver(),
        "triton": triton_version(),
        "nccl": nccl_version(),
        "cpus": cpus(),
        **runlog.versions(),
    }


def main(argv: list[str]) -> None:
    """Print the facts, and write them to OUT.json if it is given."""
    out = config.arguments(argv, "[OUT.json]")
    text = json.dumps(facts(), indent=1)
    print(text)
    if out:
        files.write_atomically(out[0], text.encode())


if __name__ == "__main__":
    config.run(main)
