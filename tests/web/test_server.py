"""serve.py as clients see it: a real server, OpenAI's client with strict validation, plain HTTP."""

import contextlib
import json
import re
import shutil
import socket

import pytest
import torch
from conftest import PATIENCE, refusal
from random_adapters import write_random
from servers import ASK, CHAT, KEY, Served, openai_client, served_folder, wait_for

import checkpoint
import serve
from config import MPTConfig, TrainConfig
from text import chat
from weights import load

openai = pytest.importorskip("openai")
safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("fastapi")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tiny_run, tmp_path_factory):
    """A run, a folder of two adapters for it, and a chat template that refuses some messages."""
    folder = served_folder(tiny_run, tmp_path_factory.mktemp("served"))
    refusal_of = "{% if m.content == 'never' %}{{ raise_exception('not this one') }}{% endif %}"
    strict = "{% for m in messages %}" + refusal_of + "{% endfor %}" + chat.CHATML
    (folder / "strict.jinja").write_text(strict)
    return folder


@pytest.fixture(scope="module")
def served(folder):
    """A server with two adapters and a key."""
    flags = ["--adapters=adapters", "--keys=keys.txt", "--rows=4", "--precision=fp32"]
    server = Served(folder, *flags, "--chat_template=strict.jinja", "--max_requests=100")
    yield server
    assert server.stop() == 0


@pytest.fixture
def client(served):
    """The strict client."""
    return openai_client(served)


# --- The endpoints, through OpenAI's client


def test_models_are_the_base_and_its_adapters(client):
    names = {model.id for model in client.models.list()}
    assert names == {"run", "anna", "bert"}
    assert client.models.retrieve("anna").id == "anna"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_a_completion(client):
    asked = dict(model="run", prompt="the river", max_tokens=12, seed=1)
    first = client.completions.create(**asked)
    choice = first.choices[0]
    assert first.usage.prompt_tokens == 9 and first.usage.completion_tokens == 12
    assert choice.finish_reason == "length" and choice.text
    assert client.completions.create(**asked).choices[0].text == choice.text
    for seed in (2, openai.NOT_GIVEN):
        again = client.completions.create(**{**asked, "seed": seed})
        assert again.choices[0].text != choice.text
    other = client.completions.create(**{**asked, "model": "anna"}).choices[0].text
    assert other != choice.text
    echoed = client.completions.create(**asked, echo=True).choices[0].text
    assert echoed == "the river" + choice.text
    as_ids = {"prompt": list(b"the river"), "logprobs": 3}
    ids = client.completions.create(**asked | as_ids).choices[0]
    assert ids.text == choice.text and len(ids.logprobs.tokens) == 12


def test_several_texts_in_one_request(client):
    both = client.completions.create(
        model="run", prompt=["the river", "a tree"], n=3, max_tokens=8, seed=1
    )
    texts = [choice.text for choice in both.choices]
    assert [choice.index for choice in both.choices] == list(range(6))
    assert len(set(texts)) == 6
    alone = client.completions.create(model="run", prompt="a tree", max_tokens=8, seed=1)
    assert alone.choices[0].text == texts[3]
    assert both.usage.prompt_tokens == 9 + 6 and both.usage.completion_tokens == 48


def test_a_stream_holds_the_same_text(client, served):
    asked = dict(model="bert", prompt="the river", max_tokens=12, seed=3)
    whole = client.completions.create(**asked)
    usage = {"include_usage": True}
    # The documented shape has no finish_reason of null, which OpenAI's own streams have.
    lenient = openai_client(served, strict=False)
    chunks = list(lenient.completions.create(**asked, stream=True, stream_options=usage))
    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == "length"


def test_a_chat(client):
    messages = [{"role": "user", "content": "hello"}]
    asked = dict(model="run", messages=messages, max_tokens=12, seed=1)
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    choice = whole.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    tokens = choice.logprobs.content
    assert len(tokens) == 12 and all(len(token.top_logprobs) == 2 for token in tokens)
    assert b"".join(bytes(token.bytes) for token in tokens).decode(errors="replace") == (
        choice.message.content
    )
    pieces = []
    with client.chat.completions.create(**asked, stream=True) as chunks:
        for chunk in chunks:
            pieces.append(chunk.choices[0].delta.content or "")
    assert "".join(pieces) == choice.message.content


def test_the_end_of_an_answer_and_stop_strings_end_a_text(client, served):
    asked = dict(model="run", prompt="the river", max_tokens=40, seed=1)
    text = client.completions.create(**asked).choices[0].text
    stop = text[5:7]
    stopped = client.completions.create(**asked, stop=[stop]).choices[0]
    assert stopped.text == text[: text.index(stop)] and stopped.finish_reason == "stop"
    lenient = openai_client(served, strict=False)
    chunks = list(lenient.completions.create(**asked, stop=[stop], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == stopped.text


def test_an_echoed_prompt_has_the_log_probabilities_of_the_model(served, folder):
    """As lm-evaluation-harness asks. The first has none, which the strict client would refuse."""
    model, tokenizer, _ = load.load_for_sampling(str(folder / "run"), None, "cpu", in_fp32=True)
    prompts = ["the river " * 9, "the river ran. é"]
    asked = dict(model="run", prompt=prompts, max_tokens=1, temperature=0, logprobs=2, echo=True)
    _, answer = served.post("/v1/completions", asked)
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        ids = torch.tensor(tokenizer.encode(prompt).tolist())
        with torch.inference_mode():
            log_p = model.eval()(ids[None])[0, :, : tokenizer.vocab_size].log_softmax(-1)
        wanted = log_p[:-1].gather(1, ids[1:, None])[:, 0].tolist()
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:-1] == pytest.approx(wanted, abs=1e-4)
        likeliest = [max(top.values()) for top in found["top_logprobs"][1:]]
        assert likeliest == pytest.approx(log_p.amax(-1).tolist(), abs=1e-4)
        assert choice["text"].startswith(prompt) and len(found["tokens"]) == len(ids) + 1
        assert found["text_offset"][-1] == len(prompt)
        assert [choice["text"][place] for place in found["text_offset"][:3]] == ["t", "h", "e"]


def test_where_tokens_begin_in_a_text_of_wide_characters(served):
    """Each character has three tokens; a text of bytes has one offset for all of them."""
    body = {**ASK, "guided_regex": "(中|文){4}", "max_tokens": 20, "logprobs": 0}
    _, whole = served.post("/v1/completions", body)
    choice = whole["choices"][0]
    assert len(choice["text"]) == 4 and choice["finish_reason"] == "stop"
    begins = [place for place in range(4) for _ in range(3)]
    assert choice["logprobs"]["text_offset"] == [*begins, 4]  # the last one is end-of-text


@pytest.mark.parametrize(
    "more, tokens",
    [
        ({"guided_regex": "ab"}, ["a", "b", ""]),  # end-of-text shows nothing
        ({"guided_regex": "é", "max_tokens": 1}, ["bytes:\\xc3"]),  # half of a character
        ({"guided_regex": "aé"}, ["a", "bytes:\\xc3", "bytes:\\xa9", ""]),
        ({"guided_regex": "ab", "echo": True}, ["x", "a", "b", ""]),
        ({"guided_regex": "é", "max_tokens": 1, "echo": True}, ["x", "bytes:\\xc3"]),
        ({"max_tokens": 0, "echo": True}, ["x"]),
    ],
)
def test_every_token_that_counts_has_its_log_probability(served, more, tokens):
    _, answer = served.post("/v1/completions", ASK | {"logprobs": 1, "max_tokens": 9} | more)
    found = answer["choices"][0]["logprobs"]
    assert found["tokens"] == tokens
    assert {len(values) for values in found.values()} == {len(tokens)}
    n_new = len(tokens) - bool(more.get("echo"))
    assert answer["usage"]["completion_tokens"] == n_new
    assert answer["choices"][0]["finish_reason"] == ("stop" if tokens[-1] == "" else "length")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_has_the_log_probabilities_of_the_whole_answer(served, path):
    """With a stop string, too, none of a token that was cut off."""
    ask, logprobs = (ASK, 2) if path == "/v1/completions" else (CHAT, True)
    for seed in range(6):
        asked = ask | {"max_tokens": 30, "seed": seed, "logprobs": logprobs, "temperature": 1.5}
        text = text_of(served.post(path, asked)[1]["choices"][0])
        asked["stop"] = [text[7:9] or "zz", "\u4e2d"]
        _, whole = served.post(path, asked)
        choice = whole["choices"][0]
        content = served.request("POST", path, asked | {"stream": True})[2]
        frames = [json.loads(line[6:]) for line in content.split("\n\n")[:-2]]
        parts = [frame["choices"][0] for frame in frames]
        assert "".join(map(text_of, parts)) == text_of(choice)
        tokens = [token for part in parts for token in tokens_of(part)]
        assert tokens == tokens_of(choice)
        assert len(tokens) == whole["usage"]["completion_tokens"]


def text_of(choice) -> str:
    """What a choice or a chunk shows."""
    return choice.get("text") or choice.get("message", choice.get("delta", {})).get("content") or ""


def tokens_of(choice) -> list:
    """The entries of a choice's log-probabilities."""
    logprobs = choice["logprobs"] or {}
    if "content" in logprobs:
        return logprobs["content"]
    return [*zip(*logprobs.values(), strict=True)]


def test_the_drawn_token_is_among_the_likeliest(served):
    body = ASK | {"max_tokens": 60, "temperature": 2.0, "logprobs": 2}
    logprobs = served.post("/v1/completions", body)[1]["choices"][0]["logprobs"]
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == value and 2 <= len(top) <= 3


def test_half_of_a_character_in_a_prompt_is_echoed_as_it_was_read(served):
    status, body = served.post("/v1/completions", {**ASK, "prompt": "a\ud800b", "echo": True})
    assert status == 200 and body["choices"][0]["text"].startswith("a\ufffdb")


def test_json_that_a_schema_describes(client, served):
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["age", "ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model="anna",
            messages=[{"role": "user", "content": "hello"}],
            response_format=form,
            max_tokens=120,
            seed=seed,
        ).choices[0]
        if answer.finish_reason == "stop":
            assert set(json.loads(answer.message.content)) == {"age", "ok"}
    is_cut = CHAT | {"response_format": form, "max_tokens": 5}
    _, answer = served.post("/v1/chat/completions", is_cut)
    assert answer["choices"][0]["finish_reason"] == "length"
    _, _, stream = served.request("POST", "/v1/chat/completions", is_cut | {"stream": True})
    assert '"length"' in stream
    digits = client.completions.create(
        model="run", prompt="x", max_tokens=9, extra_body={"guided_regex": "[0-9]{3}"}
    )
    assert re.fullmatch("[0-9]{3}", digits.choices[0].text)
    form = {"type": "json_object", "schema": {"const": {"a": 1}}}
    _, answer = served.post(
        "/v1/chat/completions", CHAT | {"response_format": form, "max_tokens": 40}
    )
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 1}
    assert digits.choices[0].finish_reason == "stop"


def test_counters_agree_with_the_answers(served):
    served.wait_until_idle()
    before = served.metrics()
    bodies = [
        {**ASK, "prompt": "the river " * n, "n": n, "max_tokens": 10 * n} for n in (1, 2, 3, 10)
    ]
    usages = [served.post("/v1/completions", body)[1]["usage"] for body in bodies]
    served.post("/v1/completions", {**ASK, "model": "nobody"})
    usages.append(served.post("/v1/chat/completions", CHAT)[1]["usage"])
    found = 'mpt_answers_total{path="/v1/completions",status="404"}'
    wait_for(lambda: served.metrics()[found] > before[found])
    after = served.metrics()

    def added(name):
        return after[name] - before[name]

    assert added('mpt_answers_total{path="/v1/completions",status="200"}') == len(bodies)
    assert added(found) == 1
    for name in ("mpt_first_token_seconds", "mpt_answer_seconds"):
        assert added(f"{name}_count") == len(usages) and added(f"{name}_sum") > 0
    n_prompt = sum(body["n"] * len(body["prompt"]) for body in bodies) + usages[-1]["prompt_tokens"]
    assert added("mpt_prompt_tokens_total") + added("mpt_prefix_tokens_total") == n_prompt
    assert added("mpt_prefix_tokens_total") > 0
    assert added("mpt_new_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    for name in ("mpt_requests_open", "mpt_texts_running", "mpt_texts_waiting"):
        assert after[name] == 0, name


# --- Refusals

SLOW_SCHEMA = {"patternProperties": {f"^k{i:03}": {} for i in range(600)}}


@pytest.mark.parametrize(
    "change, status, words",
    [
        ({"model": "anne"}, 404, "anna"),
        ({"model": None}, 400, "model"),
        ({"max_tokens": 5000}, 400, "more than 256"),
        ({"max_tokens": "4"}, 400, "max_tokens"),
        ({"max_tokens": 0}, 400, "max_tokens 0 scores a prompt"),
        ({"prompt": "x" * 300}, 400, "are more than 256"),
        ({"prompt": "x" * 10**6}, 400, "does not fit"),
        ({"prompt": [1, 2, 320]}, 400, "ids are from 0"),
        ({"prompt": ["x"] * 20_000}, 400, "send several requests"),
        ({"prompt": []}, 400, "empty list"),
        ({"prompt": [5, "a"]}, 400, "prompt.1"),
        ({"prompt": [[5], "a"]}, 400, "prompt.1"),
        ({"prompt": [1.5] * 200_000}, 400, "prompt"),
        ({"temperature": float("nan")}, 400, "temperature"),
        ({"n": 10**6}, 400, "n: "),
        ({"stop": ""}, 400, "at least 1 character"),
        ({"stop": "x", "guided_regex": "[0-9]+"}, 400, "leave one out"),
        ({"echo": True, "logprobs": 1, "stream": True}, 400, "echo with logprobs"),
        ({"stream_options": {"include_usage": True}}, 400, "needs stream"),
        ({"guided_json": {"not": {"type": "string"}}}, 400, "not"),
        ({"guided_regex": "("}, 400, ""),
        ({"guided_json": SLOW_SCHEMA}, 400, "0.5 s"),
        ({"response_format": {"type": "xml"}}, 400, "expected text, json_object"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, 400, "response_format.schema"),
    ],
)
def test_a_completion_that_cannot_be_is_refused(served, change, status, words):
    got, body = served.post("/v1/completions", {**ASK, **change})
    error = body["error"]
    assert got == status and words in error["message"], error
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"] and len(error["message"]) < 400


CHANGES = {  # names that nobody knows, and values of known ones that would change a text
    **{"guided_grammar": "x", "structured_outputs": {"choice": ["a"]}, "no_such_field": 0},
    **{"min_p": 0.9, "repetition_penalty": 5.0, "presence_penalty": 1, "ignore_eos": True},
    **{"best_of": 3, "logit_bias": {"5": 1}, "tools": [{}], "tool_choice": "required"},
    **{"skip_special_tokens": False, "add_generation_prompt": False, "suffix": "x"},
}
# As OpenAI's client, LangChain, Open WebUI, lm-evaluation-harness and vLLM's users send them.
NEUTRAL = {
    **{"n": 1, "top_p": 1, "top_k": -1, "presence_penalty": 0, "frequency_penalty": 0.0},
    **{"logit_bias": {}, "best_of": 1, "tools": [], "tool_choice": "auto", "stop": None},
    **{"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
    **{"min_p": 0, "repetition_penalty": 1.0, "ignore_eos": False, "skip_special_tokens": True},
    **{"parallel_tool_calls": True, "guided_choice": None, "no_such_field": None},
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_field_that_would_change_a_text_is_refused_by_name(served, path):
    ask = ASK if path == "/v1/completions" else CHAT
    for name, value in CHANGES.items():
        status, body = served.post(path, ask | {name: value})
        assert status == 400 and body["error"]["param"] == name, (name, body)
        assert f"{name}: this is not supported" in body["error"]["message"]
    status, body = served.post(path, ask | NEUTRAL)
    assert status == 200, body
    options = {"include_usage": None, "include_obfuscation": False, "continuous_usage_stats": True}
    status, body = served.post(path, ask | {"stream": True, "stream_options": options})
    assert status == 400 and "continuous_usage_stats" in body["error"]["message"]
    options["continuous_usage_stats"] = False
    assert served.request("POST", path, ask | {"stream": True, "stream_options": options})[0] == 200


def test_messages_as_the_client_gives_them_back(client, served):
    """An answer of OpenAI's client becomes a message with all of its fields, most of them null."""
    messages = [{"role": "user", "content": "hello", "name": "anna", "type": "text"}]
    asked = dict(model="run", max_tokens=3)
    first = client.chat.completions.create(messages=messages, **asked).choices[0].message
    messages += [first.model_dump(), {"role": "user", "content": "more"}]
    assert client.chat.completions.create(messages=messages, **asked).choices[0].message.content
    status, body = served.post("/v1/chat/completions", CHAT | {"top_logprobs": 3})
    assert status == 400 and "top_logprobs needs logprobs" in body["error"]["message"]


def test_a_template_that_refuses_a_message_is_named_without_its_folder(served, folder):
    messages = [{"role": "user", "content": "never"}]
    status, body = served.post("/v1/chat/completions", CHAT | {"messages": messages})
    assert status == 400 and str(folder) not in str(body)
    assert "strict.jinja fails: not this one" in body["error"]["message"]


def test_paths_and_methods(served):
    """HEAD is answered as GET, without a body; errors have one shape."""
    for path in ("/health", "/metrics", "/v1/models", "/v1/models/anna", "/", "/openapi.json"):
        status, headers, text = served.request("HEAD", path)
        assert status == 200 and int(headers["content-length"]) > 0 and text == "", path
    assert served.request("HEAD", "/v1/models/nobody")[0] == 404
    for method, path, status in [("GET", "/x", 404), ("GET", "/v1/completions", 405)]:
        got, _, text = served.request(method, path)
        assert got == status and "message" in json.loads(text)["error"]
    paths = json.loads(served.request("GET", "/openapi.json")[2])["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health"} <= set(paths)


@pytest.mark.parametrize("name", ["nobody", "a" * 300, "\0", "\ud800", "..", "anna"])
def test_a_name_like_that_of_a_checkpoint_is_a_model_or_404(served, name):
    for step in ("1", "9" * 5000):
        asked = ASK | {"model": f"{name}/checkpoints/step-{step}"}
        status, body = served.post("/v1/completions", asked)
        assert status == 404 and body["error"]["code"] == "model_not_found", body


def test_top_p_of_0_takes_the_likeliest_token(served):
    texts = [
        served.post("/v1/completions", ASK | {"max_tokens": 20, "seed": 5, **how})[1]["choices"]
        for how in ({"top_p": 0}, {"temperature": 0})
    ]
    assert texts[0] == texts[1]


USER = {"role": "user", "content": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
DISORDER = [  # messages, words of the answer
    ([], "messages"),
    ([{"role": "user"}], "content"),
    ([{"role": "owner", "content": "x"}], "role"),
    ([USER, USER], "alternate"),
    ([USER, {"role": "assistant", "content": "y"}], "expected user"),
    ([USER | {"content": [IMAGE]}], "messages.0.content.0.type"),
    (
        [USER | {"content": [{"type": "text", "text": "x", "image_url": "y"}]}],
        "content.0.image_url",
    ),
    ([USER | {"tool_calls": [{"id": "a"}]}], "tool_calls"),
]


@pytest.mark.parametrize("messages, words", DISORDER)
def test_a_conversation_in_disorder_is_refused(served, messages, words):
    status, body = served.post("/v1/chat/completions", {**CHAT, "messages": messages})
    assert status == 400 and words in body["error"]["message"], body


@pytest.mark.parametrize(
    "content, words",
    [
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
        (b'{"model": "run", "prompt": "\xff"}', ""),
        (b"[" * 100_000, ""),
    ],
)
def test_a_body_that_is_no_request_is_refused(served, content, words):
    status, body = served.post("/v1/completions", content)
    assert status == 400 and words in body["error"]["message"], body


def test_bodies_without_end_are_cut_off(served):
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
            b"Authorization: Bearer " + KEY.encode() + b"\r\n"
            b"Content-Type: application/json\r\n\r\n"
        )
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                client.sendall(b"100000\r\n" + b" " * 2**20 + b"\r\n")
        assert client.recv(20).startswith(b"HTTP/1.1 413")


def test_who_may_ask(served):
    assert served.request("GET", "/v1/models", key=None)[0] == 401
    assert served.request("GET", "/v1/models", key=KEY + "x")[0] == 401
    assert served.request("GET", "/health", key=None)[0] == 200
    assert served.request("GET", "/v1/models", headers={"Host": "evil.example"})[0] == 421
    assert served.request("GET", "/v1/models", headers={"Host": "["})[0] == 421
    for origin in ("http://evil.example", "http://["):
        assert served.request("GET", "/v1/models", headers={"Origin": origin})[0] == 403
    own = {"Origin": f"http://127.0.0.1:{served.port}"}
    assert served.request("GET", "/v1/models", headers=own)[0] == 200
    _, headers, _ = served.request("GET", "/health", headers={"X-Request-ID": "mine-7"})
    assert headers["x-request-id"] == "mine-7"
    wait_for(lambda: '"mine-7"' in served.said())  # it is written behind the answer


# --- Adapters at run time


def test_adapters_come_and_go(served, folder):
    cfg = load.settings_of(checkpoint.find(str(folder / "run")))
    settings = TrainConfig(init_from="any", lora_rank=2, lora_alpha=8.0)
    write_random(folder / "adapters" / "carl", cfg, settings, seed=9)
    asked = {"lora_name": "carl", "lora_path": str(folder / "adapters" / "carl")}
    assert served.request("POST", "/v1/load_lora_adapter", asked)[0] == 200
    body = {**ASK, "model": "carl", "max_tokens": 20, "seed": 1}
    _, first = served.post("/v1/completions", body)

    shutil.rmtree(folder / "adapters" / "carl")
    write_random(folder / "adapters" / "carl", cfg, settings, seed=10)
    assert served.request("POST", "/v1/load_lora_adapter", asked)[0] == 200
    _, second = served.post("/v1/completions", body)
    assert second["choices"][0]["text"] != first["choices"][0]["text"]

    assert served.request("POST", "/v1/unload_lora_adapter", {"lora_name": "carl"})[0] == 200
    assert served.post("/v1/completions", body)[0] == 404
    for path in ("../run", "/etc", "a\0b", "x" * 3000, "\ud800"):
        status, body = served.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
        assert status == 400, body


def test_a_model_without_probabilities_is_no_fault_of_the_request(served, folder):
    """The log says why, with a fix that fits the server's precision; another text goes on."""
    cfg = load.settings_of(checkpoint.find(str(folder / "run")))
    settings = TrainConfig(init_from="any", lora_rank=2, lora_alpha=8.0)
    write_random(folder / "adapters" / "huge", cfg, settings, seed=9)
    file = folder / "adapters" / "huge" / "adapter_model.safetensors"
    tensors = {name: tensor * 1e30 for name, tensor in safetensors.load_file(file).items()}
    safetensors.save_file(tensors, file)
    asked = {"lora_name": "huge", "lora_path": str(folder / "adapters" / "huge")}
    status, _, text = served.request("POST", "/v1/load_lora_adapter", asked)
    assert status == 200, text
    status, body = served.post("/v1/completions", {**ASK, "model": "huge"})
    assert status == 500 and body["error"]["type"] == "api_error"
    wait_for(lambda: "the logits are not finite: train again" in served.said())
    served.request("POST", "/v1/unload_lora_adapter", {"lora_name": "huge"})
    assert served.post("/v1/completions", ASK)[0] == 200


def test_too_many_texts_are_sent_away(served):
    asked = {**ASK, "n": 128}
    status, headers, text = served.request("POST", "/v1/completions", asked)
    assert status == 429 and "try again" in json.loads(text)["error"]["message"]
    assert headers["retry-after"]


# --- The command


def test_what_cannot_be_served(folder, monkeypatch):
    monkeypatch.chdir(folder)

    def refused(*flags) -> str:
        return refusal(serve.main, list(flags))

    assert "there is nothing to serve" in refused()
    assert "--runs=none is no folder" in refused("--runs=none")
    assert "--adapters needs the model" in refused("--runs=.", "--adapters=adapters")
    assert "--keys=FILE" in refused("run", "--host=0.0.0.0")
    (folder / "short.txt").write_text("abc\n")
    assert "16 or more characters" in refused("run", "--keys=short.txt")
    assert "rows must be from 1 to" in refused("run", "--rows=0")
    assert "nowhere" in refused("nowhere")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "set another --port" in refused("run", f"--port={port}")
    monkeypatch.setenv("ROLE_WORLD_SIZE", "2")  # of torchrun
    assert "start one serve.py for each device" in refused("run")


SEVEN_B = MPTConfig(d_model=4096, n_heads=32, n_layers=32, vocab_size=50432, alibi=True)


@pytest.mark.parametrize(
    "rows, width, gib, words",
    [
        (32, 2, 64, None),
        (32, 2, 40, "set --rows=25 or"),
        (32, 4, 24, "set --precision=bf16"),
        (1, 2, 12, "needs a larger device"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_what_fits(rows, width, gib, words):
    """A row of 2048 tokens of MPT-7B takes a GiB in bf16."""
    asked = serve.ServeSettings(rows=rows), SEVEN_B, width, gib * 2**30
    if words is None:
        serve.require_room(*asked)
    else:
        assert words in refusal(serve.require_room, *asked)
