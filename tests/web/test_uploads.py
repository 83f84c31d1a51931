"""Uploads: each wrong line is named, and a file is kept as a whole or not at all."""

import json
import os
import shutil

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")  # with the library that the client needs

from finetuning import KEYS, client_of, lines, sent, upload

from web import files

GOOD = '{"prompt": "a", "response": "b"}'
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.fixture
def client(tmp_path):
    return client_of(tmp_path)


def test_a_file_is_kept_listed_read_and_deleted(client, tmp_path):
    content = lines(3) + b"\n" + json.dumps(CHAT).encode()
    answer = sent(client, content).json()
    assert (answer["bytes"], answer["filename"]) == (len(content), "my.jsonl")
    path = f"/v1/files/{answer['id']}"
    assert client.get(path).json() == answer
    assert client.get("/v1/files").json()["data"] == [answer]
    assert client.get(f"{path}/content").content == content
    assert client.delete(path).json()["deleted"]
    assert client.get("/v1/files").json()["data"] == []
    for answer in (client.get(path), client.get(f"{path}/content"), client.delete(path)):
        assert answer.status_code == 404
    assert os.listdir(tmp_path / "jobs/files") == []


WRONG = [  # lines, numbers of those that are wrong
    ([GOOD, "{", GOOD, "[1]"], [2, 4]),
    (["", GOOD, " ", '{"prompt": "a"}'], [4]),
    (['{"prompt": 1, "response": "b"}', GOOD.replace("}", ', "completion": "c"}')], [1, 2]),
    (
        [json.dumps(CHAT), '{"messages": []}', '{"messages": [{"role": "user", "content": "a"}]}'],
        [2, 3],
    ),
    (
        [json.dumps(CHAT | {"tools": [1]}), '{"prompt": "a", "prompt": "b", "response": "c"}'],
        [1, 2],
    ),
    ([GOOD, '{"prompt": "\xff", "response": "b"}'.encode("latin-1")], [2]),
    (["{"] * 150, list(range(1, 101))),
    ([], [1]),
    (["", "  "], [1]),
    ([GOOD.encode("utf-16-le")], [1]),
    # Checked by a process of its own:
    ([GOOD] * 9000 + ["{", "[" * 100_000, GOOD[:12] + "a" * 2**20 + GOOD[12:]], [9001, 9002, 9003]),
]


@pytest.mark.parametrize("rows, wrong", WRONG)
def test_each_wrong_line_is_named(client, tmp_path, rows, wrong):
    rows = [row if isinstance(row, bytes) else row.encode() for row in rows]
    answer = sent(client, b"\n".join(rows))
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert [fault["line"] for fault in error["lines"]] == wrong
    assert all(fault["reason"] and len(fault["reason"]) <= 200 for fault in error["lines"])
    assert f"line {wrong[0]}" in error["message"] and str(tmp_path) not in answer.text
    assert os.listdir(tmp_path / "jobs/files") == []


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_a_file_with_the_mark_of_its_encoding_is_read(client, encoding):
    """As PowerShell writes it."""
    check_stored(client, "München? ", encoding)
    cut_off = "\ufeffa\U0001f600".encode("utf-16-le")[:-2]
    assert sent(client, cut_off).status_code == 400


def test_uploads_alone_may_be_large(client):
    """This one is checked by a process of its own."""
    check_stored(client, "München? " * 100_000, "utf-16")
    large = {"model": "base", "training_file": "x" * 5 * 2**20}
    assert client.post("/v1/fine_tuning/jobs", json=large).status_code == 413


def check_stored(client, prompt, encoding) -> None:
    """A file of three lines can be used, whatever its encoding is."""
    text = (json.dumps({"prompt": prompt, "response": "ja"}, ensure_ascii=False) + "\n") * 3
    file_id = upload(client, text.encode(encoding))
    answer = client.get(f"/v1/files/{file_id}/content")
    assert answer.content.decode("utf-8-sig") == text


def test_range_and_a_folder_that_is_gone(client, tmp_path):
    file_id = upload(client, lines(3))
    answer = client.get(f"/v1/files/{file_id}/content", headers={"Range": "bytes=5-2"})
    assert answer.status_code == 200 and answer.content == lines(3)
    for name in ("files", "jobs"):
        shutil.rmtree(tmp_path / "jobs" / name)
    assert client.get("/v1/files").json()["data"] == []
    assert client.get("/v1/fine_tuning/jobs").json()["data"] == []
    upload(client, lines(3))
    body = {"model": "base", "training_file": upload(client, lines(20))}
    assert client.post("/v1/fine_tuning/jobs", json=body).status_code == 200


def test_lines_are_checked_with_the_template_that_is_served(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.content }}\n{% endfor %}"
    )
    client = client_of(tmp_path, chat_template=template)
    with_system = {"messages": [{"role": "system", "content": "x"}, *CHAT["messages"]]}
    answer = sent(client, "\n".join(map(json.dumps, [CHAT, with_system])))
    assert [fault["line"] for fault in answer.json()["error"]["lines"]] == [2]
    assert "no system" in answer.text and str(tmp_path) not in answer.text


def test_checking_has_an_end(client, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHECK_SECONDS", 0.01)
    answer = sent(client, lines(9000))
    assert answer.status_code == 400 and "takes more than 0.01 s" in answer.text
    assert os.listdir(tmp_path / "jobs/files") == []


FORM = {"Content-Type": "multipart/form-data; boundary=b"}
REFUSED = [  # arguments of a POST, status
    ({"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", b"x")}}, 400),
    ({"data": {"purpose": "fine-tune"}, "files": {"file": ("a.txt", b"x")}}, 400),
    ({"data": {"purpose": "fine-tune"}, "files": {"data": ("a.jsonl", b"x")}}, 400),
    ({"data": {"purpose": "fine-tune", "file": "x"}}, 400),
    ({"json": {"purpose": "fine-tune"}}, 400),
    ({"content": b"--b\r\n", "headers": {"Content-Type": "multipart/form-data"}}, 400),
    ({"content": b"x" * 99, "headers": FORM}, 400),
    ({"data": {"purpose": "fine-tune"}, "files": {"file": ("a.jsonl", b"x" * 9 * 2**20)}}, 413),
    ({"content": iter([b"x" * 2**20] * 9), "headers": FORM}, 413),
]


def test_what_is_no_upload(client, tmp_path):
    for arguments, status in REFUSED:
        answer = client.post("/v1/files", **arguments)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]
        assert os.listdir(tmp_path / "jobs/files") == []


def test_a_strange_or_damaged_file_hides_no_file(client, tmp_path):
    folder = tmp_path / "jobs/files"
    strange, damaged = (upload(client, lines(2)) for _ in range(2))
    (folder / strange / "meta.json").write_text('{"filename": "\\ud800", "bytes": 1, "lines": 1}')
    (folder / f"file-{'0' * 24}").symlink_to(tmp_path)
    (folder / damaged / "meta.json").write_text("{")
    (folder / damaged / "data.jsonl").unlink()
    listed = {file["id"]: file["status"] for file in client.get("/v1/files").json()["data"]}
    assert listed == {strange: "processed", damaged: "error"}
    data = folder / strange / "data.jsonl"
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    for name in (strange, damaged):
        assert client.get(f"/v1/files/{name}/content").status_code == 404
    assert client.delete(f"/v1/files/{damaged}").status_code == 200


def test_pages_of_a_list(client):
    names = [upload(client, lines(2)) for _ in range(5)]
    seen, after = [], None
    while True:
        page = client.get("/v1/files", params={"limit": 2} | ({"after": after} if after else {}))
        seen += [file["id"] for file in page.json()["data"]]
        after = page.json()["last_id"]
        if not page.json()["has_more"]:
            break
    assert seen == names[::-1]
    ascending = client.get("/v1/files?order=asc").json()["data"]
    assert [file["id"] for file in ascending] == names
    for wrong in ("limit=0", "limit=x", "order=up", "after=file-x", "after=%00"):
        assert client.get(f"/v1/files?{wrong}").status_code == 400


def test_no_name_leaves_the_folder(client):
    """Of files and jobs."""
    names = ["..", "%2e%2e", "..%2ffiles", "%00", "file-"]
    for name in [*names, *(f"{kind}-{'0' * 24}" for kind in ("file", "ftjob"))]:
        file, job = f"/v1/files/{name}", f"/v1/fine_tuning/jobs/{name}"
        for path in (file, f"{file}/content", job, f"{job}/events", f"{job}/checkpoints"):
            assert client.get(path).status_code in (404, 405)
        assert client.delete(file).status_code in (404, 405)
        assert client.post(f"{job}/cancel").status_code in (404, 405)


def test_a_key_is_needed(tmp_path):
    client = client_of(tmp_path, key="another-key-of-nobody")
    assert sent(client, lines(2)).status_code == 401
    assert client_of(tmp_path, key=KEYS[1]).get("/v1/files").status_code == 200


def test_a_full_disk_is_said(disk):
    client = client_of(disk, upload_bytes=64 * 2**20)
    answer = sent(client, lines(2) + b"\n" * 30 * 2**20)
    assert answer.status_code == 507 and "room" in answer.json()["error"]["message"]
    assert os.listdir(disk / "jobs/files") == []
    assert sent(client, lines(2)).status_code == 200
