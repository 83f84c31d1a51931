"""text/corpus.py: any form of text becomes documents, always in one order; errors name the file."""

import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE, json_lines, refusal, rooms_on_path, words_of

from program import UserError
from text import corpus
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
    assert texts == list(documents("stdlib"))
    assert len(texts) > 300 and sum(map(len, texts)) > 5e6
    assert len(set(texts)) > 0.9 * len(texts)
    parts = {part for path in corpus.stdlib_files() for part in Path(path).parts}
    assert not parts & {"test", "idle_test", "site-packages"} or "site-packages" in sys.prefix


# --- .txt


def test_txt_is_split_at_end_of_text(write):
    path = write("a.txt", "one\n\nstill one\n<|endoftext|>\ntwo<|endoftext|>  \n<|endoftext|>three")
    assert list(documents(path)) == ["one\n\nstill one", "two", "three"]


@pytest.mark.parametrize(
    "text",
    [
        "one short note",
        "".join(f"paragraph {i}: " + "word " * (i % 700) + "\n\n" for i in range(200)),
        "no blank line anywhere " * 5000,
        "\n \n\t\n" * 3000 + "x" * 40000 + "\n\n" + "y" * 20000 + "\n",
        "größe – 東京\n\n" * 4000,
    ],
    ids=["short", "paragraphs", "one long line", "blank lines", "not ascii"],
)
def test_txt_without_end_of_text_is_cut_at_blank_lines_and_loses_nothing(write, text):
    pieces = list(documents(write("a.txt", text)))
    assert "".join(pieces) == text
    for piece in pieces[:-1]:
        assert piece.endswith("\n") and len(piece) > 16000
        if text.startswith(("paragraph", "größe")):
            assert piece.endswith("\n\n") and len(piece) < 20_500  # a blank line is near


# --- encodings

BAD = {  # content, the byte that the message names, its offset
    "Latin-1": (b"one\ntwo\ncaf\xe9 noir\n", "0xe9", 11),
    "Latin-1 after a BOM": (b"\xef\xbb\xbfcaf\xe9", "0xe9", 6),
    "cut in a letter": ("größe".encode()[:3], "0xc3", 2),
    "zip": (b"PK\x03\x04\x14\0\0\0\x08\xf3", "0x00", 5),
    "png": (b"\x89PNG\r\n\x1a\n\0\0", "0x89", 0),
    "far behind": (b"line\n" * 100_000 + b"\xff", "0xff", 500_000),
}


@pytest.mark.parametrize("suffix", ["txt", "py", "jsonl", "csv", "tsv"])
@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_utf8_is_named_with_its_place(write, bad, suffix):
    """The offset is that in the file, although tables and .jsonl are read line by line."""
    good_lines = {"jsonl": lines("fine").encode(), "csv": b"text\n", "tsv": b"text\n"}
    before = good_lines.get(suffix, b"")
    content, byte, offset = BAD[bad]
    mark = content[:3] if content.startswith(b"\xef\xbb\xbf") else b""
    path = write(f"my $folder/it's a.{suffix}", mark + before + content[len(mark) :])
    message = error(path)
    if suffix == "jsonl" and "line 2: expected one JSON" in message:
        return  # its line ends before the bad byte
    assert message.startswith(path)
    assert f"not UTF-8 text: byte {byte} at offset {offset + len(before):,}" in message
    while "UTF-8" in message:
        message = after_its_command(message, path)
    if bad == "Latin-1" and suffix in ("txt", "py"):
        assert list(documents(path)) == ["one\ntwo\ncafé noir\n"]


def after_its_command(message, path):
    """The message after the command in this one was run; "" if the file can be read then."""
    command = re.search("(iconv|tr) .*", message)[0]
    before = Path(path).read_bytes()
    subprocess.run(["sh", "-c", command], check=True, stderr=subprocess.DEVNULL)
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
    assert Path(path).read_bytes() != before
    try:
        list(documents(path))
    except UserError as next_error:
        return str(next_error)
    return ""


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-32", "UTF-16-LE", "UTF-16-BE"])
@pytest.mark.parametrize("suffix", ["txt", "jsonl", "csv"])
def test_another_unicode_is_named(write, encoding, suffix):
    """With its mark or without, and the command of the message converts it."""
    content = {"txt": "größe, and so on", "csv": "text\ngröße", "jsonl": lines("größe, and more")}
    before = list(documents(write(f"$it's/a.{suffix}", content[suffix])))
    path = write(f"$it's/a.{suffix}", content[suffix].encode(encoding))
    message = error(path)
    name = encoding.replace("16-", "16")
    assert message.startswith(f"{path} is {name}, not UTF-8") and f"iconv -f {name} -t" in message
    assert after_its_command(message, path) == ""
    assert list(documents(path)) == before


def test_zero_bytes_in_a_text_are_no_other_unicode(write):
    path = write("a.txt", b"a\0b and others")
    assert after_its_command(error(path), path) == ""
    assert list(documents(path)) == ["ab and others"]


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.txt", "größe"),
        ("a.py", "größe"),
        ("a.jsonl", lines("größe")),
        ("a.csv", "text\ngröße"),
    ],
)
def test_a_byte_order_mark_is_no_text(write, name, content):
    assert list(documents(write(name, b"\xef\xbb\xbf" + content.encode()))) == ["größe"]


def test_python_s_own_library_is_taken_as_it_is(write, monkeypatch):
    """The demo needs it on every machine, even if one of its files is in Latin-1."""
    path = write("a.py", b"\xef\xbb\xbf# caf\xe9\r\nx = 1\r")
    monkeypatch.setattr(corpus, "stdlib_files", lambda: [path])
    assert list(documents("stdlib")) == ["\ufeff# caf\ufffd\nx = 1\n"]


def test_line_ends_are_one_kind(write):
    assert list(documents(write("a.txt", b"one\r\ntwo\rthree\n"))) == ["one\ntwo\nthree\n"]


# --- .csv and .tsv


def test_a_table_holds_one_document_a_row(write):
    big = "word " * 60_000  # 300 kB: csv's own limit is 128
    content = f'id,text,more\n1,one,x\n2,"zwei, ""2""\n\nzwei",y\n\n3,,z\n4,"{big}",\n'
    texts = ["one", 'zwei, "2"\n\nzwei', big]
    assert list(documents(write("a.csv", content))) == texts
    assert list(documents(write("a.tsv", "text\tid\none\t1\ntwo, too\t2\n"))) == ["one", "two, too"]


@pytest.mark.parametrize(
    "content, message",
    [
        ("id;text\n1;one\n", "no column 'text', only ['id;text']"),
        ("", "no column 'text'"),
        ("id,text\n1,one\n2\n", "line 3: no column 'text'"),
        ('id,text\n1,"one\n2,two\n', "line 3: unexpected end"),
        ('id,text\n1,"one"two\n', "line 2: ',' expected"),
    ],
)
def test_a_bad_table_is_named(write, content, message):
    path = write("a.csv", content)
    assert error(path).startswith(path) and message in error(path)


def test_a_parquet_file_with_other_bytes_than_text(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    bad = pyarrow.array([b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    path = write_parquet(tmp_path / "a.parquet", text=bad)
    assert error(path).startswith(f"{path} is not a complete .parquet file: ")


# --- .jsonl and .parquet


def test_jsonl_and_parquet_hold_one_document_a_row(write, tmp_path):
    texts = ["one", "zwei\n\nzwei", "<|endoftext|> is text here"]
    assert list(documents(write("a.jsonl", lines(*texts)))) == texts
    path = write_parquet(tmp_path / "a.parquet", text=texts, other=[1, 2, 3])
    assert list(documents(path)) == texts


def test_empty_documents_are_left_out(write, tmp_path):
    texts = ["one", "", None, "two"]
    blank = "\n \r\n".join(lines(text) for text in texts) + "\n"
    assert list(documents(write("a.jsonl", blank))) == ["one", "two"]
    assert list(documents(write_parquet(tmp_path / "a.parquet", text=texts))) == ["one", "two"]


@pytest.mark.parametrize(
    "line",
    ['{"text": "half', '{"content": "x"}', '["text"]', "7", '{"text": 5}', "null", "[" * 10**5],
    ids=["half", "no field", "a list", "a number", "not text", "null", "deep"],
)
def test_a_bad_line_of_jsonl_is_named(write, line):
    path = write("a.jsonl", lines("fine") + line + "\n")
    assert error(path).startswith(f"{path}, line 2: expected one JSON object")


@pytest.mark.parametrize("columns", [{"content": ["x"]}, {"text": [1, 2]}], ids=str)
def test_a_parquet_file_without_text(tmp_path, columns):
    path = write_parquet(tmp_path / "a.parquet", **columns)
    assert f"{path} has no column 'text' of strings" in error(path)


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
    assert corpus.left_out(str(tmp_path)) == " (left out: 2 .md, 1 without a suffix, 1 .gz)"
    assert corpus.left_out(f"{tmp_path}/*.txt") == corpus.left_out("stdlib") == ""
    assert "left out: 1 .gz" in error(f"{tmp_path}/*.gz")


def test_tables_beside_other_text_are_a_question(write, tmp_path):
    """A license beside a table is not the data, nor is a list of sources beside texts."""
    write("my $data/LICENSE.txt", "All rights reserved.")
    write("my $data/train.csv", "text\none\ntwo\n")
    message = error(tmp_path / "my $data")
    assert len(corpus.files(str(tmp_path / "my $data"))) == 2  # folders of tokens may know both
    assert "tables (" in message and "train.csv) and other text (" in message
    flags = shlex.split(message.partition("as in ")[2])
    datasets = [flag.removeprefix("--dataset=") for flag in flags if flag != "or"]
    assert [list(documents(dataset)) for dataset in datasets] == [
        ["one", "two"],
        ["All rights reserved."],
    ]


def test_each_real_file_is_read_once(write, tmp_path):
    """Links to a folder above, of which each doubles the paths, and to another file."""
    write("here/a.txt", "a")
    write("here/sub/b.txt", "b")
    write("there/c.txt", "c")
    for name, target in (("0", "."), ("self", "."), ("sub/up", ".."), ("linked", "../there")):
        (tmp_path / "here" / name).symlink_to(target)
    (tmp_path / "here/also.txt").symlink_to("a.txt")
    assert list(documents(str(tmp_path / "here"))) == ["a", "c", "b"]
    assert list(documents(f"{tmp_path}/here/*.txt")) == ["a"]


def test_a_name_with_brackets_is_a_name_where_it_exists(write):
    path = write("run[1]/notes[2].txt", "found")
    assert list(documents(path)) == ["found"]
    assert list(documents(os.path.dirname(path))) == ["found"]


@pytest.mark.parametrize("name", ["missing.txt", "*.jsonl", "nowhere/*.parquet", "."])
def test_nothing_there(tmp_path, name):
    assert "no .txt, .jsonl, .parquet, .csv, .tsv or .py file is there" in error(tmp_path / name)


@pytest.mark.parametrize("name", ["my/stories.md", "stories", "stories.json", "my/stories.txt.gz"])
def test_a_file_of_another_kind_is_never_sought_on_the_hub(write, tmp_path, monkeypatch, name):
    write(name, "text")
    monkeypatch.chdir(tmp_path)
    assert "file is there" in refusal(corpus.files, name)


NO_HUB_NAMES = "my/stories.csv|stories.md|a.json|/data/c4|./c4|a/b/c|a b||~/texts".split("|")
HUB_NAMES = """
    allenai/c4:en wikitext:wikitext-103-raw-v1 wikimedia/wikipedia:20231101.en bigcode/stack-v1.2
""".split()


@pytest.mark.parametrize("name", NO_HUB_NAMES)
def test_what_cannot_be_the_name_of_a_hub_data_set_is_an_error_at_once(name):
    assert "file is there" in refusal(corpus.files, name)


@pytest.mark.parametrize("name", HUB_NAMES)
def test_the_name_of_a_hub_data_set_is_no_file(name):
    assert corpus.files(name) == []


def run(*argv, **environment):
    return subprocess.run(
        [sys.executable, *words_of("text.corpus"), *argv],
        env=rooms_on_path() | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_an_empty_file_is_said_by_the_program(write):
    result = run(write("a.txt", ""))
    assert result.returncode == 2 and "holds no document" in result.stderr


# --- the Hub


@pytest.fixture
def stream(tmp_path, monkeypatch):
    """stream(rows, subset="") streams a data set from a local folder, laid out as on the Hub.

    No network is needed.
    """
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def stream(rows, subset=""):
        folder = tmp_path / "owner" / "name"
        folder.mkdir(parents=True)
        (folder / "train.jsonl").write_text(json_lines(*rows))
        return list(corpus.hub_documents("owner/name" + subset))

    return stream


def test_a_stream_gives_the_rows_in_order(stream):
    texts = [f"document {i}" for i in range(100)]
    assert stream([{"text": t, "url": "x"} for t in texts]) == texts


def test_a_stream_without_text(stream):
    assert "no field 'text', only ['content']" in refusal(stream, [{"content": "x"}])


def test_a_subset_that_is_not_there_is_one_line(stream):
    message = refusal(stream, [{"text": "x"}], ":de")
    assert "'owner/name:de'" in message and "SUBSET" in message


def test_a_parquet_file_that_says_one_text_many_times_takes_little_memory(tmp_path):
    """400 bytes on disk, which as 60,000 separate texts would take 12 GB."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    indices = pyarrow.array([0] * 60_000, pyarrow.int32())
    text = pyarrow.DictionaryArray.from_arrays(indices, ["x" * 200_000])
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": text}), path, store_schema=False, compression="zstd")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    documents = corpus.file_documents(str(path))
    assert [len(next(documents)) for _ in range(3)] == [200_000] * 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB
