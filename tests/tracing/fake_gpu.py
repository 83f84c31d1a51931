"""A GPU that is not there: from here on this process believes that it has one.

    library = fake_gpu.build(folder)      once: the driver, compiled in some seconds
    fake_gpu.pretend(library)             in a process of its own, before torch is imported

The real training step then runs on tensors that say they are on `cuda:0` but have no data: PyTorch
computes only shapes and dtypes. It runs the GPU's path: autocast for CUDA, the choice of the
attention kernel, the fused optimizer, FSDP's streams, autograd's thread for the device. So a wrong
device, a cast that should not be there, or a wait for the GPU shows on a laptop (gpu_runs.py).

Three things stand in for what is missing:

    the driver       fake_gpu.cpp answers "one GPU, number 0"
    torch.cuda       `stand_ins` below: streams and events that do nothing, graphs that run while
                     they are captured, an H100's properties
    the other ranks  a process group of PyTorch's that transfers nothing

What it cannot show: values, speed, memory, kernels, NCCL, races between streams.
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")

# --- The driver


def compiler() -> str | None:
    """The C++ compiler: $CXX, g++ or clang++."""
    names = (os.environ.get("CXX"), "g++", "clang++")
    return next(filter(None, (shutil.which(name) for name in names if name)), None)


def build(folder: Path) -> Path:
    """Compile fake_gpu.cpp against the installed PyTorch, into `folder`. Returns the library."""
    (torch_folder,) = importlib.util.find_spec("torch").submodule_search_locations
    library = Path(folder, "fake_gpu.so")
    command = [compiler(), "-shared", "-fPIC", "-std=c++20", "-w", str(SOURCE), "-o", str(library)]
    command += [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu"]
    command += [f"-Wl,-rpath,{torch_folder}/lib"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return library


def pretend(library: Path | str) -> None:
    """From here on this process believes that it has a GPU. It cannot go back.

    library: made by `build`. PyTorch asks for a GPU only once, so it must not be imported yet.
    """
    assert "torch" not in sys.modules, "call fake_gpu.pretend() before torch is imported"
    loaded = ctypes.CDLL(str(library))
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

    def query(self) -> bool:
        return True

    def nothing(self, *args, **kwargs) -> None:
        pass

    record = wait = synchronize = nothing


class Stream(Event):
    """A queue without work."""

    cuda_stream = stream_id = device_index = priority = 0
    device_type = 1  # CUDA
    wait_stream = wait_event = __exit__ = Event.nothing

    def __enter__(self):
        return self

    @property
    def device(self):
        import torch

        return torch.device("cuda", 0)

    def record_event(self, event=None):
        return event or Event()


class Graph:
    """A CUDA graph: its kernels run once, while it is captured."""

    replays = []  # of all graphs

    def pool(self):
        return 0, 1

    def replay(self) -> None:
        self.replays.append(self)


def graph(graph, pool=None, capture_error_mode="global"):
    """The capture of a graph: a part of the step, for the tracer."""
    import torch

    return torch.profiler.record_function("captured")


@dataclass
class Properties:
    """What an H100 says of itself, as far as anybody here asks."""

    name: str = "NVIDIA H100 80GB HBM3"
    major: int = 9
    minor: int = 0
    total_memory: int = 80 * 2**30
    multi_processor_count: int = 132
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
        "CUDAGraph": Graph,
        "graph": graph,
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
