"""Tensors in other people's files: where each lies, reading its rows into a parameter, writing files of the same kind.

    model.safetensors     8 bytes: the length n of the header
                          n bytes: JSON, name -> dtype, shape, place
                          the tensors, one after another
    pytorch_model.bin     a zip: a pickle that refers to its other members, which are the tensors
    Composer's .pt        the same, with the weights in state.model and `model.` before their names

Both kinds may come in shards that an index names (model.safetensors.index.json). A pickle can run any code, so it is
read with `weights_only=True`, and without the tensors. Either way a tensor is then known by its place in a file, and a
rank reads the rows that it keeps straight into its own memory: the whole is nowhere, and nothing is mapped.

Run `python tensor_files.py path/to/model` to list what is there. Read next: hf.py.
"""

import datetime
import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard

import config
import parallel
from config import UserError, require

WEIGHTS = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of safetensors
CHUNK = 2**24  # bytes that are read at once


@dataclass
class Stored:
    """Where a tensor lies: contiguous, little-endian, `offset` bytes from the beginning of a file."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def locate(path: Path) -> dict[str, Stored]:
    """Where the tensors of a folder or file lie, by name. UserError if files lack, are damaged, or say a name twice."""
    found = {}
    for file in weight_files(path):
        layout = pickle_layout(file) if file.suffix in (".bin", ".pt") else safetensors_layout(file)
        for name, stored in layout.items():
            name = name.removeprefix("model.")  # Composer's
            require(name not in found, f"{name} is in {path} twice, the second time in {file.name}")
            found[name] = stored
    return found


def weight_files(path: Path) -> list[Path]:
    """The files that hold the weights of a folder, or a file itself. UserError if one is missing."""
    if path.is_file():
        return [path]
    found = next((path / name for name in WEIGHTS if (path / name).exists()), None)
    require(found is not None, f"no weights in {path}: expected {', '.join(WEIGHTS)}, or a .pt file")
    if found.suffix != ".json":
        return [found]
    names = read_json(found).get("weight_map")
    listed = isinstance(names, dict) and all(isinstance(name, str) for name in names.values())
    require(listed, f"{found} has no weight_map from names to files")
    files = [path / name for name in sorted(set(names.values()))]
    missing = [file.name for file in files if not file.exists()]
    require(not missing, f"{found} names {len(files)} files, but {', '.join(missing[:3])} is not there")
    return files


def read_json(path: Path) -> dict:
    """A JSON object. UserError if that is not what the file holds."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {config.one_line(error)}") from error
    require(isinstance(values, dict), f"{path} is not a JSON object")
    return values


def safetensors_layout(path: Path) -> dict[str, Stored]:
    """What the header of a safetensors file says. UserError if the file is not one, or not whole."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, size)))
        header.pop("__metadata__", None)
        layout, end = {}, 8 + length
        for name, entry in header.items():
            kind = entry["dtype"]
            require(kind in DTYPES, f"{name} in {path} is {kind}, expected one of: {', '.join(DTYPES)}")
            layout[name] = Stored(path, 8 + length + entry["data_offsets"][0], DTYPES[kind], tuple(entry["shape"]))
            end = max(end, layout[name].offset + layout[name].bytes)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is no safetensors file, or is damaged: {config.one_line(error)}") from error
    require(size == end, f"{path} is truncated or damaged: {size:,} bytes instead of {end:,}")
    return layout


def read_pickle(path: Path):
    """What a .bin or .pt file holds, its tensors with shape and place but without memory.

    UserError if it holds more than tensors, plain Python, and what Composer adds: times and numpy's random state.
    """
    rebuild = np.zeros(0).__reduce__()[0]
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")]  # before numpy 2 and since
    safe = [datetime.timedelta, np.ndarray, np.dtype, type(np.dtype("uint32")), *((rebuild, name) for name in names)]
    try:
        with FakeTensorMode(), torch.serialization.safe_globals(safe):
            return torch.load(path, weights_only=True)
    except Exception as error:  # whatever a damaged zip or an unwanted pickle brings about
        refused = re.search(r"GLOBAL (\S+)", str(error))  # torch's own advice is to run what is in there
        reason = f"it would run {refused[1]}" if refused else config.one_line(error)
        raise UserError(f"cannot read {path} with weights_only=True: {reason}") from error


def pickle_layout(path: Path) -> dict[str, Stored]:
    """Where the tensors of a .bin file lie, or those of state.model in a Composer checkpoint."""
    content = read_pickle(path)
    if isinstance(content, dict) and "state" in content:
        content = content["state"].get("model")
    require(isinstance(content, dict), f"{path} holds no dictionary of weights")
    layout = {}
    for name, tensor in content.items():
        known = isinstance(tensor, torch.Tensor) and tensor.dtype in DTYPES.values() and tensor.is_contiguous()
        require(known, f"{name} in {path} is not a contiguous tensor of floating-point numbers")
        begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        require(begin is not None, f"{path} has the format of torch before 1.6: torch.load and torch.save it once")
        offset = begin + tensor.storage_offset() * tensor.itemsize
        layout[name] = Stored(path, offset, tensor.dtype, tuple(tensor.shape))
    return layout


def same(a: Stored, b: Stored) -> bool:
    """Whether two stored tensors are the same numbers in the same dtype."""
    if a == b:  # in one place, under two names
        return True

    def piece(stored, begin):
        return np.fromfile(stored.file, np.uint8, min(CHUNK, stored.bytes - begin), offset=stored.offset + begin)

    alike = (a.dtype, a.shape) == (b.dtype, b.shape)
    return alike and all(np.array_equal(piece(a, i), piece(b, i)) for i in range(0, a.bytes, CHUNK))


def read_rows(file, stored: Stored, first: int, target: torch.Tensor) -> None:
    """Read rows of a stored tensor, from `first` on, into a contiguous CPU tensor of its dtype."""
    left = memoryview(target.flatten().view(torch.uint8).numpy())
    file.seek(stored.offset + first * stored.row_bytes)
    while len(left):
        n = file.readinto(left)
        require(n, f"{stored.file} is truncated: it ends within a tensor")
        left = left[n:]


@torch.no_grad()
def fill(param: torch.Tensor, stored: Stored) -> None:
    """Put a stored tensor into a parameter; of a sharded one each rank reads the rows of its part only.

    On the CPU, rows of full width and equal dtype are read straight into place.
    """
    local, corner, shape = param.detach(), (0,) * param.dim(), stored.shape
    if isinstance(param, DTensor):
        if any(type(placement) not in (Shard, Replicate) for placement in param.placements):
            fill(whole := torch.empty(shape, dtype=stored.dtype), stored)  # the part is no block of the tensor
            return parallel.assign_full(param, whole)
        local, corner = param.to_local(), param.__create_chunk_list__()[0].offsets
    straight = (local.device.type, local.dtype, local.shape[1:]) == ("cpu", stored.dtype, shape[1:])
    columns = [slice(begin, begin + size) for begin, size in zip(corner[1:], local.shape[1:], strict=True)]
    step = max(1, CHUNK // stored.row_bytes)  # rows
    buffer = None if straight else torch.empty(min(step, len(local)), *shape[1:], dtype=stored.dtype)
    with open(stored.file, "rb", buffering=0) as file:
        for row in range(0, len(local), step):
            part = local[row : row + step]
            rows = part if straight else buffer[: len(part)]
            read_rows(file, stored, corner[0] + row, rows)
            if not straight:
                part.copy_(rows[(slice(None), *columns)])


def write_folder(folder: Path, tensors: dict, max_bytes: int, read) -> None:
    """model.safetensors, or shards of at most `max_bytes` with an index. tensors: name -> tensor, maybe without memory;
    `read(names)` gives those of one file, name -> tensor."""
    groups, weight_map = in_groups(tensors, max_bytes), {}
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else WEIGHTS[0]
        write_safetensors(folder / file, read(names))
        weight_map |= dict.fromkeys(names, file)
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
        (folder / WEIGHTS[1]).write_text(json.dumps(index, indent=2))


def in_groups(tensors: dict, max_bytes: int) -> list[list[str]]:
    """Names in their order, in groups of at most `max_bytes` (or of one tensor that is larger)."""
    groups, free = [], 0
    for name, tensor in tensors.items():
        if not groups or tensor.nbytes > free:
            groups.append([])
            free = max_bytes
        groups[-1].append(name)
        free -= tensor.nbytes
    return groups


def write_safetensors(path: Path, tensors: dict) -> None:
    """One file. The header ends at a multiple of 8 bytes, filled up with spaces."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(memoryview(tensor.detach().cpu().flatten().view(torch.uint8).numpy()))


def main(argv) -> None:
    config.arguments(argv, "MODEL")
    for name, stored in locate(Path(argv[0])).items():
        print(f"{stored.file.name}  {stored.offset:>14,}  {str(stored.dtype):14}  {name} {stored.shape}")


if __name__ == "__main__":
    config.run(main)
