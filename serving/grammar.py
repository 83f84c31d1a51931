r"""What a JSON schema or a regular expression becomes: a matcher, or the reason why there is none.

The matchers are those of llguidance, which refuses most of what it cannot enforce. What it accepts
and does not enforce is refused here: `checked_schema`. Properties are written in the order of the
schema, control characters without \u escapes, and blanks as `BLANKS` says.

Some schemas of 8 kB take minutes to build, and nothing can interrupt llguidance. So each schema is
first built in a process of its own, which ends when it has used SECONDS of a processor:

    echo '["regex", "[a-z]+"]' | python -m serving.grammar 0.5      status 0: it may be built
"""

import contextlib
import json
import math
import re

import program
from program import UserError, one_line, require

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
SECONDS = 0.5  # of a processor, for building it
# Of llguidance. They bound a matcher's memory, and the time of a mask.
LIMITS = {"initial_lexer_fuel": 200_000, "max_lexer_states": 20_000, "verbose_errors": False}

# What llguidance reads in `pattern` differently from validators. A set of characters that has all
# control characters lets an escaped quote or backslash through, even if it excludes them.
IN_PATTERN = {
    "a negated character class": r"\[\^",
    "a class of Unicode": r"\\[pP]",
    "a control character": r"\\x[01{]|\\u(00[01]|\{)|[\x00-\x1f]",
    "a class or set operation within a character class": r"\[[^\]]*(\[|&&|--|~~)",
}
# They need a \u escape. In a constant, llguidance would leave them out.
UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
# In a regex, as in other servers, digits and letters are those of ASCII; Rust has all of Unicode's.
ASCII = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}

# What llguidance leaves open in these formats: February 29th, the length of a whole name.
LEAP_YEARS = r"(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
DATE = {"pattern": rf"^(\d{{4}}-(0[13-9]|1|02-([01]|2[0-8]))|{LEAP_YEARS}-02-29)"}
FORMATS = {"date": DATE, "date-time": DATE, "hostname": {"maxLength": 253}}

# Keywords whose values are no schemas: constants, or schemas by names that may be keywords.
INNER = dict.fromkeys(["const", "enum"], "constant") | dict.fromkeys(
    ["properties", "patternProperties", "$defs", "definitions"], "names"
)
SAY_NOTHING = set(
    "title description default examples $comment $schema $id $defs definitions deprecated "
    "readOnly writeOnly".split()
)
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
LARGEST = 2**53  # of a bound: llguidance computes with floats of 64 bits

PROBLEM = "cannot enforce the JSON schema"


def matcher_of(vocabulary, kind: str, text: str):
    """A matcher at the beginning of a text. UserError if there can be none.

    vocabulary: an LLTokenizer. kind: "JSON schema" or "regex".
    """
    import llguidance  # here, since a server can do without

    too_long = f"the {kind} has {len(text):,} characters, and {MOST_CHARACTERS:,} are allowed"
    require(len(text) <= MOST_CHARACTERS, f"{too_long}: shorten it")
    make = llguidance.LLMatcher
    try:
        if kind == "regex":
            plain = re.sub(r"(?s)\\(.)", lambda found: ASCII.get(found[1], found[0]), text)
            grammar = make.grammar_from_regex(plain)
        else:
            schema = checked_schema(json.loads(text))
            grammar = make.grammar_from_json_schema(json.dumps(schema), overrides=OPTIONS)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"cannot enforce the {kind} ({one_line(error)}): correct it") from error
    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = make(vocabulary, grammar, log_level=0, limits=limits)
    reason = reason_of(matcher.get_error())
    require(not reason, f"cannot enforce the {kind} ({reason}): change or remove that")
    # A reference to itself is no error, but then only the end of the text may come first.
    mask = bytearray(matcher.compute_logit_bias())
    mask[vocabulary.eos_token] = 0
    require(any(mask), f"the {kind} allows no text, or only an empty one: correct it")
    return matcher


def checked_schema(schema: dict) -> dict:
    """The schema, with what its formats mean. UserError for what would not be enforced, by name.

    Looks at every object, also inside of constants: a $ref may point to any of them.
    """
    require("x-guidance" not in schema, f"{PROBLEM}: remove x-guidance, which changes its meaning")
    objects, with_formats = [], []
    left = [(schema, "schema")]
    while left:
        node, kind = left.pop()
        if isinstance(node, list):
            left += [(item, kind) for item in node]
        if isinstance(node, str):
            unwritable = f"{PROBLEM}: {node[:40]!r} has a control character, which is never written"
            require(not UNWRITABLE.search(node), unwritable)
        if isinstance(node, dict):
            inner = {"constant": dict.fromkeys(node, "constant"), "schema": INNER}.get(kind, {})
            left += [(value, inner.get(key, "schema")) for key, value in node.items()]
            objects.append(node)
            check_object(node)
            if kind == "schema" and str(node.get("format")) in FORMATS:
                with_formats.append(node)
    # Bounds of several objects may have to hold for one number.
    for group in [objects] if any(map(merges, objects)) else [[node] for node in objects]:
        check_numbers(group)
    for node in with_formats:
        others = node.get("allOf")
        node["allOf"] = [*(others if isinstance(others, list) else []), FORMATS[node["format"]]]
    return schema


def check_object(node: dict) -> None:
    """The same for one object of a schema."""
    fewest = node.get("minProperties")
    few = not isinstance(fewest, int | float) or fewest <= 1
    require(few, f"{PROBLEM}: minProperties above 1 could be met by one key that is repeated")
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
        problem = f"{PROBLEM}: its pattern {pattern[:40]!r} has {what}"
        require(not found, f"{problem}; list the characters that are allowed")


def merges(node: dict) -> bool:
    """Whether other objects of the schema may say more about the same value."""
    refers = {"$ref", "anyOf", "oneOf"} & node.keys()
    says_more = node.keys() - refers - SAY_NOTHING
    return bool({"allOf", "patternProperties"} & node.keys() or refers and says_more)


def check_numbers(group: list[dict]) -> None:
    """UserError for bounds of a number that llguidance does not hold.

    group: objects whose bounds may have to hold together.
    """
    found = [(name, node[name]) for node in group for name in BOUNDS if name in node]
    found = [(name, value) for name, value in found if isinstance(value, int | float)]
    for name, value in found:
        is_number = not isinstance(value, bool)
        require(is_number, f"{PROBLEM}: {name} is {value}: write a number, as since draft 6")
        is_exact = abs(value) < LARGEST
        require(is_exact, f"{PROBLEM}: {name} is {value}, and bounds end before 2**53: remove it")
    # Between 0 and 0.1, llguidance takes a 0 even if it is excluded. So for each whole number.
    parts = [(name, value) for name, value in found if value != int(value)]
    near = {
        "exclusiveMinimum": {math.floor(value): f"{name} {value}" for name, value in parts},
        "exclusiveMaximum": {math.ceil(value): f"{name} {value}" for name, value in parts},
    }
    for name, value in found:
        other = near.get(name, {}).get(value)
        problem = f"{PROBLEM}: {name} {value} is not enforced beside {other}"
        fix = name.removeprefix("exclusive").lower()
        require(not other, f"{problem}: write a {fix} beyond {value} in its place")
    steps = {
        node["multipleOf"] for node in group if isinstance(node.get("multipleOf"), int | float)
    }
    require(len(steps) <= 1, f"{PROBLEM}: several multipleOf may meet in one number: keep one")


def reason_of(error: str) -> str:
    """What llguidance says of a schema or regex, in a few words."""
    reason = error.rpartition("error: ")[2].partition("\n")[0].partition(". Enable")[0][:200]
    return f"pattern: {reason}" if error.startswith("regex parse error") else reason


def build(kind: str, text: str) -> None:
    """Build a matcher, to see whether that takes too long."""
    with contextlib.suppress(UserError):  # whoever builds it next says what is wrong
        matcher_of(llguidance.LLTokenizer("byte"), kind, text)


if __name__ == "__main__":
    import llguidance  # before the clock starts

    program.answer(build)
