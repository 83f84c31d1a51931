"""Tensors in model files of other projects: find them, read them into parameters, write such files.

    model.safetensors     8 bytes: n, the length of the header
                          n bytes: JSON, name -> dtype, shape, offsets
                          the tensors, one after another
    pytorch_model.bin     a zip archive: a pickle, which refers to the other members, the tensors
    Composer's .pt        the same, with the weights in state.model and `model.` before their names

Both kinds may be split over several files that an index names (model.safetensors.index.json).

A pickle can run any code, so it is read with `weights_only=True`, without the tensors' numbers.
Either way the result is a `Stored` for each tensor: its file, offset, dtype and shape. A rank
then reads only the rows that it keeps, straight into its own memory.

Run `python -m weights.tensor_files path/to/model` to list what is there.
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

import program
from program import UserError, require
from storage import files

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
CHUNK = 2**24  # bytes that are read in one go
MAX_HEADER = 100_000_000  # bytes, as in the safetensors library
NO_ZIP = "it is damaged, or has the format of torch before 1.6: torch.load and torch.save it once"


@dataclass
class Stored:
    """Where a tensor is stored: contiguous, little-endian, `offset` bytes into a file."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """The bytes of one row, that is, of one index of the first dimension."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def bytes(self) -> int:
        """The bytes of the whole tensor."""
        return self.dtype.itemsize * math.prod(self.shape)


def locate(path: Path) -> dict[str, Stored]:
    """Where each tensor of a folder or file is stored, by name, without Composer's `model.`.

    Raises UserError if a file is missing or damaged, or a name occurs twice.
    """
    found = {}
    for file in weight_files(path):
        is_pickle = file.suffix in (".bin", ".pt")
        layout = pickle_layout(file) if is_pickle else safetensors_layout(file)
        for name, stored in layout.items():
            name = name.removeprefix("model.")
            shown = program.one_line(name)
            require(
                name not in found, f"{shown} is in {path} twice, the second time in {file.name}"
            )
            found[name] = stored
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
# safetensors


def safetensors_layout(path: Path) -> dict[str, Stored]:
    """The tensors that the header of a safetensors file describes. UserError if it is damaged.

    As strict as the safetensors library: the tensors follow one another without gap or overlap, and
    the last one ends where the file ends. Only floating-point dtypes are supported.
    """
    header, data_start, file_size = read_header(path)
    layout = {name: entry_of(path, name, entry, data_start) for name, entry in header.items()}

    end = data_start
    for name, stored in sorted(layout.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        require(
            stored.offset == end,
            f"{program.one_line(name)} in {path} begins at byte {stored.offset:,} "
            f"instead of {end:,}: a gap, or tensors that overlap",
        )
        end += stored.bytes
    require(
        file_size == end,
        f"{path} is truncated or damaged: {file_size:,} bytes instead of {end:,}",
    )
    return layout


def read_header(path: Path) -> tuple[dict, int, int]:
    """Read the header of a safetensors file.

    Returns its entries without `__metadata__`, the byte at which the tensors begin, and the size
    of the file. Raises UserError if it is not a valid header.
    """
    not_safetensors = f"{path} is not a safetensors file, or is damaged"
    with files.open_regular(path) as file:
        file_size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        limit = min(file_size - 8, MAX_HEADER)
        require(length <= limit, f"{not_safetensors}: a header of {length:,} bytes")
        text = file.read(length)
    try:
        header = json.loads(
            text.decode(), object_pairs_hook=strict_object, parse_constant=refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise UserError(f"{not_safetensors}: {program.one_line(error)}") from error
    require(isinstance(header, dict), f"{not_safetensors}: its header is not a JSON object")

    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    is_valid = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    require(is_valid, f"{path} is damaged: __metadata__ must be an object of texts")
    return header, 8 + length, file_size


def strict_object(pairs: list) -> dict:
    """A hook of json.loads: the dict of a JSON object.

    Raises ValueError if a name occurs twice, or a text cannot be encoded (half a surrogate pair).
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name occurs twice")
    for pair in pairs:
        for text in pair:
            if isinstance(text, str):
                text.encode()
    return values


def refuse_constant(constant: str):
    """A hook of json.loads for NaN and Infinity, which Python reads but JSON does not have."""
    raise ValueError(f"{constant} is not JSON")


def entry_of(path: Path, name: str, entry, data_start: int) -> Stored:
    """The tensor of one header entry. UserError unless its bytes match its shape and dtype."""
    where = f"{program.one_line(name)} in {path}"
    is_complete = isinstance(entry, dict) and {"dtype", "shape", "data_offsets"} <= set(entry)
    require(is_complete, f"{where} must have dtype, shape and data_offsets")

    dtype_name = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    require(isinstance(dtype_name, str), f"{where} has a dtype that is not a string")
    require(
        dtype_name in DTYPES,
        f"{where} is {program.one_line(dtype_name)}, expected one of: {', '.join(DTYPES)}",
    )
    require(are_sizes(shape), f"{where} has a shape that is not a list of whole numbers")
    require(
        are_sizes(offsets) and len(offsets) == 2,
        f"{where} has data_offsets that are not two whole numbers",
    )

    begin, end = offsets
    dtype = DTYPES[dtype_name]
    wanted = dtype.itemsize * math.prod(shape)
    # Strides of a tensor with a dimension of 0 are computed as if it were 1, and must fit 64 bits.
    strides_fit = are_sizes([math.prod(max(1, n) for n in shape)])
    require(
        end - begin == wanted and strides_fit,
        f"{where} has {end - begin:,} bytes, but its shape and dtype need {wanted:.12g}",
    )
    return Stored(path, data_start + begin, dtype, tuple(shape))


def are_sizes(values) -> bool:
    """Is this a list of at most 16 whole numbers from 0 to 2^63 - 1?

    The product of 16 such numbers still fits a float, so a message can show it.
    """
    if not isinstance(values, list) or len(values) > 16:
        return False
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


# --------------------------------------------------------------------------------------------------
# Pickles


def pickle_layout(path: Path) -> dict[str, Stored]:
    """Where the tensors of a .bin file, or of state.model in a Composer checkpoint, are stored."""
    content = read_pickle(path)
    if isinstance(content, dict) and "state" in content:
        content = nested(content, "state", "model")
    require(isinstance(content, dict), f"{path} holds no dictionary of weights")
    with files.open_regular(path) as file:
        member_sizes = zip_members(path, file)
    return {name: tensor_of(path, name, tensor, member_sizes) for name, tensor in content.items()}


def read_pickle(path: Path):
    """The content of a .bin or .pt file. Its tensors have shapes and offsets, but no memory.

    Raises UserError if it holds more than tensors, plain values, and what Composer adds: times and
    numpy's random state.
    """
    safe_types = torch.serialization.safe_globals(composer_types())
    logging.disable()  # FakeTensorMode logs a traceback for a tensor of an impossible shape
    try:
        with files.open_regular(path) as file, FakeTensorMode(), safe_types:
            require(
                zipfile.is_zipfile(file), f"cannot read {path} with weights_only=True: {NO_ZIP}"
            )
            zip_members(path, file)  # refuses a compressed one
            return torch.load(file, weights_only=True)
    except (UserError, OSError):
        raise
    except Exception as error:  # a damaged archive or a forbidden pickle can raise anything
        forbidden = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it would run {forbidden[1]}" if forbidden else without_advice(error)
        raise UserError(f"cannot read {path} with weights_only=True: {reason}") from error
    finally:
        logging.disable(logging.NOTSET)


def composer_types() -> list:
    """The types in a Composer checkpoint that torch does not allow by itself.

    Of numpy's `_reconstruct`, both names: the one before numpy 2 and the one since.
    """
    reconstruct = np.zeros(0).__reduce__()[0]
    return [
        datetime.timedelta,
        np.ndarray,
        np.dtype,
        type(np.dtype("uint32")),
        (reconstruct, "numpy.core.multiarray._reconstruct"),
        (reconstruct, "numpy._core.multiarray._reconstruct"),
    ]


def without_advice(error: Exception) -> str:
    """torch's message about a pickle, without its advice to read it with `weights_only=False`."""
    text = " ".join(str(error).split()).rpartition("WeightsUnpickler error: ")[2]
    advice = "Check the documentation|Please use|In PyTorch|This is an internal"
    text = re.split(advice, text)[0].strip()
    return text[:200] if text and "weights_only" not in text else type(error).__name__


def zip_members(path: Path, file) -> dict[int, int]:
    """The members of a zip archive: the offset of each one's data -> its bytes.

    Raises UserError if one is compressed: torch.save never does that, and a small file could fill
    the memory. Also if the numbers are not little-endian.
    """
    members = {}
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            is_uncompressed = (
                info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size
            )
            require(is_uncompressed, f"{path} is compressed: torch.save does not write that")
            if info.filename.endswith("/byteorder"):
                require(
                    archive.read(info) == b"little",
                    f"{path} is not little-endian: convert it on the machine that wrote it",
                )
            # A local header: 26 bytes, the lengths of the name and of an extra field, then both.
            file.seek(info.header_offset + 26)
            name_length, extra_length = struct.unpack("<HH", file.read(4))
            data_offset = info.header_offset + 30 + name_length + extra_length
            members[data_offset] = info.file_size
    file.seek(0)
    return members


def nested(content, *names):
    """content[name][name]..., or None if there is no such dictionary."""
    for name in names:
        content = content.get(name) if isinstance(content, dict) else None
    return content


def tensor_of(path: Path, name, tensor, member_sizes: dict[int, int]) -> Stored:
    """Where a tensor of a pickle is stored. UserError unless it lies inside its zip member."""
    require(isinstance(name, str), f"{path} holds no dictionary of weights by name")
    where = f"{program.one_line(name)} in {path}"
    is_plain = (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in DTYPES.values()
        and tensor.is_contiguous()
        and not tensor.is_neg()  # in the file, its numbers have the other sign
    )
    require(is_plain, f"{where} is not a contiguous tensor of floating-point numbers")

    # torch.load sets the offset of each storage; -1 for a tensor that was made without one.
    storage_offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", -1)
    offset_in_storage = tensor.storage_offset() * tensor.itemsize
    stored = Stored(path, storage_offset + offset_in_storage, tensor.dtype, tuple(tensor.shape))
    storage_bytes = member_sizes.get(storage_offset, 0)
    require(
        offset_in_storage + stored.bytes <= storage_bytes,
        f"{where} reaches beyond its storage: the file is damaged",
    )
    return stored


# --------------------------------------------------------------------------------------------------
# Reading tensors


def same_values(a: Stored, b: Stored) -> bool:
    """Do two stored tensors have the same bytes, dtype and shape?"""
    if a == b:  # one tensor under two names
        return True
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False

    def read_chunk(stored, begin):
        n_bytes = min(CHUNK, stored.bytes - begin)
        return np.fromfile(stored.file, np.uint8, n_bytes, offset=stored.offset + begin)

    return all(
        np.array_equal(read_chunk(a, begin), read_chunk(b, begin))
        for begin in range(0, a.bytes, CHUNK)
    )


@torch.no_grad()
def fill(pieces: list[tuple[tuple[int, ...], torch.Tensor]], stored: Stored) -> None:
    """Read a stored tensor into the pieces of it that this rank has, converted to their dtype.

    pieces: [(corner in the whole tensor, where to put what begins there), ...], see
    tensor_parallel.Layout. Each rank reads only its own rows.
    """
    for corner, block in pieces:
        read_block(block, stored, corner)


def read_block(block: torch.Tensor, stored: Stored, corner: tuple[int, ...]) -> None:
    """Fill `block` with the part of a stored tensor that begins at the index `corner`.

    Rows of full width that need no conversion are read straight into place. Others go through a
    buffer of about CHUNK bytes.
    """
    has_full_width = block.shape[1:] == stored.shape[1:]
    straight = block.device.type == "cpu" and block.dtype == stored.dtype and has_full_width
    rows_per_chunk = max(1, CHUNK // stored.row_bytes)
    if not straight:
        buffer_rows = min(rows_per_chunk, len(block))
        buffer = torch.empty(buffer_rows, *stored.shape[1:], dtype=stored.dtype)
        columns = [
            slice(begin, begin + size)
            for begin, size in zip(corner[1:], block.shape[1:], strict=True)
        ]

    with open(stored.file, "rb", buffering=0) as file:
        for first_row in range(0, len(block), rows_per_chunk):
            target = block[first_row : first_row + rows_per_chunk]
            if straight:
                read_rows(file, stored, corner[0] + first_row, target)
            else:
                rows = buffer[: len(target)]
                read_rows(file, stored, corner[0] + first_row, rows)
                target.copy_(rows[(slice(None), *columns)])


def read_rows(file, stored: Stored, first_row: int, target: torch.Tensor) -> None:
    """Read rows of a stored tensor into a contiguous CPU tensor of its dtype and width."""
    remaining = memoryview(target.flatten().view(torch.uint8).numpy())
    file.seek(stored.offset + first_row * stored.row_bytes)
    while len(remaining):
        n_read = file.readinto(remaining)
        require(n_read, f"{stored.file} is truncated: it ends within a tensor")
        remaining = remaining[n_read:]


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
    """Write name -> tensor as one file. Its header is padded to a multiple of 8 bytes."""
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    header = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin = end
        end += tensor.nbytes
        header[name] = {
            "dtype": dtype_names[tensor.dtype],
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
    """List the tensors of a model: file, offset, dtype, name, shape."""
    (path,) = program.arguments(argv, "MODEL")
    for name, stored in locate(Path(path)).items():
        dtype = str(stored.dtype)
        print(f"{stored.file.name}  {stored.offset:>14,}  {dtype:14}  {name} {stored.shape}")


if __name__ == "__main__":
    program.run(main)
