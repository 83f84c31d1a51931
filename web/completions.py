"""From a request to its texts, and from their tokens to an answer, whole or as a stream.

    body -> job_of -> Service.opened -> engine's thread -> hand_out -> a queue for each request
                                                                  |
                       answer, when all texts have ended    <-----+
                       stream, a chunk for each new piece   <-----+

What takes long happens in other threads: encoding, chat templates. Constraints are tried in a
process of their own first, one at a time for each API key. A client that leaves ends all of this.
"""

import asyncio
import bisect
import codecs
import contextlib
import json
import random
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from program import UserError, one_line
from serving.catalog import Catalog
from serving.constraint import Constraint, Constraints, json_of
from serving.engine import Engine, Event, LogProbs, NotFinite, Request
from serving.sampling import Sampling
from serving.stream import Text
from serving.thread import SHUTTING_DOWN, EngineThread
from text.chat import Template, checked_messages
from text.tokenizer import Tokenizer
from web import shapes
from web.files import Finetuning
from web.metrics import Metrics
from web.shapes import ApiError, ChatRequest, CompletionRequest, Generation

PING_SECONDS = 15  # a stream that waits says so: proxies close silent connections


@dataclass
class Service:
    """What the endpoints share. Other threads use the catalog, template and constraints.

    Without a model, for runs to look at, there is an empty catalog and no engine.
    """

    catalog: Catalog
    engine: Engine | None = None
    template: Template | None = None
    constraints: Constraints | None = None
    tokenizer: Tokenizer | None = None
    most_texts: int = 0  # running and waiting; more are refused with 429
    most_seconds: float = 0  # of one request
    finetuning: Finetuning | None = None  # None: there are no jobs
    started: int = field(default_factory=lambda: int(time.time()))
    metrics: Metrics = field(default_factory=Metrics)
    queues: dict = field(default_factory=dict)  # Request of the engine -> the queue of its events
    building: dict = field(default_factory=lambda: defaultdict(asyncio.Lock))  # of each API key
    is_draining: bool = False
    chat_stops: list[str] = field(default_factory=list)  # what the template writes behind an answer
    longest_token: int = 0  # in bytes
    thread: EngineThread | None = None

    def __post_init__(self):
        if self.engine:
            self.chat_stops = list(filter(None, [self.template.end_of_answer()]))
            self.longest_token = max(map(len, self.tokenizer.bytes_of.values()))

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the engine's thread, whose events come to `loop` with one call a step."""
        if self.engine:
            deliver = partial(loop.call_soon_threadsafe, self.hand_out)
            self.thread = EngineThread(self.engine, deliver)

    def drain(self, seconds: float) -> None:
        """Take no more texts, and end those that still run after so many seconds."""
        if self.thread:  # else it has not started yet
            self.thread.drain(seconds)

    def statistics(self) -> dict[str, int]:
        """What the engine does and has done."""
        return self.thread.statistics() if self.thread else {}

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        is_alive = self.thread is None or self.thread.thread.is_alive()
        return is_alive and not self.is_draining

    def hand_out(self, events: list[Event]) -> None:
        """Put each event of a step into the queue of its request."""
        for event in events:
            queue = self.queues.get(event.request)
            if queue:
                queue.put_nowait(event)
            if event.end:
                self.queues.pop(event.request, None)

    @contextlib.contextmanager
    def opened(self, requests: list[Request]):
        """Hand requests to the engine. Gives the queue of their events; in the end cancels them.

        ApiError if there are too many already, or the server is about to end.
        """
        if not self.is_ready:
            raise ApiError(503, SHUTTING_DOWN, retry_after=5)
        if len(self.queues) + len(requests) > self.most_texts:
            problem = f"{len(self.queues)} texts are running or waiting"
            raise ApiError(429, f"{problem}: try again later", retry_after=1)
        queue = asyncio.Queue()
        try:
            for request in requests:
                self.queues[request] = queue
                self.thread.submit(request)
            yield queue
        except UserError as error:
            raise ApiError(400, str(error)) from error
        finally:
            for request in requests:
                if self.queues.pop(request, None):
                    self.thread.cancel(request)


# --------------------------------------------------------------------------------------------------
# From a request to texts


@dataclass
class Job:
    """A request that has been checked: its texts, and how its answer looks."""

    kind: str  # chat or text
    body: Generation
    requests: list[Request]  # of the engine, in the order of the answer's choices
    echo: bool = False
    begun: float = field(default_factory=time.monotonic)

    @property
    def usage(self) -> dict:
        """The tokens of all texts. A prompt counts once, however many texts continue it."""
        n_prompt = sum(request.text.n_prompt for request in self.requests[:: self.body.n or 1])
        n_new = sum(request.text.drawn_tokens for request in self.requests)
        both = n_prompt + n_new
        return {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": both}


async def job_of(body: Generation, service: Service, owner: str) -> Job:
    """The texts that a body asks for. owner: its API key. ApiError for what cannot be answered."""
    try:
        adapter = (await asyncio.to_thread(service.catalog.find, body.model)).key
    except UserError as error:
        raise shapes.unknown_model(str(error)) from error
    try:
        constraint = await constraint_of(body, service, owner)
        requests = await asyncio.to_thread(requests_of, body, service, adapter, constraint)
    except UserError as error:  # a template is named by its path
        raise ApiError(400, shapes.public(str(error))) from error
    if isinstance(body, ChatRequest):
        return Job("chat", body, requests)
    return Job("text", body, requests, bool(body.echo))


def requests_of(
    body: Generation, service: Service, adapter: str, constraint: Constraint | None
) -> list[Request]:
    """What the engine gets: a text for each choice of the answer, and what it must conform to."""
    make = chat_texts if isinstance(body, ChatRequest) else completion_texts
    texts = make(body, service, adapter, is_free=constraint is None)
    sampling = Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),  # -1 is vLLM's for no limit
        top_p=1.0 if body.top_p is None else body.top_p,
    )
    requests = [
        Request(text, sampling, constraint and constraint.copy(), body.n_logprobs) for text in texts
    ]
    if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
        for request in requests:
            request.of_prompt = []
    return requests


async def constraint_of(body: Generation, service: Service, owner: str) -> Constraint | None:
    """What the texts must conform to. UserError or ApiError for what cannot be enforced."""
    kind, text = await asyncio.to_thread(asked_of, body)
    if text is None:
        return None
    if body.stop:
        raise ApiError(400, "stop could cut a text that must conform: leave one out", "stop")
    async with service.building[owner]:
        await service.constraints.require_cheap(kind, text)
        return await asyncio.to_thread(service.constraints.constraint, kind, text)


def asked_of(body: Generation) -> tuple[str, str | None]:
    """The kind and text of a constraint, as `Constraints.constraint` takes them; None: no text."""
    asked = [body.response_format, body.guided_json, body.guided_regex]
    if sum(value is not None for value in asked) > 1:
        several = "response_format, guided_json and guided_regex exclude each other: keep one"
        raise ApiError(400, several, "response_format")
    if body.guided_regex is not None:
        return "regex", body.guided_regex
    schema = body.guided_json if body.response_format is None else schema_of(body.response_format)
    return "JSON schema", None if schema is None else json_of(schema)


def schema_of(form: dict) -> dict | None:
    """The schema that a response_format asks for; None for any text. ApiError if it is wrong."""
    kind = form.get("type")
    fields = {"text": None, "json_object": "schema", "json_schema": "json_schema"}
    if not isinstance(kind, str) or kind not in fields:
        problem = f"response_format.type is {kind!r}: expected {', '.join(fields)}"
        raise ApiError(400, problem, "response_format")
    field = fields[kind]
    if others := sorted(form.keys() - {"type", field}):
        problem = f"response_format.{others[0]} does not belong to the type {kind}: leave it out"
        raise ApiError(400, problem, "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return form.get("schema", {"type": "object"})
    named = form.get("json_schema")
    if not isinstance(named, dict) or "schema" not in named:
        raise ApiError(400, "response_format has no json_schema.schema", "response_format")
    return named["schema"]


def completion_texts(body: CompletionRequest, service: Service, adapter: str, is_free: bool):
    """n texts for each prompt. is_free: no constraint says what they are."""
    prompts = body.prompts
    n = body.n or 1
    if len(prompts) * n > shapes.MOST_TEXTS:
        problem = f"{len(prompts)} prompts with n={n} are more than {shapes.MOST_TEXTS} texts"
        raise ApiError(400, f"{problem}: send several requests", param="prompt")
    if body.echo and body.logprobs is not None and body.stream:
        raise ApiError(400, "echo with logprobs does not stream: leave one out", param="stream")
    if body.max_tokens == 0 and not (body.echo and body.logprobs is not None):
        problem = "max_tokens 0 scores a prompt: set echo and logprobs, or a larger number"
        raise ApiError(400, problem, param="max_tokens")
    texts = []
    for prompt in prompts:
        texts += texts_of(prompt, body, service, adapter, body.max_tokens, body.stops)
    return texts


def chat_texts(body: ChatRequest, service: Service, adapter: str, is_free: bool) -> list[Text]:
    """n answers to the conversation. is_free: the template's own end may end them."""
    messages = checked_messages([m.plain for m in body.messages], last=("user", "tool"))
    template = service.template
    spelled_out = [{**m, "content": template.spelled_out(m["content"])} for m in messages]
    prompt = template.text(spelled_out, add_generation_prompt=True)
    stops = [*body.stops, *(service.chat_stops if is_free else [])]
    return texts_of(prompt, body, service, adapter, body.most_tokens, stops, special_tokens=True)


def texts_of(prompt, body, service, adapter, max_tokens, stops, special_tokens=False) -> list[Text]:
    """n texts that continue a prompt, a string or token ids."""
    room = service.engine.max_tokens
    too_long = f"the prompt does not fit into the {room} tokens of a text: shorten it"
    if len(prompt) > room * (service.longest_token if isinstance(prompt, str) else 1):
        raise ApiError(400, too_long, code="context_length_exceeded")

    seed = random.getrandbits(62) if body.seed is None else body.seed

    model_cfg = service.engine.decoder.cfg
    most = room if max_tokens is None else max_tokens
    settings = stops, seed, adapter, special_tokens

    def text_of(prompt, repeat: int) -> Text:
        return Text(prompt, service.tokenizer, model_cfg, most, *settings, repeat)

    first = text_of(prompt, 0)
    if max_tokens is None:
        first.max_new_tokens = room - first.n_prompt
    has_no_room = max_tokens is None and first.max_new_tokens < 1
    if has_no_room or first.max_length > room:
        asked = f"{first.n_prompt} tokens of the prompt and max_tokens {first.max_new_tokens}"
        asks_too_much = f"{asked} are more than {room}: lower max_tokens or shorten the prompt"
        problem = too_long if max_tokens is None else asks_too_much
        raise ApiError(400, problem, code="context_length_exceeded")
    texts = [first]
    for repeat in range(1, body.n or 1):
        text = text_of(first.ids, repeat)  # the prompt is encoded once
        text.prompt = first.prompt
        text.max_new_tokens = first.max_new_tokens
        texts.append(text)
    return texts


# --------------------------------------------------------------------------------------------------
# From tokens to an answer


async def respond(body: Generation, service: Service, http: HttpRequest) -> Response:
    """Answer a request, whole or as a stream, unless its client leaves before."""
    if body.stream_options and not body.stream:
        raise ApiError(400, "stream_options needs stream: set it", param="stream_options")
    return await unless_left(http, answer(body, service, http))


async def unless_left(http: HttpRequest, work) -> Response:
    """The answer of a coroutine, which is cancelled if the client leaves before."""
    answering = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(client_leaves(http))
    try:
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        return Response(status_code=499)  # nobody reads it
    finally:
        answering.cancel()
        leaving.cancel()


async def answer(body: Generation, service: Service, http: HttpRequest) -> Response:
    """The whole answer, or a stream that has begun."""
    job = await job_of(body, service, http.state.owner)
    http.state.job = job  # for the log
    if body.stream:
        opened = contextlib.ExitStack()
        queue = opened.enter_context(service.opened(job.requests))  # may still raise a status
        return EventStream(stream(job, service, queue), opened)
    with service.opened(job.requests) as queue:
        return JSONResponse(await gather(job, service, queue))


class EventStream(StreamingResponse):
    """A stream of server-sent events. However it ends, so do its texts."""

    def __init__(self, frames, opened: contextlib.ExitStack):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(frames, media_type="text/event-stream", headers=headers)
        self.opened = opened

    async def __call__(self, scope, receive, send) -> None:
        """Send the stream, until it ends or the client leaves."""
        with self.opened:
            await super().__call__(scope, receive, send)


async def client_leaves(http: HttpRequest) -> None:
    """Return when the client has closed the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def events_of(job: Job, service: Service, queue: asyncio.Queue):
    """The events of a job's texts, until the last one has ended; None after 15 s without one.

    ApiError if the engine has ended a text for an error, or the job takes too long.
    """
    n_open = len(job.requests)
    deadline = job.begun + service.most_seconds
    is_first = True
    while n_open:
        left = deadline - time.monotonic()
        if left <= 0:
            limit = f"the answer takes more than {service.most_seconds:g} s"
            raise ApiError(504, f"{limit}: ask for fewer tokens")
        event = await within(min(left, PING_SECONDS), queue.get())
        if event is None:
            yield None
            continue
        if event.request.error or event.end == "cancelled":
            raise failure_of(event, service)
        if is_first:
            service.metrics.add("first_token_seconds", time.monotonic() - job.begun)
            is_first = False
        n_open -= event.end is not None
        yield event
    service.metrics.add("answer_seconds", time.monotonic() - job.begun)


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


def failure_of(event: Event, service: Service) -> ApiError:
    """The error that ended a text. What only we can mend shows its words in the log alone."""
    error = event.request.error
    if not service.is_ready:
        return ApiError(503, SHUTTING_DOWN, retry_after=5)
    if isinstance(error, UserError) and not isinstance(error, NotFinite):
        return ApiError(400, str(error))
    print(f"error: a text has failed: {one_line(error)}", file=sys.stderr, flush=True)
    return ApiError(500, "the server could not generate this text: its log says why")


async def gather(job: Job, service: Service, queue: asyncio.Queue) -> dict:
    """The whole answer."""
    logprobs = {request: LogprobsOfText.of_new(service.tokenizer) for request in job.requests}
    async for event in events_of(job, service, queue):
        if event and event.logprobs:
            logprobs[event.request].add(event.token, event.logprobs)
    choices = [
        choice_of(job, number, request, logprobs[request])
        for number, request in enumerate(job.requests)
    ]
    return {**shapes.head(job.kind, job.body.model), "choices": choices, "usage": job.usage}


def choice_of(job: Job, number: int, request: Request, logprobs: "LogprobsOfText") -> dict:
    """A finished text in an answer."""
    text = request.text
    choice = {"index": number, "finish_reason": shapes.FINISH_REASONS[text.end], "logprobs": None}
    if request.n_logprobs is not None:
        choice["logprobs"] = logprobs.shaped(job.kind, end=text.drawn_tokens)
    if request.of_prompt is not None:
        choice["logprobs"] = with_prompt(request, choice["logprobs"])
    if job.kind == "chat":
        return {**choice, "message": {"role": "assistant", "content": text.text}}
    return {**choice, "text": text.prompt + text.text if job.echo else text.text}


class LogprobsOfText:
    """The log-probabilities of a text's tokens, and where in the text each token begins.

    hidden: ids that the text does not show.
    """

    def __init__(self, tokenizer: Tokenizer, hidden=()):
        self.tokenizer = tokenizer
        self.hidden = hidden
        self.tokens, self.offsets = [], []
        self.n_characters = 0
        self.n_shown = self.n_taken = 0  # characters of a stream; tokens that are in its chunks
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @classmethod
    def of_new(cls, tokenizer: Tokenizer) -> "LogprobsOfText":
        """For the new tokens of a text, of which end-of-text shows nothing."""
        return cls(tokenizer, tokenizer.ends)

    def spelled(self, token: int) -> bytes:
        """What the text shows of a token."""
        return b"" if token in self.hidden else self.tokenizer.decode_bytes([token])

    def add(self, token: int, logprobs: LogProbs) -> None:
        """Take in the next token."""
        likeliest = [
            shapes.token_logprob(self.spelled(other), logprob)
            for other, logprob in logprobs.likeliest
        ]
        of_token = shapes.token_logprob(self.spelled(token), logprobs.of_token)
        self.tokens.append({**of_token, "top_logprobs": likeliest})
        self.offsets.append(self.n_characters)
        self.n_characters += len(self.utf8.decode(self.spelled(token)))

    def shaped(self, kind: str, begin: int = 0, end: int | None = None) -> dict:
        """In the shape of chats or of texts, for the tokens from `begin` to before `end`."""
        tokens = self.tokens[begin:end]
        if kind == "chat":
            return {"content": tokens, "refusal": None}
        return shapes.text_logprobs(tokens, self.offsets[begin:end])

    def take(self, event: Event, kind: str) -> dict | None:
        """For a chunk of a stream: the next tokens that no stop string can cut off any more."""
        if event.logprobs is None:
            return None
        self.add(event.token, event.logprobs)
        self.n_shown += len(event.piece)
        begin, self.n_taken = self.n_taken, bisect.bisect_left(self.offsets, self.n_shown)
        if event.end:
            self.n_taken = event.request.text.drawn_tokens
        return self.shaped(kind, begin, self.n_taken) if begin < self.n_taken else None


def with_prompt(request: Request, new: dict) -> dict:
    """The log-probabilities of an echoed prompt's tokens, then `new`. The first one has none."""
    text = request.text
    of_prompt = LogprobsOfText(text.tokenizer)
    for token, logprobs in zip(text.ids, [LogProbs(0.0, []), *request.of_prompt], strict=False):
        of_prompt.add(token, logprobs)
    shaped = of_prompt.shaped("text")
    shaped["token_logprobs"][0] = shaped["top_logprobs"][0] = None
    new["text_offset"] = [len(text.prompt) + offset for offset in new["text_offset"]]
    return {key: shaped[key] + new[key] for key in new}


async def stream(job: Job, service: Service, queue: asyncio.Queue):
    """The answer as server-sent events. It ends with an error in one if a text fails."""
    head = shapes.head(job.kind, job.body.model)
    is_chat = job.kind == "chat"
    head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
    wants_usage = bool(job.body.stream_options and job.body.stream_options.include_usage)
    if wants_usage:
        head["usage"] = None
    numbers = {request: number for number, request in enumerate(job.requests)}

    def frame(number: int, part: dict, reason=None, logprobs=None) -> str:
        choice = {"index": number, **part, "logprobs": logprobs, "finish_reason": reason}
        return sse({**head, "choices": [choice]})

    logprobs_of = [LogprobsOfText.of_new(service.tokenizer) for _ in job.requests]
    try:
        for number, request in enumerate(job.requests):
            if is_chat:
                yield frame(number, {"delta": {"role": "assistant", "content": ""}})
            elif job.echo:
                yield frame(number, {"text": request.text.prompt})
        async for event in events_of(job, service, queue):
            if event is None:
                yield ": ping\n\n"
                continue
            number = numbers[event.request]
            logprobs = logprobs_of[number].take(event, job.kind)
            if event.piece or logprobs or event.end:
                part = {"delta": {"content": event.piece}} if is_chat else {"text": event.piece}
                yield frame(number, part, shapes.FINISH_REASONS.get(event.end), logprobs)
        if wants_usage:
            yield sse({**head, "choices": [], "usage": job.usage})
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield sse(error.body)


def sse(values: dict) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(values, separators=(',', ':'))}\n\n"
