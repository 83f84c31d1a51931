"""Object stores: uploads and downloads under faults, conditional writes, one line for each error.

Against a real S3 server; where it says so a folder.
"""

import os
import random
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import store_server
from conftest import refusal, slowly

import program
from storage import object_store
from storage.object_store import StoreError, open_store

pytest.importorskip("obstore", reason="object stores need obstore: see requirements-extra.txt")
pytestmark = pytest.mark.usefixtures("short_pauses")


@pytest.fixture
def short_pauses(monkeypatch):
    """Ours are a tenth as long. The client, whose pauses grow, repeats a request once."""
    monkeypatch.setattr(object_store, "PAUSE", 0.05)
    monkeypatch.setattr(object_store, "RETRIES", 1)


def write(path, size: int) -> bytes:
    content = random.Random(size).randbytes(size)
    path.write_bytes(content)
    return content


@pytest.mark.parametrize("size", [0, 1000, slowly(20_000_000)])
@pytest.mark.parametrize("kind", ["s3", "file"])
def test_a_file_goes_up_and_comes_down(kind, size, tmp_path, request):
    url = request.getfixturevalue("store").url if kind == "s3" else f"file://{tmp_path}/store"
    there = open_store(url)
    content = write(tmp_path / "a", size)
    found = there.upload(tmp_path / "a", "x/a")
    assert found == [size, zlib.crc32(content)]
    assert there.sizes("x") == {"a": size}
    assert there.sizes() == {"x/a": size}
    there.download("x/a", tmp_path / "b", *found)
    assert (tmp_path / "b").read_bytes() == content
    if size:
        assert there.get("x/a", 10, 20) == content[10:20]
    there.delete("x/a")
    there.delete("x/a")
    assert there.sizes("x") == {}
    with pytest.raises(FileNotFoundError):
        there.get("x/a")
    with pytest.raises(FileNotFoundError):
        there.download("x/a", tmp_path / "c", 1)


FAULTS = ["503", "refuse", "cut", "corrupt", "lose", 0.3, store_server.ABORTED]


@pytest.mark.parametrize(
    "fault, size",
    [
        *((fault, 50_000) for fault in FAULTS),
        *(slowly(fault, 20_000_000) for fault in ("cut", "corrupt", "lose")),  # in parts
    ],
)
def test_faults_change_nothing(store, fault, size, tmp_path):
    """Damaged bodies are refused on the way up, and found on the way down."""
    there = open_store(store.url)
    content = write(tmp_path / "a", size)
    seen = store.proxy.requests
    store.proxy.fault = lambda method, path: fault if len(seen) % 7 == 1 else None
    found = there.upload(tmp_path / "a", "a")
    assert seen
    seen.clear()
    there.download("a", tmp_path / "b", *found)
    assert len(seen) == 2 or fault == 0.3
    assert (tmp_path / "b").read_bytes() == content


def test_a_download_goes_on_where_it_stopped(store, tmp_path):
    there = open_store(store.url)
    content = write(tmp_path / "a", 1_000_000)
    found = there.upload(tmp_path / "a", "a")
    (tmp_path / "b.part").write_bytes(content[:999_990])
    sent = []
    blocks = there.blocks
    there.blocks = lambda *args: (sent.append(b) or b for b in blocks(*args))
    there.download("a", tmp_path / "b", *found)
    assert [len(block) for block in sent] == [10]
    (tmp_path / "c.part").write_bytes(b"wrong" + content[5:999_990])
    there.download("a", tmp_path / "c", *found)
    assert (tmp_path / "c").read_bytes() == content


def test_what_changed_on_this_disk_is_not_uploaded(store, tmp_path, monkeypatch):
    there = open_store(store.url)
    monkeypatch.setattr(object_store, "PART", 5 << 20)
    for size in (1000, 6_000_000):
        write(tmp_path / "a", size)
        assert "damaged on this disk" in refusal(there.upload, tmp_path / "a", "a", [size, 1])
    assert there.sizes() == {}


def test_what_is_not_as_listed_is_not_taken(store, tmp_path):
    there = open_store(store.url)
    there.put("a", b"12345")
    for size, crc in [(5, 1), (4, zlib.crc32(b"12345")), (6, zlib.crc32(b"12345"))]:
        with pytest.raises(StoreError):
            there.download("a", tmp_path / "a", size, crc)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("kind, fault", [("file", None), ("s3", "lose"), slowly("s3", "503")])
def test_of_many_who_create_one_wins(kind, fault, store, tmp_path):
    """Also where the answers are lost: the client repeats the request and finds its own."""
    url = store.url if kind == "s3" else f"file://{tmp_path}/store"
    there = open_store(url)
    chance = random.Random(0)
    store.proxy.fault = lambda method, path: fault if chance.random() < 0.2 else None
    names = [b"%d" % n for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        has_won = list(pool.map(lambda name: there.create("lease", name), names))
    assert has_won.count(True) == 1
    assert there.get("lease") == names[has_won.index(True)]


def test_an_answer_that_is_lost_locks_nobody_out(store):
    """The client repeats the request, and hears that there is such an object: its own."""
    there, seen = open_store(store.url), store.proxy.requests
    store.proxy.fault = lambda method, path: "lose" if len(seen) == 1 else None
    assert there.create("lease", b"mine")
    assert len(seen) == 3  # lost, refused, read back
    assert not there.create("lease", b"other")


@pytest.mark.parametrize(
    "variables, words",
    [
        ({"AWS_ENDPOINT_URL": "localhost:9000"}, "AWS_ENDPOINT_URL is not an address"),
        ({"AWS_ENDPOINT": ""}, "AWS_ENDPOINT is not an address"),
        ({"AWS_REGION": "a b"}, "AWS_REGION is not a region"),
        ({"AWS_SECRET_ACCESS_KEY": "another"}, "wrong secret key"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "does not know this access key"),
        (store_server.READER, "lack permission"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "does not answer"),
    ],
)
def test_each_cause_has_its_line(store, variables, words, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    message = refusal(lambda: open_store(store.url).put("a", b"content"))
    assert words in message
    for secret in filter(None, (*variables.values(), "127.0.0.1", "another")):
        assert secret not in message


REFUSALS = [
    ((400, "ExpiredToken", "The provided token has expired."), "credentials have expired"),
    ((403, "QuotaExceeded", "The quota is used up."), "QuotaExceeded: The quota is used up."),
    ((405, "MethodNotAllowed", "Not on this resource."), "MethodNotAllowed: Not on this resource."),
]


@pytest.mark.parametrize("fault, words", REFUSALS)
def test_what_does_not_pass_is_not_waited_for(store, fault, words, tmp_path):
    """The store's own reason is said after one request."""
    there = open_store(store.url, tries=30)
    store.proxy.fault = lambda method, path: fault
    (tmp_path / "a").write_bytes(b"1")
    for act in (
        lambda: there.get("a"),
        lambda: there.put("a", b"1"),
        lambda: there.create("a", b"1"),
        lambda: there.upload(tmp_path / "a", "a"),
        there.sizes,
    ):
        store.proxy.requests.clear()
        with pytest.raises(StoreError, match=words) as error:
            act()
        assert not error.value.passes and len(store.proxy.requests) == 1


def test_a_conflict_is_no_object(store):
    """Of all requests: it is tried again. A conditional write may find that another has won."""
    there, seen = open_store(store.url), store.proxy.requests
    faults = [store_server.ABORTED, store_server.CONFLICT]
    store.proxy.fault = lambda method, path: faults[len(seen) % 2] if len(seen) < 3 else None
    for act in (
        lambda: there.create("a", b"1"),
        lambda: there.put("a", b"1") or True,
        lambda: there.get("a") == b"1",
        lambda: there.sizes() == {"a": 1},
        lambda: not there.create("a", b"2"),
        lambda: there.delete("a") or True,
    ):
        seen.clear()
        assert act() and len(seen) > 2
    store.proxy.fault = lambda method, path: store_server.ABORTED
    with pytest.raises(StoreError, match="OperationAborted") as error:
        there.sizes()
    assert error.value.passes


def test_a_patient_store_says_once_that_it_waits(store, monkeypatch, capsys):
    monkeypatch.setattr(object_store, "LONGEST_PAUSE", 0.1)
    there, seen = open_store(store.url, tries=12), store.proxy.requests
    store.proxy.fault = lambda method, path: "503" if len(seen) < 10 else None
    assert there.sizes() == {}
    assert len(seen) == 10
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and "asks for fewer requests. Trying again" in err
    assert out == f"{store.url} answers again\n"


def test_a_name_that_the_client_cannot_read_is_named():
    """One such object makes lists of all others fail. SeaweedFS has none: obstore's words."""
    for text, name in (
        ('Path "run//x" contained empty path segment', "run//x"),
        ('Error parsing Path "run/./x": Encountered illegal character sequence', "run/./x"),
    ):
        text = f"Encountered object with invalid path: {text}"
        assert f"{name!r}: rename or delete it" in object_store.cause(text)
        assert not object_store.may_pass(text)


def test_a_bucket_that_is_not_there(store, tmp_path):
    there = open_store("s3://nowhere/run")
    (tmp_path / "a").touch()
    tries = [(there.get, "a"), (there.put, "a", b""), (there.sizes,)]
    tries += [(there.upload, tmp_path / "a", "a"), (there.download, "a", tmp_path / "b", 5)]
    for function, *args in tries:
        assert "there is no such bucket" in refusal(function, *args)


@pytest.mark.parametrize(
    "url, words",
    [
        ("ftp://host/a", "expected s3://bucket/path"),
        ("runs/my1b", "expected s3://bucket/path"),
        ("s3://", "expected s3://bucket/path"),
        ("file://relative", "expected s3://bucket/path"),
        ("s3://key:secret@bucket/a", "without keys"),
        ("s3://bucket/a?secret=1", "without keys"),
        ("s3://bucket/../b", "without keys"),
    ],
)
def test_an_address_that_is_none(url, words):
    message = refusal(open_store, url)
    assert words in message
    assert "secret" not in message


def test_without_the_client(monkeypatch):
    monkeypatch.setitem(os.sys.modules, "obstore", None)
    assert program.EXTRA in refusal(open_store, "s3://bucket/a")


def test_without_credentials_nobody_is_asked(monkeypatch):
    """Only the words: the client would ask the address of a cloud's machine for them."""
    text = "Error performing PUT http://169.254.169.254/latest/api/token in 1s"
    assert "AWS_ACCESS_KEY_ID" in object_store.cause(text)
