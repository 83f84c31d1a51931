"""The stream of text: what can be shown while it is generated.

    token  text  shown
       99  c     c
      195  c     c       half of a character: its second byte is missing
      169  cé    cé
       69  céE   cé      held back: this may be the start of the stop string "END"
       33  céE!  céE!    it was not

`write` generates one text. serving/engine.py generates many in one batch.
"""

import codecs
import contextlib
import functools
import math

import torch

from config import MPTConfig
from program import require
from serving.adapters import BASE
from serving.decoder import Decoder, generate
from serving.sampling import uniforms
from text.tokenizer import without_lone_surrogates


class Text:
    """A prompt and its continuation, which grows token by token.

    prompt: a string, or token ids. stops: strings that end the text and are not part of it.
    adapter: which one writes it, as serving/adapters.py names them. repeat: which text of this
    prompt it is, 0 for the first.

    text        the continuation so far
    streamed    how many of its characters `add` has returned
    begins      where in it each of its tokens begins, end-of-text included
    end         why the text ended; None while it grows: "end of text", "stop string",
                "max_new_tokens", "max_seq_len"; in an engine also "cancelled" and "error"
    """

    def __init__(
        self,
        prompt: str | list[int],
        tokenizer,
        cfg: MPTConfig,
        max_new_tokens: int,
        stops=(),
        seed: int = 1,
        adapter: str = BASE,
        special_tokens: bool = False,
        repeat: int = 0,
    ):
        """Raises UserError if the prompt is longer than the learned positions, or has unknown ids.

        special_tokens: the names of special tokens in the prompt stand for their ids.
        """
        self.adapter = adapter
        self.tokenizer = tokenizer
        self.stops = stops
        if isinstance(prompt, str):
            self.prompt = without_lone_surrogates(prompt)  # as it is encoded
            encode = tokenizer.encode_special if special_tokens else tokenizer.encode
            ids = encode(prompt)
        else:
            unknown = [i for i in prompt if not 0 <= i < tokenizer.vocab_size]
            last = tokenizer.vocab_size - 1
            require(not unknown, f"the prompt has the id {unknown[:1]}: ids are from 0 to {last}")
            self.prompt = tokenizer.decode(prompt)
            ids = prompt
        # An empty prompt becomes end-of-text, after which a new document begins.
        self.ids = [int(i) for i in ids] or [tokenizer.eot]
        self.n_prompt = len(self.ids)
        self.max_new_tokens = max_new_tokens
        self.max_ids = cfg.max_seq_len if cfg.learned_positions else math.inf
        require(
            self.n_prompt <= self.max_ids,
            f"the prompt has {self.n_prompt} tokens, but learned positions end at max_seq_len "
            f"{cfg.max_seq_len}: shorten it (ALiBi and RoPE have no such limit)",
        )
        self.seed = seed
        self.repeat = repeat
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # keeps incomplete characters
        self.text = ""
        self.streamed = 0
        self.begins = []
        self.end = None

    def add(self, token: int) -> str:
        """Append a token. Returns the characters that can be shown now, often none.

        A character of several bytes is shown when it is complete. Characters that may begin a stop
        string are held back.
        """
        self.begins.append(len(self.text))
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
        """End the text, and its tokens, before the first stop string. Streamed ones hold none."""
        found = [self.text.find(stop, self.streamed) for stop in self.stops]
        positions = [position for position in found if position >= 0]
        if positions:
            self.text = self.text[: min(positions)]
            self.begins = [begin for begin in self.begins if begin < len(self.text)]
            self.ids = self.ids[: self.n_prompt + len(self.begins)]
            self.end = "stop string"

    def held_back(self) -> int:
        """How many of the last characters may be the start of a stop string."""
        longest = 0
        for stop in self.stops:
            for length in range(1, min(len(stop), len(self.text) + 1)):
                if self.text.endswith(stop[:length]):
                    longest = max(longest, length)
        return longest

    @functools.cached_property
    def uniforms(self) -> torch.Tensor:
        """The numbers that draw the tokens, (max_new_tokens,)."""
        return uniforms(self.seed, self.ids[: self.n_prompt], self.repeat, self.max_new_tokens)

    @property
    def new_tokens(self) -> int:
        """How many tokens the continuation has."""
        return len(self.ids) - self.n_prompt

    @property
    def drawn_tokens(self) -> int:
        """How many tokens the continuation has, and end-of-text if it came."""
        return len(self.begins)

    @property
    def max_length(self) -> int:
        """How many tokens prompt and continuation can have together."""
        return min(self.n_prompt + self.max_new_tokens, self.max_ids + 1)


def write(decoder: Decoder, text: Text, **settings):
    """The obvious version of serving/engine.py: a text alone, from beginning to end.

    settings: temperature, top_k and top_p of `sample`. Yields the characters that can be shown now.
    UserError if the text's adapter cannot be loaded.
    """
    bank = decoder.bank
    with bank.in_use([text.adapter]) if bank else contextlib.nullcontext():
        if bank:
            bank.use([text.adapter])
        ids = torch.tensor([text.ids], device=decoder.device)
        uniforms = text.uniforms[None].to(decoder.device)
        for token in generate(decoder, ids, text.max_new_tokens, uniforms=uniforms, **settings):
            yield text.add(token.item())
            if text.end:
                return
