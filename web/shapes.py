"""What OpenAI's API looks like: the requests that are understood, the answers, the errors.

    POST /v1/completions         {"model": "demo", "prompt": "def ", "max_tokens": 16}
    POST /v1/chat/completions    {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}

Names, defaults and ranges are OpenAI's (https://platform.openai.com/docs/api-reference); `top_k`,
`guided_json` and `guided_regex` are vLLM's. Fields that change no text, such as `user`, are
ignored: `HARMLESS` and `NEUTRAL` name them. Every other one is refused by its name.
"""

import json
import math
import re
import time
import uuid
from typing import Annotated, Any, Literal, TypeVar

from fastapi.responses import JSONResponse, Response
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

MOST_TEXTS = 128  # of one request
MOST_LOGPROBS = 20
MOST_TOKENS = 2**31
LONGEST_STOP = 256  # characters
LONGEST_MESSAGE = 400  # characters of an error: it may quote what a client has sent
MAX_SEED = 2**63 - 1
# Of an absolute path; an address such as s3://bucket/folder has none.
FOLDERS = re.compile(r"((?<![\w.~/-])|(?<=file://))/(?:[^\s/'\"`,;()<>]+/)+")


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape."""

    def __init__(
        self, status: int, message: str, param=None, code=None, retry_after=None, more=None
    ):
        """more: other fields of the error."""
        super().__init__(message)
        self.status = status
        self.message = " ".join(message.split())[:LONGEST_MESSAGE]
        self.param = param
        self.code = code
        self.more = more or {}
        self.headers = {"Retry-After": str(retry_after)} if retry_after else {}

    @property
    def body(self) -> dict:
        """The JSON of the answer."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        values = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": values | self.more}

    @property
    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def unknown_model(message: str) -> ApiError:
    """The answer to a model's name that nobody knows."""
    return ApiError(404, public(message), param="model", code="model_not_found")


def public(value):
    """A value as clients see it: of each absolute path in a text only the last name is left."""
    return plain(value, lambda text: FOLDERS.sub("", text))


def as_json(value) -> Response:
    """An answer in ASCII: names and settings may hold what is no UTF-8. No NaN, no Infinity."""
    content = json.dumps(plain(value), allow_nan=False).encode()
    return Response(content, media_type="application/json")


def plain(value, shown=str, depth: int = 8):
    """A value that JSON can hold: None for a number that is not finite, and no deep nests.

    shown: what becomes of each text.
    """
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict | list | tuple) and not depth:
        return "..."
    if isinstance(value, dict):
        return {str(key): plain(inner, shown, depth - 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, shown, depth - 1) for inner in value]
    return value


# --------------------------------------------------------------------------------------------------
# Requests

Item = TypeVar("Item")
# A list is refused at its first wrong item: one error for each would take seconds.
ListOf = Annotated[list[Item], Field(fail_fast=True)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


def kind_of(value) -> str:
    """Of what a field is that takes several types: "str", or "[int]" for a list of integers.

    So a fault is found in the type that was meant. It is the tag of this type.
    """
    if not isinstance(value, list):
        return "str"
    first = value[0] if value else ""
    inner = {str: "str", list: "[int]"}.get(type(first), "int")
    return f"[{inner}]"


# The same for a text or a list of some.
TextOrList = Discriminator(lambda value: "[str]" if isinstance(value, list) else "str")


# Of any part of a request: they change no text here. `name`: no chat template gets it.
HARMLESS = set(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "prediction parallel_tool_calls cache_prompt include_obfuscation name tool_call_id "
    "cache_control".split()
)
# Nor do these, with one of these values, which some clients always send. Nor does null in any.
NEUTRAL = {
    **dict.fromkeys(["presence_penalty", "frequency_penalty", "min_p", "min_tokens"], [0]),
    **dict.fromkeys(["repetition_penalty", "length_penalty", "typical_p", "best_of"], [1]),
    **dict.fromkeys(["tools", "functions", "tool_calls", "annotations"], [[]]),
    **dict.fromkeys(["stop_token_ids", "bad_words"], [[]]),
    **dict.fromkeys(["ignore_eos", "use_beam_search", "include_stop_str_in_output"], [False]),
    **dict.fromkeys(["echo", "continue_final_message", "continuous_usage_stats"], [False]),
    **dict.fromkeys(["skip_special_tokens", "spaces_between_special_tokens"], [True]),
    "add_generation_prompt": [True],
    "logit_bias": [{}],
    "suffix": [""],
    "tool_choice": ["none", "auto"],
    "function_call": ["none"],
    "modalities": [["text"]],
    "type": ["text", "message"],
}


def refused(value):
    """ValueError for a field that this server would have to ignore."""
    raise ValueError("this is not supported: leave it out")


NotSupported = Annotated[Any, AfterValidator(lambda value: value and refused(value))]


class Part(BaseModel):
    """A request or a part of one. A field that is not declared is refused unless it is harmless."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(refused)]]

    @model_validator(mode="before")
    @classmethod
    def without_harmless(cls, values):
        """The fields without those that change nothing."""
        if not isinstance(values, dict):
            return values
        known = cls.model_fields.keys()
        changes = values.keys() - HARMLESS
        changes -= {name for name in changes if values[name] in [None, *NEUTRAL.get(name, [])]}
        return {name: value for name, value in values.items() if name in known | changes}


class StreamOptions(Part):
    """Whether the last chunk of a stream counts its tokens."""

    include_usage: bool | None = None


class Generation(Part):
    """What completions and chat have in common."""

    model: str
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_TEXTS)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    stop: (
        Annotated[
            Annotated[Stop, Tag("str")]
            | Annotated[ListOf[Stop], Field(max_length=16), Tag("[str]")],
            TextOrList,
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: str | None = None

    @property
    def stops(self) -> list[str]:
        """The strings that end a text."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(Generation):
    """A prompt to continue, or several."""

    prompt: Annotated[
        Annotated[str, Tag("str")]
        | Annotated[ListOf[int], Tag("[int]")]
        | Annotated[ListOf[str], Tag("[str]")]
        | Annotated[ListOf[ListOf[int]], Tag("[[int]]")],
        Discriminator(kind_of),
    ] = ""
    max_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = 16  # 0: read the prompt
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> list:
        """Each prompt: a string, or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(400, "prompt is an empty list: give a text", param="prompt")
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    @property
    def n_logprobs(self) -> int | None:
        """How many of the likeliest tokens are asked for, beside the one that was drawn."""
        return self.logprobs


class TextPart(Part):
    """A part of a message. There are no images here."""

    type: Literal["text"]
    text: str


class Message(Part):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[str, Tag("str")] | Annotated[ListOf[TextPart], Tag("[str]")],
        TextOrList,
    ]

    @property
    def plain(self) -> dict[str, str]:
        """Role and text, as text/chat.py has them."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "".join(part.text for part in self.content)}


class ChatRequest(Generation):
    """A conversation to answer."""

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def most_tokens(self) -> int | None:
        """How many new tokens there may be; None: as many as fit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def n_logprobs(self) -> int | None:
        """As for a completion."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: set it to true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class LoadAdapter(BaseModel):
    """vLLM's request to serve one more adapter."""

    lora_name: str
    lora_path: str


class UnloadAdapter(BaseModel):
    """vLLM's request to serve an adapter no more."""

    lora_name: str


# --------------------------------------------------------------------------------------------------
# Answers

FINISH_REASONS = {
    "end of text": "stop",
    "stop string": "stop",
    "max_new_tokens": "length",
    "max_seq_len": "length",
}


def head(kind: str, model: str) -> dict:
    """What each answer and each chunk of a stream begins with. kind: chat or text."""
    prefix, name = {
        "chat": ("chatcmpl", "chat.completion"),
        "text": ("cmpl", "text_completion"),
    }[kind]
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": name,
        "created": int(time.time()),
        "model": model,
    }


def text_logprobs(tokens: list[dict], offsets: list[int]) -> dict:
    """The log-probabilities of tokens (`LogprobsOfText.tokens`) in the shape of completions.

    offsets: where in the text each token begins.
    """
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [  # and the token itself
            {other["token"]: other["logprob"] for other in [*token["top_logprobs"], token]}
            for token in tokens
        ],
        "text_offset": offsets,
    }


def token_logprob(spelling: bytes, logprob: float) -> dict:
    """A token as text and bytes. JSON has no -inf, no NaN: -9999, as in OpenAI's answers.

    Half of a character is spelled as in OpenAI's answers: two halves must not look alike.
    """
    try:
        text = spelling.decode()
    except UnicodeDecodeError:
        text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)
    return {"token": text, "logprob": max(-9999.0, logprob), "bytes": list(spelling)}
