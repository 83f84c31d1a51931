"""The stream of text: what can be shown while it is generated, and several texts in one batch.

    token  text  shown
       99  c     c
      195  c     c       half of a character: its second byte is missing
      169  cé    cé
       69  céE   cé      held back: this may be the start of the stop string "END"
       33  céE!  céE!    it was not

Texts share a batch. When half of them have ended, the others continue in a smaller batch.
"""

import codecs
import contextlib
import math
import sys
import time

import torch

from config import MPTConfig
from program import require
from serving.adapters import BASE
from serving.decoder import Decoder, generate
from serving.sampling import uniforms
from serving.speed import Speed


class Text:
    """A prompt and its continuation, which grows token by token.

    stops: strings that end the text and are not part of it. adapter: which one writes it, as
    serving/adapters.py names them. repeat: which text of this prompt it is, 0 for the first.

    text        the continuation so far
    streamed    how many of its characters `add` has returned
    end         why the text ended; None while it grows
    """

    def __init__(
        self,
        prompt: str,
        tokenizer,
        cfg: MPTConfig,
        max_new_tokens: int,
        stops=(),
        seed: int = 1,
        adapter: str = BASE,
        special_tokens: bool = False,
        repeat: int = 0,
    ):
        """Raises UserError if the prompt is longer than the learned positions.

        special_tokens: the names of special tokens in the prompt stand for their ids.
        """
        self.prompt = prompt
        self.adapter = adapter
        self.tokenizer = tokenizer
        self.stops = stops
        # An empty prompt becomes end-of-text, after which a new document begins.
        encode = tokenizer.encode_special if special_tokens else tokenizer.encode
        self.ids = [int(i) for i in encode(prompt)] or [tokenizer.eot]
        self.n_prompt = len(self.ids)
        self.max_new_tokens = max_new_tokens
        self.max_ids = cfg.max_seq_len if cfg.learned_positions else math.inf
        require(
            self.n_prompt <= self.max_ids,
            f"the prompt has {self.n_prompt} tokens, but learned positions end at max_seq_len "
            f"{cfg.max_seq_len}: shorten it (ALiBi and RoPE have no such limit)",
        )
        self.uniforms = uniforms(seed, self.ids, repeat, max_new_tokens)  # they draw the tokens
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # keeps incomplete characters
        self.text = ""
        self.streamed = 0
        self.end = None

    def add(self, token: int) -> str:
        """Append a token. Returns the characters that can be shown now, often none.

        A character of several bytes is shown when it is complete. Characters that may begin a stop
        string are held back.
        """
        if token in self.tokenizer.ends:
            self.end = "end of text"
        else:
            self.ids.append(token)
            self.text += self.utf8.decode(self.tokenizer.decode_bytes([token]))
        if len(self.ids) > self.max_ids:
            self.end = "max_seq_len"
        elif self.new_tokens == self.max_new_tokens:
            self.end = "max_new_tokens"
        self.cut_at_stop_string()

        streamed_before = self.streamed
        self.streamed = len(self.text)
        if not self.end:
            self.streamed -= self.held_back()
        return self.text[streamed_before : self.streamed]

    def cut_at_stop_string(self) -> None:
        """End the text before the first stop string in it. Streamed characters hold none."""
        found = [self.text.find(stop, self.streamed) for stop in self.stops]
        positions = [position for position in found if position >= 0]
        if positions:
            self.text = self.text[: min(positions)]
            self.end = "stop string"

    def held_back(self) -> int:
        """How many of the last characters may be the start of a stop string."""
        longest = 0
        for stop in self.stops:
            for length in range(1, len(stop)):
                if self.text.endswith(stop[:length]):
                    longest = max(longest, length)
        return longest

    @property
    def new_tokens(self) -> int:
        """How many tokens the continuation has."""
        return len(self.ids) - self.n_prompt


def write(decoder: Decoder, texts: list[Text], speed: Speed, **settings):
    """Generate all texts to their ends. Yields (text, the characters of it that can be shown now).

    settings: temperature, top_k and top_p of `sample`. When half of a batch have ended, or the
    learned positions of its longest text have, the others continue in a new batch and a new cache.
    UserError if a text's adapter cannot be loaded.
    """
    bank = decoder.bank
    adapters = [text.adapter for text in texts]
    with bank.in_use(adapters) if bank else contextlib.nullcontext():
        while growing := [text for text in texts if not text.end]:
            if bank:
                bank.use([text.adapter for text in growing])
            yield from write_batch(decoder, growing, speed, settings)


def write_batch(decoder: Decoder, texts: list[Text], speed: Speed, settings: dict):
    """`write` until half of the texts have ended. They all have equally many new tokens."""
    ids, pad = left_padded(texts)
    n_done = texts[0].new_tokens
    uniforms = torch.stack([text.uniforms[n_done:] for text in texts])
    tokens_of_steps = generate(
        decoder,
        ids.to(decoder.device),
        uniforms.shape[1],
        pad=pad.to(decoder.device) if pad.any() else None,
        uniforms=uniforms.to(decoder.device),
        **settings,
    )

    speed.prompt_tokens += sum(len(text.ids) for text in texts)
    begin = time.perf_counter()
    for step, tokens in enumerate(tokens_of_steps):
        tokens = tokens.tolist()  # waits for the device
        seconds = time.perf_counter() - begin
        if step == 0:
            speed.prompt_seconds += seconds
        else:
            speed.steps += 1
            speed.seconds += seconds
            speed.tokens += sum(not text.end for text in texts)
            speed.cached_tokens += len(texts) * (ids.shape[1] + step)
            speed.adapter_bytes += decoder.bank.bytes_per_step if decoder.bank else 0

        for text, token in zip(texts, tokens, strict=True):
            if not text.end:
                yield text, text.add(token)
        n_growing = sum(not text.end for text in texts)
        if 2 * n_growing <= len(texts):
            return
        begin = time.perf_counter()


def left_padded(texts: list[Text]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (B, T), padded on the left so that all rows end together, and each row's padding (B,)."""
    longest = max(len(text.ids) for text in texts)
    pad = [longest - len(text.ids) for text in texts]
    rows = [[0] * n + text.ids for n, text in zip(pad, texts, strict=True)]
    return torch.tensor(rows), torch.tensor(pad)


def print_stream(decoder: Decoder, text: Text, speed: Speed, settings: dict) -> None:
    """Generate one text and print it meanwhile."""
    print(text.prompt, end="", flush=True)
    for _, piece in write(decoder, [text], speed, **settings):
        print(piece, end="", flush=True)
    print(flush=True)
    if not text.text:
        print(f"no text: {text.end} came first; set another --seed or --prompt", file=sys.stderr)
    if text.end == "max_seq_len":
        print(f"ended at max_seq_len {text.max_ids}, where learned positions end", file=sys.stderr)
