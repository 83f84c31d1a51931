"""A model that is cut over two ranks: serve.py and generate.py answer as one process does."""

import contextlib
import http.client
import inspect
import json
import re
import signal
import threading

import pytest
from conftest import PATIENCE
from launches import Job, wait_for
from servers import served_folder
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

import generate
import serve

pytestmark = pytest.mark.slow
FLAGS = ["run", "--adapters=adapters", "--max_tokens=4096", "--precision=fp32", "--port=0"]


def posted(port, body) -> tuple[int, dict]:
    """The status and JSON of a completion."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def port_of(job) -> int:
    wait_for(lambda: "open http" in job.log() or not job.runs())
    return int(re.search(r":(\d+)\. Try:\n", job.log()).group(1))


def test_two_ranks_serve_and_end_together(tiny_run, tmp_path):
    """Texts with adapters and a schema are those of one process. SIGTERM to all ranks: status 0."""
    folder = served_folder(tiny_run, tmp_path)
    asks = [{"model": name, "prompt": "the", "max_tokens": 8} for name in ("run", "anna", "bert")]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asks.append({**asks[0], "response_format": form})
    answers = []
    for size in (1, 2):
        with Job(folder, size, serve.main, [*FLAGS, f"--tp={size}"]) as job:
            port = port_of(job)
            found = [posted(port, {**ask, "temperature": 0}) for ask in asks]
            answers.append([(status, body["choices"]) for status, body in found])
            for rank in range(size):
                job.send(signal.SIGTERM, rank)
            assert job.wait() == [0] * size, job.log()
        (folder / "log").unlink()
    assert answers[0] == answers[1]
    assert {status for status, _ in answers[0]} == {200}
    texts = [choices[0]["text"] for _, choices in answers[0]]
    assert len(set(texts)) == 4

    words = ["run", "--adapter=adapters/anna", "--prompt=the", "--temperature=0"]
    words += ["--max_new_tokens=8", "--precision=fp32", "--tp=2"]
    with Job(folder, 2, generate.main, words) as job:
        assert job.wait() == [0, 0], job.log()
        assert f"the{texts[1]}\n" in job.log()


def test_a_rank_that_dies_ends_the_server(tiny_run, tmp_path):
    """With its name and a status; who waits for a text gets an error."""
    folder = served_folder(tiny_run, tmp_path)
    with Job(folder, 2, serve.main, [*FLAGS, "--tp=2"]) as job:
        port = port_of(job)
        answers = []
        long = {"model": "run", "prompt": "the", "max_tokens": 4000}
        client = threading.Thread(target=lambda: answers.append(posted(port, long)))
        client.start()
        wait_for(lambda: running_at(port))
        job.send(signal.SIGKILL, 1)
        client.join(PATIENCE)
        assert answers[0][0] in (500, 503) and "error" in answers[0][1]
        assert job.wait(but=1) == [75], job.log()
        (line,) = [line for line in job.errors() if "a text has failed" not in line]
        assert job.name_of(1) in line


@pytest.mark.parametrize("flag", ["--keys=nokeys.txt", "--host=0.0.0.0"])
def test_a_wrong_setting_ends_all_ranks(flag, tiny_run, tmp_path):
    """Also those that ignore torchrun's SIGTERM once they follow rank 0."""
    folder = served_folder(tiny_run, tmp_path)
    with Job(folder, 2, serve.main, [*FLAGS, "--tp=2", flag]) as job:
        assert job.wait(seconds=60) == [2, 2], job.log()


def test_texts_end_before_torchrun_kills_the_ranks():
    """They get an error as an answer, and not none."""
    patience = inspect.signature(LocalElasticAgent).parameters["shutdown_timeout"].default
    assert serve.ServeSettings().drain_seconds < patience


def running_at(port) -> int:
    """How many texts a server writes at the moment."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        return json.loads(connection.getresponse().read())["running"]
