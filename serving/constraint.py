r"""Text that must conform: to a JSON schema, to JSON at all, or to a regular expression.

Before each token, a matcher says which tokens may come next. The others get the logit -inf:

    schema: {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}

    text so far     may come next, of single characters
                    {
    {"age":         digits, -, a space, a line break        and no letter, however likely
    {"age": 4       digits, }, a space, a comma, ...
    {"age": 42}     the end of the text, nothing else

So each text that ends by itself conforms. One that is cut, by max_new_tokens, may not.

The matchers are those of llguidance, which refuses most of what it cannot enforce. What it accepts
and does not enforce is refused here: `check_schema`. Properties are written in the order of the
schema, control characters without \u escapes, and blanks as `BLANKS` says.

Run `python -m serving.constraint` for random texts that conform to a schema.
"""

import json
import random
import re
import threading
from collections import OrderedDict

import torch

from config import EXTRA, UserError, arguments, one_line, require, run
from text import tokenizer as tokenizers

BLANKS = r"( |\n {0,24})?"  # between the parts of JSON: enough for indentation, and no endless row
OPTIONS = {
    "whitespace_flexible": False,
    "whitespace_pattern": BLANKS,
    # With \u one key has several spellings, of which only one would be known as that property.
    "json_allowed_escapes": 'nrbtf\\"',
    # A schema could set these itself.
    "lenient": False,
    "coerce_one_of": False,
}
MOST_CHARACTERS = 50_000  # of a schema or expression
# Of llguidance. So a matcher takes at most half a second to build, and tens of megabytes.
LIMITS = {"initial_lexer_fuel": 200_000, "max_lexer_states": 20_000, "verbose_errors": False}

# What llguidance reads in `pattern` differently from validators. A set of characters that has all
# control characters lets an escaped quote or backslash through, even if it excludes them.
IN_PATTERN = {
    "a negated character class": r"\[\^",
    "a class of Unicode": r"\\[pP]",
    "a control character": r"\\x[01{]|\\u(00[01]|\{)|[\x00-\x1f]",
    "a class or set operation within a character class": r"\[[^\]]*(\[|&&|--|~~)",
}


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

    def check(self) -> None:
        """UserError if the matcher has failed: it reached a dead end, or one of its limits."""
        reason = reason_of(self.matcher.get_error())
        problem = f"the text cannot go on as its schema or regex demands ({reason})"
        require(not reason, f"{problem}: simplify that")


class Constraints:
    """Builds constraints for the texts of one tokenizer. Keeps the last ones that were built.

    Building takes a millisecond, or a second for a long schema: do it in a thread. All methods may
    be called by several threads. n_kept: matchers.
    """

    def __init__(self, tokenizer, n_kept: int = 32):
        """Takes 0.2 s for 50,000 ids. UserError if llguidance is not installed."""
        try:
            import llguidance  # here, since a server can do without
        except ImportError as error:
            raise UserError(f"constraints need the package llguidance: {EXTRA}") from error
        self.library = llguidance
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
        is_object = isinstance(schema, dict)
        require(is_object, 'the JSON schema must be an object, such as {"type": "object"}')
        try:
            text = json.dumps(schema, allow_nan=False)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"the JSON schema is no JSON ({one_line(error)}): correct it"
            ) from error
        return self.constraint("JSON schema", text, schema)

    def json_object(self) -> Constraint:
        """Any JSON object."""
        return self.schema({"type": "object"})

    def regex(self, pattern: str) -> Constraint:
        """Text that as a whole matches an expression of Rust's crate regex. UserError for others."""
        return self.constraint("regex", pattern)

    def constraint(self, kind: str, text: str, schema: dict | None = None) -> Constraint:
        """A copy of the matcher that was built for this text, or is built now."""
        key = kind, text
        with self.lock:
            matcher = self.kept.get(key)
        if matcher is None:
            matcher = self.build(kind, text, schema)
        with self.lock:
            self.kept[key] = matcher
            self.kept.move_to_end(key)
            while len(self.kept) > self.n_kept:
                self.kept.popitem(last=False)
        return Constraint(matcher.deep_copy(), self.eot, self.ends)

    def build(self, kind: str, text: str, schema: dict | None):
        """A matcher at the beginning of a text. UserError if there can be none."""
        too_long = f"the {kind} has {len(text):,} characters, and {MOST_CHARACTERS:,} are allowed"
        require(len(text) <= MOST_CHARACTERS, f"{too_long}: shorten it")
        make = self.library.LLMatcher
        try:
            if schema is None:
                grammar = make.grammar_from_regex(text)
            else:
                check_schema(schema)
                grammar = make.grammar_from_json_schema(text, overrides=OPTIONS)
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"cannot enforce the {kind} ({one_line(error)}): correct it") from error
        limits = self.library.LLParserLimits(**LIMITS)
        matcher = make(self.vocabulary, grammar, log_level=0, limits=limits)
        reason = reason_of(matcher.get_error())
        require(not reason, f"cannot enforce the {kind} ({reason}): change or remove that")
        # A reference to itself is no error, but then only the end of the text may come first.
        mask = bytearray(matcher.compute_logit_bias())
        mask[self.eot] = 0
        require(any(mask), f"the {kind} allows no text, or only an empty one: correct it")
        return matcher


def check_schema(schema: dict) -> None:
    """UserError for what llguidance would accept without enforcing it, by name.

    Looks at every object, also inside of constants: a $ref may point to any of them.
    """
    problem = "cannot enforce the JSON schema"
    require(
        "x-guidance" not in schema, f"{problem}: x-guidance would change its meaning; remove it"
    )
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        if not isinstance(node, dict):
            continue
        left += node.values()
        fewest = node.get("minProperties")
        few = not isinstance(fewest, int | float) or fewest <= 1
        require(few, f"{problem}: minProperties above 1 could be met by one key that is repeated")
        named = node.get("patternProperties")
        patterns = [*named] if isinstance(named, dict) else []
        for pattern in [*patterns, node.get("pattern")]:
            if isinstance(pattern, str):
                check_pattern(pattern)


def check_pattern(pattern: str) -> None:
    """UserError for a `pattern` that llguidance reads in another way than validators."""
    plain = re.sub(r"\\[\\\[\]]", "x", pattern)  # escaped ones open and close no class
    for what, spelling in IN_PATTERN.items():
        found = re.search(spelling, plain)
        problem = f"cannot enforce the JSON schema: its pattern {pattern[:40]!r} has {what}"
        require(not found, f"{problem}; list the characters that are allowed")


def reason_of(error: str) -> str:
    """What llguidance says of a schema or regex, in a few words."""
    reason = error.rpartition("error: ")[2].partition("\n")[0].partition(". Enable")[0][:200]
    return f"pattern: {reason}" if error.startswith("regex parse error") else reason


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
