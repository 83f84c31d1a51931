"""The engine: many texts in one batch, which each joins and leaves between two tokens.

    submit -> waiting -> its adapter loads -> its prompt is read -> a row of the batch -> end
                         (a few at a time)    (one at a time, in    (each step, one more
                                               chunks)               token for all rows)

So a step reads the weights once for all rows, and no text waits for another one to end. A batch of
a fixed set of texts would run with ever fewer rows until its longest one ends. This is called
iteration-level scheduling or continuous batching (Orca: Yu et al., OSDI 2022).

Prompts are read between two tokens of all others. So a step reads as much of them as takes 80 ms,
and the rest in the next steps.

In exact arithmetic a text does not depend on those beside it: it is the one of `stream.write`. In
fp32 and bf16, sums are rounded otherwise in another batch, and a text may take another turn where
two tokens are about equally likely.

Run `python -m serving.engine` to watch texts come and go.
"""

import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from config import MPTConfig
from model import MPT, init_weights
from program import UserError, arguments, require, run
from serving.adapters import BASE
from serving.constraint import Constraint
from serving.decoder import Decoder
from serving.rows import Batch, SharedBatch
from serving.sampling import Sampling, sample
from serving.speed import Speed, tokens_read
from serving.stream import Text
from text import tokenizer as tokenizers

# A chunk of a prompt counts as this many tokens at least, since each reads all weights. Else many
# short prompts that arrive together would hold up the next token of all others.
MIN_COST = 32
AHEAD = 4  # waiting texts whose adapters are loaded in advance


class NotFinite(UserError):
    """The model gives no probabilities: no request is at fault."""


@dataclass(eq=False)
class Request:
    """A text that somebody waits for.

    constraint: what the text may be. An error that it raises ends this text alone.
    n_logprobs: report the log-probability of each token, and of so many of the likeliest ones.
    of_prompt: a list that gets the same for the tokens of the prompt, from the second one on.
    error: what ended the text, if its `end` is "error". The engine sets it.
    """

    text: Text
    sampling: Sampling = field(default_factory=Sampling)
    constraint: Constraint | None = None
    n_logprobs: int | None = None
    of_prompt: list["LogProbs"] | None = None
    error: Exception | None = None


@dataclass
class LogProbs:
    """Natural logarithms of the model's probabilities, before temperature, top-k, constraints."""

    of_token: float
    likeliest: list[tuple[int, float]]  # (token, log-probability), n_logprobs of them


@dataclass
class Event:
    """A new token of a text, its end, or both."""

    request: Request
    token: int | None = None  # None: the text was cancelled or has failed
    piece: str = ""  # characters that can be shown now, often none
    logprobs: LogProbs | None = None
    end: str | None = None  # `Text.end`; set in the last event of a request


class Engine:
    """Generates the texts of requests. `step` is to be called as long as `is_busy`.

    n_rows: texts that are generated at the same time; all others wait. max_tokens: of a text, its
    prompt included. chunk: tokens of prompts that a step reads at most, and read_seconds: how long
    it may take while texts wait for their next token. prefix_bytes: room for beginnings of prompts
    that may be shared (serving/rows.py). A decoder with an AdapterBank loads adapters beside
    decoding. The memory of all this is bounded: n_rows + 1 texts and the prefixes.

    All methods but `check` are to be called by one thread; serving/thread.py has one.
    """

    def __init__(
        self,
        decoder: Decoder,
        n_rows: int = 32,
        max_tokens: int = 2048,
        chunk: int = 256,
        read_seconds: float = 0.08,
        prefix_bytes: int = 0,
    ):
        self.decoder = decoder
        self.bank = decoder.bank
        self.n_rows = n_rows
        self.max_tokens = max_tokens
        self.chunk = chunk
        self.read_seconds = read_seconds
        self.seconds_a_token = 0.0  # of a prompt, of the last chunks
        kind = SharedBatch if decoder.team else Batch
        self.batch = kind(decoder, n_rows, max_tokens, prefix_bytes)
        if self.bank:
            self.bank.fill_on_all_ranks = self.batch.fill
        # Where a request is:
        self.waiting = OrderedDict()  # Request -> None, in the order of their arrival
        self.loading = []  # their adapters are loaded or being loaded
        self.reading = None  # its prompt is being read, into a cache of its own
        self.n_read = 0  # tokens of it that are in the cache
        self.running = []  # one for each row
        self.events = []  # since the last step
        self.speed = Speed()

    # ----------------------------------------------------------------------------------------------
    # Requests

    def check(self, request: Request) -> None:
        """UserError if a request can never be served. Any thread may ask."""
        text = request.text
        parts = f"prompt ({text.n_prompt} tokens) and max_new_tokens ({text.max_new_tokens})"
        fix = "shorten the prompt or lower max_new_tokens"
        fits = text.max_length <= self.max_tokens
        require(fits, f"{parts} are more than {self.max_tokens} together: {fix}")
        least = 1 if request.of_prompt is None else 0
        require(text.max_new_tokens >= least, f"max_new_tokens must be {least} or more")
        require((request.n_logprobs or 0) >= 0, "n_logprobs must be 0 or more")
        no_bank = f"no adapters are served here, so not {text.adapter}: leave the adapter out"
        require(self.bank or text.adapter == BASE, no_bank)

    def submit(self, request: Request) -> None:
        """Add a request. UserError if it can never be served: any other one runs to its end."""
        self.check(request)
        self.waiting[request] = None

    def cancel(self, request: Request, error: Exception | None = None) -> None:
        """End a text wherever it is, because of an error if one is given.

        One that has ended stays as it is.
        """
        if request.text.end:
            return
        if request in self.waiting:
            del self.waiting[request]
        else:
            self.remove(request)
        request.error = error
        request.text.end = "error" if error else "cancelled"
        self.events.append(Event(request, end=request.text.end))

    def cancel_all(self, error: Exception | None = None) -> None:
        """`cancel` for all requests that have not ended."""
        begun = [*self.loading, *([self.reading] if self.reading else []), *self.running]
        for request in [*self.waiting, *reversed(begun)]:  # the last rows first: none has to move
            self.cancel(request, error)

    def remove(self, request: Request) -> None:
        """Take a request out that is no longer waiting, and release its adapter."""
        if request in self.loading:
            self.loading.remove(request)
        elif request is self.reading:
            self.reading = None
            self.batch.end_prompt(None)
        else:
            row = self.running.index(request)
            self.batch.leave(row)
            self.running[row] = self.running[-1]
            self.running.pop()
        if self.bank:
            self.bank.release(request.text.adapter)

    @property
    def is_busy(self) -> bool:
        """Whether `step` has something to do or to report."""
        return bool(self.running or self.reading or self.loading or self.waiting or self.events)

    # ----------------------------------------------------------------------------------------------
    # Steps

    def run(self, requests: list[Request]) -> Iterator[Event]:
        """Generate these texts, for a program that has no others. Raises what has ended one."""
        for request in requests:
            self.submit(request)
        try:
            while self.is_busy:
                for event in self.step():
                    if event.request.error:
                        raise event.request.error
                    yield event
        finally:
            self.cancel_all()

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Read some tokens of prompts, then add one token to each running text.

        Returns what has happened since the last step, in order. An error of one request ends its
        text; one of the decoder ends all running texts. Neither is raised.
        """
        room = self.tokens_to_read()
        while room > 0 and (self.reading or self.begin_next()):
            room -= max(self.read_chunk(room), MIN_COST)
        if self.running:
            self.decode()
        elif not self.reading and self.loading:
            time.sleep(0.001)  # leave the processor to the thread that loads adapters
        events, self.events = self.events, []
        return events

    def tokens_to_read(self) -> int:
        """How many tokens of prompts this step may read."""
        seconds = self.chunk * self.seconds_a_token
        if not self.running or seconds <= self.read_seconds:
            return self.chunk
        return max(MIN_COST, int(self.chunk * self.read_seconds / seconds))

    def begin_next(self) -> bool:
        """Begin to read the first prompt whose adapter is loaded. False: there is none, or no row.

        So a text may overtake others whose adapters are still loading.
        """
        self.load_ahead()
        if len(self.running) == self.n_rows:
            return False
        for request in list(self.loading):
            try:
                if not self.bank or self.bank.is_loaded(request.text.adapter):
                    self.begin(request)
                    return True
            except Exception as error:  # such as: the adapter's file is damaged
                self.cancel(request, error)
        return False

    def load_ahead(self) -> None:
        """Let the adapters of the next texts be loaded."""
        while self.waiting and len(self.loading) < AHEAD:
            request = next(iter(self.waiting))
            if self.bank:
                try:
                    self.bank.acquire(request.text.adapter)
                except UserError:  # all slots are in use until some text ends
                    return
            del self.waiting[request]
            self.loading.append(request)

    def begin(self, request: Request) -> None:
        """Make the cache of a prompt, and fill it with the known beginning."""
        self.loading.remove(request)
        self.reading = request
        # All logits of a prompt are needed: then no beginning is known.
        start = self.prefix_start(request) if request.of_prompt is None else None
        self.n_read = self.batch.begin(request.text.ids[: request.text.n_prompt], start)
        self.speed.prefix_tokens += self.n_read

    def prefix_start(self, request: Request) -> tuple:
        """What keys and values depend on beside the ids."""
        adapter = request.text.adapter
        return adapter, self.bank.version(adapter) if self.bank else 0

    def read_chunk(self, room: int) -> int:
        """Read at most `room` tokens of the prompt. After the last one its text joins the batch.

        Returns how many tokens were read.
        """
        begin = time.perf_counter()
        request = self.reading
        n = min(room, request.text.n_prompt - self.n_read)
        try:
            logits = self.batch.read(n, self.slots([request]), request.of_prompt is not None)
            if request.of_prompt is not None:
                logits = self.note_prompt(request, logits)
            self.n_read += n
            if self.n_read == request.text.n_prompt:
                self.join(request, logits)
        except Exception as error:
            self.cancel(request, error)
        seconds = time.perf_counter() - begin
        self.speed.prompt_tokens += n
        self.speed.prompt_seconds += seconds
        pace = seconds / max(n, MIN_COST)
        self.seconds_a_token = (pace + (self.seconds_a_token or pace)) / 2
        return n

    def join(self, request: Request, logits) -> None:
        """The prompt has been read: its text gets a row, and its first token from logits (1, V)."""
        self.batch.join()
        self.running.append(request)
        self.reading = None
        start = None
        try:
            if request.text.max_new_tokens:
                self.add_tokens([request], logits)
                self.speed.prompts += 1
            else:  # its prompt was to be read, no more
                request.text.end = "max_new_tokens"
                self.events.append(Event(request, end=request.text.end))
                self.remove(request)
            start = None if request.error else self.prefix_start(request)
        finally:
            self.batch.end_prompt(start)

    def note_prompt(self, request: Request, logits) -> torch.Tensor:
        """Report the log-probabilities of what was read, and return the last logits, (1, V).

        logits: (1, n, V), after each of the n tokens.
        """
        n = logits.shape[1]
        following = request.text.ids[self.n_read + 1 : self.n_read + 1 + n]
        log_p = logits[0, : len(following)].log_softmax(dim=-1)
        for row, token in zip(log_p, following, strict=True):
            request.of_prompt.append(report(row, token, request.n_logprobs))
        return logits[:, -1]

    def decode(self) -> None:
        """Add one token to each running text."""
        begin = time.perf_counter()
        requests = list(self.running)
        try:
            last_ids = [request.text.ids[-1] for request in requests]
            logits = self.batch.decode(last_ids, self.slots(requests))
            n_columns = self.batch.n_columns
            self.add_tokens(requests, logits)
        except Exception as error:  # such as: no memory. No text can go on without this token
            for request in reversed(requests):
                self.cancel(request, error)
            return
        self.speed.steps += 1
        self.speed.tokens += len(requests)
        self.speed.seconds += time.perf_counter() - begin
        self.speed.cached_tokens += len(requests) * tokens_read(self.decoder.cfg, n_columns)
        self.speed.adapter_bytes += self.bank.bytes_per_step if self.bank else 0

    def slots(self, requests: list[Request]) -> list[int] | None:
        """The slot of the adapter of each text; None without a bank."""
        if not self.bank:
            return None
        return self.bank.slots_of([request.text.adapter for request in requests])

    def add_tokens(self, requests: list[Request], logits) -> None:
        """Draw the next token of n running texts from logits (n, V), and add it to them."""
        log_p = log_probabilities(requests, logits)
        is_finite = logits.sum(dim=-1).isfinite()
        errors = [None] * len(requests)
        for row, request in enumerate(requests):
            if request.constraint:
                try:
                    forbid(logits[row], request.constraint.mask())
                except Exception as error:  # it ends this text alone
                    errors[row] = error

        drawn = torch.stack([draw(requests, logits), is_finite])
        tokens, is_finite = drawn.tolist()  # waits for the device
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            try:
                if not is_finite[row]:
                    in_fp32 = self.decoder.dtype == torch.float32
                    fix = "train again from an earlier checkpoint"
                    fix = fix if in_fp32 else "try --precision=fp32"
                    raise NotFinite(f"the logits are not finite: {fix}")
                if request.constraint and not errors[row]:
                    request.constraint.accept(token)
            except Exception as error:
                errors[row] = error
            if errors[row]:
                self.cancel(request, errors[row])
            else:
                self.add_token(request, token, log_p.get(row))

    def add_token(self, request: Request, token: int, log_p) -> None:
        """Add a token to a text. log_p: (V,) or None."""
        text = request.text
        logprobs = None if log_p is None else report(log_p, token, request.n_logprobs)
        piece = text.add(token)
        self.events.append(Event(request, token, piece, logprobs, text.end))
        if text.end:
            self.remove(request)


# --------------------------------------------------------------------------------------------------
# From logits to tokens


def log_probabilities(requests: list[Request], logits) -> dict[int, torch.Tensor]:
    """For the rows that ask for them, by row: (V,) each."""
    rows = [row for row, request in enumerate(requests) if request.n_logprobs is not None]
    if not rows:
        return {}
    return dict(zip(rows, logits[rows].log_softmax(dim=-1), strict=True))


def report(log_p, token: int, n: int) -> LogProbs:
    """What log-probabilities (V,) say of a token, and the n likeliest ones."""
    values, ids = log_p.topk(min(n, len(log_p)))
    likeliest = list(zip(ids.tolist(), values.tolist(), strict=True))
    return LogProbs(log_p[token].item(), likeliest)


def forbid(logits, mask) -> None:
    """Set the logits (V,) of tokens to -inf where the mask (V,) is 0. UserError if all are."""
    require(mask.any(), "the constraint allows no token here: change it")
    logits.masked_fill_(mask.to(logits.device) == 0, -torch.inf)


def draw(requests: list[Request], logits) -> torch.Tensor:
    """A token for each row of logits (n, V): (n,). Rows of equal settings are drawn in one call."""
    groups = defaultdict(list)
    for row, request in enumerate(requests):
        groups[request.sampling].append(row)
    tokens = logits.new_empty(len(requests), dtype=torch.int64)
    for sampling, rows in groups.items():
        texts = [requests[row].text for row in rows]
        uniforms = torch.stack([text.uniforms[text.new_tokens] for text in texts])
        uniforms = uniforms.to(logits.device, non_blocking=True)  # the step may still run
        if len(groups) == 1:
            return sample(logits, **vars(sampling), uniform=uniforms)
        tokens[rows] = sample(logits[rows], **vars(sampling), uniform=uniforms)
    return tokens


def demonstrate(argv) -> None:
    """Print who is where after each step: seven texts, three rows, prompts read in chunks of 32."""
    arguments(argv)
    cfg = MPTConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=257, alibi=True)
    model = MPT(cfg)
    init_weights(model, seed=0)
    tokenizer = tokenizers.load("bytes")
    engine = Engine(Decoder(model, tokenizer.vocab_size), n_rows=3, max_tokens=128, chunk=32)
    names = {}
    lengths = [(9, 9), (5, 4), (90, 5), (7, 8), (3, 3), (40, 6), (8, 4)]  # prompt, new tokens
    for name, (n_prompt, n_new) in zip("ABCDEFG", lengths, strict=True):
        request = Request(Text("x" * n_prompt, tokenizer, cfg, n_new, seed=ord(name)))
        names[request] = name
        engine.submit(request)

    print("step  rows   reads  waiting")
    n_steps = 0
    while engine.is_busy:
        ended = [names[event.request] for event in engine.step() if event.end]
        n_steps += 1
        rows = "".join(names[request] for request in engine.running)
        reads = names.get(engine.reading, "")
        queue = "".join(names[request] for request in [*engine.loading, *engine.waiting])
        print(f"{n_steps:4}  {rows:5}  {reads:5}  {queue:7}", *(f"{name} ends" for name in ended))


if __name__ == "__main__":
    run(demonstrate)
