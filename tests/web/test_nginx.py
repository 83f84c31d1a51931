"""Two servers behind a real nginx with slurm/nginx.conf: one address, streams, a dead server."""

import http.client
import json
import shutil
import signal
import socket
import subprocess
import time
from concurrent import futures

import pytest
from conftest import PATIENCE, ROOT
from servers import ASK, Served, wait_for

from launch.pool import free_port

pytest.importorskip("fastapi")

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not NGINX, reason="needs the program nginx: apt-get install nginx"),
]


@pytest.fixture
def proxy(tiny_run, tmp_path):
    """(the port of nginx, its two servers)."""
    shutil.copytree(tiny_run, tmp_path / "run")
    served = [Served(tmp_path, "--rows=4", "--jobs=jobs") for _ in range(2)]
    port = free_port()
    conf = (ROOT / "slurm/nginx.conf").read_text()
    ours = {"listen 8080": port, "127.0.0.1:8001": served[0].port, "127.0.0.1:8002": served[1].port}
    for old, new in ours.items():
        assert conf.count(old) == 1
        conf = conf.replace(old, f"{old[:-4]}{new}")
    conf = conf.replace("listen ", "listen 127.0.0.1:")
    for slow in ("header_timeout 10s", "body_timeout 30s"):
        assert conf.count(slow) == 1
        conf = conf.replace(slow, f"{slow.split()[0]} 1s")
    places = [f"{kind}_temp_path {tmp_path}/{kind};" for kind in ("proxy", "client_body")]
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {tmp_path}/pid; error_log {tmp_path}/errors;\n"
        f"events {{}} http {{ access_log off; {' '.join(places)}\n{conf} }}"
    )
    words = [NGINX, "-p", tmp_path, "-e", tmp_path / "errors", "-c", tmp_path / "nginx.conf"]
    nginx = subprocess.Popen(words)
    wait_for(lambda: is_listening(port))
    yield port, served
    nginx.terminate()
    nginx.wait(PATIENCE)
    for one in served:
        one.process.kill()
        one.process.wait()


def is_listening(port) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def asked(port, path, body=None, host="127.0.0.1", **headers):
    """(status, answer) of a request as a browser on the page of nginx sends it."""
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE)
    headers = {"Origin": f"http://{host}:{port}", "Content-Type": "application/json"} | headers
    content = json.dumps(body) if isinstance(body, dict) else body
    connection.request("POST" if body else "GET", path, content, headers)
    answer = connection.getresponse()
    return answer.status, answer


def requests_of(served) -> float:
    """How many completions a server has answered."""
    name = 'path="/v1/completions"'
    return sum(
        value for key, value in served.metrics().items() if name in key and "_sum" not in key
    )


def test_slow_clients_requests_streams_and_uploads(proxy):
    port, served = proxy
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
    for sent in (head[:30], head + b"\r\n{"):  # half of a head, half of a body
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
            client.sendall(sent)
            assert client.recv(100) == b""
    assert not any(requests_of(one) for one in served)

    for host in ("127.0.0.1", "localhost"):
        assert asked(port, "/", host=host)[0] == 200
        assert asked(port, "/v1/completions", ASK, host=host)[0] == 200
    assert asked(port, "/v1/completions", ASK, Origin="http://elsewhere.example")[0] == 403
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--b\r\n'
    form += b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    form += b'{"prompt": "a", "response": "b"}\n' * 60_000  # more than nginx takes by itself
    form += b"\r\n--b--\r\n"
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    status, answer = asked(port, "/v1/files", form, **kind)
    assert status == 200, answer.read()

    body = {**ASK, "max_tokens": 200, "stream": True, "temperature": 0}
    _, stream = asked(port, "/v1/completions", body)
    begun = time.monotonic()
    times = [time.monotonic() - begun for line in stream if line.startswith(b"data")]
    assert len(times) > 20 and times[len(times) // 4] < times[-1]  # not all at the end

    for _ in range(6):
        assert asked(port, "/v1/completions", ASK)[0] == 200
    assert all(requests_of(one) for one in served)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_request_is_lost_with_a_server_before_its_answer_begins(proxy, number):
    """Of 24 clients at once, half of whose texts the server writes that dies or drains."""
    port, served = proxy
    body = {**ASK, "max_tokens": 200, "temperature": 0}
    with futures.ThreadPoolExecutor(24) as clients:
        answers = [clients.submit(answer_of, port, body) for _ in range(24)]
        wait_for(lambda: all(one.health()["waiting"] for one in served))
        served[0].process.send_signal(number)
        found = [answer.result() for answer in answers]
    assert [status for status, _ in found] == [200] * 24
    assert len({text for _, text in found}) == 1
    assert served[0].process.wait() == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    assert asked(port, "/v1/completions", ASK)[0] == 200


def answer_of(port, body) -> tuple[int, str]:
    """The status and the text of a completion."""
    status, answer = asked(port, "/v1/completions", body)
    return status, json.loads(answer.read())["choices"][0]["text"]
