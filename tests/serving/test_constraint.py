"""serving/constraint.py: whatever is drawn through its masks conforms; the rest is refused."""

import asyncio
import contextlib
import datetime
import json
import random
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import jsonschema
import pytest
from conftest import byte_level, refusal, slowly
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from program import UserError
from serving import grammar
from serving.constraint import Constraints, json_of, random_text
from text import tokenizer as tokenizers

BYTES = tokenizers.load("bytes")
CONSTRAINTS = Constraints(BYTES)


def takes(constraint, text: str, tokenizer=BYTES) -> bool:
    """Whether a whole text may be written, and then end."""
    for token in tokenizer.encode(text).tolist():
        if not constraint.mask()[token]:
            return False
        constraint.accept(token)
    return bool(constraint.mask()[tokenizer.eot])


def allowed(constraint) -> set[int]:
    return set(constraint.mask().nonzero().flatten().tolist())


# --- Random schemas, random texts

NAMES = st.sampled_from(["a", "b", "ab", "é", '"', "\\", "a\nb", "\x01", "x y", ""])
PATTERNS = st.sampled_from(
    ["^a+$", "b", "^[a-c]{2,3}$", r"^\d\d-\w$", "^(x|yy)*$", r"\\", r"^\S{1,3}$", '^["a]*$', "^.?$"]
)
CONSTANTS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-99, 99),
    st.text(max_size=3),
    st.sampled_from([0.5, -2.25]),
)


def some(**fields):
    """Objects that have any of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


def of_type(name: str, **fields):
    return some(**fields).map(lambda found: {"type": name} | found)


def span(low: str, high: str, values):
    """Both limits of a range, in order."""
    return st.tuples(values, values).map(sorted).map(lambda pair: {low: pair[0], high: pair[1]})


def larger(schemas):
    """Schemas that are made of others."""
    properties = st.dictionaries(NAMES, schemas, max_size=3)
    objects = st.builds(
        lambda properties, n_required, more: {
            "type": "object",
            "properties": properties,
            "required": [*properties][:n_required],
            **more,
        },
        properties,
        st.integers(0, 3),
        some(additionalProperties=st.booleans() | schemas),
    )
    maps = st.builds(
        lambda pattern, value, more: (
            {"type": "object", "patternProperties": {pattern: value}} | more
        ),
        PATTERNS,
        schemas,
        some(additionalProperties=st.booleans() | schemas, maxProperties=st.integers(0, 2)),
    )
    arrays = st.builds(
        lambda more, lengths: {"type": "array"} | more | lengths,
        some(items=schemas, prefixItems=st.lists(schemas, min_size=1, max_size=2)),
        span("minItems", "maxItems", st.integers(0, 3)),
    )
    several = st.lists(schemas, min_size=1, max_size=3)
    return objects | maps | arrays | several.map(lambda found: {"anyOf": found})


SIMPLE = st.one_of(
    of_type("string", minLength=st.integers(0, 2), maxLength=st.integers(2, 5)),
    of_type("string", pattern=PATTERNS),
    of_type("string", format=st.sampled_from(["date-time", "uuid", "ipv4", "email"])),
    of_type("integer", multipleOf=st.integers(1, 7)),
    span("minimum", "maximum", st.integers(-200, 200)).map(
        lambda limits: {"type": "integer"} | limits
    ),
    span("minimum", "exclusiveMaximum", st.sampled_from([-1.5, 0.25, 3, 100])),
    of_type("number", exclusiveMinimum=st.integers(-5, 5)),
    st.sampled_from([{"type": "boolean"}, {"type": ["null", "integer"]}, {}]),
    st.lists(CONSTANTS, min_size=1, max_size=3).map(lambda found: {"enum": found}),
    CONSTANTS.map(lambda found: {"const": found}),
)
SCHEMAS = st.recursive(SIMPLE, larger, max_leaves=6)


@pytest.mark.parametrize("n_schemas", [20, slowly(300)])
def test_each_text_that_ends_by_itself_conforms(n_schemas):
    check_random_schemas(BYTES, n_schemas)


@pytest.mark.slow
def test_so_do_texts_of_the_tokens_of_gpt2(gpt2):
    check_random_schemas(gpt2, 60)


def check_random_schemas(tokenizer, n_schemas):
    constraints = Constraints(tokenizer)
    ended, refused = [], []

    @settings(
        max_examples=n_schemas,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEMAS)
    def check(schema):
        for seed in range(2):
            try:
                constraint = constraints.schema(schema)
                text = random_text(constraint, tokenizer, random.Random(seed), 300)
            except UserError as error:
                refused.append(str(error))
                continue
            if text:
                jsonschema.validate(json.loads(text), schema)
                ended.append(text)

    check()
    assert len(ended) > n_schemas
    for message in refused:
        assert re.search(
            "Unsatisfiable|disjoint|allows no text|cannot go on|control char", message
        ), message


@pytest.mark.parametrize("name", ["bytes", "bpe", "tokenizer.json", "gpt2"])
def test_every_kind_of_tokenizer(name, request, tmp_path):
    if name == "gpt2":
        tokenizer = request.getfixturevalue("gpt2")
    elif name == "bpe":
        tokenizer = tokenizers.train_bpe(['{"name": "a", "age": 42}, "tags"'] * 9, 280)
    elif name == "tokenizer.json":
        byte_level("th", "ag").save(str(tmp_path / "tokenizer.json"))
        tokenizer = tokenizers.load(str(tmp_path / "tokenizer.json"))
    else:
        tokenizer = BYTES
    constraints = Constraints(tokenizer)
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer"}, "thé": {"enum": ["é", "the"]}},
        "required": ["age"],
        "additionalProperties": False,
    }
    constraint = constraints.schema(schema)
    assert constraint.mask().shape == (tokenizer.vocab_size,)
    assert takes(constraint, '{"age": 42, "thé": "é"}', tokenizer)
    assert not takes(constraints.schema(schema), '{"age": 4.2}', tokenizer)
    for seed in range(5):
        text = random_text(constraints.schema(schema), tokenizer, random.Random(seed), 200)
        jsonschema.validate(json.loads(text), schema)


# --- JSON

INDENTED = json.dumps({"a": [1, {"b": {}}], "c": None}, indent=4)
AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
TEXTS = [
    (AGE, '{"age": 4}', True),
    (AGE, '{"age": 4, "x": "y"}', True),
    (AGE, '{"age": 4, "age": "y"}', False),
    (AGE, '{"age": 4', False),
    # With an escape, the same key would not be known as that property.
    (AGE, '{"age": 4, "\\u0061ge": "y"}', False),
    ({"properties": {'"': {"type": "integer"}}}, '{"\\"": "y"}', False),
    ({"properties": {'"': {"type": "integer"}}}, '{"\\"": 4}', True),
    ({"type": "object"}, INDENTED, True),
    ({"type": "object"}, "[1]", False),
    (dict(properties={"a": {}, "b": {}}, required=["a", "b"]), '{"a": 1, "b": 2}', True),
    (dict(properties={"b": {}, "a": {}}, required=["a", "b"]), '{"a": 1, "b": 2}', False),
    ({"type": "object"}, '{"a":  1}', False),
    ({"type": "object"}, '{"a": \n1}', False),
    ({"type": "object"}, '{"a": 1}\n', False),
    ({"type": "object"}, "{\n" + " " * 25 + "}", False),
    ({"type": "object"}, "{\n\n}", False),
    ({"type": "string", "pattern": r"^--\w+[\]-]$"}, '"--a]"', True),
    ({"type": "string", "pattern": r"^\S+@\S+$"}, '"a\\"@b"', True),
    ({"type": "string", "pattern": r"^\S+@\S+$"}, '"a\\n@b"', False),
]


@pytest.mark.parametrize("schema, text, fits", TEXTS, ids=str)
def test_texts_that_a_schema_allows(schema, text, fits):
    assert takes(CONSTRAINTS.schema(schema), text) == fits


def test_each_date_exists():
    dates = CONSTRAINTS.schema({"type": "string", "format": "date"})
    times = CONSTRAINTS.schema({"anyOf": [{"type": "null"}, {"format": "date-time"}]})
    draw = random.Random(1)
    for _ in range(300):
        year, month, day = draw.randint(1, 9999), draw.choice([0, 1, 2, 2, 4, 12, 13]), 0
        day = draw.choice([0, 1, 28, 29, 29, 30, 31, 32])
        text = f"{year:04}-{month:02}-{day:02}"
        try:
            exists = bool(datetime.date(year, month, day))
        except ValueError:
            exists = False
        assert takes(dates.copy(), f'"{text}"') == exists, text
        assert takes(times.copy(), f'"{text}T10:00:00Z"') == exists, text


@pytest.mark.parametrize("name", ["const", "enum", "properties", "day"])
def test_dates_exist_whatever_the_name_of_their_property(name):
    date = {"type": "string", "format": "date"}
    schema = {"properties": {name: date}, "required": [name]}
    assert takes(CONSTRAINTS.schema(schema), json.dumps({name: "2024-02-29"}))
    assert not takes(CONSTRAINTS.schema(schema), json.dumps({name: "2023-02-29"}))
    assert takes(CONSTRAINTS.schema({"const": {name: date}}), json.dumps({name: date}))


def test_a_name_of_a_host_has_a_length():
    name = ".".join(["a" * 60] * 4)
    for length, fits in [(250, True), (253, True), (254, False)]:
        host = CONSTRAINTS.schema({"type": "string", "format": "hostname"})
        assert takes(host, f'"{name}.{"b" * length}'[: length + 1] + '"') == fits


# --- Limits of numbers

BOUNDS = [0, 1, -1, 5, 10, -10, 99, 0.1, 0.5, 0.95, -0.5, -0.05, 1.5, -1.5, 2.25, 1e-7]
BOUNDS += [2**53, 2**63, 2**64 - 1, -(2**63), 10**30, 1e22, 2**53 - 1]
STEPS = [1, 2, 3, 7, 12, 100, 0.1, 0.25, 0.5, 1.5, 0.01, 0.07, 1e-7]


def exact(number) -> Fraction:
    return Fraction(str(number))


def conforms(schema, text: str) -> bool:
    """Whether a number in decimals is what a schema describes, without rounding."""
    value = Fraction(text)
    tests = {
        "minimum": lambda bound: value >= bound,
        "exclusiveMinimum": lambda bound: value > bound,
        "maximum": lambda bound: value <= bound,
        "exclusiveMaximum": lambda bound: value < bound,
        "multipleOf": lambda step: (value / step).denominator == 1,
    }
    is_of_type = schema["type"] == "number" or value.denominator == 1
    return is_of_type and all(
        tests[name](exact(bound)) for name, bound in schema.items() if name in tests
    )


def decimals(value: Fraction) -> str:
    """A number without an exponent. value: of at most 9 decimals."""
    sign, digits = "-" * (value < 0), f"{abs(value.numerator) * 10**9 // value.denominator:010}"
    return f"{sign}{digits[:-9]}.{digits[-9:]}".rstrip("0").rstrip(".")


def numbers_near(bounds) -> set[str]:
    """Texts of numbers that such bounds might get wrong."""
    texts = {"0", "-0", "0.0", "-0.0", "1", "-1", "1e1", "-1E-1"}
    for bound in map(exact, bounds):
        whole = int(bound)
        texts |= {str(whole), str(-whole), str(whole + 1), str(whole - 1), f"{whole}.0"}
        steps = [Fraction(0), *(Fraction(sign, 10**n) for n in range(6) for sign in (1, -1))]
        texts |= {decimals(bound + step) for step in steps}
    return texts


@pytest.mark.parametrize("n_schemas", [150, slowly(3000)])
def test_limits_of_numbers_hold_or_are_refused_by_name(n_schemas):
    draw = random.Random(n_schemas)
    taken = refused = 0
    for _ in range(n_schemas):
        schema = {"type": draw.choice(["integer", "number"])}
        for name in grammar.BOUNDS:
            if draw.random() < 0.4:
                schema[name] = draw.choice([*BOUNDS, draw.randint(-30, 30)])
        if draw.random() < 0.25:
            schema["multipleOf"] = draw.choice(STEPS)
        parts = [{name: schema[name]} for name in schema if name != "type"]
        how = draw.choice([schema, {"type": schema["type"], "allOf": parts}])
        try:
            constraint = CONSTRAINTS.schema(how)
        except UserError as error:
            assert re.search(r"[Mm]inimum|[Mm]aximum|multiple|bounds|interval", str(error)), error
            refused += 1
            continue
        taken += 1
        for text in numbers_near(value for name, value in schema.items() if name != "type"):
            fits = takes(constraint.copy(), text)
            assert conforms(schema, text) or not fits, (how, text)
    assert min(taken, refused) > n_schemas // 5


def test_bounds_that_may_meet_in_one_number_are_looked_at_together():
    positive, small = {"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}
    meeting = [
        {"allOf": [positive, small]},
        {"$ref": "#/$defs/a", "$defs": {"a": positive}, **small},
        {"oneOf": [positive], **small},
        {"properties": {"a": positive}, "patternProperties": {"a": small}},
        {"properties": {"a": positive}, "anyOf": [{"properties": {"a": small}}]},
    ]
    for schema in meeting:
        assert "exclusiveMinimum 0 is not enforced" in refusal(CONSTRAINTS.schema, schema)
    two = {"type": "integer", "allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}
    assert "multipleOf" in refusal(CONSTRAINTS.schema, two)
    apart = {"properties": {"a": positive, "b": small}, "required": ["a", "b"]}
    assert takes(CONSTRAINTS.schema(apart), '{"a": 7, "b": 0}')


# --- Regular expressions

REGEXES = [
    (r"\d{3}-\d{4}", "123-4567", True),
    (r"\d{3}-\d{4}", "123-456", False),
    ("^a+$", "aa", True),
    ("a+", "baa", False),
    ('[^"]*', "é\n", True),
    ('[^"]*', 'a"', False),
    ("a/b\nc", "a/b\nc", True),
    ('x/ | "evil', "evil", False),
    (r"[\d-]+\w\\d", r"4-5_\d", True),
    (r"\d", "\u0664", False),
    (r"[\w]", "é", False),
    (r"[^\d]\W\D", "é-é", True),
]


@pytest.mark.parametrize("pattern, text, fits", REGEXES)
def test_a_regex_holds_for_the_whole_text(pattern, text, fits):
    assert takes(CONSTRAINTS.regex(pattern), text) == fits


# --- What cannot be enforced


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def with_pattern(pattern):
    return {"type": "string", "pattern": pattern}


ITSELF = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
REFUSED = [
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"not": {"type": "string"}}, '"not"'),
    ({"if": {}, "then": {}}, '"if"'),
    ({"type": "array", "contains": {}}, '"contains"'),
    ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
    ({"type": "object", "propertyNames": {"pattern": "a"}}, '"propertyNames"'),
    ({"type": "object", "unevaluatedProperties": False}, '"unevaluatedProperties"'),
    ({"type": "string", "format": "postcode"}, "Unknown format: postcode"),
    ({"type": "strng"}, "strng"),
    ({"$ref": "https://elsewhere/schema"}, "https://elsewhere/schema"),
    (with_pattern("a(?=b)"), "pattern: look-around"),
    (with_pattern('^[^"]*$'), "negated character class"),
    ({"patternProperties": {'^[^"]*$': {}}}, "negated character class"),
    ({"$ref": "#/x/a", "x": {"a": with_pattern("[^b]")}}, "negated character class"),
    (with_pattern(r"\P{P}"), "class of Unicode"),
    (with_pattern(r"[\x00-!]"), "control character"),
    (with_pattern("[a[b]]"), "within a character class"),
    (with_pattern("[[:^punct:]]"), "within a character class"),
    ({"type": "object", "minProperties": 2}, "minProperties above 1"),
    ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "x-guidance"),
    (ITSELF, "allows no text"),
    ({"enum": []}, "Unsatisfiable"),
    ({"const": float("nan")}, "no JSON"),
    ({"const": "\ud800"}, "cannot enforce"),
    ({"enum": ["a\x1f"]}, "control character"),
    ({"const": {"a": ["\x7f"]}}, "control character"),
    ({"enum": ["x" * 60_000]}, "50,000 are allowed"),
    (nested(200), "recursion limit"),
    (nested(5_000), "recursion depth"),
    (True, "must be an object"),
]


@pytest.mark.parametrize("schema, words", REFUSED, ids=[words for _, words in REFUSED])
def test_a_schema_that_cannot_be_enforced_is_refused_by_name(schema, words):
    assert words in refusal(CONSTRAINTS.schema, schema)


def test_a_property_may_have_the_name_of_a_keyword():
    names = ["pattern", "minProperties", "x-guidance", "patternProperties", "not", "oneOf"]
    schema = {"properties": dict.fromkeys(names, {"type": "integer"})}
    assert takes(CONSTRAINTS.schema(schema), '{"pattern": 1, "not": 2}')


BAD_REGEXES = ["a(?=b)", "(", r"\bx", "a^b", "", "$", "\ud800", "x" * 60_000]


@pytest.mark.parametrize("pattern", BAD_REGEXES, ids=lambda pattern: ascii(pattern)[:9])
def test_a_regex_that_cannot_be_enforced_is_refused(pattern):
    assert "the regex" in refusal(CONSTRAINTS.regex, pattern)


def test_a_dead_end_and_a_wrong_token_end_one_text_alone():
    endless = {"$ref": "#/properties/a"}
    schema = {"type": "object", "properties": {"a": endless}, "required": ["a"]}
    constraint, other = CONSTRAINTS.schema(schema), CONSTRAINTS.schema(AGE)
    for token in b'{"a"':
        constraint.accept(token)
    message = refusal(lambda: [constraint.accept(ord(":")), constraint.mask()])
    assert "cannot go on" in message
    wrong = CONSTRAINTS.schema(AGE)
    assert "cannot go on" in refusal(wrong.accept, ord("x"))
    assert "cannot go on" in refusal(wrong.mask)
    assert takes(other, '{"age": 1}')
    assert takes(CONSTRAINTS.schema(AGE), '{"age": 1}')


def test_every_id_that_ends_texts_may_end_this_one():
    tokenizer = tokenizers.load("bytes")
    tokenizer.ends |= {7, 1000}  # as a model's folder adds them; the vocabulary ends at 256
    constraint = Constraints(tokenizer).regex("ab?")
    assert allowed(constraint) == {ord("a")}
    constraint.accept(ord("a"))
    assert allowed(constraint) == {ord("b"), 7, 256}
    constraint.accept(7)


# --- Building


def many(n: int, spelling: str, value=None) -> dict:
    """An object of n fields."""
    return {spelling.format(i): value or {} for i in range(n)}


HOSTILE = {
    "patternProperties": {"patternProperties": many(1000, "^k{:03x}")},
    "multipleOf": {"type": "integer", "multipleOf": 999983},
    "allOf": {"allOf": [{"type": "string", "pattern": f"a.*{i}"} for i in range(20)]},
    "anyOf": {"anyOf": [{"properties": many(9, f"k{i}_{{}}")} for i in range(300)]},
    "properties": {"properties": many(2500, "k{}")},
    "required": {"required": [*many(5000, "k{}")]},
    "additionalProperties": {"properties": many(900, "k{}", {"additionalProperties": {}})},
    "enum": {"enum": [*range(8000)]},
    "const": {"const": many(2500, "k{}")},
    "pattern": {"type": "string", "pattern": "^((a{1,50}){1,50}b){1,50}.*a.{200}c$"},
    "maxLength": {"type": "string", "minLength": 10**6, "maxLength": 10**9},
    "maxItems": {"type": "array", "minItems": 10**5, "maxItems": 10**6},
    "prefixItems": {"type": "array", "prefixItems": [{}] * 9000},
    "format": {"properties": many(700, "k{}", {"type": "string", "format": "uri"})},
    "minimum": {"properties": many(500, "k{}", {"type": "number", "minimum": -1.23456789})},
    "$ref": {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
        | {"d30": {"patternProperties": many(200, "^k{}")}},
    },
}
REPETITIONS = ["(a{1,100}){1,100}", "(a|b)*a(a|b){20}", r"\p{L}{1,3000}", ".*a.{900}b.{900}c"]
TRIED = [("JSON schema", json_of(schema)) for schema in HOSTILE.values()]
TRIED += [("regex", pattern) for pattern in REPETITIONS]


@pytest.mark.slow
@pytest.mark.parametrize("kind, text", TRIED, ids=[*HOSTILE, *range(len(REPETITIONS))])
def test_whatever_is_not_refused_is_built_in_a_second_of_a_processor(kind, text):
    begin = time.process_time()
    with contextlib.suppress(UserError):
        asyncio.run(CONSTRAINTS.require_cheap(kind, text))
        CONSTRAINTS.constraint(kind, text)
    assert time.process_time() - begin < 2 * grammar.SECONDS


def test_threads_may_build_at_the_same_time():
    constraints = Constraints(BYTES, n_kept=3)

    def one(number):
        schema = {"enum": [f"text {number % 7}"]}
        return takes(constraints.schema(schema), f'"text {number % 7}"')

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(200)))


def test_without_llguidance_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert "requirements-extra.txt" in refusal(Constraints, BYTES)
