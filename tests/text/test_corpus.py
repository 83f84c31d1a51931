"""text/corpus.py: any form of text becomes documents, always in one order; errors name the file."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import json_lines, refusal

from text import corpus, sources
from text.corpus import documents


@pytest.fixture
def write(tmp_path):
    """write(name, content) makes a file, of text or of bytes, and returns its path."""

    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def lines(*texts):
    return json_lines(*({"text": text, "other": 1} for text in texts))


def write_parquet(path, **columns):
    parquet = pytest.importorskip("pyarrow.parquet")  # comes with `datasets`
    parquet.write_table(pytest.importorskip("pyarrow").table(columns), path)
    return str(path)


def error(dataset):
    """The message with which this data set is refused."""
    return refusal(lambda: list(documents(str(dataset))))


# --- the standard library


def test_the_standard_library_is_a_corpus():
    texts = list(documents("stdlib"))
    assert len(texts) > 300 and sum(map(len, texts)) > 5e6
    assert len(set(texts)) > 0.9 * len(texts)
    parts = {part for path in sources.stdlib_files() for part in Path(path).parts}
    assert not parts & {"test", "idle_test", "site-packages"} or "site-packages" in sys.prefix


# --- .txt


def test_txt_is_split_at_end_of_text(write):
    path = write("a.txt", "one\n\nstill one\n<|endoftext|>\ntwo<|endoftext|>  \n<|endoftext|>three")
    assert list(documents(path)) == ["one\n\nstill one", "two", "three"]


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"paragraph {i}: " + "word " * (i % 700) + "\n\n" for i in range(200)),
        "no blank line anywhere " * 5000,
        "\n \n\t\n" * 3000 + "x" * 40000 + "\n\n" + "y" * 20000 + "\n",
        "größe – 東京\n\n" * 4000,
    ],
    ids=["paragraphs", "one long line", "blank lines", "not ascii"],
)
def test_txt_without_end_of_text_is_cut_at_blank_lines_and_loses_nothing(write, text):
    pieces = list(documents(write("a.txt", text)))
    assert "".join(pieces) == text
    for piece in pieces[:-1]:
        assert piece.endswith("\n") and len(piece) > 16000
        if text.startswith(("paragraph", "größe")):
            assert piece.endswith("\n\n") and len(piece) < 20_500  # a blank line is near


# --- encodings


@pytest.mark.parametrize(
    "suffix, good_lines", [("txt", ""), ("jsonl", '{"text": "fine"}\n'), ("csv", "text\n")]
)
def test_what_is_not_utf8_is_named_with_its_place(write, suffix, good_lines):
    """The offset is that in the file, although tables and .jsonl are read line by line."""
    for mark, content, byte, offset in (
        (b"", b"one\ncaf\xe9 noir\n", "0xe9", 7),
        (b"\xef\xbb\xbf", b"caf\xe9", "0xe9", 6),  # with a byte order mark
        (b"", "größe".encode()[:3], "0xc3", 2),
        (b"", b"PK\x03\x04\x14\0\0\0\x08\xf3", "0x00", 5),
        (b"", b"line\n" * 100_000 + b"\xff", "0xff", 500_000),
    ):
        path = write(f"a.{suffix}", mark + good_lines.encode() + content)
        message = error(path)
        if suffix == "jsonl" and "line 2: expected one JSON" in message:
            continue  # its line ends before the bad byte
        assert message.startswith(path)
        assert f"not UTF-8 text: byte {byte} at offset {offset + len(good_lines):,}" in message


@pytest.mark.parametrize("encoding", ["LATIN1", "UTF-16", "UTF-32"])
def test_the_command_in_the_message_converts_a_file(write, encoding):
    path = write("my $folder/it's a.txt", "größe, and so on".encode(encoding))
    message = error(path)
    assert message.startswith(path) and f"iconv -f {encoding} -t UTF-8" in message
    subprocess.run(["sh", "-c", re.search("iconv .*", message)[0]], check=True)
    assert list(documents(path)) == ["größe, and so on"]
    assert os.listdir(os.path.dirname(path)) == ["it's a.txt"]


def test_a_text_that_a_parquet_file_repeats_is_one_text_in_memory(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"text": ["x" * 20_000] * 3_000}), path)
    assert os.path.getsize(path) < 100_000
    before = pyarrow.total_allocated_bytes()
    next(iter(documents(path)))
    assert pyarrow.total_allocated_bytes() - before < 10**7


def test_byte_order_marks_are_no_text_and_line_ends_are_one_kind(write):
    for name, content in (
        ("a.txt", "größe"),
        ("a.py", "größe"),
        ("a.jsonl", lines("größe")),
        ("a.csv", "text\ngröße"),
    ):
        assert list(documents(write(name, b"\xef\xbb\xbf" + content.encode()))) == ["größe"]
    assert list(documents(write("b.txt", b"one\r\ntwo\rthree\n"))) == ["one\ntwo\nthree\n"]


def test_python_s_own_library_is_taken_as_it_is(write, monkeypatch):
    """The demo needs it on every machine, even if one of its files is in Latin-1."""
    path = write("a.py", b"\xef\xbb\xbf# caf\xe9\r\nx = 1\r")
    monkeypatch.setattr(sources, "stdlib_files", lambda: [path])
    assert list(documents("stdlib")) == ["\ufeff# caf\ufffd\nx = 1\n"]


# --- .csv and .tsv


def test_a_table_holds_one_document_a_row(write):
    big = "word " * 60_000  # 300 kB: csv's own limit is 128
    content = f'id,text,more\n1,one,x\n2,"zwei, ""2""\n\nzwei",y\n\n3,,z\n4,"{big}",\n'
    texts = ["one", 'zwei, "2"\n\nzwei', big]
    assert list(documents(write("a.csv", content))) == texts
    assert list(documents(write("a.tsv", "text\tid\none\t1\ntwo, too\t2\n"))) == ["one", "two, too"]


BAD = {  # a file, and what is said of it
    "a.csv: other delimiter": ("id;text\n1;one\n", " has no column 'text', only ['id;text']"),
    "b.csv: empty": ("", " has no column 'text'"),
    "c.csv: a short row": ("id,text\n1,one\n2\n", ", line 3: no column 'text'"),
    "d.csv: no end": ('id,text\n1,"one\n2,two\n', ", line 3: unexpected end"),
    "a.jsonl: half a line": (lines("fine") + '{"text": "half\n', ", line 2: expected one JSON"),
    "b.jsonl: another field": (lines("fine") + '{"content": "x"}\n', ", line 2: expected one"),
    "c.jsonl: a list": (lines("fine") + '["text"]\n', ", line 2: expected one JSON object"),
    "e.jsonl: no text": (lines("fine") + '{"text": 5}\n', ", line 2: expected one JSON object"),
    "d.jsonl: deep": (lines("fine") + "[" * 10**5 + "\n", ", line 2: expected one JSON object"),
}


def test_a_bad_row_is_named(write):
    for name, (content, message) in BAD.items():
        path = write(name.partition(":")[0], content)
        assert error(path).startswith(path) and message in error(path), name


# --- .jsonl and .parquet


def test_a_bad_parquet_file_is_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    latin = pyarrow.array([b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    path = write_parquet(tmp_path / "a.parquet", text=latin)
    assert error(path).startswith(f"{path} is not a complete .parquet file: ")
    for columns in ({"content": ["x"]}, {"text": [1, 2]}):
        path = write_parquet(tmp_path / "a.parquet", **columns)
        assert f"{path} has no column 'text' of strings" in error(path)


def test_jsonl_and_parquet_hold_one_document_a_row(write, tmp_path):
    """Empty ones are left out."""
    texts = ["one", "", None, "zwei\n\nzwei", "<|endoftext|> is text here"]
    whole = [text for text in texts if text]
    blank = "\n \r\n".join(lines(text) for text in texts) + "\n"
    assert list(documents(write("a.jsonl", blank))) == whole
    path = write_parquet(tmp_path / "a.parquet", text=texts, other=[1] * 5)
    assert list(documents(path)) == whole


# --- several files


def test_folders_and_globs_are_read_in_sorted_order(write, tmp_path):
    write("b.txt", "b")
    write("a.jsonl", lines("a"))
    write("sub/c.py", "c = 1\n\nd = 2\n")
    write("d.md", "left out")
    write("F.TXT", "f")
    write_parquet(tmp_path / "aa.parquet", text=["aa"])
    assert list(documents(str(tmp_path))) == ["f", "a", "aa", "b", "c = 1\n\nd = 2\n"]
    assert list(documents(f"{tmp_path}/*.txt")) == ["b"]
    assert list(documents(f"{tmp_path}/[ab].*")) == ["a", "b"]
    write("tables/b.tsv", "text\nb\n")
    write("tables/a.csv", "text\na\n")
    assert list(documents(str(tmp_path / "tables"))) == ["a", "b"]


def test_what_is_left_out_is_named(write, tmp_path):
    for name in ("a.txt", "b.jsonl.gz", "sub/c.md", "sub/d.md", "LICENSE", ".hidden.md"):
        write(name, "text")
    assert sources.left_out(str(tmp_path)) == " (left out: 2 .md, 1 without a suffix, 1 .gz)"
    assert sources.left_out(f"{tmp_path}/*.txt") == sources.left_out("stdlib") == ""
    assert "left out: 1 .gz" in error(f"{tmp_path}/*.gz")


def test_tables_beside_other_text_are_a_question(write, tmp_path):
    """A license beside a table is not the data, nor is a list of sources beside texts."""
    write("my $data/LICENSE.txt", "All rights reserved.")
    write("my $data/train.csv", "text\none\ntwo\n")
    message = error(tmp_path / "my $data")
    assert len(sources.files(str(tmp_path / "my $data"))) == 2  # folders of tokens may know both
    assert "holds text (" in message and "LICENSE.txt) and tables (" in message
    flags = shlex.split(message.partition("as in ")[2])
    datasets = [flag.removeprefix("--dataset=") for flag in flags if flag != "or"]
    assert [list(documents(dataset)) for dataset in datasets] == [
        ["All rights reserved."],
        ["one", "two"],
    ]


def test_each_real_file_is_read_once(write, tmp_path):
    """Links to a folder above, of which each doubles the paths, and to another file."""
    write("here/a.txt", "a")
    write("here/sub/b.txt", "b")
    write("there/c.txt", "c")
    for name, target in (("0", "."), ("self", "."), ("sub/up", ".."), ("linked", "../there")):
        (tmp_path / "here" / name).symlink_to(target)
    (tmp_path / "here/also.txt").symlink_to("a.txt")
    brackets = write("run[1]/notes[2].txt", "found")  # a name, since it exists
    assert list(documents(brackets)) == list(documents(os.path.dirname(brackets))) == ["found"]
    assert list(documents(str(tmp_path / "here"))) == ["a", "c", "b"]
    assert list(documents(f"{tmp_path}/here/*.txt")) == ["a"]


def test_nothing_there(tmp_path):
    for name in ("missing.txt", "*.jsonl", "."):
        assert "no .txt, .jsonl, .parquet, .csv, .tsv or .py file" in error(tmp_path / name)


# --- the Hub

NO_HUB_NAMES = "my/stories.csv|stories.md|a.json|/data/c4|./c4|a/b/c|a b||~/texts|here".split("|")
HUB_NAMES = """
    allenai/c4:en wikitext:wikitext-103-raw-v1 wikimedia/wikipedia:20231101.en bigcode/stack-v1.2
""".split()


def test_the_name_of_a_hub_data_set_is_no_file(write, tmp_path, monkeypatch):
    """And a file of another kind, or what looks like a path, is never sought on the Hub."""
    write("here", "text")
    monkeypatch.chdir(tmp_path)
    for name in NO_HUB_NAMES:
        assert "file is there" in refusal(sources.files, name)
    for name in HUB_NAMES:
        assert sources.files(name) == []


def test_a_stream_gives_the_rows_in_order(write, tmp_path, monkeypatch):
    """Of a local folder that is laid out as on the Hub: no network is needed."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def stream(rows, subset=""):
        write("owner/name/train.jsonl", json_lines(*rows))
        return list(corpus.hub_documents("owner/name" + subset))

    texts = [f"document {i}" for i in range(100)]
    assert stream([{"text": t, "url": "x"} for t in texts]) == texts
    message = refusal(stream, [{"text": "x"}], ":de")
    assert "'owner/name:de'" in message and "SUBSET" in message
    assert "no field 'text', only ['content']" in refusal(stream, [{"content": "x"}])
