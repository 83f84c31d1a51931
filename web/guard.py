"""What stands before every endpoint: keys, limits, and a line of the log for each request.

The page asks every second how runs and jobs are: what it asks is counted, and not logged.

    request id           the client's X-Request-ID, or a new one; in the answer and the log
    Host, Origin         other sites must not reach a server on this machine through a browser
    keys                 Authorization: Bearer KEY, compared in constant time
    size                 413 for a body whose head says that it is too long (FastAPI counts others)
    open requests        429 beyond a limit that lies below the limit of open files
    time                 408 for a client that sends its body too slowly; an answer that nobody
                         reads ends with its request's time

It is plain ASGI: Starlette's BaseHTTPMiddleware would hide from a stream that its client has left.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import re
import sys
import time
import uuid
from pathlib import Path
from urllib.parse import urlsplit

from program import UserError, require
from web.metrics import Metrics
from web.shapes import ApiError

SPARE_FILES = 200  # open files beside those of requests
MOST_BYTES = 4 * 2**20  # of a body
BODY_SECONDS = 30
UPLOADS = "/v1/files"  # the path whose bodies may be larger, and take longer
UPLOAD_SECONDS = 600
READ_SECONDS = 60  # for a client to read the rest of an answer, after the time for making it
OPEN_TO_ALL = ("/health", "/")  # without a key
OPEN_FOLDER = "/static/"  # the page's own files, which ask for the key
POLLED = ("/api/", "/static/", "/v1/fine_tuning/")  # by the page: answers are no lines of the log
WATCHING = ("/health", "/metrics")  # whatever the load, and not counted as open
NO_SNIFFING = (b"x-content-type-options", b"nosniff")  # a browser takes no text for a script
REQUEST_ID = re.compile(rb"[\w.:-]{1,100}")


def read_keys(path: str) -> list[str]:
    """The keys in a file, one a line; lines that begin with # are comments. UserError without any.

    Each may be followed by a space and words of yours, such as whose it is.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--keys={path} cannot be read: {error}") from error
    keys = []
    for number, line in enumerate(lines, 1):
        key, *_ = [*line.split(), ""]
        if not key or key.startswith("#"):
            continue
        is_plain = key.isascii() and key.isprintable()
        wrong = f"{path}, line {number}: a key has 16 or more characters, all of them ASCII"
        require(len(key) >= 16 and is_plain, f"{wrong}: take the output of uuidgen")
        keys.append(key)
    require(keys, f"--keys={path} has no key: write one a line, such as the output of uuidgen")
    return keys


class TooSlow(BaseException):
    """The body took too long. No Exception, which FastAPI would take for a body with a fault."""


class Guard:
    """An ASGI application around another one.

    keys: empty for none. hosts: names under which clients may reach the server; empty for any.
    most_open: requests that are answered at the same time. most_seconds: for making an answer.
    upload_bytes: of a body to UPLOADS; 0 if there are no uploads.
    """

    def __init__(
        self,
        app,
        keys: list[str],
        hosts: list[str],
        most_open: int,
        most_seconds: float,
        metrics: Metrics,
        upload_bytes: int = 0,
    ):
        self.app = app
        self.most_seconds = most_seconds
        self.digests = [digest(key) for key in keys]
        self.hosts = hosts
        self.most_open = most_open
        self.metrics = metrics
        self.upload_bytes = upload_bytes
        self.n_open = 0

    async def __call__(self, scope, receive, send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})
        is_upload = bool(self.upload_bytes and scope["path"] == UPLOADS)
        scope["state"]["most_bytes"] = self.upload_bytes if is_upload else MOST_BYTES
        body_seconds = UPLOAD_SECONDS if is_upload else BODY_SECONDS
        begun = time.monotonic()
        status = 499  # the client has left before the answer began

        async def send_with_id(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ours = [(b"x-request-id", request_id.encode()), NO_SNIFFING]
                message["headers"] = [*message["headers"], *ours]
            await send(message)

        is_counted = scope["path"] not in WATCHING
        self.n_open += is_counted
        key_number = None
        loop = asyncio.get_running_loop()
        most_seconds = self.most_seconds + READ_SECONDS
        end = loop.call_later(most_seconds, asyncio.current_task().cancel)
        # HEAD is answered as GET: uvicorn leaves the body out.
        inner = scope | ({"method": "GET"} if scope["method"] == "HEAD" else {})
        try:
            key_number = self.check(scope, headers)
            await self.app(inner, in_time(receive, body_seconds), send_with_id)
        except ApiError as error:
            await error.response(scope, receive, send_with_id)
        except TooSlow:
            limit = f"the body took more than {body_seconds} s: send it faster"
            await ApiError(408, limit).response(scope, receive, send_with_id)
        except asyncio.CancelledError:  # by the clock above, or a second signal
            if status == 499:  # else the connection closes in the middle of the answer
                ended = "the server has ended this request: try again later"
                await ApiError(503, ended).response(scope, receive, send_with_id)
        finally:
            end.cancel()
            self.n_open -= is_counted
            route = inner.get("route")
            self.log(scope | {"route": route}, request_id, status, begun, key_number)

    def check(self, scope, headers: dict) -> int | None:
        """The number of the request's key, from 1. ApiError for a request that is refused."""
        self.check_site(headers)
        most_bytes = scope["state"]["most_bytes"]
        if int(headers.get(b"content-length", 0)) > most_bytes:
            raise too_large(most_bytes)
        if scope["path"] in OPEN_TO_ALL or scope["path"].startswith(OPEN_FOLDER):
            return None
        number = self.number_of_key(headers.get(b"authorization", b""))
        # Jobs belong to a key for longer than it has this number.
        scope["state"]["owner"] = self.digests[number - 1].hex()[:16] if number else ""
        if self.n_open > self.most_open and scope["path"] not in WATCHING:
            problem = f"{self.most_open} requests are open"
            raise ApiError(429, f"{problem}: try again later", retry_after=1)
        return number

    def check_site(self, headers: dict) -> None:
        """ApiError for a Host or an Origin that is not ours."""
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin")
        if self.hosts and name_of(f"//{host}") not in self.hosts:
            raise ApiError(421, f"this server is not {host[:100]!r}: see --host")
        if origin and origin.decode("latin-1").partition("://")[2] != host:
            raise ApiError(403, "requests of other sites are refused")

    def number_of_key(self, authorization: bytes) -> int | None:
        """Which key a request has, from 1; None if none is needed. ApiError if it is wrong."""
        if not self.digests:
            return None
        kind, _, key = authorization.partition(b" ")
        given = digest(key.strip()) if kind.lower() == b"bearer" else b""
        # All are compared, so the time does not tell which one it is like.
        equal = [hmac.compare_digest(given, known) for known in self.digests]
        if True not in equal:
            fix = "send the header Authorization: Bearer KEY"
            raise ApiError(401, f"no valid API key: {fix}", code="invalid_api_key")
        return equal.index(True) + 1

    def log(self, scope, request_id: str, status: int, begun: float, key: int | None) -> None:
        """Write a line of JSON about an answered request to standard error."""
        route = scope.get("route")
        path = getattr(route, "path", None) or "other"  # not what a client has invented
        self.metrics.answers[path, status] += 1
        if status == 200 and scope["method"] == "GET" and path.startswith(POLLED):
            return
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "id": request_id,
            "method": scope["method"],
            "path": path,
            "status": status,
            "seconds": round(time.monotonic() - begun, 4),
        }
        if key:
            line["key"] = key
        if job := scope["state"].get("job"):
            line |= {"model": job.body.model, **job.usage}
        with contextlib.suppress(OSError):  # nobody reads the log
            print(json.dumps(line), file=sys.stderr, flush=True)


def name_of(url: str) -> str | None:
    """The name of a host in a URL; None if it is none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def digest(key: str | bytes) -> bytes:
    """A key as something of fixed length."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def in_time(receive, seconds: float):
    """`receive`, with a limit on the time until the body is complete. TooSlow beyond it."""
    deadline = time.monotonic() + seconds
    is_complete = False

    async def receive_in_time():
        nonlocal is_complete
        if is_complete:
            return await receive()
        message = await within(max(0, deadline - time.monotonic()), receive())
        if message is None:
            raise TooSlow
        is_complete = not message.get("more_body", False)
        return message

    return receive_in_time


async def within(seconds: float, awaitable):
    """What an awaitable gives within so many seconds, else None.

    (On Python 3.11 `asyncio.wait_for` can miss that its own task is cancelled.)
    """
    task = asyncio.ensure_future(awaitable)
    try:
        done, _ = await asyncio.wait([task], timeout=seconds)
        return task.result() if done else None
    finally:
        task.cancel()


def too_large(most_bytes: int) -> ApiError:
    """The answer to a body beyond the limit."""
    return ApiError(413, f"the body is larger than {most_bytes:,} bytes: send less at once")
