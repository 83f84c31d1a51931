"""Tensors in model files of other projects: find them, read them into parameters, write such files.

    model.safetensors     a header, which names dtypes, shapes and offsets, then the tensors
    pytorch_model.bin     a zip archive: a pickle, which refers to the other members, the tensors
    Composer's .pt        the same, with the weights in state.model and `model.` before their names

Both kinds may be split over several files that an index names (model.safetensors.index.json).

The package safetensors reads and writes the first kind. A pickle can run any code, so torch reads
it with `weights_only=True`. Both map files into memory: a rank copies just the rows that it keeps.

Run `python -m weights.tensor_files path/to/model` to list what is there.
"""

import contextlib
import datetime
import json
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import program
from program import UserError, require
from storage import files
from storage.checkpoint_files import reason_of

WEIGHT_FILES = (  # in a folder, the first of these that exists is read
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
DTYPES = {  # as a safetensors header names them
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
CHUNK = 2**25  # bytes that are mapped at a time
OLD_FORMAT = "it is damaged, or of torch before 1.6: torch.load and torch.save it once"


@dataclass
class Stored:
    """A tensor in a file."""

    file: Path
    name: str  # in that file
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def chunk_rows(self) -> int:
        """How many rows, indices of the first dimension, are read at a time."""
        row_bytes = self.dtype.itemsize * math.prod(self.shape[1:])
        return max(1, CHUNK // row_bytes)


def locate(path: Path) -> dict[str, Stored]:
    """Where each tensor of a folder or file is stored, by name, without Composer's `model.`.

    Raises UserError if a file is missing or damaged, or a name occurs twice.
    """
    found = {}
    for file in weight_files(path):
        with opened(file) as tensors:
            for full_name, tensor in tensors.items():
                name = full_name.removeprefix("model.")
                twice = f"{program.one_line(name)} is in {path} twice"
                require(name not in found, f"{twice}, the second time in {file.name}")
                found[name] = stored_as(file, full_name, tensor)
    return found


def weight_files(path: Path) -> list[Path]:
    """The files with the weights of a folder, or the file itself. UserError if one is missing."""
    if path.exists() and not path.is_dir():
        return [path]
    existing = [path / name for name in WEIGHT_FILES if (path / name).exists()]
    problem = f"no weights in {path}{files.absence(path)}"
    require(existing, f"{problem}: expected {', '.join(WEIGHT_FILES)}, or a .pt file")
    found = existing[0]
    if found.suffix != ".json":
        return [found]

    weight_map = files.read_json(found, dict, {"weight_map": dict})["weight_map"]
    listed = {files.member(path, name, found) for name in weight_map.values()}
    require(listed, f"{found} names no files")
    missing = [file.name for file in sorted(listed) if not file.exists()]
    require(
        not missing,
        f"{found} names {len(listed)} files, but {', '.join(missing[:3])} is not there",
    )
    return sorted(listed)


# --------------------------------------------------------------------------------------------------
# Reading


@contextlib.contextmanager
def opened(file: Path):
    """The tensors of a file by name: slicing one, as in tensor[2:5], gives these rows.

    They are mapped into memory as long as one of them is in use. Raises UserError if the file is
    damaged.
    """
    files.open_regular(file).close()  # safetensors would wait for a pipe, or read a device
    if file.suffix in (".bin", ".pt"):
        yield pickled_weights(file)
        return
    library = safetensors_for(file)
    try:
        with library.safe_open(file, "pt") as content:
            names = content.keys()
            yield {name: content.get_slice(name) for name in names}
    except library.SafetensorError as error:
        problem = f"{file} is truncated or damaged, or not a safetensors file"
        raise UserError(f"{problem} ({program.one_line(error)})") from error


def stored_as(file: Path, name: str, tensor) -> Stored:
    """Dtype and shape of a tensor of `opened`. UserError unless it has floating-point numbers."""
    if isinstance(tensor, torch.Tensor):
        dtype, shape = tensor.dtype, tensor.shape
    else:
        dtype, shape = tensor.get_dtype(), tensor.get_shape()
        dtype = DTYPES.get(dtype, dtype)
    where = f"{program.one_line(name)} in {file}"
    expected = f"expected one of: {', '.join(DTYPES)}"
    require(dtype in DTYPES.values(), f"{where} is {dtype}, {expected}")
    return Stored(file, name, dtype, tuple(shape))


def safetensors_for(file: Path):
    """The package safetensors. UserError if it is not installed."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise UserError(f"{file} needs the package safetensors: {program.EXTRA}") from error
    return safetensors


def pickled_weights(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .bin file, or of state.model in a Composer checkpoint."""
    content = read_pickle(file)
    if isinstance(content, dict) and "state" in content:
        content = nested(content, "state", "model")
    require(isinstance(content, dict), f"{file} holds no dictionary of weights")
    for name, tensor in content.items():
        require(isinstance(name, str), f"{file} holds no dictionary of weights by name")
        is_plain = (
            isinstance(tensor, torch.Tensor)
            and not tensor.is_nested
            and tensor.layout is torch.strided
            and tensor.device.type == "cpu"
        )
        where = f"{program.one_line(name)} in {file}"
        require(is_plain, f"{where} is not a tensor with all its numbers")
    return content


def read_pickle(file: Path):
    """The content of a .bin or .pt file. Its tensors are mapped into memory.

    Raises UserError if it holds more than tensors, plain values, and what Composer adds: times and
    numpy's random state.
    """
    problem = f"cannot read {file} with weights_only=True"
    with files.open_regular(file) as content:
        require(zipfile.is_zipfile(content), f"{problem}: {OLD_FORMAT}")
    try:
        with torch.serialization.safe_globals(composer_types()):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged archive or a forbidden pickle can raise anything
        raise UserError(f"{problem}: {reason_of(error)}") from error


def composer_types() -> list:
    """The types in a Composer checkpoint that torch does not allow by itself."""
    reconstruct = np.zeros(0).__reduce__()[0]
    return [
        datetime.timedelta,
        np.ndarray,
        np.dtype,
        type(np.dtype("uint32")),
        (reconstruct, "numpy.core.multiarray._reconstruct"),
        (reconstruct, "numpy._core.multiarray._reconstruct"),
    ]


def nested(content, *names):
    """content[name][name]..., or None if there is no such dictionary."""
    for name in names:
        content = content.get(name) if isinstance(content, dict) else None
    return content


def fill(pieces_of: dict, tensors: dict[str, Stored]) -> None:
    """Read stored tensors into the pieces of them that this rank has, converted to their dtype.

    pieces_of: name -> [(corner in the whole tensor, where to put what begins there), ...], see
    tensor_parallel.Layout. Each rank reads only its own rows. UserError if a file has been damaged
    since `locate`.
    """
    for name, stored in tensors.items():
        for corner, block in pieces_of.get(name, []):
            fill_piece(block, corner, stored)


@torch.no_grad()
def fill_piece(block: torch.Tensor, corner: tuple[int, ...], stored: Stored) -> None:
    """Fill a block with what begins at a corner of a stored tensor, CHUNK bytes at a time.

    The file is opened anew for each: what was mapped before is then not in memory any more.
    """
    columns = [
        slice(begin, begin + size) for begin, size in zip(corner[1:], block.shape[1:], strict=True)
    ]
    for first in range(0, len(block), stored.chunk_rows):
        target = block[first : first + stored.chunk_rows]
        begin = corner[0] + first
        rows = slice(begin, begin + len(target))
        with opened(stored.file) as tensors:
            target.copy_(tensors[stored.name][(rows, *columns)])


def same_values(a: Stored, b: Stored) -> bool:
    """Do two stored tensors have the same numbers, dtype and shape?"""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with opened(a.file) as of_a, opened(b.file) as of_b:
        return torch.equal(of_a[a.name][:], of_b[b.name][:])


# --------------------------------------------------------------------------------------------------
# Writing


def write_folder(folder: Path, tensors: dict, max_bytes: int, read) -> None:
    """Write model.safetensors, or several files of at most `max_bytes` and an index.

    tensors: name -> tensor, which may have no memory (device meta).
    read: names of one file -> {name: tensor} with memory.
    """
    groups = in_groups(tensors, max_bytes)
    if len(groups) == 1:
        write_safetensors(folder / "model.safetensors", read(groups[0]))
        return

    weight_map = {}
    for number, names in enumerate(groups, 1):
        file_name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_safetensors(folder / file_name, read(names))
        weight_map |= dict.fromkeys(names, file_name)
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def in_groups(tensors: dict, max_bytes: int) -> list[list[str]]:
    """Names in order, in groups of at most `max_bytes`. A larger tensor is a group of its own."""
    groups = []
    free_bytes = 0
    for name, tensor in tensors.items():
        if not groups or tensor.nbytes > free_bytes:
            groups.append([])
            free_bytes = max_bytes
        groups[-1].append(name)
        free_bytes -= tensor.nbytes
    return groups


def write_safetensors(path: Path, tensors: dict) -> None:
    """Write name -> tensor as one file. Raises OSError, such as for a full disk."""
    library = safetensors_for(path)
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        library.torch.save_file(tensors, path, {"format": "pt"})
    except library.SafetensorError as error:
        raise OSError(program.one_line(error)) from error


def main(argv) -> None:
    """List the tensors of a model: file, dtype, name, shape."""
    (path,) = program.arguments(argv, "MODEL")
    for name, stored in locate(Path(path)).items():
        print(f"{stored.file.name}  {stored.dtype!s:14}  {name} {stored.shape}")


if __name__ == "__main__":
    program.run(main)
