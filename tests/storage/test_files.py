"""storage/files.py: wrong content is kept apart from files that cannot be read; atomic writes."""

import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import PATIENCE, ROOT, refusal

from storage import files


@pytest.mark.parametrize(
    "content, cause",
    [
        (b"", "Expecting value"),
        (b"[1, 2]", "not a JSON object"),
        (b"\xff\xfe{}", "codec can't decode"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"step": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"host": "a"}', "no 'step'"),
        (b'{"step": "7"}', "'step' is '7'"),
        (b'{"step": true}', "'step' is True"),
        (b'{"step": 9223372036854775808}', "'step' is 9223372036854775808"),
    ],
)
def test_a_damaged_file_is_named_with_its_cause(tmp_path, content, cause):
    path = tmp_path / "meta.json"
    path.write_bytes(content)
    message = refusal(files.read_json, path, fields={"step": int}, fix="delete it")
    assert str(path) in message and cause in message and message.endswith(": delete it")
    assert len(message) < 400


def test_a_good_file_is_read(tmp_path):
    path = tmp_path / "a.json"
    byte_order_mark = b"\xef\xbb\xbf"  # as some editors write it
    path.write_bytes(byte_order_mark + b'{"step": 3, "seconds": 2, "lines": []}')
    fields = {"step": int, "seconds": float, "lines": list}
    assert files.read_json(path, fields=fields)["step"] == 3


def test_what_cannot_be_read_is_not_called_damaged(tmp_path):
    """And a pipe or a device is refused without waiting."""
    with pytest.raises(FileNotFoundError):
        files.read_json(tmp_path / "nothing.json")
    assert "is a folder" in refusal(files.read_json, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        assert "not a regular file" in refusal(files.read_json, tmp_path / name)


def test_a_huge_file_is_not_read(tmp_path):
    with open(tmp_path / "a.json", "wb") as file:
        file.truncate(files.MAX_JSON + 1)
    assert "expected at most" in refusal(files.read_json, tmp_path / "a.json")


def test_bad_lines_are_skipped_and_reported(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\n7\n{"no": 1}\n\n{"step": 2}\n{"step": 3')
    rows, bad = files.read_json_lines(path, {"step": int})
    assert rows == [{"step": 1}, {"step": 2}]
    assert [line.split(" is ")[0] for line in bad] == ["line 2", "line 3", "line 4", "line 7"]


@pytest.mark.parametrize(
    "last, bad",
    [
        (b'{"step": 3, "lo', []),  # cut off by a crash
        (b"\0" * 600, []),  # by a power failure
        (b'{"step": 3}', []),  # only the line break is missing
        (b'{"step": "3"}', ["line 3 is damaged ('step' is '3')"]),
        (b"7", ["line 3 is damaged (not a JSON object)"]),
    ],
)
def test_a_last_line_that_a_crash_cut_off_is_nothing_unusual(tmp_path, last, bad):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": -2}\n' + last)

    def fault(row):
        return "it is negative" if row["step"] < 0 else ""

    rows, problems = files.read_json_lines(path, {"step": int}, appended=True, fault=fault)
    is_good = last == b'{"step": 3}'
    assert [row["step"] for row in rows] == ([1, 3] if is_good else [1])
    assert problems == ["line 2 is damaged (it is negative)"] + bad

    path.write_bytes(path.read_bytes() + b"\n")  # now it is not the last line
    _, problems = files.read_json_lines(path, {"step": int}, appended=True)
    assert len(problems) == (0 if is_good else 1)


OUTSIDE = ["../a", "a/b", "/etc/passwd", "", ".", "..", "a\\b", "a\0b", None, 7, ["a"]]


def test_another_folder_is_not_entered(tmp_path):
    for name in OUTSIDE:
        assert "index.json names the file" in refusal(files.member, tmp_path, name, "index.json")
    assert files.member(tmp_path, "__0_0.distcp", "index.json") == tmp_path / "__0_0.distcp"


def test_tables(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes("\ufeffa,b\n1,ß\n\n2\n".encode())
    assert files.read_csv(path, ["a", "b"]) == [{"a": "1", "b": "ß"}, {"a": "2", "b": ""}]
    refused = {
        b"a,b\n1,2,3\n": "a row has more cells",
        b"a\n\xff\n": "is not a table of mine: 'utf-8' codec",
        b"": "no column a",
    }
    for content, message in refused.items():
        path.write_bytes(content)
        assert message in refusal(files.read_csv, path, ["a"], "a table of mine")


# --------------------------------------------------------------------------------------------------
# Writing


def test_a_written_file_has_the_usual_mode(tmp_path):
    """So that a group, say, can read it: not the mode of a private temporary file."""
    (tmp_path / "usual").write_text("")
    files.write_atomically(tmp_path / "a", b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def fail(_):
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)) as caught:
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a.json"]
    if isinstance(error, OSError):
        assert (caught.value.errno, caught.value.filename) == (28, str(path))


def test_a_link_is_replaced_and_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "a.json").symlink_to(precious)
    files.write_atomically(tmp_path / "a.json", b"new")
    assert (tmp_path / "a.json").read_bytes() == b"new" and precious.read_text() == "mine"
    assert not (tmp_path / "a.json").is_symlink()


def test_several_writers_at_once(tmp_path):
    """Each writes whole files while the others do; each read finds one of them."""
    path = tmp_path / "a"
    contents = [bytes([65 + writer]) * 200_000 for writer in range(4)]

    def write(writer):
        for _ in range(20):
            files.write_atomically(path, contents[writer])
            assert path.read_bytes() in contents

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert os.listdir(tmp_path) == ["a"]


HOLD = """
import sys, time
from storage import files
with files.locked(sys.argv[1], "it is held"):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_lock_names_its_owner_and_ends_with_it(tmp_path, capfd):
    """kill -9 frees it. Nothing of the owner stays in the file."""
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as holder:
        holder.stdout.readline()
        with ThreadPoolExecutor(1) as thread:

            def wait():
                with files.locked(path, "it is held") as is_locked:
                    return is_locked, path.read_bytes()

            waiting = thread.submit(wait)
            said = ""
            while not said.endswith("\n") and not waiting.done():
                said += capfd.readouterr().err
                time.sleep(0.01)
            assert not waiting.done()
            holder.kill()
            is_locked, content = waiting.result(PATIENCE)
    assert said == f"it is held by process {holder.pid} on {platform.node()}: waiting\n"
    assert is_locked and content == f"process {os.getpid()} on {platform.node()}".encode()
    assert path.read_bytes() == b""


def test_a_tail_goes_on_behind_what_has_no_line_breaks(tmp_path):
    """As zeros after a power cut. Lines that are complete come once, in pieces or all together."""
    path = tmp_path / "rows"
    path.write_bytes(b"a\nb\n" + bytes(25) + b"\nc\nd")
    tail = files.Tail(path)
    pieces = []
    while not pieces or pieces[-1]:
        pieces.append(tail.read(10)[1])
    assert b"".join(pieces) == b"a\nb\n" + bytes(25) + b"\nc\n" == files.Tail(path).read()[1]
    with path.open("ab") as file:
        file.write(b"e\n")
    assert tail.read(10) == (False, b"de\n")
