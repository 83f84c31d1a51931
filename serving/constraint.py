"""Text that must conform: to a JSON schema, to JSON at all, or to a regular expression.

Before each token, a matcher says which tokens may come next. The others get the logit -inf:

    schema: {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}

    text so far     may come next, of single characters
                    {
    {"age":         digits, -, a space, a line break        and no letter, however likely
    {"age": 4       digits, }, a space, a comma, ...
    {"age": 42}     the end of the text, nothing else

So each text that ends by itself conforms. One that is cut, by max_new_tokens, may not.

serving/grammar.py says what can be enforced.

Run `python -m serving.constraint` for random texts that conform to a schema.
"""

import json
import random
import threading
from collections import OrderedDict

import torch

import program
from program import EXTRA, UserError, arguments, one_line, require, run
from serving import grammar
from text import tokenizer as tokenizers


class Words:
    """A tokenizer of ours as llguidance takes one: the bytes of each id, and a call to encode."""

    bos_token_id = None

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.tokens = [tokenizer.bytes_of.get(i, b"") for i in range(tokenizer.vocab_size)]
        self.eos_token_id = tokenizer.eot
        self.special_token_ids = [token.id for token in tokenizer.special_tokens.values()]

    def __call__(self, text) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self.tokenizer.encode(text).tolist()


class Constraint:
    """What one text may be. `mask` and `accept` are called in turn, once for each token."""

    def __init__(self, matcher, eot: int, ends: list[int]):
        self.matcher = matcher
        self.eot = eot
        self.ends = ends

    def mask(self) -> torch.Tensor:
        """(V,) uint8: 0 for tokens that may not come next. UserError if no text can conform."""
        mask = bytearray(self.matcher.compute_logit_bias())
        self.check()
        for token in self.ends:
            mask[token] = mask[self.eot]
        return torch.frombuffer(mask, dtype=torch.uint8)

    def accept(self, token: int) -> None:
        """Take note of the token that was drawn. UserError if it may not come next."""
        self.matcher.consume_token(self.eot if token in self.ends else token)
        self.check()

    def copy(self) -> "Constraint":
        """The same for another text."""
        return Constraint(self.matcher.deep_copy(), self.eot, self.ends)

    def check(self) -> None:
        """UserError if the matcher has failed: it reached a dead end, or one of its limits."""
        reason = grammar.reason_of(self.matcher.get_error())
        problem = f"the text cannot go on as its schema or regex demands ({reason})"
        require(not reason, f"{problem}: simplify that")


class Constraints:
    """Builds constraints for the texts of one tokenizer. Keeps the last ones that were built.

    Building takes a millisecond, or half a second for a long schema: do it in a thread. Call
    `require_cheap` first for what strangers have written. All methods may be called by several
    threads. n_kept: matchers.
    """

    def __init__(self, tokenizer, n_kept: int = 32):
        """Takes 0.2 s for 50,000 ids. UserError if llguidance is not installed."""
        try:
            import llguidance  # here, since a server can do without
        except ImportError as error:
            raise UserError(f"constraints need the package llguidance: {EXTRA}") from error
        self.eot = tokenizer.eot
        self.ends = [i for i in tokenizer.ends if i < tokenizer.vocab_size]
        self.vocabulary = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(Words(tokenizer)),
            slices=llguidance.LLTokenizer.json_slices(),
        )
        self.n_kept = n_kept
        self.kept = OrderedDict()  # (kind, text) -> matcher; the least recently used first
        self.lock = threading.Lock()

    def schema(self, schema: dict) -> Constraint:
        """JSON that conforms to a schema. UserError if the schema cannot be enforced."""
        return self.constraint("JSON schema", json_of(schema))

    def regex(self, pattern: str) -> Constraint:
        """Text that as a whole matches a regular expression, in the syntax of Rust's crate regex.

        UserError if it cannot be enforced.
        """
        return self.constraint("regex", pattern)

    def constraint(self, kind: str, text: str) -> Constraint:
        """A copy of the matcher that was built for this text, or is built now.

        kind: "JSON schema", whose text is that of `json_of`, or "regex".
        """
        key = kind, text
        with self.lock:
            matcher = self.kept.get(key)
        if matcher is None:
            matcher = grammar.matcher_of(self.vocabulary, kind, text)
        with self.lock:
            self.kept[key] = matcher
            self.kept.move_to_end(key)
            while len(self.kept) > self.n_kept:
                self.kept.popitem(last=False)
        return Constraint(matcher, self.eot, self.ends).copy()

    async def require_cheap(self, kind: str, text: str) -> None:
        """UserError if `constraint` would take too long.

        A process of its own finds out, which ends with this call.
        """
        if (kind, text) in self.kept:
            return
        fix = "use fewer patternProperties, allOf, smaller multipleOf or repetitions"
        try:
            await program.answer_apart("serving.grammar", [kind, text], grammar.SECONDS)
        except TimeoutError as error:
            most = f"takes more than {grammar.SECONDS} s of a processor"
            raise UserError(f"building the {kind} {most}: {fix}") from error
        except RuntimeError as error:
            raise UserError(f"building the {kind} fails: {fix}") from error


def json_of(schema: dict) -> str:
    """A schema as JSON. UserError if it is none."""
    is_object = isinstance(schema, dict)
    require(is_object, 'the JSON schema must be an object, such as {"type": "object"}')
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the JSON schema is no JSON ({one_line(error)}): correct it") from error


def random_text(constraint: Constraint, tokenizer, draw: random.Random, n_tokens: int) -> str:
    """A text of tokens drawn from those that may come next, "" if it has not ended after n_tokens.

    After half of them, it closes what is open wherever it may.
    """
    closing = [*tokenizer.ends, *(i for i, text in tokenizer.bytes_of.items() if text in b'"]}')]
    ids = []
    while len(ids) < n_tokens:
        allowed = constraint.mask().nonzero().flatten().tolist()
        wanted = [i for i in closing if i in allowed] if len(ids) > n_tokens // 2 else []
        token = draw.choice(wanted or allowed)
        constraint.accept(token)
        if token in tokenizer.ends:
            return tokenizer.decode(ids)
        ids.append(token)
    return ""


def demonstrate(argv) -> None:
    """Print random texts that conform to a schema."""
    arguments(argv)
    tokenizer = tokenizers.load("bytes")
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 2},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    constraints = Constraints(tokenizer)
    print(json.dumps(schema))
    draw = random.Random(1)
    for _ in range(5):
        text = random_text(constraints.schema(schema), tokenizer, draw, 200)
        print(json.dumps(json.loads(text)))


if __name__ == "__main__":
    run(demonstrate)
