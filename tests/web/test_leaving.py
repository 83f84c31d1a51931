"""Clients that leave, and a server that has to end: nothing is lost or left over.

A server within this process shows what it holds: rows, slots of adapters, tasks, files.
"""

import asyncio
import collections
import contextlib
import gc
import http.client
import json
import logging
import os
import random
import signal
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from conftest import PATIENCE
from random_adapters import write_random
from servers import Served, served_folder, wait_for

import checkpoint
import serve
from config import TrainConfig
from serving.thread import SHUTTING_DOWN
from weights import load

pytest.importorskip("fastapi")

pytestmark = pytest.mark.slow
ADAPTERS = [f"adapter-{number}" for number in range(10)]
RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: the connection is closed with RST


class Inside:
    """A server in a thread of this process."""

    def __init__(self, folder):
        from web import app
        from web.server import Server

        sizes = {"rows": 2, "max_lora_rank": 4, "max_tokens": 256}
        cfg = serve.ServeSettings(adapters=str(folder / "adapters"), **sizes)
        run = str(folder / "run")
        self.service = serve.service_of(cfg, run, 5000, *serve.decoder_of(cfg, run))
        self.guard = app.build(self.service, [], [], 5000)
        self.server = Server(self.guard, self.service, PATIENCE, "ready")
        self.socket = serve.listening("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=lambda: asyncio.run(self.work()))
        self.thread.start()
        wait_for(lambda: self.server.started)

    async def work(self):
        self.loop = asyncio.get_running_loop()
        await self.server.serve([self.socket])

    def held(self) -> dict[str, int]:
        """What is held for requests, a number for each kind of thing."""
        engine, state = self.service.engine, self.server.server_state
        return {
            "texts": len(self.service.queues) + engine.is_busy,
            "rows": len(engine.batch.rows.pads),
            "slots": sum(resident.users for resident in engine.bank.residents.values()),
            "requests": self.guard.n_open,
            "connections": len(state.connections) + len(state.tasks),
            "tasks": len(asyncio.all_tasks(self.loop)),
            "files": len(os.listdir("/proc/self/fd")),
        }

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.server.handle_exit, signal.SIGTERM, None)
        self.thread.join(PATIENCE)
        self.socket.close()


@pytest.fixture(scope="module")
def folder(tiny_run, tmp_path_factory):
    """More adapters than a small server has slots for."""
    folder = served_folder(tiny_run, tmp_path_factory.mktemp("served"))
    settings = TrainConfig(init_from="any", lora_rank=4, lora_alpha=8.0)
    cfg = load.settings_of(checkpoint.find(str(folder / "run")))
    for seed, name in enumerate(ADAPTERS):
        write_random(folder / "adapters" / name, cfg, settings, seed)
    return folder


@pytest.fixture(scope="module")
def inside(folder):
    """A server that generates two texts at a time."""
    inside = Inside(folder)
    yield inside
    inside.stop()


# --- Clients


def message(body: dict) -> bytes:
    """A request for a completion."""
    content = json.dumps(body)
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += ["Connection: close", f"Content-Length: {len(content)}", "", content]
    return "\r\n".join(lines).encode()


async def answer(port: int, body: dict) -> tuple[int, bytes]:
    """(status, content) of the answer to a completion; a stream's content in its frames."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(message(body))
    head, _, content = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), content


def end_of(body: dict, status: int, content: bytes) -> str:
    """How an answer ends: "finished", "error" in a stream, or "503". No other end is proper."""
    if status == 503:
        words = json.loads(content)["error"]["message"]
        assert SHUTTING_DOWN in words or "has ended this request" in words  # of who waited longest
        return "503"
    assert status == 200, content
    if body["stream"]:
        frames = [line[6:] for line in content.split(b"\r\n") if line.startswith(b"data: ")]
        *frames, last = [json.loads(frame) for frame in frames if frame.strip() != b"[DONE]"]
        if "error" in last:
            assert SHUTTING_DOWN in last["error"]["message"]
            return "error"
        assert b"data: [DONE]" in content
        choices = [frame["choices"][0] for frame in (*frames, last)]
    else:
        choices = json.loads(content)["choices"]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(reasons) == body.get("n", 1) and set(reasons) <= {"length", "stop"}
    return "finished"


async def leave(port: int, body: dict, rng) -> None:
    """Send a request, or a part of it, and be gone a moment later, by FIN or by RST."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = message(body)
    is_cut = rng.random() < 0.1
    writer.write(content[: rng.randrange(len(content))] if is_cut else content)
    if rng.random() < 0.3 and not is_cut:
        await reader.read(rng.choice([1, 300]))
    else:
        await asyncio.sleep(rng.random() * 0.5)
    if rng.random() < 0.5:
        plug = writer.get_extra_info("socket")
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.close()


async def crowd(port: int, rng, n_clients: int) -> list[int]:
    """Clients that come at random moments; half of them leave.

    Returns for how many tokens those asked that have left, and for how many those that have stayed.
    """
    n_tokens = [0, 0]

    async def one(number: int) -> None:
        stays = rng.random() < 0.5
        body = {
            "model": rng.choice(["run", "anna", *ADAPTERS]),
            "prompt": "ab" * rng.randrange(40),
            "max_tokens": rng.choice([1, 10, 60]) if stays else 150,
            "n": rng.choice([1, 1, 3]),
            "stream": rng.random() < 0.5,
            "seed": number,
        }
        n_tokens[stays] += body["n"] * body["max_tokens"]
        await asyncio.sleep(rng.random() * n_clients / 100)
        if not stays:
            await leave(port, body, rng)
        elif end_of(body, *await answer(port, body)) != "finished":
            raise AssertionError(body)

    await asyncio.gather(*map(one, range(n_clients)))
    return n_tokens


@pytest.mark.parametrize(
    "seed, n_clients", [(1, 200), pytest.param(2, 3000, marks=pytest.mark.long)]
)
def test_whoever_stays_is_answered_and_nothing_is_held_for_the_others(
    seed, n_clients, inside, caplog
):
    asyncio.run(crowd(inside.port, random.Random(0), 5))
    held = ["connections", "texts", "rows", "slots", "requests"]
    wait_for(lambda: not any(inside.held()[kind] for kind in held))
    gc.collect()
    before = inside.held()
    n_before = inside.service.thread.statistics()["new_tokens"]
    n_left, n_stayed = asyncio.run(crowd(inside.port, random.Random(seed), n_clients))
    # Other tests' pools, which end when idle, may close files of this process meanwhile.
    wait_for(lambda: all(n <= before[kind] for kind, n in inside.held().items()))
    n_new = inside.service.thread.statistics()["new_tokens"] - n_before
    assert n_stayed // 2 < n_new < n_stayed + n_left // 2
    assert inside.service.metrics.answers["/v1/completions", 499]
    gc.collect()  # tasks whose errors nobody has seen say so now
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def children() -> list[str]:
    """The processes that this one has started."""
    return [
        child
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def test_schemas_are_built_one_at_a_time_and_end_with_their_clients(inside, tmp_path, monkeypatch):
    """Also where the process that tries one does not come to an end by itself."""
    others = set(children())

    def n_tried() -> int:
        return len(set(children()) - others)

    endless = tmp_path / "endless"
    endless.write_text("#!/bin/sh\nexec sleep 1000\n")
    endless.chmod(0o755)
    body = {"model": "run", "prompt": "x", "max_tokens": 3}

    async def ask_and_leave() -> None:
        writers = []
        for number in range(6):
            reader, writer = await asyncio.open_connection("127.0.0.1", inside.port)
            writer.write(message(body | {"guided_regex": f"[ab]{{{number}}}c", "stream": True}))
            writers.append(writer)
        await asyncio.to_thread(wait_for, lambda: n_tried() and inside.guard.n_open == 6)
        assert n_tried() == 1
        assert (await answer(inside.port, body))[0] == 200
        for writer in writers:
            writer.close()
        await asyncio.to_thread(wait_for, lambda: inside.guard.n_open == 0)

    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", str(endless))
        asyncio.run(ask_and_leave())
    wait_for(lambda: n_tried() == 0)
    assert asyncio.run(answer(inside.port, body | {"guided_regex": "ab"}))[0] == 200


def test_schemas_that_take_minutes_hold_up_neither_others_nor_the_end(folder):
    served = Served(folder, "--drain_seconds=3")
    plain = {"model": "run", "prompt": "x", "max_tokens": 3}
    clients = []
    for number in range(6):
        schema = {"patternProperties": {f"^k{i:03}": {} for i in range(1000)}, "title": str(number)}
        clients.append(socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE))
        clients[-1].sendall(message(plain | {"guided_json": schema}))
    assert served.post("/v1/completions", plain, key=None)[0] == 200
    begin = time.monotonic()
    assert served.stop() == 0
    assert time.monotonic() - begin < PATIENCE / 2
    assert clients[0].recv(100).startswith((b"HTTP/1.1 400", b"HTTP/1.1 503"))
    for client in clients:
        client.close()
    assert "Traceback" not in served.said(), served.said()


def test_an_idle_connection_stays_open(inside):
    client = http.client.HTTPConnection("127.0.0.1", inside.port, timeout=PATIENCE)
    with contextlib.closing(client):
        for _ in range(2):
            client.request("GET", "/health")
            connection = client.sock
            answer = client.getresponse()
            assert answer.status == 200 and answer.read()
        assert client.sock is connection  # http.client would have opened another one
    assert inside.server.config.timeout_keep_alive == 75


# --- Long answers


LONG = {"model": "run", "prompt": "x", "max_tokens": 250, "n": 8}


def test_a_stream_that_waits_says_so(inside, monkeypatch):
    """Proxies close connections on which nothing comes."""
    monkeypatch.setattr("web.completions.PING_SECONDS", 0.01)

    async def ask_behind_another():
        first = asyncio.ensure_future(answer(inside.port, {**LONG, "stream": False}))
        await asyncio.to_thread(wait_for, lambda: inside.service.engine.running)
        found = await answer(inside.port, {**LONG, "n": 1, "stream": True})
        return [end_of({**LONG, "stream": False}, *await first), found]

    ended, (status, content) = asyncio.run(ask_behind_another())
    assert ended == "finished" and b": ping\n\n" in content
    assert end_of({"stream": True}, status, content) == "finished"


def test_an_answer_that_takes_too_long_ends_with_an_error(inside, monkeypatch):
    monkeypatch.setattr(inside.service, "most_seconds", 0.05)
    for stream, wanted in [(False, 504), (True, 200)]:
        status, content = asyncio.run(answer(inside.port, {**LONG, "stream": stream}))
        assert status == wanted and b"the answer takes more than 0.05 s" in content
    wait_for(lambda: not inside.service.engine.is_busy)


def test_more_connections_than_files(folder):
    """Those beyond the limit are closed or sent away; then the server goes on."""
    served = Served(folder, n_files=300)  # 100 open requests
    bodies = [LONG | {"n": 1, "stream": i % 2 == 0} for i in range(400)]

    async def ask_all() -> list:
        asked = [answer(served.port, body) for body in bodies]
        return await asyncio.gather(*asked, return_exceptions=True)

    kinds = collections.Counter(
        found[0] if isinstance(found, tuple) else "closed" for found in asyncio.run(ask_all())
    )
    assert kinds[200] and set(kinds) <= {200, 429, "closed"}, kinds
    assert served.post("/v1/completions", {**LONG, "n": 1}, key=None)[0] == 200
    assert served.stop() == 0
    assert len(served.said().splitlines()) < 1000


# --- SIGTERM


def n_begun(served) -> int:
    """How many completions have reached the engine, if each has one text."""
    metrics = served.metrics()
    n_answered = sum(metrics[name] for name in metrics if "completions" in name)
    return metrics["mpt_texts_running"] + metrics["mpt_texts_waiting"] + n_answered


@pytest.mark.parametrize(
    "drain_seconds, n_tokens, ends",
    [(PATIENCE, 20, {"finished"}), (1, 200, {"503", "error"})],
)
def test_at_sigterm_each_of_300_requests_comes_to_a_proper_end(
    drain_seconds, n_tokens, ends, folder
):
    served = Served(folder, "--adapters=adapters", "--rows=8", f"--drain_seconds={drain_seconds}")
    bodies = [
        {"model": ["run", "anna", "bert"][i % 3], "prompt": "x" * (i % 50), "max_tokens": n_tokens}
        | {"seed": i, "stream": i % 2 == 0}
        for i in range(300)
    ]

    async def ask_all() -> list:
        asked = [asyncio.ensure_future(answer(served.port, body)) for body in bodies]
        await asyncio.to_thread(wait_for, lambda: n_begun(served) >= 300)
        served.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*asked)

    answers = asyncio.run(ask_all())
    found = [end_of(body, *one) for body, one in zip(bodies, answers, strict=True)]
    assert served.process.wait(PATIENCE) == 0
    # On a fast machine some finish within a second, too.
    assert set(found) - {"finished"} == ends - {"finished"}, collections.Counter(found)
    said = served.said()
    assert "Traceback" not in said, said[said.find("Traceback") :][:5000]


@pytest.mark.parametrize("n_signals", [2, 3])
def test_a_second_signal_ends_texts_and_a_third_one_even_what_hangs(n_signals, folder):
    served = Served(folder, "--rows=1", f"--drain_seconds={PATIENCE}", "--max_requests=2000")
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE) as client:
        client.sendall(message({**LONG, "n": 128}))
        wait_for(lambda: served.health()["running"])
        for _ in range(n_signals):
            served.process.send_signal(signal.SIGTERM)
            time.sleep(0.05)  # two equal signals at once would arrive as one
        status = served.process.wait(PATIENCE)
        assert status == 0 or (status == 1 and n_signals == 3), served.said()
        assert n_signals == 3 or client.recv(100).startswith(b"HTTP/1.1 503"), served.said()
    assert "Traceback" not in served.said(), served.said()
