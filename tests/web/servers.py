"""What a server's tests share: a folder to serve, serve.py as a process, requests.

served = Served(served_folder(tiny_run, tmp_path), "--rows=4")
status, body = served.post("/v1/completions", {"model": "run", "prompt": "x"})
served.stop()                                        SIGTERM; the exit status
"""

import collections
import http.client
import json
import re
import secrets
import shutil
import signal
from pathlib import Path

from conftest import PATIENCE
from launches import Program, wait_for
from random_adapters import write_random

import checkpoint
import serve
from config import TrainConfig
from weights import load

KEY = "a-key-of-the-tests-0001"
ASK = {"model": "run", "prompt": "x", "max_tokens": 4}
CHAT = {"model": "run", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


def served_folder(tiny_run, folder) -> Path:
    """`folder` with a run, two adapters for it, and a file of keys."""
    shutil.copytree(tiny_run, folder / "run")
    settings = TrainConfig(init_from="any", lora_rank=4, lora_alpha=8.0)
    cfg = load.settings_of(checkpoint.find(str(folder / "run")))
    for seed, name in enumerate(["anna", "bert"]):
        write_random(folder / "adapters" / name, cfg, settings, seed)
    (folder / "keys.txt").write_text(f"# whose key it is\n{KEY} the tests\n")
    return folder


def openai_client(served, strict=True):
    """OpenAI's own client. strict: it checks that each answer has the documented shape."""
    import openai

    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{served.port}/v1",
        api_key=KEY,
        max_retries=0,
        _strict_response_validation=strict,
    )


class Served:
    """A running serve.py. model: what it serves, if anything. n_files: how many it may open."""

    def __init__(self, folder, *flags, model="run", n_files=None):
        words = [model, "--max_tokens=256"] if model else []
        self.log = Path(folder, f"log-{secrets.token_hex(4)}")
        self.process = Program(serve.main, [*words, "--port=0", *flags], folder, self.log, n_files)
        wait_for(lambda: "open http" in self.said() or self.process.poll() is not None)
        assert self.process.poll() is None, self.said()
        port, self.curl = re.search(r":(\d+)\. Try:\n(.*)", self.said()).groups()
        self.port = int(port)

    def said(self) -> str:
        """What it has printed."""
        return self.log.read_text() if self.log.exists() else ""

    def request(self, method, path, body=None, headers=(), key=KEY):
        """(status, headers, text) of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        headers = {"Content-Type": "application/json", **dict(headers)}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        content = body if isinstance(body, str | bytes | None) else json.dumps(body)
        connection.request(method, path, content, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, dict(answer.headers), text

    def post(self, path, body, **more):
        """(status, JSON) of a POST."""
        status, _, text = self.request("POST", path, body, **more)
        return status, json.loads(text)

    def metrics(self) -> collections.Counter:
        """All numbers of /metrics by name and labels."""
        lines = self.request("GET", "/metrics")[2].splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return collections.Counter({name: float(value) for name, value in pairs})

    def wait_until_idle(self) -> None:
        """Wait until no text is left in the engine, and no request open but ours."""
        wait_for(lambda: self.health()["running"] == self.health()["waiting"] == 0)

    def health(self) -> dict:
        """What /health says."""
        return json.loads(self.request("GET", "/health")[2])

    def stop(self) -> int:
        """End it as SLURM and Kubernetes do. Returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)
