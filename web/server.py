"""Uvicorn with our own end: SIGTERM lets open requests finish, until a deadline.

    SIGTERM, Ctrl-C   no new requests; those that are open go on
    after `drain_seconds`   texts that still run end with an error in their answer
    then              connections close, the process ends with status 0

Uvicorn alone would cut open answers, and tell the application only afterwards.
"""

import asyncio
import sys
import threading
from functools import partial

import uvicorn

from web.completions import Service
from web.guard import Guard

CLOSE_SECONDS = 5  # to send what is left after the engine has ended


class Server(uvicorn.Server):
    """Serves an application until SIGTERM or Ctrl-C, then drains it."""

    def __init__(self, app: Guard, service: Service, drain_seconds: float):
        config = uvicorn.Config(
            app,
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,  # the guard writes a line for each request
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=drain_seconds + CLOSE_SECONDS,
        )
        super().__init__(config)
        self.service = service
        self.drain_seconds = drain_seconds

    async def startup(self, sockets=None) -> None:
        """Start the engine's thread, whose events come to this loop with one call a step."""
        loop = asyncio.get_running_loop()
        self.service.start(partial(loop.call_soon_threadsafe, self.service.hand_out))
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame) -> None:
        """Begin to drain. A second signal ends at once."""
        self.force_exit = self.service.is_draining
        self.should_exit = True
        if not self.service.is_draining:
            self.service.is_draining = True
            print(f"draining for up to {self.drain_seconds:g} s", file=sys.stderr, flush=True)
            drain = partial(self.service.thread.drain, self.drain_seconds)
            threading.Thread(target=drain, daemon=True).start()
