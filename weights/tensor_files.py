"""Tensors in other people's files: where each lies, reading its rows into a parameter, writing files of the same kind.

    model.safetensors     8 bytes: the length n of the header
                          n bytes: JSON, name -> dtype, shape, place
                          the tensors, one after another
    pytorch_model.bin     a zip: a pickle that refers to its other members, which are the tensors
    Composer's .pt        the same, with the weights in state.model and `model.` before their names

Both kinds may come in shards that an index names (model.safetensors.index.json). A pickle can run any code, so it is
read with `weights_only=True`, and without the tensors. Either way a tensor is then known by its place in a file, and a
rank reads the rows that it keeps straight into its own memory: the whole is nowhere, and nothing is mapped.

Run `python -m weights.tensor_files path/to/model` to list what is there. Read next: weights/hf.py.
"""

import datetime
import json
import logging
import math
import re
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard

import config
import parallel
from config import UserError, require
from storage import files

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}  # of safetensors
CHUNK = 2**24  # bytes that are read at once
NO_ZIP = "it is damaged, or has the format of torch before 1.6: torch.load and torch.save it once"
MAX_HEADER = 100_000_000  # bytes, as in the safetensors library


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
            require(
                name not in found,
                f"{config.one_line(name)} is in {path} twice, the second time in {file.name}",
            )
            found[name] = stored
    return found


def weight_files(path: Path) -> list[Path]:
    """The files that hold the weights of a folder, or a file itself. UserError if one is missing."""
    if path.exists() and not path.is_dir():
        return [path]
    found = next((path / name for name in WEIGHTS if (path / name).exists()), None)
    require(
        found is not None, f"no weights in {path}: expected {', '.join(WEIGHTS)}, or a .pt file"
    )
    if found.suffix != ".json":
        return [found]
    weight_map = files.read_json(found, dict, {"weight_map": dict})["weight_map"]
    listed = {files.member(path, name, found) for name in weight_map.values()}
    require(listed, f"{found} names no files")
    missing = [file.name for file in sorted(listed) if not file.exists()]
    require(
        not missing, f"{found} names {len(listed)} files, but {', '.join(missing[:3])} is not there"
    )
    return sorted(listed)


def safetensors_layout(path: Path) -> dict[str, Stored]:
    """What the header of a safetensors file says. UserError if the file is not one, or not whole.

    As strict as the safetensors library, with its dtypes of floating point only: the tensors follow one another
    without gap or overlap, and end where the file ends.
    """
    header, begin, size = read_header(path)
    layout = {name: entry_of(path, name, entry, begin) for name, entry in header.items()}
    end = begin
    for name, tensor in sorted(layout.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        place = f"{config.one_line(name)} in {path} begins at byte {tensor.offset:,}"
        require(tensor.offset == end, f"{place} instead of {end:,}: a gap, or tensors that overlap")
        end += tensor.bytes
    require(size == end, f"{path} is truncated or damaged: {size:,} bytes instead of {end:,}")
    return layout


def read_header(path: Path) -> tuple[dict, int, int]:
    """The header of a safetensors file without `__metadata__`, the byte at which its data begins, and its size."""
    with files.open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        limit = min(size - 8, MAX_HEADER)
        require(
            length <= limit,
            f"{path} is no safetensors file, or is damaged: a header of {length:,} bytes",
        )
        text = file.read(length)
    try:
        header = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is no safetensors file, or is damaged: {config.one_line(error)}"
        ) from error
    require(
        isinstance(header, dict), f"{path} is no safetensors file: its header is not a JSON object"
    )
    metadata = header.pop("__metadata__", {})
    texts = isinstance(metadata, dict) and all(
        isinstance(value, str) for value in metadata.values()
    )
    require(texts, f"{path} is damaged: __metadata__ must be an object of texts")
    return header, 8 + length, size


def unique(pairs: list) -> dict:
    """A JSON object, for json.loads. ValueError if a name is there twice, or a text holds half a surrogate pair."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name is there twice")
    "".join(text for pair in pairs for text in pair if isinstance(text, str)).encode()
    return values


def refuse(constant: str):
    raise ValueError(f"{constant} is no JSON")


def entry_of(path: Path, name: str, entry, begin: int) -> Stored:
    """The tensor of one entry of a header. UserError unless its bytes are those of its shape and dtype."""
    where = f"{config.one_line(name)} in {path}"
    keys = {"dtype", "shape", "data_offsets"}
    require(
        isinstance(entry, dict) and set(entry) == keys,
        f"{where} must have dtype, shape and data_offsets",
    )
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    require(isinstance(kind, str), f"{where} has a dtype that is no text")
    require(
        kind in DTYPES, f"{where} is {config.one_line(kind)}, expected one of: {', '.join(DTYPES)}"
    )
    require(whole(shape), f"{where} has a shape that is no list of whole numbers")
    pair = whole(offsets) and len(offsets) == 2
    require(pair, f"{where} has data_offsets that are not two whole numbers")
    held, wanted = offsets[1] - offsets[0], DTYPES[kind].itemsize * math.prod(shape)
    fits = held == wanted and whole([math.prod(max(1, n) for n in shape)])
    require(fits, f"{where} has {held:,} bytes, but its shape and dtype need {wanted:.12g}")
    return Stored(path, begin + offsets[0], DTYPES[kind], tuple(shape))


def whole(values) -> bool:
    """Is this a list of whole numbers from 0 to 2^63 - 1, and so short that their product is a float?"""
    fine = isinstance(values, list) and len(values) <= 16
    return fine and all(type(value) is int and 0 <= value < 2**63 for value in values)


def read_pickle(path: Path):
    """What a .bin or .pt file holds, its tensors with shape and place but without memory.

    UserError if it holds more than tensors, plain Python, and what Composer adds: times and numpy's random state.
    """
    rebuild = np.zeros(0).__reduce__()[0]
    names = [
        f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")
    ]  # before numpy 2 and since
    safe = [
        datetime.timedelta,
        np.ndarray,
        np.dtype,
        type(np.dtype("uint32")),
        *((rebuild, name) for name in names),
    ]
    logging.disable()  # FakeTensorMode logs a traceback for a tensor of impossible shape
    try:
        with (
            files.open_regular(path) as file,
            FakeTensorMode(),
            torch.serialization.safe_globals(safe),
        ):
            require(
                zipfile.is_zipfile(file), f"cannot read {path} with weights_only=True: {NO_ZIP}"
            )
            members(path, file)
            return torch.load(file, weights_only=True)
    except (UserError, OSError):
        raise
    except Exception as error:  # whatever a damaged zip or an unwanted pickle brings about
        refused = re.search(
            r"GLOBAL (\S+)", str(error)
        )  # torch's own advice is to run what is in there
        reason = f"it would run {refused[1]}" if refused else without_advice(error)
        raise UserError(f"cannot read {path} with weights_only=True: {reason}") from error
    finally:
        logging.disable(logging.NOTSET)


def without_advice(error: Exception) -> str:
    """What torch says of a pickle, without its advice to read it with `weights_only` set to False."""
    text = " ".join(str(error).split()).rpartition("WeightsUnpickler error: ")[2]
    text = re.split("Check the documentation|Please use|In PyTorch|This is an internal", text)[
        0
    ].strip()
    return text[:200] if text and "weights_only" not in text else type(error).__name__


def members(path: Path, file) -> dict[int, int]:
    """Of a zip: where the data of each member begins -> its bytes. UserError if one is compressed.

    torch.save never compresses: what is small here and large in memory is there to do harm.
    """
    found = {}
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            stored = (
                member.compress_type == zipfile.ZIP_STORED
                and member.file_size == member.compress_size
            )
            require(stored, f"{path} is compressed: torch.save does not write that")
            if member.filename.endswith("/byteorder"):
                order = archive.read(member)
                require(
                    order == b"little",
                    f"{path} has another byte order: convert it where it was written",
                )
            file.seek(member.header_offset + 26)  # the lengths of the name and of what follows it
            lengths = struct.unpack("<HH", file.read(4))
            found[member.header_offset + 30 + sum(lengths)] = member.file_size
    file.seek(0)
    return found


def pickle_layout(path: Path) -> dict[str, Stored]:
    """Where the tensors of a .bin file lie, or those of state.model in a Composer checkpoint."""
    content = read_pickle(path)
    if isinstance(content, dict) and "state" in content:
        content = inside(content, "state", "model")
    require(isinstance(content, dict), f"{path} holds no dictionary of weights")
    with files.open_regular(path) as file:
        room = members(path, file)
    return {name: tensor_of(path, name, tensor, room) for name, tensor in content.items()}


def inside(content, *names):
    """content[name][name]..., or None if there is no such dictionary."""
    for name in names:
        content = content.get(name) if isinstance(content, dict) else None
    return content


def tensor_of(path: Path, name, tensor, room: dict[int, int]) -> Stored:
    """Where a tensor of a pickle lies. UserError unless that is inside of its member of the file."""
    require(isinstance(name, str), f"{path} holds no dictionary of weights by name")
    where = f"{config.one_line(name)} in {path}"
    known = (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in DTYPES.values()
        and tensor.is_contiguous()
    )
    known = known and not tensor.is_neg()  # whose numbers in the file have the other sign
    require(known, f"{where} is not a contiguous tensor of floating-point numbers")
    begin = getattr(
        tensor.untyped_storage(), "_checkpoint_offset", -1
    )  # -1: it was made up, without a storage
    first = tensor.storage_offset() * tensor.itemsize
    stored = Stored(path, begin + first, tensor.dtype, tuple(tensor.shape))
    require(
        first + stored.bytes <= room.get(begin, 0),
        f"{where} reaches beyond its storage: the file is damaged",
    )
    return stored


def same(a: Stored, b: Stored) -> bool:
    """Whether two stored tensors are the same numbers in the same dtype."""
    if a == b:  # in one place, under two names
        return True

    def piece(stored, begin):
        return np.fromfile(
            stored.file, np.uint8, min(CHUNK, stored.bytes - begin), offset=stored.offset + begin
        )

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
            fill(
                whole := torch.empty(shape, dtype=stored.dtype), stored
            )  # the part is no block of the tensor
            return parallel.assign_full(param, whole)
        local, corner = param.to_local(), param.__create_chunk_list__()[0].offsets
    straight = (local.device.type, local.dtype, local.shape[1:]) == ("cpu", stored.dtype, shape[1:])
    columns = [
        slice(begin, begin + size) for begin, size in zip(corner[1:], local.shape[1:], strict=True)
    ]
    step = max(1, CHUNK // stored.row_bytes)  # rows
    buffer = (
        None if straight else torch.empty(min(step, len(local)), *shape[1:], dtype=stored.dtype)
    )
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
        file = (
            f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            if len(groups) > 1
            else WEIGHTS[0]
        )
        write_safetensors(folder / file, read(names))
        weight_map |= dict.fromkeys(names, file)
    if len(groups) > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
            "weight_map": weight_map,
        }
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
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(memoryview(tensor.detach().cpu().flatten().view(torch.uint8).numpy()))


def main(argv) -> None:
    config.arguments(argv, "MODEL")
    for name, stored in locate(Path(argv[0])).items():
        print(
            f"{stored.file.name}  {stored.offset:>14,}  {str(stored.dtype):14}  {name} {stored.shape}"
        )


if __name__ == "__main__":
    config.run(main)
