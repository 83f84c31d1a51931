"""The operations of a training step on a GPU that is not there.

    python -m bench fake_gpu configs/mpt125m.py --ranks=8 --sharding=FULL_SHARD

The real training step runs, on tensors that say they are on `cuda:0` but have no data: PyTorch
computes only shapes and dtypes. It runs the GPU's path: autocast for CUDA, the choice of the
attention kernel, the fused optimizer, FSDP's streams, autograd's thread for the device. So a wrong
device, a cast that should not be there, or a wait for the GPU shows on a laptop.

Three things stand in for what is missing:

    the driver       bench/fake_gpu.cpp answers "one GPU, number 0"; compiled in some seconds
    torch.cuda       `stand_ins` below: streams and events that do nothing, an H100's properties
    the other ranks  a process group of PyTorch's that transfers nothing

What it cannot show: values, speed, memory, kernels, NCCL, races between streams.

Not only the step runs, but all that a run does on its device (bench/fake_runs.py), each under a log
(bench/operations.py). A step has to have: nothing across devices, nothing on the host, no
read-back, and gradients that are reduced in fp32.
"""

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import config
from config import MPTConfig, TrainConfig, require

SOURCE = Path(__file__).with_suffix(".cpp")


@dataclass
class FakeGpuArgs:
    """What to pretend, and how to print it."""

    ranks: int = 1  # data-parallel ranks, of which this is rank 0; 8 of them are a node
    json: bool = False  # print JSON: each distinct operation with shapes, dtypes and how often

    def check(self) -> None:
        """Raise UserError for a number of ranks that cannot be."""
        require(self.ranks > 0, f"ranks must be at least 1, not {self.ranks}")


# --- The driver


def compiler() -> str:
    """The C++ compiler: $CXX, g++ or clang++. UserError if there is none."""
    names = (os.environ.get("CXX"), "g++", "clang++")
    found = next(filter(None, (shutil.which(name) for name in names if name)), None)
    fix = "install g++ (apt install g++), or set CXX to yours"
    require(found, f"a GPU that is not there needs a C++ compiler: {fix}")
    return found


def build(folder: Path) -> Path:
    """Compile fake_gpu.cpp against the installed PyTorch, into `folder`. Returns the library.

    UserError if there is no compiler, or if it fails.
    """
    (torch_folder,) = importlib.util.find_spec("torch").submodule_search_locations
    library = Path(folder, "fake_gpu.so")
    command = [compiler(), "-shared", "-fPIC", "-std=c++20", "-w", str(SOURCE), "-o", str(library)]
    command += [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu"]
    command += [f"-Wl,-rpath,{torch_folder}/lib"]
    done = subprocess.run(command, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
    problem = f"{command[0]} cannot compile {SOURCE.name}: {errors[0].strip()[:160]}"
    require(done.returncode == 0, f"{problem} (needed: g++ 10 or newer, PyTorch 2.9 or newer)")
    return library


def pretend(library: Path | None = None) -> None:
    """From here on this process believes that it has a GPU. It cannot go back.

    library: made by `build`; None builds one. Raises UserError if PyTorch is imported already: it
    asks for a GPU only once.
    """
    require("torch" not in sys.modules, "call fake_gpu.pretend() before torch is imported")
    with tempfile.TemporaryDirectory() as folder:
        loaded = ctypes.CDLL(str(library or build(folder)))
    import torch

    loaded.register_guard()
    for name, stand_in in stand_ins(torch.device("cuda", 0)).items():
        setattr(torch.cuda, name, stand_in)
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False


# --- torch.cuda


class Event:
    """A point in a queue without work: always reached."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None):
        """Put it at the end of a queue."""

    def wait(self, stream=None):
        """Let a queue wait for it."""

    def synchronize(self):
        """Let the host wait for it."""

    def query(self) -> bool:
        """Whether it is reached."""
        return True

    def elapsed_time(self, end) -> float:
        """Milliseconds until another event."""
        return 0.0


class Stream:
    """A queue without work."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device_type = 1  # CUDA
    priority = 0

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    @property
    def device(self):
        """The GPU that is not there."""
        import torch

        return torch.device("cuda", 0)

    def wait_stream(self, other):
        """Wait until another queue is empty."""

    def wait_event(self, event):
        """Wait for an event."""

    def record_event(self, event=None):
        """An event at the end of this queue."""
        return event or Event()

    def synchronize(self):
        """Let the host wait until it is empty."""

    def query(self) -> bool:
        """Whether it is empty."""
        return True


@dataclass
class Properties:
    """What an H100 says of itself, as far as anybody here asks."""

    name: str = "NVIDIA H100 80GB HBM3"
    major: int = 9
    minor: int = 0
    total_memory: int = 80 * 2**30
    multi_processor_count: int = 132
    clock_rate: int = 1_980_000  # kHz
    gcnArchName: str = ""  # AMD's


def stand_ins(device) -> dict:
    """{name in torch.cuda: what replaces it}."""
    queue = Stream()
    gpu = Properties()
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "get_device_properties": lambda device=None: gpu,
        "get_device_name": lambda device=None: gpu.name,
        "get_device_capability": lambda device=None: (gpu.major, gpu.minor),
        "mem_get_info": lambda device=None: (gpu.total_memory, gpu.total_memory),
        "max_memory_allocated": lambda device=None: 0,
        "Event": Event,
        "Stream": Stream,
        "stream": lambda stream: stream or queue,
        "current_stream": lambda device=None: queue,
        "default_stream": lambda device=None: queue,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": random_state,
        "set_rng_state": lambda state, device="cuda": None,
    }


def random_state(device="cuda"):
    """A generator's state, 16 bytes, which recomputation keeps."""
    import torch

    return torch.zeros(16, dtype=torch.uint8)


# --- The program


def main(argv: list[str]) -> None:
    """Print what each run does on its device."""
    model_cfg, cfg, args = config.load(argv, MPTConfig, TrainConfig, FakeGpuArgs)
    print("PyTorch runs on tensors without data; this takes a minute", file=sys.stderr)
    pretend()
    from bench import fake_runs  # here, since it imports torch

    logs = fake_runs.run_all(model_cfg, cfg, args.ranks)
    if args.json:
        print(json.dumps(fake_runs.as_json(logs), indent=1))
    else:
        print(fake_runs.tables(logs))


if __name__ == "__main__":
    config.run(main)
