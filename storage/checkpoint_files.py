"""The files of a checkpoint, read without trusting whoever wrote them.

    checksums.json     bytes and crc32 of each other file: finds what a disk or a copy damaged
    meta.json          step and settings
    .metadata          a pickle of DCP: where the pieces of each tensor lie
    __0_0.distcp ...   the pieces, each written by torch.save

A pickle can run any code when `pickle.load` reads it, and a stranger's checksums fit a stranger's files. So `.metadata`
is read as data: `Unpickler` looks nothing up and calls nothing. What it finds must make sense (plain file names, places
within the files, pieces that cover their tensor) before DCP gets it. The pieces are read with weights_only=True.

Run `python -m storage.checkpoint_files runs/demo/checkpoints/step-200` to check one and list what it holds.
Read next: checkpoint.py.
"""

import io
import math
import os
import pickle
import re
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import config
from config import UserError, require
from storage import files

MAX_METADATA = (
    2**31
)  # bytes; a 70B on 1,024 ranks has 2 million pieces, of each of which DCP writes about 250
META_FIELDS = {
    **{"step": int, "seed": int, "global_batch_size": int},
    **{"tokenizer": str, "precision": str, "data_fingerprint": str},
}


# ---------------------------------------------------------------------------------------------------------------
# Damage


def checksum(path: Path) -> list[int]:
    """Bytes and crc32 of a file."""
    buffer, size, crc = memoryview(bytearray(2**20)), 0, 0
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(buffer):
            size, crc = size + n, zlib.crc32(buffer[:n], crc)
    return [size, crc]


def find_damage(path: Path) -> str | None:
    """What is damaged in a checkpoint, in a few words, or None.

    One process reads all of it; `checkpoint.verify` shares that between ranks. OSError if it cannot
    be read, UserError if undamaged files hold what we do not read.
    """
    wanted = read_checksums(path)
    if lacking := incomplete(wanted):
        return lacking
    return first_fault(path, wanted, sorted(wanted)) or contradiction(path, wanted)


def require_undamaged(path: Path, damage: str | None) -> None:
    require(not damage, f"{path} is damaged ({damage}): take another checkpoint, or copy it again")


def read_checksums(path: Path) -> dict | None:
    """File name -> (bytes, crc32), or None if checksums.json is absent or damaged. OSError if it is unreadable."""
    source = path / "checksums.json"
    try:
        table = files.read_json(source)
        for name, entry in table.items():
            files.member(path, name, source)
            whole = isinstance(entry, list) and [type(number) for number in entry] == [int, int]
            require(whole, f"{source} does not say bytes and crc32 of {name}")
    except (UserError, FileNotFoundError, NotADirectoryError):
        return None
    return {name: tuple(entry) for name, entry in table.items()}


def incomplete(checksums: dict | None) -> str | None:
    """What the checksums of a checkpoint lack that all have, or None."""
    if not checksums:
        return "checksums.json is missing or damaged"
    missing = [name for name in (".metadata", "meta.json") if name not in checksums]
    return f"checksums.json does not name {missing[0]}" if missing else None


def first_fault(path: Path, checksums: dict, names) -> str | None:
    """What is wrong with the first bad one of the files `names`, or None."""
    return next(filter(None, (fault(path / name, *checksums[name]) for name in names)), None)


def fault(path: Path, size: int, crc: int) -> str | None:
    """What is wrong with one file, or None."""
    if path.name not in os.listdir(path.parent):
        return f"{path.name}: missing"
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        return f"{path.name}: not a regular file"
    if found.st_size != size:
        return f"{path.name}: {found.st_size:,} bytes instead of {size:,}"
    return None if checksum(path) == [size, crc] else f"{path.name}: checksum differs"


def contradiction(path: Path, checksums: dict) -> str | None:
    """What the undamaged files of a checkpoint say against one another, or None."""
    step = read_meta(path)["step"]
    if path.name != f"step-{step}":
        return f"meta.json is of step {step}"
    named = {place.relative_path for place in read_metadata(path).storage_data.values()}
    missing = min(named - set(checksums), default=None)
    return missing and f"checksums.json does not name {missing}"


# ---------------------------------------------------------------------------------------------------------------
# meta.json and .metadata


def read_meta(path: Path) -> dict:
    """What a checkpoint says about itself: step, settings, precision, data fingerprint."""
    meta = files.read_json(path / "meta.json", dict, META_FIELDS)
    skip_steps = meta.get("skip_steps", "")
    require(
        isinstance(skip_steps, str),
        f"{path}/meta.json is damaged ('skip_steps' is {files.shown(skip_steps)})",
    )
    return config.renamed(meta, f"{path}/meta.json")


@dataclass(eq=False, repr=False)
class Record:
    """What stands in a pickle for a class, or for an object of that class. Nothing is imported, nothing is called."""

    name: str
    args: object = ()  # what the class would be called with
    state: object = None  # fields of the object


class Table(dict):
    """A dict whose keys are text or records: hashing a tuple of tuples of tuples can take for ever."""

    def __setitem__(self, key, value):
        require(isinstance(key, str | Record), "it has a key that is no text")
        super().__setitem__(key, value)


DTYPES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split()
KNOWN = {
    "torch": ["Size", *DTYPES],
    "torch.serialization": ["_get_layout"],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.distributed.checkpoint.metadata": """Metadata MetadataIndex StorageMeta TensorProperties _MEM_FORMAT_ENCODING
        TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata""".split(),
    "pathlib": ["PosixPath"],
    "pathlib._local": ["PosixPath"],  # Python 3.13
}
PLAIN = """PROTO FRAME STOP MARK MEMOIZE BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1
    SHORT_BINUNICODE BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS SETITEM SETITEMS
    STACK_GLOBAL""".split()  # instructions of a pickle that make plain data


class Unpickler(pickle._Unpickler):
    """Reads a pickle as data: known names become records, what should be called becomes a record with arguments.

    Python's own: the one in C can be made to ask for 64 GB of memory by a file of ten bytes.
    """

    def __init__(self, content: bytes):
        super().__init__(io.BytesIO())
        self.content = content

    def load(self):
        """As Python's own, but frames, which tell a reader how much to read at once, are passed over: faster so."""
        file = io.BytesIO(self.content)
        self.read, self.readline, self.memo = file.read, file.readline, {}
        self.metastack, self.stack = [], []
        self.append = self.stack.append
        try:
            while True:
                self.dispatch[self.read(1)[0]](self)
        except pickle._Stop as stop:
            return stop.value

    def load_frame(self):
        self.read(8)

    def find_class(self, module, name):
        require(name in KNOWN.get(module, ()), f"it wants {files.shown(f'{module}.{name}')}")
        return Record(name)

    def load_table(self):
        self.append(Table())

    def load_object(self):
        args = self.stack.pop()
        self.stack[-1] = Record(self.stack[-1].name, args)

    def load_state(self):
        state = self.stack.pop()
        require(type(self.stack[-1]) is Record, "it sets fields of something that is no object")
        self.stack[-1].state = state

    dispatch = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]
        for name in PLAIN
    }
    dispatch |= {
        pickle.EMPTY_DICT[0]: load_table,
        pickle.BUILD[0]: load_state,
        pickle.FRAME[0]: load_frame,
    }
    dispatch |= {pickle.NEWOBJ[0]: load_object, pickle.REDUCE[0]: load_object}


def read_metadata(path: Path) -> Metadata:
    """Where the tensors of a checkpoint lie, as DCP wants to know it. UserError if that makes no sense."""
    content = files.read_bytes(path / ".metadata", MAX_METADATA)
    try:
        metadata = as_metadata(Unpickler(content).load())
        check_places(path, metadata)
        for name, entry in metadata.state_dict_metadata.items():
            check_entry(name, entry, metadata.storage_data)
    except OSError:
        raise
    except Exception as error:  # arbitrary bytes raise arbitrary exceptions
        reason = (
            config.one_line(error) if isinstance(error, UserError) else f"{type(error).__name__}"
        )
        raise UserError(f"{path}/.metadata cannot be trusted ({reason})") from error
    return metadata


def as_metadata(record: Record) -> Metadata:
    """DCP's objects from records. Any exception if these are not what DCP writes."""
    entries = {name: as_entry(entry) for name, entry in record.state["state_dict_metadata"].items()}
    places = record.state["storage_data"].items()
    return Metadata(
        entries, storage_data={as_index(index): as_place(place) for index, place in places}
    )


def as_entry(record: Record):
    if record.name == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = record.state
    dtype = state["properties"].state[0].name
    require(dtype in DTYPES, "it names an unknown dtype")
    chunks = [as_chunk(chunk.state) for chunk in state["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(getattr(torch, dtype)), as_size(state["size"]), chunks
    )


def as_chunk(state: dict) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(as_size(state["offsets"]), as_size(state["sizes"]))


def as_index(record: Record) -> MetadataIndex:
    state = record.state
    offset = state.get("offset")
    require(isinstance(state["fqn"], str), "it has a name that is no text")
    return MetadataIndex(state["fqn"], None if offset is None else as_size(offset))


def as_place(record: Record) -> _StorageInfo:
    state = record.state
    require(not state.get("transform_descriptors"), "it wants a file to be transformed")
    return _StorageInfo(
        state["relative_path"], as_count(state["offset"]), as_count(state["length"])
    )


def as_size(record: Record) -> torch.Size:
    (sizes,) = record.args
    return torch.Size([as_count(size) for size in sizes])


def as_count(number) -> int:
    if type(number) is not int or not 0 <= number < 2**63:
        raise UserError(f"it has a size of {files.shown(number)}")
    return number


def check_places(path: Path, metadata: Metadata) -> None:
    """UserError unless all pieces lie within regular files of the folder."""
    ends = {}
    for place in metadata.storage_data.values():
        name = place.relative_path
        if name not in ends:
            found = files.member(path, name, ".metadata").lstat()
            require(stat.S_ISREG(found.st_mode), f"{name} is not a regular file")
            ends[name] = found.st_size
        require(
            place.offset + place.length <= ends[name],
            f"{name} ends before a piece that it should hold",
        )


def check_entry(name: str, entry, places: dict) -> None:
    """UserError unless the pieces of a tensor are there and cover it, each element once."""
    if isinstance(entry, BytesStorageMetadata):  # a setting or a count of the optimizer
        require(not name.startswith("model."), f"{files.shown(name)} is no tensor")
        return
    dtype, n_pieces = entry.properties.dtype, 1
    require(
        dtype.is_floating_point or not name.startswith("model."), f"{files.shown(name)} is {dtype}"
    )
    uncovered = f"the pieces of {files.shown(name)} do not cover it"
    for chunk in entry.chunks:
        require(len(chunk.offsets) == len(chunk.sizes) == len(entry.size), uncovered)
        place = places.get(MetadataIndex(name, chunk.offsets))
        whole = place and math.prod(chunk.sizes) * dtype.itemsize <= place.length
        require(whole, f"a piece of {files.shown(name)} is missing")
    # Along each dimension the pieces follow one another from 0 to the end, and together they are a grid.
    chunks = [
        chunk for chunk in entry.chunks if math.prod(chunk.sizes)
    ]  # some ranks may have no rows
    for dim, size in enumerate(entry.size if chunks else ()):
        end = 0
        cuts = sorted({(chunk.offsets[dim], chunk.sizes[dim]) for chunk in chunks})
        for begin, length in cuts:
            require(begin == end, uncovered)
            end += length
        require(end == size, uncovered)
        n_pieces *= len(cuts)
    corners = {chunk.offsets for chunk in chunks}
    expected = n_pieces if math.prod(entry.size) else 0
    require(len(corners) == len(chunks) == expected, uncovered)


# ---------------------------------------------------------------------------------------------------------------
# Tensors


class Reader(dcp.FileSystemReader):
    """DCP's, with metadata that were checked before: it never reads `.metadata` itself."""

    def __init__(self, path: Path, metadata: Metadata):
        super().__init__(path)
        self.metadata = metadata

    def read_metadata(self) -> Metadata:
        return self.metadata


class Planner(DefaultLoadPlanner):
    """DCP's, which would read what is no tensor (settings of the optimizer) with weights_only=False."""

    def load_bytes(self, read_item, value: io.BytesIO) -> None:
        name, target = read_item.dest_index.fqn, self.original_state_dict
        require(not isinstance(self.state_dict[name], torch.Tensor), f"{name} is no tensor")
        *path, last = self.mappings[name]
        for key in path:
            target = target[key]
        target[last] = torch.load(value, weights_only=True)


def require_weights(path: Path, metadata: Metadata, weights: dict) -> None:
    """UserError unless a checkpoint holds the weights of a model (name -> tensor), no others, in these shapes.

    Weights that a model does not ask for would be left out in silence: its settings are not those of the checkpoint.
    """
    entries = metadata.state_dict_metadata.items()
    held = {
        name.removeprefix("model."): tuple(w.size)
        for name, w in entries
        if name.startswith("model.")
    }
    wanted = {name: tuple(weight.shape) for name, weight in weights.items()}
    differ = sorted(name for name in held | wanted if held.get(name) != wanted.get(name))
    what = f"{len(differ)} weights of {path} are not those of its settings"
    if differ:
        first = differ[0]
        shapes = f"{held.get(first, 'missing')} instead of {wanted.get(first, 'none')}"
        raise UserError(f"{what}, such as {files.shown(first)}: {shapes}")


def cause_of(error: BaseException) -> BaseException:
    """What went wrong, from the exceptions in which DCP and torch wrap it.

    DCP collects the errors of all ranks: the first counts. torch.save reports a place in the file
    (unexpected pos 704) instead of the OSError that it met.
    """
    failures = getattr(error, "failures", None)  # of DCP: rank -> (exception, traceback)
    error = next(iter(failures.values()))[0] if failures else error
    if isinstance(error, UserError):  # knows what it says
        return error
    behind = error
    while behind and not isinstance(behind, OSError):
        behind = behind.__context__
    return behind or error


def reason_of(error: BaseException) -> str:
    """What went wrong, in one line. Never torch's advice to run what is in a file."""
    error = cause_of(error)
    if "weights_only" not in str(error):
        return config.one_line(error) or type(error).__name__
    refused = re.search(r"GLOBAL (\S+)", str(error))
    return f"it would run {refused[1]}" if refused else "it holds more than tensors and numbers"


def main(argv) -> None:
    config.arguments(argv, "CHECKPOINT")
    path = Path(argv[0])
    require_undamaged(path, find_damage(path))
    for name, entry in read_metadata(path).state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            print(
                f"{str(entry.properties.dtype):14}  {len(entry.chunks):4} pieces  {name} {tuple(entry.size)}"
            )


if __name__ == "__main__":
    config.run(main)
