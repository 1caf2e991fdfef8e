"""Short equivalents of the tests of vLLM's OpenAI server, by file and test.

Each function takes the server of test_serve_vllm.py. Names before the colon are files of vLLM's tests.
"""

from __future__ import annotations

import concurrent.futures
import json
import re
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import openai

Case = Callable[[Any], None]
CASES: dict[str, Case] = {}

TALK = [{"role": "system", "content": "you are a helpful assistant"}, {"role": "user", "content": "what is 1+1?"}]
MODELS = ("base", "adapter")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
}
REGEX = r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
CHOICES = ["Python", "Java", "Rust"]
WRONG_GUIDES = {
    "json": {"json": {"type": "object", "properties": {"foo": "bar"}}},
    "regex": {"regex": "[.*"},
    "grammar": {"grammar": "root ::= select_statementinvalidsyntax"},
    "two": {"json": SCHEMA, "regex": "a"},
    "type": {"regex": {"1": "Python"}},
}


def case(name: str, *variants: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function once, or once for each variant, which it takes as its second argument."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for variant in variants:
            label = variant if isinstance(variant, str) else json.dumps(variant)
            CASES[f"{name}[{label}]"] = lambda served, variant=variant: function(served, variant)
        if not variants:
            CASES[name] = function
        return function

    return register


def complete(served: Any, status: int = 200, **fields: Any) -> Any:
    body = {"model": "base", "prompt": "Hello, my name is", "max_tokens": 5, "temperature": 0.0, **fields}
    return served.post("/v1/completions", status, **body)


def chat(served: Any, status: int = 200, **fields: Any) -> Any:
    body = {"model": "base", "messages": TALK, "max_completion_tokens": 5, "temperature": 0.0, **fields}
    return served.post("/v1/chat/completions", status, **body)


def stream_of(served: Any, path: str, **fields: Any) -> list[Any]:
    """Returns the events of a stream."""
    answer = served.client.post(path, json={"model": "base", "temperature": 0.0, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    *lines, last = (line.removeprefix("data: ") for line in answer.text.splitlines() if line)
    assert last == "[DONE]"
    return [json.loads(line) for line in lines]


def streamed(served: Any, is_chat: bool, **fields: Any) -> list[Any]:
    if is_chat:
        return stream_of(served, "/v1/chat/completions", **{"messages": TALK, "max_completion_tokens": 5, **fields})
    return stream_of(served, "/v1/completions", **{"prompt": "Hello, my name is", "max_tokens": 5, **fields})


def client_of(served: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.client.base_url}/v1", api_key="none", max_retries=0)


@case("completion: single", *MODELS)
def _(served: Any, model: str) -> None:
    with client_of(served) as client:
        answer = client.completions.create(model=model, prompt="Hello, my name is", max_tokens=5, temperature=0.0)
        (choice,) = answer.choices
        assert answer.id is not None
        assert answer.usage is not None
        assert choice.finish_reason in ("length", "stop")
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        by_ids = client.completions.create(model=model, prompt=[5, 5, 5, 5, 5], max_tokens=5, temperature=0.0)
        assert by_ids.choices[0].prompt_logprobs is None  # type: ignore[attr-defined]


@case("completion: truncation_side", "left", "right")
def _(served: Any, side: str) -> None:
    prompt = list(range(10, 18))
    fields = {"truncate_prompt_tokens": 4, "truncation_side": side, "return_token_ids": True}
    (choice,) = complete(served, prompt=prompt, max_tokens=1, **fields)["choices"]
    assert choice["prompt_token_ids"] == (prompt[-4:] if side == "left" else prompt[:4])


@case("completion: logprobs", None, 0, 5)
def _(served: Any, number: int | None) -> None:
    found = complete(served, prompt=[10] * 5, logprobs=number)["choices"][0]["logprobs"]
    if number is None:
        assert found is None
    else:
        assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(found["tokens"])
        assert all(1 <= len(top) <= number + 1 for top in found["top_logprobs"])


@case("completion: too many logprobs", False, True)
def _(served: Any, stream: bool) -> None:
    assert complete(served, 400, logprobs=21, stream=stream)["error"]["param"] == "logprobs"
    complete(served)


@case("completion: prompt_logprobs", -1, 0, 1, None)
def _(served: Any, number: int | None) -> None:
    prompts = ["A robot may not injure", "My name is"]
    if number == -1:
        assert complete(served, 400, prompt=prompts, prompt_logprobs=number)["error"]["param"] == "prompt_logprobs"
        return
    for choice, prompt in zip(
        complete(served, prompt=prompts, prompt_logprobs=number)["choices"], prompts, strict=True
    ):
        found = choice["prompt_logprobs"]
        assert found is None if number is None else len(found) == len(served.ids(prompt))


@case("completion: streaming", *MODELS)
def _(served: Any, model: str) -> None:
    whole = complete(served, model=model)["choices"][0]
    events = streamed(served, False, model=model)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"][0]["finish_reason"]] == [
        whole["finish_reason"]
    ]


@case("completion: parallel sampling", False, True)
def _(served: Any, stream: bool) -> None:
    fields = {"prompt": "What is an LLM?", "max_tokens": 30, "n": 3, "temperature": 1.0, "seed": 42}
    texts = [""] * 3
    ended = []
    answers = streamed(served, False, **fields) if stream else [complete(served, **fields)]
    for choice in (choice for answer in answers for choice in answer["choices"]):
        texts[choice["index"]] += choice["text"]
        ended += [choice["index"]] if choice["finish_reason"] else []
    assert sorted(ended) == [0, 1, 2]
    assert len(set(texts)) == 3


@case("completion: stream_options", [False, False], [False, True], [True, False], [True, True], [])
def _(served: Any, options: list[bool]) -> None:
    check_stream_options(served, False, options)


@case("chat: stream_options", [False, False], [True, False], [True, True], [])
def _(served: Any, options: list[bool]) -> None:
    check_stream_options(served, True, options)


def check_stream_options(served: Any, is_chat: bool, options: list[bool]) -> None:
    given = dict(zip(("include_usage", "continuous_usage_stats"), options, strict=False))
    events = streamed(served, is_chat, stream_options=given, ignore_eos=True)
    with_usage, always = options if options else (False, False)
    *others, last = events
    if not with_usage:
        assert all(event.get("usage") is None for event in events)
        return
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
    assert all((event.get("usage") is not None) == always for event in others)
    if always:
        counts = [event["usage"]["completion_tokens"] for event in events]
        for before, after, event in zip(counts, counts[1:], events[1:], strict=False):
            assert before == 0 or after > before or (not event["choices"] and after == before)
        assert counts[-1] == 5


@case("completion: stream_options without stream", {"include_usage": None}, {"include_usage": True},
      {"continuous_usage_stats": None}, {"continuous_usage_stats": True})  # fmt: skip
def _(served: Any, options: dict[str, Any]) -> None:
    complete(served, 400, stream_options=options)


@case("chat: stream_options without stream", {"include_usage": None}, {"include_usage": True})
def _(served: Any, options: dict[str, Any]) -> None:
    chat(served, 400, stream_options=options)


@case("completion: batch", "texts", "ids")
def _(served: Any, kind: str) -> None:
    prompts: list[Any] = ["Hello, my name is"] * 2 if kind == "texts" else [[10] * 5] * 2
    first, second = complete(served, prompt=prompts)["choices"]
    assert first["text"] == second["text"]
    beams = [choice["text"] for choice in complete(served, prompt=prompts, n=2, use_beam_search=True)["choices"]]
    assert beams[:2] == beams[2:]
    assert beams[0] != beams[1]
    texts = ["", ""]
    for event in streamed(served, False, prompt=prompts):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [first["text"]] * 2


@case("completion: echo with logprobs", 0, 1)
def _(served: Any, number: int) -> None:
    for prompt in ("Hello, my name is", served.ids("Hello")):
        (choice,) = complete(served, prompt=prompt, echo=True, logprobs=number)["choices"]
        assert choice["text"].startswith(prompt if isinstance(prompt, str) else "Hello")
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        assert all(1 <= len(top) <= number + 1 for top in found["top_logprobs"][1:])
        assert len(found["text_offset"]) == len(found["tokens"])


@case("completion: wrong guide", *WRONG_GUIDES)
def _(served: Any, name: str) -> None:
    complete(served, 400, structured_outputs=WRONG_GUIDES[name])


@case("chat: wrong guide", *WRONG_GUIDES)
def _(served: Any, name: str) -> None:
    chat(served, 400, structured_outputs=WRONG_GUIDES[name])


@case("completion: empty prompt list", [], [[]])
def _(served: Any, prompt: Any) -> None:
    complete(served, 400, prompt=prompt) if not prompt else None


@case("prompt validation: token outside the vocabulary", 269_999, 2**31)
def _(served: Any, token: int) -> None:
    complete(served, 400, prompt=[token])


@case("prompt validation: max_tokens", -1, "x")
def _(served: Any, number: Any) -> None:
    assert complete(served, 400, max_tokens=number)["error"]["param"] == "max_tokens"


@case("prompt validation: too long", "completion", "chat")
def _(served: Any, kind: str) -> None:
    text = "a " * 1000
    error = (
        complete(served, 400, prompt=text)
        if kind == "completion"
        else chat(served, 400, messages=[{"role": "user", "content": text}])
    )["error"]
    assert error["code"] == 400


@case("completion: wrong body", "[]", "1", "{", '"a"', "null")
def _(served: Any, body: str) -> None:
    answer = served.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400


@case("basic: wrong content type", "/v1/completions", "/v1/chat/completions")
def _(served: Any, path: str) -> None:
    answer = served.client.post(path, content="a=1", headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert answer.status_code == 415


@case("basic: routes", "/health", "/ping", "/version", "/load", "/metrics", "/v1/models", "/docs", "/openapi.json")
def _(served: Any, path: str) -> None:
    assert served.client.get(path).status_code == 200


@case("basic: unknown model", "completion", "chat", "embedding")
def _(served: Any, kind: str) -> None:
    error = (
        complete(served, 404, model="nobody")
        if kind == "completion"
        else chat(served, 404, model="nobody")
        if kind == "chat"
        else served.post("/v1/embeddings", 404, model="nobody", input="a")
    )["error"]
    assert (error["code"], error["param"]) == (404, "model")


@case("chat: logprobs", *[[model, number] for model in MODELS for number in (None, 0, 5)])
def _(served: Any, variant: list[Any]) -> None:
    model, number = variant
    fields = {} if number is None else {"logprobs": True, "top_logprobs": number}
    found = chat(served, model=model, **fields)["choices"][0]["logprobs"]
    if number is None:
        assert found is None
    else:
        assert all(len(entry["top_logprobs"]) == number for entry in found["content"])


@case("chat: too many logprobs", *MODELS)
def _(served: Any, model: str) -> None:
    for stream in (False, True):
        chat(served, 400, model=model, logprobs=True, top_logprobs=21, stream=stream)
    chat(served, model=model)


@case("chat: prompt_logprobs", -1, 0, 1, None)
def _(served: Any, number: int | None) -> None:
    if number == -1:
        chat(served, 400, prompt_logprobs=number)
        return
    found = chat(served, prompt_logprobs=number)["prompt_logprobs"]
    assert found is None if number is None else len(found) > 0


@case("chat: more than one prompt_logprobs")
def _(served: Any) -> None:
    one, two = (chat(served, prompt_logprobs=number)["prompt_logprobs"] for number in (1, 2))
    assert len(one[0:1]) == 1
    assert all(len(first) <= len(second) for first, second in zip(one[1:], two[1:], strict=True))
    assert any(len(first) < len(second) for first, second in zip(one[1:], two[1:], strict=True))


@case("chat: session", *MODELS)
def _(served: Any, model: str) -> None:
    answer = chat(served, model=model, logprobs=True, top_logprobs=5)
    message = answer["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert answer["usage"]["total_tokens"] == sum(
        answer["usage"][f"{kind}_tokens"] for kind in ("prompt", "completion")
    )
    chat(served, model=model, messages=[*TALK, message, {"role": "user", "content": "express your result in json"}])


@case("chat: streaming", *MODELS)
def _(served: Any, model: str) -> None:
    whole = chat(served, model=model)["choices"][0]
    events = [event["choices"][0] for event in streamed(served, True, model=model)]
    assert "".join(event["delta"].get("content") or "" for event in events) == whole["message"]["content"]
    assert [event["finish_reason"] for event in events if event["finish_reason"]] == [whole["finish_reason"]]
    assert {event["delta"]["role"] for event in events if "role" in event["delta"]} == {"assistant"}


@case("chat: structured outputs", "choice", "json", "regex", "choice with logprobs")
def _(served: Any, kind: str) -> None:
    guide: dict[str, Any] = {"json": {"json": SCHEMA}, "regex": {"regex": REGEX}}.get(kind, {"choice": CHOICES})
    more = {"logprobs": True, "top_logprobs": 5} if kind.endswith("logprobs") else {}
    fields = {"structured_outputs": guide, "max_completion_tokens": 60, "temperature": 0.7, "seed": 3}
    (choice,) = chat(served, **fields, **more)["choices"]
    text = choice["message"]["content"]
    if kind == "json":
        assert set(json.loads(text)) == {"name", "age"}
    elif kind == "regex":
        assert re.fullmatch(REGEX, text)
    else:
        assert text in CHOICES
    for entry in choice["logprobs"]["content"] if more else ():
        assert all(top["logprob"] >= -9999.0 for top in entry["top_logprobs"])


@case("chat: response_format", "json_object", "json_schema", "text")
def _(served: Any, kind: str) -> None:
    form: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        form["json_schema"] = {"name": "foo_test", "schema": {**SCHEMA, "additionalProperties": False}}
    # The random model ends no text of its own accord, so its JSON is kept short.
    bias = {str(served.ids("}")[0]): 30}
    fields = {"response_format": form, "logit_bias": bias, "max_completion_tokens": 60}
    text = chat(served, **fields)["choices"][0]["message"]["content"]
    if kind != "text":
        assert isinstance(json.loads(text), dict)


@case("chat: content as parts")
def _(served: Any) -> None:
    parts = [{"type": "text", "text": TALK[1]["content"]}]
    by_parts = chat(served, messages=[TALK[0], {"role": "user", "content": parts}])
    assert by_parts["choices"][0]["message"] == chat(served)["choices"][0]["message"]


@case("chat: n", [3, False], [2, True], [1, False])
def _(served: Any, variant: list[Any]) -> None:
    number, stream = variant
    fields = {"n": number, "temperature": 0.7, "seed": 42, "max_completion_tokens": 8}
    texts = [""] * number
    for answer in streamed(served, True, **fields) if stream else [chat(served, **fields)]:
        for choice in answer["choices"]:
            texts[choice["index"]] += choice["delta" if stream else "message"].get("content") or ""
    assert all(texts)
    assert number == 1 or len(set(texts)) > 1


@case("chat: seed below 64 bits")
def _(served: Any) -> None:
    assert chat(served, 400, seed=-(1 << 63) - 1)["error"]["param"] == "seed"


@case("chat: logit_bias", ["5", 1.0, 200], ["99999", 1.0, 400], ["-1", 1.0, 400], ["a", 1.0, 400], ["5", 101, 400])
def _(served: Any, variant: list[Any]) -> None:
    token, bias, status = variant
    chat(served, status, logit_bias={token: bias})


@case("chat: stop_token_ids outside the vocabulary", [-1], ["a"])
def _(served: Any, tokens: list[Any]) -> None:
    chat(served, 400, stop_token_ids=tokens)


@case("chat: echo", False, True)
def _(served: Any, stream: bool) -> None:
    messages = [*TALK, {"role": "assistant", "content": "The answer"}]
    fields = {"messages": messages, "echo": True, "add_generation_prompt": False, "continue_final_message": True}
    if stream:
        text = "".join(e["choices"][0]["delta"].get("content") or "" for e in streamed(served, True, **fields))
    else:
        text = chat(served, **fields)["choices"][0]["message"]["content"]
    assert text.startswith("The answer")


@case("return_token_ids", *[[kind, stream] for kind in ("completion", "chat") for stream in (False, True)])
def _(served: Any, variant: list[Any]) -> None:
    kind, stream = variant
    fields = {"return_token_ids": True}
    if stream:
        events = streamed(served, kind == "chat", **fields)
        tokens = [token for event in events for choice in event["choices"] for token in choice.get("token_ids", ())]
        first = events[0] if kind == "chat" else events[0]["choices"][0]
        assert sum("prompt_token_ids" in (event if kind == "chat" else event["choices"][0]) for event in events) == 1
    else:
        answer = chat(served, **fields) if kind == "chat" else complete(served, **fields)
        (choice,) = answer["choices"]
        tokens, first = choice["token_ids"], answer if kind == "chat" else choice
    assert first["prompt_token_ids"]
    assert 0 < len(tokens) <= 5


@case("return_tokens_as_token_ids", "completion", "chat")
def _(served: Any, kind: str) -> None:
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    if kind == "completion":
        (choice,) = complete(served, logprobs=1, **fields)["choices"]
        names = choice["logprobs"]["tokens"]
    else:
        (choice,) = chat(served, logprobs=True, top_logprobs=1, **fields)["choices"]
        names = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert names == [f"token_id:{token}" for token in choice["token_ids"]]


@case("tokenization: completion", False, True)
def _(served: Any, add: bool) -> None:
    found = served.post("/tokenize", model="base", prompt="This is a test", add_special_tokens=add)
    assert found == {"tokens": served.ids("This is a test"), "count": 14, "max_model_len": 704, "token_strs": None}


@case("tokenization: chat", [False, False], [True, False], [False, True])
def _(served: Any, variant: list[bool]) -> None:
    generates, continues = variant
    messages = [*TALK, {"role": "assistant", "content": "Sure,"}] if continues else TALK
    fields = {"add_generation_prompt": generates, "continue_final_message": continues}
    found = served.post("/tokenize", model="base", messages=messages, **fields)
    text = served.post("/detokenize", model="base", tokens=found["tokens"])["prompt"]
    assert text.endswith("Sure," if continues else "assistant\n" if generates else "<|im_end|>\n")
    assert found["count"] == len(found["tokens"])


@case("tokenization: token_strs")
def _(served: Any) -> None:
    found = served.post("/tokenize", prompt="ab c", return_token_strs=True)
    assert found["token_strs"] == [served.tokenizer.id_to_token(token) for token in found["tokens"]]


@case("tokenization: detokenize")
def _(served: Any) -> None:
    assert served.post("/detokenize", model="base", tokens=served.ids("a test"))["prompt"] == "a test"


@case("tokenization: tokenizer_info", "tokenizer_class", "chat_template")
def _(served: Any, name: str) -> None:
    assert isinstance(served.client.get("/tokenizer_info").json()[name], str)


@case("models: lineage")
def _(served: Any) -> None:
    base, *adapters = served.client.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == ("base", None)
    assert adapters[0]["id"] == "adapter"
    assert {adapter["parent"] for adapter in adapters} == {"base"}


def load(served: Any, name: str, path: Any, status: int = 200, **fields: Any) -> str:
    body = {"lora_name": name, "lora_path": str(path), **fields}
    answer = served.client.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == status, answer.text
    return str(answer.text)


@case("lora: load, list, unload", {}, {"base_model_name": "base"})
def _(served: Any, fields: dict[str, str]) -> None:
    assert "Success" in load(served, "loaded", served.root / "adapter", **fields)
    assert served.client.get("/v1/models/loaded").json()["root"] == str(served.root / "adapter")
    load(served, "loaded", served.root / "adapter", 400)
    load(served, "loaded", served.root / "adapter", load_inplace=True)
    assert (
        complete(served, model="loaded")["choices"][0]["text"]
        == complete(served, model="adapter")["choices"][0]["text"]
    )
    answer = served.client.post("/v1/unload_lora_adapter", json={"lora_name": "loaded"})
    assert "removed successfully" in answer.text
    assert served.client.post("/v1/unload_lora_adapter", json={"lora_name": "loaded"}).status_code == 404


@case("lora: invalid files", "adapter_config.json", "rank")
def _(served: Any, kind: str) -> None:
    directory = served.root / f"invalid-{kind}"
    shutil.copytree(served.root / "adapter", directory)
    config = directory / "adapter_config.json"
    text = "this is not json" if kind != "rank" else json.dumps({**json.loads(config.read_text()), "r": 1024})
    config.write_text(text)
    load(served, "invalid", directory, 400)


@case("lora: many at once", False, True)
def _(served: Any, beams: bool) -> None:
    names = [f"adapter_{i}" for i in range(6)]

    def run(name: str) -> list[str]:
        load(served, name, served.root / "adapter")
        fields = {"use_beam_search": True, "n": 2} if beams else {}
        answer = complete(served, model=name, prompt=["Hello there", "Foo bar"], **fields)
        served.client.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()
        return [choice["text"] for choice in answer["choices"]]

    with concurrent.futures.ThreadPoolExecutor(len(names)) as threads:
        texts = list(threads.map(run, names))
    assert all(text == texts[0] for text in texts)


@case("embedding: input", "text", "texts", "ids", "lists")
def _(served: Any, kind: str) -> None:
    given = {"text": "ab", "texts": ["ab", "c"], "ids": served.ids("ab"), "lists": [served.ids("ab"), served.ids("c")]}
    answer = served.post("/v1/embeddings", model="base", input=given[kind])
    assert len(answer["data"]) == (2 if kind in ("texts", "lists") else 1)
    assert answer["usage"]["prompt_tokens"] == (3 if kind in ("texts", "lists") else 2)
    np.testing.assert_allclose(np.linalg.norm(answer["data"][0]["embedding"]), 1.0, rtol=1e-5)


@case("embedding: base64")
def _(served: Any) -> None:
    with client_of(served) as client:
        by_default = client.embeddings.create(model="base", input="ab").data[0].embedding
        as_floats = client.embeddings.create(model="base", input="ab", encoding_format="float").data[0].embedding
    np.testing.assert_allclose(by_default, as_floats, rtol=1e-6)


@case("embedding: truncation", 1, 10, -1)
def _(served: Any, number: int) -> None:
    answer = served.post("/v1/embeddings", model="base", input="abcd", truncate_prompt_tokens=number)
    assert answer["usage"]["prompt_tokens"] == (1 if number == 1 else 4)


@case("embedding: truncation refused", 0, 8193)
def _(served: Any, number: int) -> None:
    served.post("/v1/embeddings", 400, model="base", input="abcd", truncate_prompt_tokens=number)


@case("pooling: single", "float", "base64")
def _(served: Any, form: str) -> None:
    (entry,) = served.post("/pooling", model="base", input="ab", encoding_format=form)["data"]
    assert entry["object"] == "pooling"
    assert isinstance(entry["data"], list if form == "float" else str)


@case("request id", "header", "field")
def _(served: Any, kind: str) -> None:
    headers = {"X-Request-Id": "mine"} if kind == "header" else {}
    body = {"model": "base", "prompt": "a", "max_tokens": 1, **({} if headers else {"request_id": "mine"})}
    answer = served.client.post("/v1/completions", json=body, headers=headers)
    assert (answer.json()["id"], answer.headers["x-request-id"]) == ("cmpl-mine", "mine")
