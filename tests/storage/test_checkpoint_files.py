"""storage/checkpoint_files.py: a stranger's checkpoint runs nothing, a damaged one is not used, by any program."""

import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import subprocess
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import flags_for, rooms_on_path, words_of
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
from config import MPTConfig, TrainConfig, UserError
from model import MPT
from storage.checkpoint_files import cause_of, find_damage, read_metadata, reason_of
from weights import hf, load

SMALL = MPTConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=257, max_seq_len=16)
WEIGHT = "model.transformer.blocks.0.ffn.down_proj.weight"


class Evil:
    """Unpickled, it makes a file and becomes what the pickle in `content` holds."""

    def __init__(self, mark: Path, content: bytes):
        self.code = (
            f"(open({str(mark)!r}, 'w').close(), __import__('pickle').loads({content!r}))[1]"
        )

    def __reduce__(self):
        return eval, (self.code,)


def save(path: Path, weights: dict, cfg: MPTConfig = SMALL) -> Path:
    """A checkpoint of a model's weights, with the settings of a run."""
    path.parent.mkdir(parents=True)
    settings = {**asdict(cfg), **asdict(TrainConfig(tokenizer="bytes"))}
    more = {"precision": "fp32", "data_fingerprint": "f00"}
    checkpoint.prepare(path, {"step": checkpoint.number(path), **settings, **more})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights}, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return seal(path)


def seal(path: Path, **more) -> Path:
    """Write checksums that fit what is there now, as a stranger would."""
    names = [
        file.name for file in path.iterdir() if file.is_file() and file.name != "checksums.json"
    ]
    checkpoint.write_json(
        path / "checksums.json", {n: checkpoint.checksum(path / n) for n in names} | more
    )
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
    """It runs code and is the true metadata afterwards."""
    evil = Evil(mark, (path / ".metadata").read_bytes())
    (path / ".metadata").write_bytes(pickle.dumps(evil))
    seal(path)


def code_as_weight(path, mark, name=WEIGHT):
    """A weight that the metadata call an object: DCP's own planner reads it with weights_only=False."""
    evil = pickle.dumps(Evil(mark, pickle.dumps(torch.zeros(32, 128))), protocol=2)  # as torch.save
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
    change(
        path,
        lambda metadata: metadata.storage_data.update(
            {index: _StorageInfo("evil.distcp", 0, len(content))}
        ),
    )


def elsewhere(path, mark):
    """The pieces lie outside of the folder."""
    shutil.move(path / "__0_0.distcp", path.parent / "outside")

    def point(metadata):
        for place in metadata.storage_data.values():
            place.relative_path = "../outside"

    change(path, point)


def endless(path, mark):
    """A pipe that nobody writes into."""
    (path / "__0_0.distcp").unlink()
    os.mkfifo(path / "__0_0.distcp")
    seal(path, **{"__0_0.distcp": [0, 0]})


def device(path, mark):
    (path / "__0_0.distcp").unlink()
    (path / "__0_0.distcp").symlink_to("/dev/zero")
    seal(path, **{"__0_0.distcp": [0, 0]})


def checksums_elsewhere(path, mark):
    seal(path, **{"../../../outside": [1, 1]})


ATTACKS = {
    code_in_metadata: r"\.metadata cannot be trusted \(it wants 'builtins.eval'\)",
    code_as_weight: r"\.metadata cannot be trusted \(.* is no tensor\)",
    code_in_piece: r"cannot read .*step-5 \(it would run (builtins\.|__builtin__\.)?eval\)",
    elsewhere: r"names the file '\.\./outside', expected the plain name",
    endless: r"__0_0\.distcp: not a regular file",
    device: r"__0_0\.distcp: not a regular file",
    checksums_elsewhere: r"checksums\.json is missing or damaged",
}
USES = {
    "sample": lambda run, new: load.load_for_sampling(str(run), None, torch.device("cpu")),
    "export": lambda run, new: hf.export(run, new),
    "init_from": lambda run, new: load.init_from(MPT(SMALL), run),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_strangers_checkpoint_runs_nothing(run, tmp_path, attack, use):
    attack(run / "checkpoints" / "step-5", tmp_path / "mark")
    with pytest.raises(UserError, match=ATTACKS[attack]) as caught:
        USES[use](run, tmp_path / "new")
    text = str(caught.value)
    assert not (tmp_path / "mark").exists() and not (tmp_path / "new").exists()
    assert "weights_only" not in text and "\n" not in text


def verify(path):
    """What `checkpoint.verify` says, which the ranks share; a process that reads it all finds the same."""
    try:
        found = checkpoint.verify(path)
    except UserError as error:
        with pytest.raises(UserError, match=re.escape(str(error))):
            find_damage(path)
        raise
    assert find_damage(path) == found
    return found


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.json"])
def test_a_damaged_checkpoint_is_not_used(run, tmp_path, use, name):
    file = run / "checkpoints" / "step-5" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"(checksum differs|meta\.json is damaged)"):
        USES[use](run, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("use", USES)
def test_a_sound_one_is_used(run, tmp_path, use):
    assert verify(run / "checkpoints" / "step-5") is None
    USES[use](run, tmp_path / "new")


# ---------------------------------------------------------------------------------------------------------------
# What else must fit


def test_a_checkpoint_of_another_step_is_unsound(run):
    folder = run / "checkpoints"
    other = (folder / "step-5").rename(folder / "step-6")
    assert verify(other) == "meta.json is of step 5"


@pytest.mark.parametrize("name", [".metadata", "meta.json", "__0_0.distcp"])
def test_checksums_must_name_every_file(run, name):
    path = run / "checkpoints" / "step-5"
    table = json.loads((path / "checksums.json").read_text())
    del table[name]
    checkpoint.write_json(path / "checksums.json", table)
    assert verify(path) == f"checksums.json does not name {name}"


@pytest.mark.parametrize(
    "text, cause",
    [
        ("[1]", "not a JSON object"),
        ("3", "not a JSON object"),
        ("[" * 100_000, "nested too deep"),
        ("\xff", "codec can't decode"),
        ('{"step": "5"}', "'step' is '5'"),
        ('{"step": 5}', "no 'seed'"),
    ],
)
def test_meta_of_the_wrong_shape_is_named(run, text, cause):
    path = run / "checkpoints" / "step-5"
    (path / "meta.json").write_bytes(text.encode("latin-1"))
    seal(path)
    with pytest.raises(UserError, match=rf"step-5/meta\.json is damaged \(.*{cause}"):
        load.load_for_sampling(str(run), None, torch.device("cpu"))


def test_settings_of_the_wrong_type_are_named(run):
    path = run / "checkpoints" / "step-5"
    meta = json.loads((path / "meta.json").read_text())
    checkpoint.write_json(path / "meta.json", meta | {"n_layers": "many"})
    seal(path)
    with pytest.raises(
        UserError, match="n_layers in .*meta.json is 'many', expected a whole number"
    ):
        load.load_for_sampling(str(run), None, torch.device("cpu"))


def pieces(metadata):
    return metadata.state_dict_metadata[WEIGHT].chunks


CHANGES = {
    "a piece is missing": (lambda m: pieces(m).clear(), "do not cover it"),
    "a piece is negative": (
        lambda m: setattr(pieces(m)[0], "sizes", torch.Size([-32, -128])),
        "a size of -32",
    ),
    "too large for its bytes": (
        lambda m: (
            setattr(m.state_dict_metadata[WEIGHT], "size", torch.Size([2**40, 128])),
            setattr(pieces(m)[0], "sizes", torch.Size([2**40, 128])),
        ),
        "is missing",
    ),
    "a piece with other dimensions": (
        lambda m: setattr(pieces(m)[0], "sizes", torch.Size([32])),
        "do not cover it",
    ),
    "a hole": (lambda m: setattr(pieces(m)[0], "sizes", torch.Size([31, 128])), "do not cover it"),
    "a piece twice": (lambda m: pieces(m).append(pieces(m)[0]), "do not cover it"),
    "nowhere": (lambda m: m.storage_data.pop(MetadataIndex(WEIGHT, [0, 0])), "is missing"),
    "beyond the end": (
        lambda m: setattr(m.storage_data[MetadataIndex(WEIGHT, [0, 0])], "offset", 2**40),
        "ends before a piece",
    ),
    "no floating point": (
        lambda m: setattr(m.state_dict_metadata[WEIGHT].properties, "dtype", torch.int64),
        "is torch.int64",
    ),
    "a transformed file": (
        lambda m: setattr(
            m.storage_data[MetadataIndex(WEIGHT, [0, 0])], "transform_descriptors", ["zstd"]
        ),
        "wants a file to be transformed",
    ),
    "no storage": (lambda m: setattr(m, "storage_data", None), "cannot be trusted"),
    "no entries": (lambda m: setattr(m, "state_dict_metadata", [1]), "cannot be trusted"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_that_make_no_sense_are_refused(run, name):
    action, cause = CHANGES[name]
    path = change(run / "checkpoints" / "step-5", action)
    with pytest.raises(UserError, match=rf"\.metadata cannot be trusted \(.*{cause}|{cause}"):
        verify(path)


def laughs() -> bytes:
    """A dict whose key is a tuple of two tuples of two tuples ...: its hash takes 2^60 steps."""
    key = ()
    for _ in range(60):
        key = (key, key)
    twice = pickle.PROTO + b"\x04" + b"})" + pickle.MEMOIZE + (b"h\0" + b"\x86")
    for number in range(1, 60):
        twice += pickle.MEMOIZE + pickle.BINGET + bytes([number]) + b"\x86"
    return twice + b"Ns."


PICKLES = {
    "not one": b"no tensors",
    "empty": b"",
    "a class of ours": pickle.dumps(UserError("x")),
    "a dotted name": b"\x80\x04\x8c\x05torch\x8c\x0dSize.__init__\x93.",
    "protocol 0": b"cos\nsystem\n(S'true'\ntR.",
    "an instance": b"(S'true'\nios\nsystem\n.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"Pabc\n.",
    "64 GB of memory": b"\x80\x04Nr\xff\xff\xff\xff.",
    "a frame without end": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "a text without end": b"\x80\x04X\xff\xff\xff\xffabc.",
    "fields of a dict": b"\x80\x04}}b.",
    "a number instead": b"\x80\x04K\x01.",
    "a hash without end": laughs(),
    "nested deep": b"\x80\x04)" + b"\x85" * 10**5 + b".",
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_of_another_kind_is_refused(tmp_path, name):
    (tmp_path / ".metadata").write_bytes(PICKLES[name])
    begin, before = time.process_time(), peak_bytes()
    with pytest.raises(UserError, match=r"\.metadata cannot be trusted"):
        read_metadata(tmp_path)
    assert time.process_time() - begin < 20
    assert peak_bytes() - before < 2**31


def peak_bytes() -> int:
    """The most memory that this process had."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, kB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@pytest.mark.slow
def test_mutated_metadata_load_or_are_refused(run):
    path, dice = run / "checkpoints" / "step-5", random.Random(0)
    content = (path / ".metadata").read_bytes()
    refused = 0
    for _ in range(400):
        mutated = bytearray(content)
        for _ in range(dice.randint(1, 4)):
            mutated[dice.randrange(len(mutated))] = dice.randrange(256)
        (path / ".metadata").write_bytes(
            mutated[: dice.choice([None, None, dice.randrange(len(mutated))])]
        )
        try:
            read_metadata(path)
        except (UserError, FileNotFoundError) as error:
            refused += "\n" not in str(error)
    assert refused > 200


@pytest.mark.parametrize(
    "name", ["step-²", "step-007", "step-", "step--1", "step-5x", "step-٣", "step-1.tmp"]
)
def test_only_plain_numbers_are_steps(run, name):
    (run / "checkpoints" / name).mkdir()
    assert [path.name for path in checkpoint.complete(run / "checkpoints")] == ["step-5"]
    assert [path.name for path in checkpoint.numbered(run / "checkpoints")] == ["step-5"]


def test_weights_that_are_not_finite_are_not_imported(tmp_path):
    model = MPT(SMALL)
    hf.export(model, tmp_path / "sound")
    hf.import_(tmp_path / "sound", tmp_path / "a", "bytes")
    with torch.no_grad():
        model.transformer.norm_f.weight[3] = float("nan")
    hf.export(model, tmp_path / "theirs")
    with pytest.raises(
        UserError, match=r"transformer\.norm_f\.weight holds numbers that are not finite"
    ):
        hf.import_(tmp_path / "theirs", tmp_path / "b", "bytes")
    assert not (tmp_path / "b").exists()


# ---------------------------------------------------------------------------------------------------------------
# The programs themselves


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_data):
    """A folder with a run of two steps in it, and the flags that it had."""
    folder = tmp_path_factory.mktemp("trained")
    flags = "--d_model=32 --n_heads=4 --n_layers=1 --vocab_size=257 --max_seq_len=16 --global_batch_size=4"
    flags = [
        *flags.split(),
        "--warmup_steps=1",
        "--precision=fp32",
        "--eval_tokens=64",
        *flags_for(tiny_data),
    ]
    done = program(folder, "fsdp_train.py", *flags, "--run_dir=run", "--max_steps=2")
    assert done.returncode == 0, done.stderr
    (folder / "task.txt").write_text("the blue house")
    return folder, flags


def program(folder, name, *flags):
    command = [sys.executable, *words_of(name), *flags]
    how = {"capture_output": True, "text": True, "timeout": 240, "env": rooms_on_path()}
    return subprocess.run(command, cwd=folder, **how)


PROGRAMS = {
    "generate.py": ["run", "--max_new_tokens=2"],
    "evaluation.zero_shot": ["run", "--tasks=task.txt"],
    "weights.hf": ["export", "run", "new"],
    "lifecycle.resume": ["run"],
    "init_from": ["fsdp_train.py", "--init_from=run", "--run_dir=other", "--max_steps=2"],
    "resuming": ["fsdp_train.py", "--run_dir=run", "--max_steps=3"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_runs_a_strangers_code(trained, tmp_path, name):
    """Code in the metadata, and for resuming, which alone reads them, in the settings of the optimizer."""
    source, flags = trained
    what = (
        [*PROGRAMS[name], *flags] if "fsdp_train.py" in PROGRAMS[name] else [name, *PROGRAMS[name]]
    )
    mark = tmp_path / "mark"
    lr = "optim.param_groups.transformer.norm_f.weight.lr"
    attacks = {
        "metadata": lambda path: code_in_metadata(path, mark),
        "optimizer": lambda path: code_as_weight(path, mark, lr),
    }
    for attack in attacks if name == "resuming" else ["metadata"]:
        folder = shutil.copytree(source, tmp_path / attack)
        attacks[attack](folder / "run" / "checkpoints" / "step-2")
        done = program(folder, *what)
        assert done.returncode == (1 if name == "lifecycle.resume" else 2), done.stderr
        said = done.stdout + done.stderr
        assert re.search(
            r"(it would run|it wants) (eval|'builtins\.eval'|__builtin__\.eval)", said
        ), said
        assert not mark.exists() and "weights_only" not in said and "Traceback" not in said
        assert names_of(folder / "run" / "checkpoints") == ["step-2"]


def names_of(folder):
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------------------------------------------------------
# Settings of another model


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"no_bias": True}, r"weights of .*step-5 are not those of its settings, such as .*bias'"),
        (
            {"alibi": True},
            r"1 weights of .*step-5 are not those of its settings, such as '.*wpe\.weight'",
        ),
        ({"d_model": 2**18, "n_heads": 2**10}, r"are not those of its settings"),
        ({"n_layers": 10_000}, r"holds 16 tensors, too few for 10000 layers"),
    ],
    ids=["bias", "positions", "huge", "layers"],
)
def test_weights_that_the_settings_do_not_ask_for_are_not_left_out(run, settings, message):
    """They would be ignored in silence, and the model would be another one; or memory for terabytes would be asked."""
    path = run / "checkpoints" / "step-5"
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | settings))
    seal(path)
    with pytest.raises(UserError, match=message):
        USES["sample"](run, None)


def test_metadata_of_many_pieces_are_read_in_seconds(tmp_path):
    """Of 20,000: a 70B on 1,024 ranks has a hundred times as many."""
    entries, places, n = {}, {}, 20_000
    chunks = [ChunkStorageMetadata(torch.Size([i, 0]), torch.Size([1, 64])) for i in range(n)]
    entries["model.w"] = TensorStorageMetadata(
        TensorProperties(torch.float32), torch.Size([n, 64]), chunks
    )
    for i, chunk in enumerate(chunks):
        places[MetadataIndex("model.w", chunk.offsets)] = _StorageInfo("__0_0.distcp", 256 * i, 256)
    (tmp_path / "__0_0.distcp").write_bytes(bytes(256 * n))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=places)))
    begin = time.process_time()
    assert len(read_metadata(tmp_path).storage_data) == n
    assert time.process_time() - begin < 20  # 1 here


# ---------------------------------------------------------------------------------------------------------------
# A tokenizer elsewhere


def private_tokenizer(run, tmp_path, link: bool):
    """The run's settings name a file of the user's, or the run's copy is a link to it."""
    from text import tokenizer as tokenizers

    private = tmp_path / "private.json"
    tokenizers.Tokenizer("bpe-257", tokenizers.BYTES).save(str(private))
    path = run / "checkpoints" / "step-5"
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(
        json.dumps(meta | {"tokenizer": "bpe-257" if link else str(private)})
    )
    if link:
        (run / "tokenizer.json").symlink_to(private)
    seal(path)


@pytest.mark.parametrize("link", [False, True])
def test_export_copies_no_file_from_elsewhere(run, tmp_path, link):
    private_tokenizer(run, tmp_path, link)
    with pytest.raises(
        UserError,
        match="is a link" if link else "cannot read the tokenizer file .*/run/tokenizer.json",
    ):
        hf.export(run, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_sampling_reads_no_tokenizer_from_elsewhere(run, tmp_path):
    private_tokenizer(run, tmp_path, link=False)
    with pytest.raises(UserError, match="cannot read the tokenizer file .*/run/tokenizer.json"):
        USES["sample"](run, None)


# ---------------------------------------------------------------------------------------------------------------
# Errors that DCP and torch wrap


def wrapped(inner, outer):
    """`outer`, raised while `inner` was being handled."""
    try:
        try:
            raise inner
        except BaseException:
            raise outer  # noqa: B904
    except BaseException as error:
        return error


def test_the_cause_is_found_behind_what_wraps_it():
    full = OSError(28, "No space left on device")
    torch_s = wrapped(full, RuntimeError("unexpected pos 704 vs 600"))
    assert cause_of(torch_s) is full
    assert (
        cause_of(dcp.CheckpointException("write", {3: (torch_s, None), 5: (ValueError("x"), None)}))
        is full
    )
    assert reason_of(dcp.CheckpointException("write", {3: (torch_s, None)})) == str(full)


def test_an_error_that_wraps_nothing_of_the_system_is_the_cause():
    plain = wrapped(KeyError("a"), RuntimeError("shapes differ"))
    assert cause_of(plain) is plain
    told = wrapped(OSError(2, "No such file"), UserError("give another folder"))
    assert cause_of(told) is told
