"""storage/checkpoint_files.py: no program runs code in a checkpoint, or uses a damaged one."""

import enum
import io
import json
import os
import pickle
import re
import shutil
import time
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import refusal
from test_checkpoint import META, save_several
from test_parallel import RUN, build
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import checkpoint
from config import MPTConfig, TrainConfig
from model import MPT
from program import UserError
from storage.checkpoint_files import (
    Unpickler,
    Writer,
    cause_of,
    checksum,
    find_damage,
    read_back,
    read_metadata,
    reason_of,
)
from storage.files import write_json
from text import tokenizer as tokenizers
from weights import hf, load

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SMALL = MPTConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=257, max_seq_len=16)
WEIGHT = "model.transformer.blocks.0.ffn.down_proj.weight"


class Evil:
    """Unpickled, it makes a file and becomes what the pickle in `content` holds."""

    def __init__(self, mark: Path, content: bytes):
        make_file = f"open({str(mark)!r}, 'w').close()"
        self.code = f"({make_file}, __import__('pickle').loads({content!r}))[1]"

    def __reduce__(self):
        return eval, (self.code,)


def save(path: Path, weights: dict, cfg: MPTConfig = SMALL) -> Path:
    """A checkpoint of a model's weights, with the settings of a run."""
    path.parent.mkdir(parents=True)
    settings = {**asdict(cfg), **asdict(TrainConfig(tokenizer="bytes"))}
    more = {"precision": "fp32", "data_fingerprint": "f00"}
    checkpoint.prepare(path, {"step": checkpoint.number(path), **settings, **more})
    dcp.save({"model": weights}, storage_writer=Writer(path), no_dist=True)
    return path


def seal(path: Path, **more) -> Path:
    """Write checksums that fit the files as they are now, as an attacker would."""
    table = path / "checksums.json"
    files = [file for file in path.iterdir() if file.is_file() and file != table]
    checksums = {file.name: checksum(file) for file in files}
    write_json(table, checksums | more)
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run folder with the checkpoint of step 5."""
    run = tmp_path_factory.mktemp("sound") / "run"
    save(run / "checkpoints" / "step-5", MPT(SMALL).state_dict())
    return run


@pytest.fixture
def run(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "run")


def change(path: Path, action) -> Path:
    """Change the true metadata and seal the checkpoint again."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    action(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return seal(path)


def code_in_metadata(path, mark):
    """A pickle that runs code and then gives the true metadata."""
    evil = Evil(mark, (path / ".metadata").read_bytes())
    (path / ".metadata").write_bytes(pickle.dumps(evil))
    seal(path)


def code_as_weight(path, mark, name=WEIGHT):
    """A weight marked as a non-tensor, which DCP's own planner reads with weights_only=False."""
    weight = pickle.dumps(torch.zeros(32, 128))
    evil = pickle.dumps(Evil(mark, weight), protocol=2)  # torch.save's protocol
    (path / "evil.distcp").write_bytes(evil)

    def swap(metadata):
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(name)] = _StorageInfo("evil.distcp", 0, len(evil))

    change(path, swap)


def code_in_piece(path, mark):
    """In place of the bytes of a tensor."""
    evil = io.BytesIO()
    torch.save(Evil(mark, pickle.dumps(torch.zeros(32, 128))), evil)
    content = evil.getvalue().ljust(20_000, b"\0")
    (path / "evil.distcp").write_bytes(content)
    index = MetadataIndex(WEIGHT, [0, 0])
    location = _StorageInfo("evil.distcp", 0, len(content))
    change(path, lambda metadata: metadata.storage_data.update({index: location}))


def elsewhere(path, mark):
    """The pieces lie outside the folder."""
    shutil.move(path / "__0_0.distcp", path.parent / "outside")

    def point_outside(metadata):
        for location in metadata.storage_data.values():
            location.relative_path = "../outside"

    change(path, point_outside)


def endless(path, mark):
    """A pipe without a writer."""
    (path / "__0_0.distcp").unlink()
    os.mkfifo(path / "__0_0.distcp")
    seal(path, **{"__0_0.distcp": [0, 0]})


def checksums_elsewhere(path, mark):
    """checksums.json names a file outside the folder."""
    seal(path, **{"../../../outside": [1, 1]})


# What makes the attack -> the error it must meet.
ATTACKS = {
    code_in_metadata: "it refers to 'builtins.eval'",
    code_as_weight: "is not a tensor",
    code_in_piece: r"it would run (builtins\.|__builtin__\.)?eval",
    elsewhere: r"names the file '\.\./outside'",
    endless: r"__0_0\.distcp: not a regular file",
    checksums_elsewhere: r"checksums\.json is missing or damaged",
}
# How programs load a checkpoint.
USES = {
    "sample": lambda run, new: load.load_for_sampling(str(run), None, torch.device("cpu")),
    "export": lambda run, new: hf.export(run, new),
    "init_from": lambda run, new: load.init_from(MPT(SMALL), run),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_strangers_checkpoint_runs_nothing(run, tmp_path, attack, use):
    attack(run / "checkpoints" / "step-5", tmp_path / "mark")
    message = refusal(USES[use], run, tmp_path / "new")
    assert re.search(ATTACKS[attack], message) and "weights_only" not in message
    assert not (tmp_path / "mark").exists() and not (tmp_path / "new").exists()


def error_of_resuming(world, cfg):
    return refusal(lambda: checkpoint.load(checkpoint.latest(cfg.run_dir), *build(world, cfg)))


def test_resuming_runs_nothing_either(ranks, tmp_path):
    """It alone reads the settings of the optimizer, which are no tensors."""
    cfg, mark = replace(RUN, run_dir=str(tmp_path)), tmp_path / "mark"
    ranks(1)(save_several, cfg, [5])
    path = checkpoint.latest(tmp_path)
    code_as_weight(path, mark, "optim.param_groups.transformer.norm_f.weight.lr")
    (text,) = ranks(1)(error_of_resuming, cfg)
    assert re.search(r"it would run (builtins\.|__builtin__\.)?eval", text)
    assert not mark.exists() and "weights_only" not in text


def verify(path):
    """`checkpoint.verify`, which shares the reading; `find_damage`, alone, must find the same."""
    try:
        damage = checkpoint.verify(path)
    except UserError as error:
        with pytest.raises(UserError, match=re.escape(str(error))):
            find_damage(path)
        raise
    assert find_damage(path) == damage
    return damage


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["__0_0.distcp", "meta.json"])
def test_a_damaged_checkpoint_is_not_used(run, tmp_path, use, name):
    file = run / "checkpoints" / "step-5" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    message = refusal(USES[use], run, tmp_path / "new")
    assert re.search(r"checksum differs|meta\.json is damaged", message)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("use", USES)
def test_a_sound_one_is_used(run, tmp_path, use):
    assert verify(run / "checkpoints" / "step-5") is None
    USES[use](run, tmp_path / "new")


# --------------------------------------------------------------------------------------------------
# Files that contradict each other or make no sense


def test_a_checkpoint_of_another_step_is_unsound(run):
    folder = run / "checkpoints"
    renamed = (folder / "step-5").rename(folder / "step-6")
    assert verify(renamed) == "meta.json says step 5"


def test_checksums_must_name_every_file(run):
    path = run / "checkpoints" / "step-5"
    table = json.loads((path / "checksums.json").read_text())
    for name in (".metadata", "meta.json", "__0_0.distcp"):
        others = {other: checksum for other, checksum in table.items() if other != name}
        write_json(path / "checksums.json", others)
        assert verify(path) == f"checksums.json does not name {name}"


def change_meta(path: Path, **values) -> None:
    """Change settings of a checkpoint and seal it again."""
    meta = json.loads((path / "meta.json").read_text())
    write_json(path / "meta.json", meta | values)
    seal(path)


def entry(metadata):
    """The metadata of WEIGHT, whose shape is (32, 128)."""
    return metadata.state_dict_metadata[WEIGHT]


def resize_piece(*sizes):
    """A change that gives the only piece of WEIGHT these sizes."""
    return lambda metadata: setattr(entry(metadata).chunks[0], "sizes", torch.Size(sizes))


def set_location(**values):
    """A change of where the only piece of WEIGHT is."""

    def change_location(metadata):
        location = metadata.storage_data[MetadataIndex(WEIGHT, [0, 0])]
        for name, value in values.items():
            setattr(location, name, value)

    return change_location


def enlarge(metadata):
    entry(metadata).size = torch.Size([2**40, 128])
    resize_piece(2**40, 128)(metadata)


def turn_negative(metadata):
    entry(metadata).size = torch.Size([-32, -128])
    resize_piece(-32, -128)(metadata)


def overlap(metadata):
    """Two pieces with as many elements as the tensor, which leave a hole."""
    piece = replace(entry(metadata).chunks[0], sizes=torch.Size([16, 128]))
    entry(metadata).chunks[:] = [piece, replace(piece, offsets=torch.Size([8, 0]))]
    first, second = (MetadataIndex(WEIGHT, [row, 0]) for row in (0, 8))
    metadata.storage_data[second] = metadata.storage_data[first]


# What is changed, how, and the error.
CHANGES = {
    "a piece is too large": (resize_piece(33, 128), "do not cover it"),
    "all is negative": (turn_negative, "a size that is no whole number"),
    "too large for its bytes": (enlarge, "is missing"),
    "a piece with other dimensions": (resize_piece(32), "cannot be trusted"),
    "two pieces overlap": (overlap, "do not cover it"),
    "a hole": (resize_piece(31, 128), "do not cover it"),
    "nowhere": (lambda m: m.storage_data.pop(MetadataIndex(WEIGHT, [0, 0])), "is missing"),
    "beyond the end": (set_location(offset=2**40), "ends before a piece"),
    "integers": (lambda m: setattr(entry(m).properties, "dtype", torch.int64), "is torch.int64"),
    "before the start": (set_location(offset=-8), "ends before a piece"),
    "no storage": (lambda m: setattr(m, "storage_data", None), "cannot be trusted"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_that_makes_no_sense_is_refused(run, name):
    action, cause = CHANGES[name]
    path = change(run / "checkpoints" / "step-5", action)
    assert cause in refusal(verify, path)


PICKLES = {  # test_fuzz.py has random ones
    "a class of ours": pickle.dumps(UserError("x")),
    "a dotted name": b"\x80\x04\x8c\x05torch\x8c\x0dSize.__init__\x93.",
    "a known module": b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
    "protocol 0": b"cos\nsystem\n(S'true'\ntR.",
    "an instance": b"(S'true'\nios\nsystem\n.",
    "a frame without end": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "a number instead": b"\x80\x04K\x01.",
    "nested deep": b"\x80\x04)" + b"\x85" * 10**5 + b".",
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_of_another_kind_is_refused(tmp_path, name):
    (tmp_path / ".metadata").write_bytes(PICKLES[name])
    assert ".metadata cannot be trusted" in refusal(read_metadata, tmp_path)


def test_of_a_known_module_only_known_names_can_be_had(tmp_path):
    """torch.serialization.load could read any file."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(torch.serialization.load))
    assert "refers to 'torch.serialization.load'" in refusal(read_metadata, tmp_path)


# How versions of Python pickle a member of an enum, such as the memory format of each tensor.
ENUM_FORMS = {
    "to 3.10, from 3.11.4": lambda member, protocol: (type(member), (member.value,)),
    "3.11.0 to 3.11.3": lambda member, protocol: (getattr, (type(member), member.name)),
}


@pytest.mark.parametrize("form", ENUM_FORMS)
def test_what_each_python_writes_is_read(sound, tmp_path, form, monkeypatch):
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", ENUM_FORMS[form])
    path = save(tmp_path / "run/checkpoints/step-1", MPT(SMALL).state_dict())
    content = (path / ".metadata").read_bytes()
    assert (b"getattr" in content) == ("3.11.0" in form)
    assert verify(path) is None
    read_back(path)
    USES["sample"](tmp_path / "run", None)


def test_paths_are_read_by_either_name_of_their_class():
    for module in ("pathlib", "pathlib._local"):  # the latter: Python 3.13
        reader = Unpickler(io.BytesIO(f"c{module}\nPosixPath\n.".encode()))
        assert reader.load() is PurePosixPath


class Unreadable(torch.optim.SGD):
    """Its settings hold an object that no checkpoint may hold."""

    def __init__(self, params):
        super().__init__(params)
        self.param_groups[0]["lr"] = Fraction(1, 8)


def save_unreadable(world, cfg):
    """The error of saving what our own reader refuses."""
    model, _ = build(world, cfg)
    saver = checkpoint.Checkpointer(cfg.run_dir, world.device, 1)

    def save():
        saver.save(1, model, Unreadable(model.parameters()), META)
        saver.finish()

    return refusal(save)


def test_a_run_ends_if_it_could_not_read_its_own_checkpoint(ranks, tmp_path):
    (text,) = ranks(1)(save_unreadable, replace(RUN, run_dir=str(tmp_path)))
    assert "could not save step 1" in text and "would run fractions.Fraction" in text
    assert not any((tmp_path / "checkpoints").iterdir())


class Got:
    """Pickled as a call of getattr."""

    def __init__(self, *args):
        self.args = args

    def __reduce__(self):
        return getattr, self.args


FORMAT = type(TensorProperties().__getstate__()[3])  # the enum of memory formats
MEMBER = "TORCH_CHANNELS_LAST"
ATTRIBUTES = {  # -> the reason why they are refused, "" if they are not
    "a member": (Got(FORMAT, MEMBER), ""),
    "of a function": (Got(os.system, "__call__"), "refers to 'posix.system'"),
    "of itself": (Got(getattr, "__call__"), "KeyError"),
    "a dunder": (Got(FORMAT, "__class__"), "KeyError"),
    "a private one": (Got(FORMAT, "_member_map_"), "KeyError"),
    "dotted": (Got(FORMAT, f"{MEMBER}.name"), "KeyError"),
    "with a default": (Got(FORMAT, "none", MEMBER), "TypeError"),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_getattr_gets_only_the_member_of_an_enum(run, name, monkeypatch):
    """Even where nobody reads what it gets: the memory format has no use here."""
    attribute, reason = ATTRIBUTES[name]
    state = TensorProperties().__getstate__()
    state = (*state[:3], attribute, state[4])
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda properties: state)
    path = change(run / "checkpoints" / "step-5", lambda metadata: None)
    if reason:
        assert re.search(rf"\.metadata cannot be trusted \(.*{reason}", refusal(verify, path))
    else:
        assert verify(path) is None


def test_only_plain_numbers_are_steps(run):
    for name in ["step-²", "step-007", "step-", "step--1", "step-5x", "step-٣", "step-1.tmp"]:
        (run / "checkpoints" / name).mkdir()
    assert [path.name for path in checkpoint.complete(run / "checkpoints")] == ["step-5"]
    assert [path.name for path in checkpoint.numbered(run / "checkpoints")] == ["step-5"]


def test_weights_that_are_not_finite_are_not_imported(tmp_path):
    model = MPT(SMALL)
    with torch.no_grad():
        model.transformer.norm_f.weight[3] = float("nan")
    hf.export(model, tmp_path / "theirs")
    message = refusal(hf.import_, tmp_path / "theirs", tmp_path / "run", "bytes")
    assert "transformer.norm_f.weight contains NaN or infinity" in message
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------
# Settings of another model


OTHER_MODELS = {
    "bias": ({"no_bias": True}, "do not match its settings, such as .*bias'"),
    "positions": ({"alibi": True}, r"1 weights .*such as '.*wpe\.weight'"),
    "huge": ({"d_model": 2**18, "n_heads": 2**10}, "do not match its settings"),
    "layers": ({"n_layers": 3}, "do not match its settings"),
}


@pytest.mark.parametrize("settings, message", OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_weights_that_the_settings_do_not_ask_for_are_an_error(run, settings, message):
    """Ignored, they would silently give another model; settings may also ask for terabytes."""
    change_meta(run / "checkpoints" / "step-5", **settings)
    assert re.search(message, refusal(USES["sample"], run, None))


def test_metadata_of_many_pieces_is_read_in_seconds(tmp_path):
    """Of 20,000: a 70B on 1,024 ranks has a hundred times as many."""
    n = 20_000
    chunks = [ChunkStorageMetadata(torch.Size([i, 0]), torch.Size([1, 64])) for i in range(n)]
    properties = TensorProperties(torch.float32)
    entries = {"model.w": TensorStorageMetadata(properties, torch.Size([n, 64]), chunks)}
    places = {}
    for i, chunk in enumerate(chunks):
        places[MetadataIndex("model.w", chunk.offsets)] = _StorageInfo("__0_0.distcp", 256 * i, 256)
    (tmp_path / "__0_0.distcp").write_bytes(bytes(256 * n))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=places)))
    begin = time.process_time()
    assert len(read_metadata(tmp_path).storage_data) == n
    assert time.process_time() - begin < 20  # seconds; 1 on two cores


def test_the_cause_is_found_behind_what_wraps_it():
    full = OSError(28, "No space left on device")
    of_torch = RuntimeError("unexpected pos 704 vs 600")
    of_torch.__context__ = full
    of_dcp = dcp.CheckpointException("write", {3: (of_torch, None), 5: (ValueError("x"), None)})
    assert cause_of(of_torch) is cause_of(of_dcp) is full
    assert reason_of(of_dcp) == str(full)
    plain = RuntimeError("shapes differ")
    plain.__context__ = KeyError("a")
    assert cause_of(plain) is plain


# --------------------------------------------------------------------------------------------------
# A tokenizer outside the run folder


def private_tokenizer(run, tmp_path, link: bool):
    """The run's settings name a private file of the user, or the run's copy links to it."""
    private = tmp_path / "private.json"
    tokenizers.Tokenizer("bpe-257", tokenizers.BYTES).save(str(private))
    if link:
        (run / "tokenizer.json").symlink_to(private)
    name = "bpe-257" if link else str(private)
    change_meta(run / "checkpoints" / "step-5", tokenizer=name)


@pytest.mark.parametrize("link", [False, True])
def test_no_tokenizer_from_elsewhere_is_read_or_copied(run, tmp_path, link):
    private_tokenizer(run, tmp_path, link)
    unread = "run/tokenizer.json"
    assert ("is a link" if link else unread) in refusal(hf.export, run, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    if not link:
        assert unread in refusal(USES["sample"], run, None)
