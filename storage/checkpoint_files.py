"""The files of a checkpoint: how they are written, and read without trusting whoever did it.

    checksums.json     bytes and crc32 of each other file: finds what a disk or a copy damaged
    meta.json          step, settings, data fingerprint
    .metadata          a pickle of PyTorch's distributed checkpoint (DCP): where the pieces of each
                       tensor are
    __0_0.distcp ...   the pieces, each written by torch.save

Checksums find damage, not malice: an attacker changes a file and its checksum. And a pickle can run
any code when `pickle.load` reads it. So our `Unpickler` knows the names that DCP uses, and no
others. DCP gets the result only if it makes sense: plain file names, pieces that lie within their
files and cover their tensors. The pieces are read with weights_only=True.

Whether the saved settings are those of another model is decided here, too: `different_functions`.

Run `python -m storage.checkpoint_files runs/demo/checkpoints/step-200` to check a checkpoint and
list its tensors.
"""

import io
import math
import os
import pickle
import platform
import re
import stat
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path, PurePosixPath

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.staging import AsyncStager

import config
import program
from config import MPTConfig, TrainConfig, function_of, norm_of
from launch import parser
from program import UserError, require
from storage import files

# What the meta.json of every checkpoint has; settings that came later are not required.
META_FIELDS = {
    "step": int,
    "seed": int,
    "global_batch_size": int,
    "tokenizer": str,
    "precision": str,
    "data_fingerprint": str,
}

# --------------------------------------------------------------------------------------------------
# Damage


def checksum(path: Path) -> list[int]:
    """Bytes and crc32 of a file."""
    buffer = memoryview(bytearray(2**20))
    size = crc = 0
    with files.open_regular(path) as file:
        while n := file.readinto(buffer):
            size += n
            crc = zlib.crc32(buffer[:n], crc)
    return [size, crc]


def find_damage(path: Path) -> str | None:
    """What is damaged in a checkpoint, in a few words, or None. Reads every byte of it.

    `checkpoint.verify` finds the same, but shares the reading between the ranks. Raises OSError if
    the checkpoint cannot be read, UserError if undamaged files hold something we do not accept.
    """
    checksums = read_checksums(path)
    if gap := incomplete(checksums):
        return gap
    return first_fault(path, checksums, sorted(checksums)) or contradiction(path, checksums)


def require_undamaged(path: Path, damage: str | None) -> None:
    """Raise UserError if there is damage. damage: what `find_damage` returned."""
    require(not damage, f"{path} is damaged ({damage}): take another checkpoint, or copy it again")


def put_aside(path: Path, kind: str) -> str:
    """Rename an unusable checkpoint, so that its step can be saved again. It is never deleted.

    step-N becomes step-N.kind, or step-N.kind-2 and so on if that exists. Returns the new name.
    """
    return path.rename(files.free_name(path.with_suffix(f".{kind}"))).name


def read_checksums(path: Path) -> dict | None:
    """File name -> (bytes, crc32); None if checksums.json is missing or damaged.

    Raises OSError if it cannot be read.
    """
    try:
        content = files.read_bytes(path / "checksums.json", files.MAX_JSON)
    except (UserError, FileNotFoundError, NotADirectoryError):
        return None
    return parse_checksums(content, path)


def parse_checksums(content: bytes, path: Path) -> dict | None:
    """The same from the content of checksums.json. path: the checkpoint's."""
    source = path / "checksums.json"
    try:
        table = files.parse_json(content, str(source))
        for name, entry in table.items():
            files.member(path, name, source)
            is_pair = isinstance(entry, list) and [type(number) for number in entry] == [int, int]
            require(is_pair, f"{source} does not give bytes and crc32 of {name}")
    except UserError:
        return None
    return {name: tuple(entry) for name, entry in table.items()}


def incomplete(checksums: dict | None) -> str | None:
    """What is missing in the checksums of a checkpoint, or None."""
    if not checksums:
        return "checksums.json is missing or damaged"
    for name in (".metadata", "meta.json"):
        if name not in checksums:
            return f"checksums.json does not name {name}"
    return None


def first_fault(path: Path, checksums: dict, names) -> str | None:
    """What is wrong with the first bad file among `names`, or None."""
    for name in names:
        size, crc = checksums[name]
        if found := fault(path / name, size, crc):
            return found
    return None


def fault(path: Path, size: int, crc: int) -> str | None:
    """What is wrong with one file, or None. Never opens a pipe, a device or a link."""
    if path.name not in os.listdir(path.parent):
        return f"{path.name}: missing"
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return f"{path.name}: not a regular file"
    if status.st_size != size:
        return f"{path.name}: {status.st_size:,} bytes instead of {size:,}"
    if checksum(path) != [size, crc]:
        return f"{path.name}: checksum differs"
    return None


def contradiction(path: Path, checksums: dict) -> str | None:
    """How undamaged files of a checkpoint contradict its name or each other, or None."""
    step = read_meta(path)["step"]
    if path.name != f"step-{step}":
        return f"meta.json says step {step}"
    locations = read_metadata(path).storage_data.values()
    unlisted = {location.relative_path for location in locations} - set(checksums)
    return f"checksums.json does not name {min(unlisted)}" if unlisted else None


# --------------------------------------------------------------------------------------------------
# meta.json


def read_meta(path: Path) -> dict:
    """meta.json: step, settings (under their new names), precision, data fingerprint.

    Raises UserError if it is damaged, OSError if it cannot be read.
    """
    source = path / "meta.json"
    meta = files.read_json(source, dict, META_FIELDS)
    fault = files.wrong_type(meta, {"skip_steps": str, "base": str, "base_fingerprint": str})
    require(not fault, f"{source} is damaged ({fault})")
    return parser.rename_keys(meta)


def read_settings(path: Path) -> MPTConfig:
    """The model settings of a checkpoint. Raises UserError if they are wrong."""
    return config.from_dict(MPTConfig, read_meta(path), f"{path}/meta.json")


def read_adapter_settings(path: Path) -> TrainConfig | None:
    """The settings of a checkpoint's adapters; None if it holds a whole model.

    Raises UserError if they are wrong.
    """
    meta = read_meta(path)
    names = [name for name in meta if name.startswith("lora_")]
    saved = {name: meta[name] for name in (*names, "rslora", "init_from") if name in meta}
    cfg = config.from_dict(TrainConfig, saved, f"{path}/meta.json")
    return cfg if cfg.lora_rank else None


# --------------------------------------------------------------------------------------------------
# The same model?
#
# A run goes on if the settings SAME_MODEL are equal: `differing`. Another run may start from its
# weights if the two models compute the same function of a text: `different_functions`.

# The settings that decide what a model computes, in training, too.
SAME_MODEL = [f for f in MPTConfig.__dataclass_fields__ if not f.endswith("_pdrop")]


def differing(names: list[str], saved: dict, ours: dict) -> list[str]:
    """A few words for each of the settings `names` that differs."""
    return [f"{k} {saved[k]} (here {ours[k]})" for k in names if saved[k] != ours[k]]


def different_functions(there: MPTConfig, here: MPTConfig) -> list[str]:
    """The settings by which two models have other weight shapes or logits, in a few words each."""
    theirs, ours = function_settings(there), function_settings(here)
    return differing([name for name in theirs if name in ours], theirs, ours)


def function_settings(cfg: MPTConfig) -> dict:
    """The settings that decide the shapes and logits of a model, by name.

    Settings that have no effect here are left out, such as rope_theta without rope.
    """
    values = comparable(asdict(cfg))
    values |= {"learned_pos_emb": cfg.learned_positions, "kv_n_heads": cfg.n_kv_heads}
    has_effect = {
        "attn_uses_sequence_id": False,  # hides other documents; one text has none
        "alibi_bias_max": cfg.alibi,
        "rope_theta": cfg.rope,
        "max_seq_len": cfg.learned_positions,
        "embedding_fraction": False,  # of gradients
    }
    return {name: values[name] for name in SAME_MODEL if has_effect.get(name, True)}


def comparable(settings: dict) -> dict:
    """The settings with one name for all ways to compute the same function.

    A run may be resumed with another attention kernel, or with its norms in another precision.
    """
    attn_impl, norm_type = settings["attn_impl"], settings["norm_type"]
    same = {"attn_impl": function_of(attn_impl), "norm_type": norm_of(norm_type)}
    return settings | same


# --------------------------------------------------------------------------------------------------
# .metadata

# Module -> the names that DCP's pickles use from it. None of them runs code that a file brings.
KNOWN_NAMES = {
    "torch": "Size float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": """
        Metadata MetadataIndex StorageMeta TensorProperties _MEM_FORMAT_ENCODING
        TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata
    """,
}


class Unpickler(pickle.Unpickler):
    """Reads a pickle in which only DCP's own classes can be named."""

    def find_class(self, module, name):
        """The class or function of this name; UserError unless DCP uses it."""
        if module.startswith("pathlib") and name == "PosixPath":  # pathlib._local in Python 3.13
            return PurePosixPath
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 pickle an enum
            return lambda cls, member: _MEM_FORMAT_ENCODING[member]
        is_known = name in KNOWN_NAMES.get(module, "").split()
        require(is_known, f"it refers to {files.shown(f'{module}.{name}')}")
        return super().find_class(module, name)


def read_metadata(path: Path) -> Metadata:
    """Where the tensors of a checkpoint are, as DCP expects it. Slow for many pieces.

    Raises UserError if it makes no sense, OSError if it cannot be read.
    """
    content = files.read_bytes(path / ".metadata")
    try:
        found = Unpickler(io.BytesIO(content)).load()
        entries, locations = found.state_dict_metadata, found.storage_data
        check_locations(path, locations)
        for name, entry in entries.items():
            check_entry(name, entry, locations)
    except OSError:
        raise
    except Exception as error:  # arbitrary bytes raise arbitrary exceptions
        known = isinstance(error, UserError)
        reason = program.one_line(error) if known else type(error).__name__
        raise UserError(f"{path}/.metadata cannot be trusted ({reason})") from error
    return Metadata(entries, storage_data=locations)


def check_locations(path: Path, locations: dict) -> None:
    """Raise UserError unless all pieces lie within files of the folder."""
    file_sizes = {}
    for location in locations.values():
        name = location.relative_path
        if name not in file_sizes:
            file_sizes[name] = files.member(path, name, ".metadata").lstat().st_size
        end = location.offset + location.length
        is_within = 0 <= location.offset <= end <= file_sizes[name]
        require(is_within, f"{name} ends before a piece that it should hold")


def check_entry(name: str, entry, locations: dict) -> None:
    """Raise UserError unless the pieces of a tensor exist and cover it, each element once."""
    is_weight = name.startswith("model.")
    shown = files.shown(name)
    if isinstance(entry, BytesStorageMetadata):  # a setting or a count of the optimizer
        require(not is_weight, f"{shown} is not a tensor")
        return
    dtype = entry.properties.dtype
    require(dtype.is_floating_point or not is_weight, f"{shown} is {dtype}")
    are_sizes = all(type(size) is int and size >= 0 for size in entry.size)
    require(are_sizes, f"{shown} has a size that is no whole number")
    for chunk in entry.chunks:
        location = locations.get(MetadataIndex(name, chunk.offsets))
        n_bytes = math.prod(chunk.sizes) * dtype.itemsize
        require(location and n_bytes <= location.length, f"a piece of {shown} is missing")
    require(tiles(entry.chunks, entry.size), f"the pieces of {shown} do not cover it")


def tiles(chunks, shape: torch.Size) -> bool:
    """Whether the pieces form a grid that covers a tensor of this shape, each element once.

    Along each dimension the pieces must follow one another from 0 to the end; then there must be
    as many pieces as the grid has cells, all at different places. Empty pieces do not count: a
    rank may have no rows.
    """
    chunks = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if not math.prod(shape):
        return not chunks
    n_cells = 1
    for dim, size in enumerate(shape):
        end = 0
        intervals = sorted({(chunk.offsets[dim], chunk.sizes[dim]) for chunk in chunks})
        for begin, length in intervals:
            if begin != end:
                return False
            end += length
        if end != size:
            return False
        n_cells *= len(intervals)
    places = {chunk.offsets for chunk in chunks}
    return len(places) == len(chunks) == n_cells


# --------------------------------------------------------------------------------------------------
# Tensors


class Reader(dcp.FileSystemReader):
    """DCP's reader with metadata that `read_metadata` has checked: it unpickles none itself."""

    def __init__(self, path: Path, metadata: Metadata):
        super().__init__(path)
        self.metadata = metadata

    def read_metadata(self) -> Metadata:
        """The checked metadata."""
        return self.metadata


class Planner(DefaultLoadPlanner):
    """DCP's planner, except that non-tensors (the optimizer's settings) cannot run code.

    DCP would read those with weights_only=False.
    """

    def load_bytes(self, read_item, value: io.BytesIO) -> None:
        """Read one non-tensor into its place in the nested state dict."""
        name = read_item.dest_index.fqn
        require(not isinstance(self.state_dict[name], torch.Tensor), f"{name} is not a tensor")
        *path, last = self.mappings[name]
        target = self.original_state_dict
        for key in path:
            target = target[key]
        target[last] = torch.load(value, weights_only=True)


def read_back(path: Path) -> None:
    """Raise UserError if a checkpoint that was just written could not be read again.

    Other versions of Python and torch may write what this file does not know. Of the pieces it
    reads those that are no tensors.
    """
    try:
        read_meta(path)
        metadata = read_metadata(path)
        for index, location in metadata.storage_data.items():
            if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
                with open(path / location.relative_path, "rb") as file:
                    file.seek(location.offset)
                    torch.load(io.BytesIO(file.read(location.length)), weights_only=True)
    except OSError:
        raise
    except Exception as error:
        versions = f"Python {platform.python_version()} and torch {torch.__version__}"
        raise UserError(
            f"what {versions} have written cannot be read again ({reason_of(error)}): use another "
            "version of them"
        ) from error


def require_weights(path: Path, metadata: Metadata, weights: dict) -> None:
    """Raise UserError unless a checkpoint holds exactly the weights of a model, in these shapes.

    weights: name -> tensor. Further weights in the checkpoint are an error too: DCP would ignore
    them silently, and the model would not be the one that was saved.
    """
    saved = {}
    for name, entry in metadata.state_dict_metadata.items():
        if name.startswith("model."):
            saved[name.removeprefix("model.")] = tuple(entry.size)
    wanted = {name: tuple(weight.shape) for name, weight in weights.items()}
    differ = sorted(name for name in saved | wanted if saved.get(name) != wanted.get(name))
    if differ:
        first = differ[0]
        raise UserError(
            f"{len(differ)} weights of {path} do not match its settings, such as "
            f"{files.shown(first)}: {saved.get(first, 'missing')} instead of "
            f"{wanted.get(first, 'none')}"
        )


# --------------------------------------------------------------------------------------------------
# Errors


def cause_of(error: BaseException) -> BaseException:
    """The original error, unwrapped from the exceptions of DCP and torch.

    DCP collects the errors of all ranks; the first counts. On a full disk torch.save reports a
    position in the file (unexpected pos 704) in place of the OSError.
    """
    failures = getattr(error, "failures", None)  # of DCP: rank -> (exception, traceback)
    if failures:
        error = next(iter(failures.values()))[0]
    earlier = error
    while earlier and not isinstance(earlier, OSError | UserError):
        earlier = earlier.__context__
    return earlier or error


def reason_of(error: BaseException) -> str:
    """The original error in one line, without torch's advice to set weights_only=False."""
    error = cause_of(error)
    if isinstance(error, UserError):
        return str(error)
    if "weights_only" not in str(error):
        return program.one_line(error) or type(error).__name__
    refused = re.search(r"GLOBAL (\S+)", str(error))
    return f"it would run {refused[1]}" if refused else "it holds more than tensors and numbers"


# --------------------------------------------------------------------------------------------------
# Writing


class Stager(AsyncStager):
    """Copies weights and optimizer from `device` to host memory, which is kept from save to save.

    Allocating takes longer than copying. In place of DCP's DefaultStager, which in torch 2.11 fails
    at the second save.
    """

    _synchronize_after_execute = False  # `stage` waits

    def __init__(self, device: torch.device):
        # ROCm stages through pageable memory. The copier pins what it has allocated already, tensor
        # by tensor: AMD advises against that for gigabytes, and some versions refuse a second piece
        # of a page, which small tensors share (read, not run).
        self.pinned = device.type == "cuda" and torch.version.hip is None
        self.copier = StateDictStager(pin_memory=self.pinned, share_memory=False)

    def stage(self, state_dict: dict) -> dict:
        """The copy. Training may change the tensors as soon as this returns.

        UserError if host memory is too small.
        """
        try:
            copy = self.copier.stage(state_dict, non_blocking=self.pinned)
        except (RuntimeError, MemoryError) as error:
            if not program.out_of_memory(error):
                raise
            # Not the device's memory: a smaller microbatch would not help.
            raise UserError(
                f"no host memory for the copy of a checkpoint ({program.one_line(error)}): run "
                "fewer ranks on a machine, or shard the model over more"
            ) from error
        if self.pinned:
            torch.cuda.synchronize()  # the copies were only enqueued
        return copy


class Writer(dcp.FileSystemWriter):
    """DCP's writer, plus checksums: each rank computes its files' while they are synced.

    reads_back: also make sure that our own reader can read what was written.
    """

    def __init__(self, path: Path, reads_back: bool = True):
        # write_data syncs the files, and the tensors are in host memory already.
        super().__init__(path, sync_files=False, per_thread_copy_ahead=0)
        self.reads_back = reads_back

    def write_data(self, plan, planner):
        """Write this rank's pieces, in the background thread.

        Returns what rank 0 gathers: (DCP's results, {file name: [bytes, crc32]}). Raises UserError
        if a weight is not finite: no run can continue from it.
        """
        for item in plan.items:
            if item.index.fqn.startswith("model."):
                require_finite(item.index.fqn.removeprefix("model."), planner.resolve_data(item))
        try:
            results = super().write_data(plan, planner).wait()
        except Exception as error:
            raise cause_of(error) from error

        paths = {self.path / result.storage_data.relative_path for result in results}
        with ThreadPoolExecutor() as pool:
            synced = pool.map(files.sync, paths)  # the disk works while we compute checksums
            checksums = {path.name: checksum(path) for path in paths}
        list(synced)  # raises what sync raised
        done = torch.futures.Future()
        done.set_result((results, checksums))
        return done

    def finish(self, metadata, results) -> None:
        """Write `.metadata` and the checksums of all files. On rank 0, after all ranks.

        results: what `write_data` returned on each rank.
        """
        super().finish(metadata, [of_dcp for of_dcp, _ in results])
        checksums = {}
        for _, of_rank in results:
            checksums |= of_rank
        files.sync(self.path / ".metadata")
        for name in (".metadata", "meta.json"):
            checksums[name] = checksum(self.path / name)
        files.write_json(self.path / "checksums.json", checksums)
        if self.reads_back:
            read_back(self.path)


def require_finite(name: str, weights: torch.Tensor) -> None:
    """Raise UserError if there is a NaN or an infinity among the weights."""
    finite = not weights.numel() or all(bound.isfinite() for bound in weights.aminmax())
    require(finite, f"{name} contains NaN or infinity")


def main(argv: list[str]) -> None:
    """Check a checkpoint and list its tensors."""
    path = Path(program.arguments(argv, "CHECKPOINT")[0])
    require_undamaged(path, find_damage(path))
    for name, entry in read_metadata(path).state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            pieces = f"{len(entry.chunks):4} pieces"
            print(f"{str(entry.properties.dtype):14}  {pieces}  {name} {tuple(entry.size)}")


if __name__ == "__main__":
    program.run(main)
