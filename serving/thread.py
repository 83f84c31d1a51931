"""The thread that owns an engine: other threads submit requests to it and cancel them.

    another thread                      the engine's thread
    submit(request)  -- inbox -->       between two steps: engine.submit, engine.cancel
    cancel(request)  -- inbox -->       engine.step()
    deliver(events)  <-----------       once for each step that has something to report

A web server whose loop runs in one thread passes the events on with one call a step:

    thread = EngineThread(engine, lambda events: loop.call_soon_threadsafe(hand_out, events))

The last event of each request has an `end` (serving/engine.py::Event).
"""

import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable

from program import UserError, require
from serving.engine import Engine, Event, Request

SHUTTING_DOWN = "the server is shutting down: try again later"


class EngineThread:
    """Starts the thread. It runs until `drain`.

    deliver: called by the thread with a list of events. It has to return soon, and may not raise.
    """

    def __init__(self, engine: Engine, deliver: Callable[[list[Event]], None]):
        self.engine = engine
        self.deliver = deliver
        self.inbox = queue.SimpleQueue()  # functions that the thread is to call
        self.lock = threading.Lock()  # nothing is submitted after the thread has read its inbox
        self.is_closed = False
        self.n_submitted = 0
        self.n_ended = 0
        self.deadline = math.inf  # of time.monotonic, once the engine is to end
        self.thread = threading.Thread(target=self.work, name="engine", daemon=True)
        self.thread.start()

    def submit(self, request: Request) -> None:
        """Hand over a request. UserError if it can never be served, or after `drain`."""
        self.engine.check(request)
        with self.lock:
            require(not self.is_closed, SHUTTING_DOWN)
            self.n_submitted += 1
            self.inbox.put(lambda: self.engine.submit(request))

    def cancel(self, request: Request) -> None:
        """End a text. Its last event says "cancelled", unless it has ended already."""
        self.inbox.put(lambda: self.engine.cancel(request))

    def drain(self, seconds: float) -> None:
        """Refuse new requests, wait for the others, and end what is left after so many seconds.

        Those end with "error". When this returns, the thread has delivered its last event. Of two
        calls the earlier end counts.
        """
        end = time.monotonic() + seconds
        with self.lock:
            self.is_closed = True
        self.inbox.put(lambda: setattr(self, "deadline", min(self.deadline, end)))
        self.thread.join()

    def statistics(self) -> dict[str, int]:
        """Texts now, and totals since the start. A text waits until it is in the batch."""
        speed = self.engine.speed
        n_open = self.n_submitted - self.n_ended
        n_running = min(len(self.engine.running), n_open)
        return {
            "running": n_running,
            "waiting": n_open - n_running,
            "steps": speed.steps,
            "prompt_tokens": speed.prompt_tokens,
            "prefix_tokens": speed.prefix_tokens,
            "new_tokens": speed.prompts + speed.tokens,
        }

    # ----------------------------------------------------------------------------------------------
    # What the thread does

    def work(self) -> None:
        """Serve until the deadline. If the engine itself fails, nobody waits for ever, either."""
        try:
            while not self.is_over():
                self.read_inbox()
                self.report(self.engine.step())
        finally:
            with self.lock:
                self.is_closed = True
            self.read_inbox()
            self.engine.cancel_all(UserError(SHUTTING_DOWN))
            self.report(self.engine.step())
            if self.engine.batch.lost:  # the program that serves it has to end
                os.kill(os.getpid(), signal.SIGTERM)

    def is_over(self) -> bool:
        """Whether the engine was to end, and has nothing left to do or no time; or cannot go on."""
        if self.engine.batch.lost:
            return True
        if self.deadline == math.inf:
            return False
        return not self.engine.is_busy or time.monotonic() >= self.deadline

    def read_inbox(self) -> None:
        """Do what other threads have asked for. Without anything else to do, wait for it."""
        is_idle = not self.is_closed and not self.engine.is_busy
        if is_idle:
            self.inbox.get()()
        while not self.inbox.empty():
            self.inbox.get()()

    def report(self, events: list[Event]) -> None:
        self.n_ended += sum(event.end is not None for event in events)
        if events:
            self.deliver(events)
