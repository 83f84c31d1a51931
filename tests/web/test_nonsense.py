"""Random requests that are wrong in some way: each gets an answer, and harms no other one."""

import collections
import copy
import http.client
import json
import os
import random
import socket

import pytest
from conftest import PATIENCE
from servers import ASK, CHAT, KEY, Served, served_folder, wait_for

h11 = pytest.importorskip("h11")
pytest.importorskip("fastapi")

pytestmark = pytest.mark.slow

MOST_BYTES = 4 * 2**20  # of a body
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, "b"]}},
    "required": ["a"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
SETTINGS = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3, "stop": ["ab", "c"], "n": 2}
METHOD = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}}
POSTS = {
    "/v1/completions": [
        ASK | SETTINGS | {"logprobs": 2, "echo": False},
        ASK | {"model": "anna", "prompt": ["a", "b"], "stream": True, "guided_regex": "[a-f]{2}"},
        ASK | {"prompt": [1, 2, 3], "guided_json": SCHEMA, "max_tokens": 30},
        ASK | {"prompt": [[1, 2], [3]], "stream": True, "stream_options": {"include_usage": True}},
        ASK | {"stream": True, "user": "x", "store": False, "frequency_penalty": 0},
    ],
    "/v1/chat/completions": [
        CHAT | SETTINGS | {"logprobs": True, "top_logprobs": 2},
        CHAT | {"stream": True, "response_format": FORM, "max_completion_tokens": 30},
        CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        CHAT | {"stream": True, "user": "x", "metadata": {}, "tools": []},
    ],
    "/v1/load_lora_adapter": [{"lora_name": "carl", "lora_path": "anna"}],
    "/v1/unload_lora_adapter": [{"lora_name": "carl"}],
    "/v1/fine_tuning/jobs": [
        {"model": "run", "training_file": "FILE", "suffix": "a", "seed": 1, "metadata": {"a": "b"}},
        {"model": "run", "training_file": "FILE", "method": METHOD, "validation_file": "FILE"},
        {"model": "run", "training_file": "FILE", "hyperparameters": {"n_epochs": "auto"}},
    ],
    "/v1/fine_tuning/jobs/preview": [{"model": "run", "training_file": "none"}],
    **{f"/v1/fine_tuning/jobs/JOB/{verb}": [{"a": 1}] for verb in ("cancel", "pause", "resume")},
}
GETS = ["/v1/models", "/v1/models/anna", "/health", "/metrics", "/openapi.json"]
GETS += ["/v1/files", "/v1/files/FILE", "/v1/files/FILE/content", "/v1/files?limit=2&after=FILE"]
GETS += [f"/v1/fine_tuning/jobs{end}" for end in ("", "/JOB", "/JOB/events", "/JOB/checkpoints")]
GETS += ["/v1/fine_tuning/jobs/JOB/log", "/v1/fine_tuning/jobs/JOB/events?after=JOB&limit=2"]
GETS += ["/api/adapters/anna", "/api/adapters/run"]
UPLOAD = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--x\r\n'
    b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    b'{"prompt": "a", "response": "b"}\n{"prompt": "a", "response": "b"}\r\n--x--\r\n'
)
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "x"]
PATHS = ["/", "*", "//", "/..", "/v1/../health", "/%00", "/v1/models/%ff", "/v1/models/a%2f..%2fb"]
PATHS += ["/docs", "/v1/completions/", "http://[/", "/?" + "a" * 3000, "/v1/models/" + "é" * 9]


class Raw(str):
    """Text that stands in the body as it is, which no JSON of ours would hold."""


def nested(depth, value=1):
    for _ in range(depth):
        value = [value] if depth % 2 else {"a": value}
    return value


VALUES = [
    *[None, True, False, 0, 1, 2, -1, 127, 2**31, 2**63, 10**40, 0.0, 1.0, 0.7, -1e308],
    *["", "x", "run", "anna", "json_object", "text", "\0", "\ud800", "é" * 50, "x" * 5000],
    *[[], {}, [[]], [{}], [None], [0], ["x"] * 3, [0] * 20_000, ["a"] * 3000, {"a": {"a": {}}}],
    *[nested(9), nested(50), nested(3, "x"), "(" * 99, {"": ""}, {"type": "text"}, {"$ref": "#"}],
    *map(Raw, ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "01", "'a'", '"\\x"', ""]),
    *map(Raw, ["[" * 2000, "[" * 99_999 + "]" * 99_999, '"\ud83d"', '{"a":1,"a":2}', "1,,2"]),
]
NAMES = ["", "N", "tools", "suffix", "best_of", "logit_bias", "a\0"]
BYTES = [b"\xff", b"\0", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"}", b'"', b"\\u", b"\r\n\r\n", b","]
HEADERS = {
    "Content-Type": ["", "text/plain", "application/json; charset=x", "multipart/form-data"],
    "Authorization": ["", "Bearer", f"Basic {KEY}", "Bearer \xff\xfe", f"bearer  {KEY} "],
    "Host": ["", "[", "evil.example", "localhost:x", "127.0.0.1"],
    "Origin": ["null", "http://[", "http://localhost", "\xe9"],
    "X-Request-ID": ["", "a b", "x" * 300, "\xff"],
    "Expect": ["100-continue", "x"],
    "Upgrade": ["websocket", "h2c"],
    "Connection": ["Upgrade", "close", "keep-alive", "\xff"],
    "Transfer-Encoding": ["chunked", "gzip", "chunked, chunked", "identity"],
    "Content-Length": ["0", "-1", "x", "7", "99999999999999999999", "1, 2"],
    "Content-Encoding": ["gzip"],
    "Accept": ["text/html", "\0"],
    "A" * 70_000: ["x"],
    "a b": ["x"],
}


# --- Mutations


def places(value, path=()):
    """The path of each value within a body."""
    yield path
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list) else []
    for key, inner in items[:50]:
        yield from places(inner, (*path, key))


def changed(rng, body):
    """A body in which one value is another one, is missing, or has another name."""
    *path, last = rng.choice([path for path in places(body) if path])
    place = body
    for key in path:
        place = place[key]
    how = rng.random()
    if how < 0.7:
        place[last] = copy.deepcopy(rng.choice(VALUES))  # a second change may be within it
    elif how < 0.8:
        del place[last]
    elif how < 0.9 and isinstance(place, dict):
        place[rng.choice(NAMES)] = place[last]
    else:
        place[last] = [place[last]] * rng.choice([0, 1, 2, 300])
    return body


def written(value) -> str:
    """A body as text."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def spoiled(rng, content: bytes) -> bytes:
    """A body that is cut, or has other bytes in it."""
    place = rng.randrange(len(content) + 1)
    tail = rng.choice([0, 0, place, min(place + 1, len(content))])
    return content[:place] + rng.choice([b"", *BYTES]) + (content[tail:] if tail else b"")


def random_request(rng, names) -> bytes:
    """A request as it is sent. names: what stands for FILE and JOB in it."""
    path, method, content = rng.choice(GETS), "GET", b""
    kind = "application/json"
    if rng.random() < 0.08:
        path, method, content, kind = "/v1/files", "POST", UPLOAD, "multipart/form-data; boundary=x"
    elif rng.random() < 0.85:
        path, method = rng.choice([*POSTS, "/v1/completions", "/v1/chat/completions"]), "POST"
        body = json.loads(json.dumps(rng.choice(POSTS[path])))
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            body = changed(rng, body)
            if not body:
                break
        content = written(body).encode("utf-8", "surrogatepass")
    for name, value in names.items():
        path, content = path.replace(name, value), content.replace(name.encode(), value.encode())
    what = rng.random()
    if what < 0.15 or kind != "application/json" and what < 0.8:
        content = spoiled(rng, content)
    elif what < 0.2:
        method = rng.choice(METHODS)
    elif what < 0.25:
        path = rng.choice(PATHS)
    headers = {
        "Host": "localhost",
        "Content-Type": kind,
        "Authorization": f"Bearer {KEY}",
        "Content-Length": str(len(content)),
        "Connection": "close",
    }
    for _ in range(rng.choice([0] * 6 + [1, 2])):
        name = rng.choice([*HEADERS])
        headers[name] = rng.choice([None, *HEADERS[name]])
    lines = [f"{method} {path} HTTP/{rng.choice(['1.1'] * 60 + ['1.0', '2', '0.9'])}"]
    lines += [f"{name}: {value}" for name, value in headers.items() if value is not None]
    head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
    message = head + content[:MOST_BYTES]
    if rng.random() < 0.05:
        message = message[: rng.randrange(1, len(message))]
    return message


# --- Answers


def end_of(message: bytes) -> str:
    """Whether a message is a whole request, only a part of one, or no HTTP at all."""
    reader = h11.Connection(h11.SERVER)
    reader.receive_data(message)
    try:
        while type(event := reader.next_event()) in (h11.Request, h11.Data):
            pass
    except h11.RemoteProtocolError:
        return "no HTTP"
    return "whole" if isinstance(event, h11.EndOfMessage) else "part"


def answer_to(port: int, message: bytes):
    """(status, headers, body) that the server answers; None if it answers nothing."""
    method = message.partition(b" ")[0].decode("latin-1")
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        try:
            client.sendall(message)
            if end_of(message) == "part":
                client.shutdown(socket.SHUT_WR)
            answer = http.client.HTTPResponse(client, method=method)
            answer.begin()
            return answer.status, answer.headers, answer.read()
        except (ConnectionError, http.client.RemoteDisconnected):
            return None


def checked(text: bytes):
    """JSON, and nothing that only Python would read."""

    def refused(constant):
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refused)


def check_answer(message: bytes, answer) -> str:
    """AssertionError if this is no answer to such a request. Returns its kind."""
    if answer is None:
        assert end_of(message) != "whole"
        return "none"
    status, headers, body = answer
    assert status < 500
    kind = headers["Content-Type"] or ""
    if status >= 400 and not message.startswith(b"HEAD"):
        error = checked(body)["error"]
        assert set(error) - {"lines"} == {"message", "type", "param", "code"}
        assert error["message"] and "\n" not in error["message"] and len(error["message"]) <= 400
    elif kind.startswith("text/event-stream"):
        *frames, nothing = body.decode().split("\n\n")
        assert nothing == "" and all(frame.startswith("data: ") for frame in frames)
        assert frames[-1] == "data: [DONE]" or "error" in checked(frames[-1].encode()[6:])
        for frame in frames[:-1]:
            assert checked(frame.encode()[6:])["object"]
    elif kind == "application/json" and body:
        assert checked(body)
    return f"{status // 100}xx {kind.partition(';')[0]}"


KINDS = ["none", "2xx application/json", "2xx text/event-stream", "4xx application/json"]


@pytest.fixture(scope="module")
def served(tiny_run, tmp_path_factory):
    """A server that has nothing left in the end, and no traceback in its log."""
    folder = served_folder(tiny_run, tmp_path_factory.mktemp("served"))
    (folder / "jobs").mkdir()
    (folder / "adapters").rename(folder / "jobs/models")
    served = Served(folder, "--jobs=jobs", "--keys=keys.txt", "--rows=4")
    served.post("/v1/completions", ASK)
    n_files = files_of(served)
    yield served
    served.wait_until_idle()
    wait_for(lambda: files_of(served) <= n_files)
    assert served.stop() == 0
    assert "Traceback" not in served.said()


def files_of(served) -> int:
    """How many files a server has open."""
    return len(os.listdir(f"/proc/{served.process.pid}/fd"))


@pytest.mark.parametrize(
    "seed, n_requests",
    [(1, 1000), pytest.param(2, 10_000, marks=pytest.mark.long)],
)
def test_nonsense_is_answered_and_harms_nobody(seed, n_requests, served):
    usual = {**ASK, "temperature": 0, "max_tokens": 3}
    _, first = served.post("/v1/completions", usual)
    rng = random.Random(seed)
    kinds = collections.Counter()
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    _, file = served.post("/v1/files", UPLOAD, headers=headers)
    _, job = served.post("/v1/fine_tuning/jobs", {"model": "run", "training_file": file["id"]})
    names = {"FILE": file["id"], "JOB": job["id"]}
    for number in range(n_requests):
        message = random_request(rng, names)
        answer = answer_to(served.port, message)
        try:
            kinds[check_answer(message, answer)] += 1
            if number % 10 == 9:
                status, body = served.post("/v1/completions", usual)
                assert (status, body["choices"]) == (200, first["choices"])
        except Exception:
            print(f"request {number}: {message[:2000]!r}\nanswer: {str(answer)[:2000]}")
            raise
    assert min(kinds[kind] for kind in KINDS) > n_requests // 40, kinds


def test_a_body_that_turns_to_nonsense_behind_its_answer(served):
    """Uvicorn alone would write a traceback, for clients without a key as well."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        assert client.recv(20).startswith(b"HTTP/1.1 401")
        client.sendall(b"no chunk\r\n\r\n")
        while client.recv(1000):
            pass
