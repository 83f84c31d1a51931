"""text/mds.py: folders that MosaicML's package wrote, token for token; damaged ones; our own.

tests/text/mds/write.py made the folders there. Set MDS_PYTHON to a Python that has the package to
let it read what we export.
"""

import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE, flags_for, refusal, slowly

import data
from config import TrainConfig
from data import Split
from text import corpus, mds, sources, tokenizer
from text.prepare import prepare
from text.shards import Shard, shard_files

HERE = Path(__file__).parent / "mds"
sys.path.insert(0, str(HERE))
import write as theirs  # noqa: E402

LENGTH = theirs.LENGTH
COMPRESSED = [name.replace(":", "-") or "raw" for name in theirs.COMPRESSIONS]
EOT = 256  # of bytes


def read(folder, *more) -> list:
    """The documents of a data set; ids as lists."""
    found = corpus.documents(str(folder), *more)
    return [text if isinstance(text, str) else text.tolist() for text in found]


@pytest.fixture
def copy(tmp_path):
    """copy(name) is a copy of one of the folders, to be damaged."""
    return lambda name, to="copy": Path(shutil.copytree(HERE / name, tmp_path / to))


@pytest.fixture
def settings(tmp_path):
    """settings(dataset, ...): how it is prepared, in tokens of bytes."""

    def settings(dataset, **more):
        more = {"tokenizer": "bytes", "val_fraction": 0.25} | more
        return TrainConfig(dataset=str(dataset), data_dir=f"{tmp_path}/tokens", **more)

    return settings


# --- What the package wrote


@pytest.mark.parametrize("name", [*theirs.KINDS, *COMPRESSED])
def test_ids_are_the_writer_s_in_their_order(name):
    assert read(HERE / name) == read(HERE / name / "index.json") == theirs.rows_of(name)
    assert sources.left_out(str(HERE / name)) == ""


def test_texts_are_the_writer_s_and_other_columns_are_skipped(settings, capsys):
    """One of them is pickled."""
    texts = theirs.texts_of("text")
    assert read(HERE / "text") == texts
    mds.main([f"{HERE}/zstd/index.json", f"{HERE}/text/index.json"])
    shown = capsys.readouterr().out
    assert f"{HERE}/zstd/shard.00000.mds.zstd: 27 samples of tokens, 864 in all, intact" in shown
    assert "samples of text" in shown
    (path,) = shard_files(prepare(settings(HERE / "text")), "val")
    expected = [[*text.encode(), EOT] for text in texts[::4]]
    assert Shard(path).ids.tolist() == sum(expected, [])


def test_a_merged_index_repeats_no_shard():
    assert (HERE / "merged/0/index.json").exists()
    rows = theirs.rows_of("merged/0") + theirs.rows_of("merged/1")
    assert read(HERE / "merged") == read(f"{HERE}/merged/[01]/index.json") == rows
    assert read(HERE / "merged/1") == theirs.rows_of("merged/1")


def test_several_folders_are_read_in_order_but_not_if_one_is_for_validation(copy, tmp_path):
    copy("zstd", "train")
    copy("gz", "more")
    assert read(tmp_path) == theirs.rows_of("gz") + theirs.rows_of("zstd")
    copy("raw", "val_small")
    message = refusal(read, tmp_path)
    assert f"{tmp_path}/val_small/index.json is for validation" in message
    assert read(message.partition("--dataset=")[2]) == theirs.rows_of("gz")


@pytest.mark.parametrize("name", ["values", "testimony", "evaluations"])
def test_a_word_that_begins_like_validation_is_another_word(copy, tmp_path, name):
    copy("zstd", "train")
    copy("gz", name)
    assert sorted(read(tmp_path)) == sorted(theirs.rows_of("zstd") + theirs.rows_of("gz"))


@pytest.mark.parametrize("name", ["Valid.1", "test2", "evals", "valset_1"])
def test_a_folder_for_validation_beside_others_is_a_question(copy, tmp_path, name):
    copy("zstd", "train")
    copy("gz", name)
    assert f"{tmp_path}/{name}/index.json is for validation" in refusal(read, tmp_path)


def test_shards_beside_text_are_a_question(copy):
    folder = copy("zstd")
    (folder / "LICENSE.txt").write_text("All rights reserved.")
    message = refusal(read, folder)
    flag = shlex.split(message.partition("as in ")[2])[-1]
    assert read(flag.removeprefix("--dataset=")) == theirs.rows_of("zstd")


def test_a_shard_that_the_package_has_decompressed_is_read_raw(copy):
    folder = copy("zstd")
    raw, compressed = folder / "shard.00000.mds", folder / "shard.00000.mds.zstd"
    raw.write_bytes(mds.content_of(mds.shards([f"{folder}/index.json"])[0]))
    compressed.unlink()
    assert read(folder) == theirs.rows_of("zstd")


def test_the_index_of_something_else_is_no_data_set(tmp_path):
    (tmp_path / "index.json").write_text('{"pages": []}')
    assert "left out: 1 .json" in refusal(read, tmp_path)
    (tmp_path / "a.txt").write_text("text")
    assert read(tmp_path) == ["text"]


# --- Our shards


@pytest.mark.parametrize("workers", [1, slowly(2)])
def test_rows_become_windows_and_each_keeps_its_place(settings, workers):
    """With their max_seq_len. Every fourth row is for validation."""
    folder = prepare(settings(HERE / "bytes-int64"), workers)
    rows = theirs.rows_of("bytes-int64")
    for name, expected in (("train", [r for i, r in enumerate(rows) if i % 4]), ("val", rows[::4])):
        split = Split(folder, name, LENGTH)
        inputs = split.windows(np.arange(len(split)))[:, :-1]
        # The last row has no id behind it that could be its label.
        assert inputs.tolist() == expected[: len(split)] and len(split) == len(expected) - 1
        assert split.tokens == LENGTH * len(expected) == split.text_bytes
        assert split.count("documents") == len(expected)


def test_documents_are_separated_once(settings, tmp_path):
    rows = theirs.rows_of("documents")
    with_end = [[*row, EOT] for row in rows]
    assert read(HERE / "documents", tokenizer.load("bytes")) == with_end
    for row in with_end[::2]:
        row.append(EOT)
    arrays = [np.array(row[:-1]) for row in with_end]  # half of them have their end-of-text
    write_rows(tmp_path / "mds", arrays)
    folder = prepare(settings(tmp_path / "mds"))
    expected = sum(([*row, EOT] for i, row in enumerate(rows) if i % 4), [])
    (path,) = shard_files(folder, "train")
    shard = Shard(path)
    assert shard.ids.tolist() == expected and shard.dtype == np.uint16
    assert shard.header["text_bytes"] == len(expected) - expected.count(EOT)


def write_rows(folder, rows, encoding="ndarray:int64", **more) -> Path:
    """One shard of a column `tokens`, of any arrays. more: other values of its entry."""
    folder.mkdir()
    samples = []
    for row in rows:
        shape = [] if encoding == "bytes" else [4 * row.ndim + 2, *struct.pack("<I", len(row))]
        values = bytes(shape) + row.tobytes()
        samples.append(struct.pack("<I", len(values)) + values)
    begin = 4 * (len(rows) + 2)
    ends = begin + np.cumsum([0, *map(len, samples)])
    content = np.array([len(rows), *ends], "<u4").tobytes() + b"".join(samples)
    (folder / "shard.00000.mds").write_bytes(content)
    raw = {"basename": "shard.00000.mds", "bytes": len(content), "hashes": {}}
    about = {"version": 2, "format": "mds", "samples": len(rows), "compression": None}
    about |= {"column_names": ["tokens"], "column_encodings": [encoding], "column_sizes": [None]}
    about |= {"raw_data": raw, "zip_data": None} | more
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [about]}))
    return folder


def write_merged(folder, parts, encoding) -> Path:
    """A folder whose index joins that of one folder for each part, as `merge_index` does."""
    folder.mkdir()
    entries = []
    for number, rows in enumerate(parts):
        place = write_rows(folder / f"{number}", rows, encoding)
        (about,) = json.loads((place / "index.json").read_text())["shards"]
        about["raw_data"]["basename"] = f"{number}/shard.00000.mds"
        entries.append(about)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return folder


@pytest.mark.parametrize("encoding", ["ndarray:int64", "bytes"])
@pytest.mark.parametrize("sizes", [(1, 9, 5), (0, 1, 1)])
def test_rows_are_known_by_the_whole_index(tmp_path, encoding, sizes):
    """However few of them are in the first shard."""
    parts = [np.arange(64 * n).reshape(n, 64) % 250 for n in sizes]
    folder = write_merged(tmp_path / "mds", parts, encoding)
    assert read(folder, tokenizer.load("bytes")) == np.concatenate(parts).tolist()


@pytest.mark.parametrize("encoding", ["ndarray:int64", "bytes"])
def test_documents_are_known_by_the_whole_index(tmp_path, encoding):
    """Although those of the first shards have one length."""
    parts = [[np.array([5, 6])] * 3, [np.array([7, 8])], [np.array([1, 2]), np.array([3])]]
    folder = write_merged(tmp_path / "mds", parts, encoding)
    expected = [[*row.tolist(), EOT] for part in parts for row in part]
    assert read(folder, tokenizer.load("bytes")) == expected


def test_one_row_whose_type_has_its_length_is_a_row(tmp_path):
    about = mds.write_shard(tmp_path / "shard.00000.mds", np.ones((1, 9), "<i4"))
    (tmp_path / "index.json").write_text(json.dumps({"shards": [about]}))
    assert read(tmp_path, tokenizer.load("bytes")) == [[1] * 9]


@pytest.mark.parametrize("dtype", ["<i8", "<i4", "<u2", "<u8", "<u4"])
def test_bytes_are_read_in_the_type_in_which_they_are_ids(tmp_path, dtype, capsys):
    """LLM Foundry's token_encoding_type, which no file says."""
    rows = np.random.default_rng(0).integers(0, 257, (20, 64)).astype(dtype)
    folder = write_rows(tmp_path / "mds", rows, "bytes")
    assert read(folder, tokenizer.load("bytes")) == rows.tolist()
    mds.main([f"{folder}/index.json"])
    assert "20 samples of tokens, 1,280 in all" in capsys.readouterr().out
    rows[3, 5] = 10_420  # damage, in whatever type
    folder = write_rows(tmp_path / "damaged", rows, "bytes")
    message = refusal(read, folder, tokenizer.load("bytes"))
    assert "has the id 10420, of 257 known ids" in message
    floats = write_rows(tmp_path / "floats", np.full((9, 8), 0.3), "bytes")
    assert "no int64, int32 or uint16" in refusal(read, floats, tokenizer.load("bytes"))


def test_the_tokenizer_must_be_the_one_that_made_the_ids(settings, copy, capfd, tmp_path):
    message = refusal(prepare, settings(HERE / "zstd", tokenizer="bpe-300"))
    assert "holds ids already" in message and "--tokenizer" in message
    rows = [np.array([5, 256]), np.array([257, 7])]
    folder = write_rows(tmp_path / "mds", rows, "bytes")
    message = refusal(prepare, settings(folder))
    assert f"{folder}/shard.00000.mds has the id 257, of 257 known ids" in message
    assert "set the --tokenizer" in message
    prepare(settings(HERE / "zstd"))
    begin = bytes(theirs.rows_of("zstd")[0][:30]).decode(errors="replace")
    assert f"in tokens of bytes: {begin!r}" in capfd.readouterr().err


def test_a_changed_shard_makes_other_tokens(settings, copy):
    folder = copy("raw")
    before = prepare(settings(folder))
    tokens = [path.read_bytes() for path in shard_files(before)]
    shutil.rmtree(folder)
    shutil.copytree(HERE / "int32", folder)
    prepare(settings(folder))
    assert [path.read_bytes() for path in shard_files(before)] != tokens


def test_one_shard_at_a_time_is_in_memory(tmp_path):
    n_bytes = 4 * 2**20
    rows = np.zeros((n_bytes // 4096, 1024), "<i4")
    entries = [mds.write_shard(tmp_path / f"shard.{i:05d}.mds", rows) for i in range(6)]
    (tmp_path / "index.json").write_text(json.dumps({"shards": entries}))
    tracemalloc.start()
    assert sum(map(len, corpus.documents(str(tmp_path)))) == 6 * rows.size
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert n_bytes < peak < 2 * n_bytes


# --- Damage


def entry(**changes):
    """A change of the first entry of index.json: its fields, or those of `raw_data`."""

    def change(folder):
        index = json.loads((folder / "index.json").read_text())
        about = index["shards"][0]
        for name, value in changes.items():
            (about["raw_data"] if name in mds.FILE else about)[name] = value
        (folder / "index.json").write_text(json.dumps(index))

    return change


def content(change):
    """A change of the first shard's bytes."""

    def damage(folder):
        path = next(folder.glob("shard.00000*"))
        path.write_bytes(change(bytearray(path.read_bytes())))

    return damage


def words(**values):
    """A change of the first shard's numbers: w0 is the number of samples, w1 the first offset."""

    def change(old):
        for name, value in values.items():
            struct.pack_into("<I", old, 4 * int(name[1:]), value)
        return old

    return content(change)


def flipped(old):
    old[len(old) // 2] ^= 1
    return old


SHARD, INDEX = "shard.00000.mds", "index.json"
DAMAGE = {  # name: folder, change, the file that the message names, words of it
    "cut": ("raw", content(lambda old: old[:-9]), SHARD, "bytes instead of"),
    "wrong hash": ("raw", content(flipped), SHARD, "its sha1 does not match"),
    "unknown hash": ("raw", entry(hashes={"crc7": "0"}), INDEX, "unknown kind, 'crc7'"),
    "missing": ("raw", lambda folder: (folder / SHARD).unlink(), SHARD, "is missing"),
    "size": ("raw", entry(bytes=77), SHARD, "bytes instead of 77"),
    "size, decompressed": ("zstd", entry(bytes=7777), SHARD, "bytes instead of 7,777"),
    "snappy's size": ("snappy", entry(bytes=7777, hashes={}), SHARD, "bytes instead of 7,777"),
    "huge size": ("zstd", entry(bytes=2**40), INDEX, "'bytes' is 1099511627776"),
    "not that compression": ("zstd", entry(compression="bz2"), SHARD, "damaged"),
    "compression": ("zstd", entry(compression="lz4:3"), INDEX, "its compression is 'lz4', known"),
    "samples": ("raw", entry(samples=-5), SHARD, "27 samples instead of -5"),
    "offsets fall": ("int32", words(w5=400), SHARD, "its offsets"),
    "column's size": ("int32", entry(column_sizes=[9]), SHARD, "the sizes of its columns"),
    "columns": ("int32", entry(column_sizes=[None, 9]), INDEX, "its columns"),
    "column": ("int32", entry(column_names=["ids"]), INDEX, "has no column 'text' or 'tokens'"),
    "pickle": ("int32", entry(column_encodings=["pkl"]), INDEX, "'tokens' are 'pkl', known"),
    "no text": ("text", entry(column_encodings=["pkl"] * 5), INDEX, "'text' is 'pkl'"),
    "format": ("raw", entry(format="json"), INDEX, "its format is 'json'"),
    "outside": ("raw", entry(basename="../raw/x"), INDEX, "names the file '..'"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_line_that_names_the_file(copy, name):
    folder, damage, file, expected = DAMAGE[name]
    folder = copy(folder)
    damage(folder)
    message = refusal(read, folder)
    assert f"{folder}/{file}" in message and expected in message


def test_samples_that_are_no_ids_or_no_text(copy, tmp_path):
    for number, (encoding, row, expected) in enumerate(
        [
            ("ndarray:int64", np.array([3, -1]), "has the id -1"),
            ("ndarray:int64", np.zeros((2, 2), int), "an array of 2 dimensions"),
            ("bytes", np.zeros(7, np.uint8), "'tokens' of odd sizes"),
        ]
    ):
        folder = write_rows(tmp_path / f"{number}", [row], encoding)
        message = refusal(read, folder)
        assert message.startswith(f"{folder}/{SHARD}") and expected in message

    folder = copy("text")
    good = bytes(mds.content_of(mds.shards([f"{folder}/index.json"])[0]))
    latin = "größe".encode("latin-1").ljust(7)
    (folder / SHARD).write_bytes(good.replace("größe".encode(), latin))
    entry(hashes={})(folder)
    assert refusal(read, folder).startswith(f"{folder}/{SHARD} is damaged ('utf-8' codec")


# --- Export


@pytest.fixture(scope="module")
def exported(tiny_data, tmp_path_factory):
    """The tiny data set as MDS: its folder, and what our shards hold in whole rows of 64."""
    out = tmp_path_factory.mktemp("exported") / "out"
    flags = [*flags_for(tiny_data), "--max_seq_len=64", f"--export_mds={out}"]
    data.main(flags)
    assert f"{out} is there already" in refusal(data.main, flags)
    assert "set --data_format=text" in refusal(data.main, [*flags, "--data_format=chat"])
    rows = {"train": [], "val": []}
    for split, some in rows.items():
        for path in shard_files(tiny_data, split):
            ids = Shard(path).ids.tolist()
            some += [ids[first : first + 64] for first in range(0, len(ids) - 63, 64)]
    return out, rows


def test_what_we_export_we_read(exported, tmp_path):
    out, rows = exported
    for name in ("train", "val"):
        assert read(out / name) == rows[name]
    json_file = tokenizer.load(f"{out}/tokenizer.json")
    text = "größe, and more"
    assert json_file.encode(text).tolist() == tokenizer.load("bytes").encode(text).tolist()


def test_what_we_export_their_package_reads(exported):
    out, rows = exported
    their_python = os.environ.get("MDS_PYTHON", sys.executable)
    command = [their_python, str(HERE / "write.py"), str(out / "train")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    if "No module named 'streaming'" in done.stderr:
        pytest.skip("set MDS_PYTHON to a Python that has mosaicml-streaming: tests/text/mds")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == rows["train"]
