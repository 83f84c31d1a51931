"""What OpenAI's API looks like: the requests that are understood, the answers, the errors.

    POST /v1/completions         {"model": "demo", "prompt": "def ", "max_tokens": 16}
    POST /v1/chat/completions    {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}

Names, defaults and ranges are OpenAI's (https://platform.openai.com/docs/api-reference); `top_k`,
`guided_json` and `guided_regex` are vLLM's. What would change a text and is not built here, such as
tools, is refused by its name. Other fields, such as `user`, are ignored.
"""

import json
import math
import re
import time
import uuid
from typing import Annotated, Any, Literal, TypeVar

from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MOST_TEXTS = 128  # of one request
MOST_LOGPROBS = 20
MOST_TOKENS = 2**31
LONGEST_STOP = 256  # characters
LONGEST_MESSAGE = 400  # characters of an error: it may quote what a client has sent
MAX_SEED = 2**63 - 1
FOLDERS = re.compile(r"(?<![\w.~/:-])/(?:[^\s/'\"`,;()<>]+/)+")  # of an absolute path


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
    if isinstance(value, str):
        return FOLDERS.sub("", value)
    if isinstance(value, dict):
        return {key: public(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [public(inner) for inner in value]
    return value


def as_json(value) -> Response:
    """An answer in ASCII: names and settings may hold what is no UTF-8. No NaN, no Infinity."""
    content = json.dumps(plain(value), allow_nan=False).encode()
    return Response(content, media_type="application/json")


def plain(value, depth: int = 8):
    """A value that JSON can hold: None for a number that is not finite, and no deep nests."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict | list) and not depth:
        return "..."
    if isinstance(value, dict):
        return {str(key): plain(inner, depth - 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, depth - 1) for inner in value]
    return value


# --------------------------------------------------------------------------------------------------
# Requests

Item = TypeVar("Item")
# A list is refused at its first wrong item: one error for each would take seconds.
ListOf = Annotated[list[Item], Field(fail_fast=True)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


def refused(value):
    """ValueError for a setting that this server would have to ignore."""
    if value:
        raise ValueError("this is not supported: leave it out")
    return value


NotSupported = Annotated[Any, AfterValidator(refused)]  # only a value that changes nothing


class StreamOptions(BaseModel):
    """Whether the last chunk of a stream counts its tokens."""

    include_usage: bool = False


class Generation(BaseModel):
    """What completions and chat have in common."""

    model_config = ConfigDict(strict=True)

    model: str
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_TEXTS)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    stop: Stop | Annotated[ListOf[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: str | None = None

    presence_penalty: NotSupported = None
    frequency_penalty: NotSupported = None
    logit_bias: NotSupported = None

    @property
    def stops(self) -> list[str]:
        """The strings that end a text."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(Generation):
    """A prompt to continue, or several."""

    prompt: str | ListOf[int] | ListOf[str] | ListOf[ListOf[int]] = ""
    max_tokens: Count | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: NotSupported = None
    best_of: Literal[1] | None = None

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


class TextPart(BaseModel):
    """A part of a message. There are no images here."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[TextPart]

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
    tools: NotSupported = None
    functions: NotSupported = None

    @property
    def most_tokens(self) -> int | None:
        """How many new tokens there may be; None: as many as fit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def n_logprobs(self) -> int | None:
        """As for a completion."""
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
        "top_logprobs": [  # of several that look alike as text, the likeliest
            {other["token"]: other["logprob"] for other in reversed(token["top_logprobs"])}
            for token in tokens
        ],
        "text_offset": offsets,
    }


def token_logprob(spelling: bytes, logprob: float) -> dict:
    """A token as text and bytes. JSON has no -inf, no NaN: -9999, as in OpenAI's answers."""
    text = spelling.decode("utf-8", "replace")
    return {"token": text, "logprob": max(-9999.0, logprob), "bytes": list(spelling)}
