"""corpus.py: text in any form becomes documents, in an order that is always the same; a mistake names the file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import corpus
from config import UserError
from corpus import documents

ROOT = Path(__file__).parent.parent


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
    return "".join(json.dumps({"text": t, "other": 1}) + "\n" for t in texts)


def write_parquet(path, **columns):
    parquet = pytest.importorskip("pyarrow.parquet")  # comes with `datasets`
    parquet.write_table(pytest.importorskip("pyarrow").table(columns), path)
    return str(path)


def error(dataset):
    """The message of the UserError that reading this data set raises; always one line."""
    with pytest.raises(UserError) as caught:
        list(documents(str(dataset)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
    assert all(p.endswith("\n") and p.strip(" \t") != p.rstrip() for p in pieces[:-1])  # each ends after a blank line
    assert all(len(p) > 16000 for p in pieces[:-1])


def test_many_paragraphs_make_several_documents(write):
    pieces = list(documents(write("a.txt", ("word " * 100 + "\n\n") * 400)))
    assert 10 <= len(pieces) <= 13 and max(map(len, pieces)) < 17000  # 200 kB, about 16 kB each


def test_bytes_that_are_not_utf8_do_not_stop_a_corpus(write):
    assert list(documents(write("a.txt", b"caf\xe9"))) == ["caf\ufffd"]


# --- .jsonl and .parquet


def test_jsonl_and_parquet_hold_one_document_a_row(write, tmp_path):
    texts = ["one", "zwei\n\nzwei", "<|endoftext|> is text here"]
    assert list(documents(write("a.jsonl", lines(*texts)))) == texts
    assert list(documents(write_parquet(tmp_path / "a.parquet", text=texts, other=[1, 2, 3]))) == texts


def test_empty_documents_are_left_out(write, tmp_path):
    texts = ["one", "", None, "two"]
    assert list(documents(write("a.jsonl", lines(*texts)))) == ["one", "two"]
    assert list(documents(write_parquet(tmp_path / "a.parquet", text=texts))) == ["one", "two"]


@pytest.mark.parametrize(
    "line",
    ['{"text": "half', '{"content": "x"}', '["text"]', "plain text", "7", '{"text": 5}', b"\xff\xfe"],
    ids=["half", "no field", "a list", "no json", "a number", "not text", "not utf-8"],
)
def test_a_bad_line_of_jsonl_is_named(write, line):
    path = write("a.jsonl", lines("fine").encode() + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    assert error(path) == f'{path}, line 2: expected one JSON object with a field "text"'


def test_a_parquet_file_without_text(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", content=["x"])
    assert error(path) == f"{path} has no column 'text' of strings, only {{'content': 'string'}}"


def test_a_parquet_column_that_holds_no_text(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", text=[1, 2])
    assert path in error(path)


@pytest.mark.parametrize("content", [b"", b"PAR1 but not really PAR1"], ids=["empty", "damaged"])
def test_a_damaged_parquet_file_is_named(write, content):
    pytest.importorskip("pyarrow")
    path = write("a.parquet", content)
    assert path in error(path)


# --- several files


def test_folders_and_globs_are_read_in_sorted_order(write, tmp_path):
    write("b.txt", "b")
    write("a.jsonl", lines("a"))
    write("sub/c.py", "c = 1\n\nd = 2\n")
    write("d.md", "left out")
    write_parquet(tmp_path / "aa.parquet", text=["aa"])
    assert list(documents(str(tmp_path))) == ["a", "aa", "b", "c = 1\n\nd = 2\n"]
    assert list(documents(f"{tmp_path}/*.txt")) == ["b"]
    assert list(documents(f"{tmp_path}/[ab].*")) == ["a", "b"]


def test_a_name_with_brackets_is_a_name_where_it_exists(write):
    path = write("run[1]/notes[2].txt", "found")
    assert list(documents(path)) == ["found"]
    assert list(documents(os.path.dirname(path))) == ["found"]


@pytest.mark.parametrize("name", ["missing.txt", "*.jsonl", "nowhere/*.parquet", "."])
def test_nothing_there(tmp_path, name):
    assert "no .txt, .jsonl or .parquet file is there" in error(tmp_path / name)


def run(*argv, **environment):
    return subprocess.run(
        [sys.executable, str(ROOT / "corpus.py"), *argv],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_an_empty_file_is_said_by_the_program(write):
    result = run(path := write("a.txt", ""))
    assert (result.returncode, result.stderr) == (2, f"error: dataset={path!r} holds no document\n")


def test_the_program_counts(write):
    result = run(path := write("a.jsonl", lines("one", "three")))
    assert result.returncode == 0
    assert result.stdout == f"{path}: 2 documents, 8 characters; the last begins 'three'\n"


# --- the Hub


def test_the_hub_cannot_be_reached(tmp_path):
    """A real process that is told to stay offline, with an empty cache."""
    pytest.importorskip("datasets")
    result = run("allenai/c4:en", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert result.returncode == 2
    wanted = "error: cannot reach the Hub for dataset='allenai/c4:en': use local files"
    assert result.stderr.startswith(wanted) and result.stderr.count("\n") == 1


@pytest.fixture
def stream(tmp_path, monkeypatch):
    """stream(rows, subset="") streams a data set laid out as on the Hub, from a local folder: no network."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def stream(rows, subset=""):
        (tmp_path / "owner" / "name").mkdir(parents=True)
        (tmp_path / "owner" / "name" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return list(corpus.hub_documents("owner/name" + subset))

    return stream


def test_a_stream_gives_the_rows_in_order(stream):
    texts = [f"document {i}" for i in range(100)]
    assert stream([{"text": t, "url": "x"} for t in texts]) == texts


def test_a_stream_without_text(stream):
    with pytest.raises(UserError, match=r"data set owner/name has no field 'text', only \['content'\]"):
        stream([{"content": "x"}])


def test_a_subset_that_is_not_there_is_one_line(stream):
    with pytest.raises(UserError, match="dataset='owner/name:de': .*SUBSET") as caught:
        stream([{"text": "x"}], ":de")
    assert "\n" not in str(caught.value)
