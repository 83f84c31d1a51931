"""Uvicorn with our own begin and end: it says when it is ready, and lets open requests finish.

    SIGTERM, Ctrl-C         no new connections; requests that are open go on
    after `drain_seconds`   texts that still run end with an error in their answer
    then                    connections close, the process ends with status 0
    a second signal         texts end at once
    a third one             the process ends at once

Uvicorn alone would cut open answers, and tell the application only afterwards. Clients that send or
read too slowly are for a proxy to cut off: slurm/nginx.conf.
"""

import asyncio
import contextlib
import errno
import json
import os
import sys
import threading
from functools import partial

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from web.completions import Service
from web.guard import SPARE_FILES, Guard
from web.shapes import ApiError

CLOSE_SECONDS = 10  # to send what is left after the engine has ended
IDLE_SECONDS = 75  # between two requests: longer than proxies keep a connection (nginx: 60)


class Connection(H11Protocol):
    """A client's connection. Too many are closed at once; all errors have one shape."""

    def connection_made(self, transport) -> None:
        """Keep a connection, unless there are too many already."""
        super().connection_made(transport)
        if len(self.connections) > self.app.most_open + SPARE_FILES // 2:
            transport.abort()

    def send_400_response(self, message: str) -> None:
        """Answer what is no HTTP in the shape of all errors, unless its head has an answer."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(ApiError(400, "this is not a valid HTTP request").body)
            lines = ["HTTP/1.1 400 Bad Request", "content-type: application/json"]
            lines += [f"content-length: {len(body)}", "connection: close", "", body]
            self.transport.write("\r\n".join(lines).encode())
        if self.cycle:
            self.cycle.disconnected = True  # an answer that comes now is dropped
        self.transport.close()


class Server(uvicorn.Server):
    """Serves an application until SIGTERM or Ctrl-C, then drains it.

    ready: what to print when clients can come.
    """

    def __init__(self, app: Guard, service: Service, drain_seconds: float, ready: str):
        config = uvicorn.Config(
            app,
            http=Connection,
            proxy_headers=False,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,  # the guard writes a line for each request
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=drain_seconds + CLOSE_SECONDS,
        )
        super().__init__(config)
        self.service = service
        self.drain_seconds = drain_seconds
        self.ready = ready
        self.n_signals = 0  # SIGTERM or Ctrl-C
        self.is_full = False  # all files were open once, and a line has said so

    async def startup(self, sockets=None) -> None:
        """Start the engine's thread, then listen."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self.note_error)
        self.service.start(loop)
        await super().startup(sockets)
        print(self.ready, flush=True)

    def note_error(self, loop, context: dict) -> None:
        """An error in the event loop. It has one for each client that waits for a free file."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif not self.is_full:
            self.is_full = True
            print("all files are open: raise ulimit -n for more clients", file=sys.stderr)

    def handle_exit(self, sig: int, frame) -> None:
        """Begin to drain, or end sooner what is draining."""
        self.should_exit = True
        self.n_signals += 1
        if self.n_signals > 2:
            os._exit(1)  # the engine's thread may be inside PyTorch: an ordinary end would abort
        self.service.is_draining = True
        seconds = self.drain_seconds if self.n_signals == 1 else 0
        with contextlib.suppress(OSError):  # not print: the signal may have interrupted one
            os.write(2, f"draining for up to {seconds:g} s\n".encode())
        drain = partial(self.service.drain, seconds)
        threading.Thread(target=drain, daemon=True).start()
