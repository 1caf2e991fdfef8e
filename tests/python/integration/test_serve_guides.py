"""Guides over HTTP: OpenAI's response_format, and vLLM's structured outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from support.http_server import http_server
from support.models import ModelSpec, save_model
from support.processes import python_path
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

SPEC = ModelSpec(vocab_size=270)
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
# The bias favours letters that soon end a text.
BIAS = {str(token): 40.0 for letter in '"}' for token in byte_level().encode(letter).ids}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("guides")
    model = save_model(SPEC, root / "model")
    save_tokenizer(byte_level(), model)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with http_server(build_engine(model, root), "--served_model_name", "base") as address:
        yield address


def post(address: str, route: str, **fields: Any) -> httpx.Response:
    body = {"max_tokens": 200, "seed": 3, "temperature": 4, "logit_bias": BIAS, **fields}
    return httpx.post(f"{address}/v1/{route}", json=body, timeout=60)


def completion(address: str, **fields: Any) -> str:
    response = post(address, "completions", prompt="Say hello", **fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["text"])


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
    ],
    ids=["response_format", "structured_outputs", "its text", "guided_json", "its text of old"],
)
def test_schemas(address: str, fields: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(completion(address, **fields)), SCHEMA)


@pytest.mark.parametrize("names", [{"structured_outputs"}, set()], ids=["now", "then"])
def test_other_guides(address: str, names: set[str]) -> None:
    def fields(name: str, value: Any) -> dict[str, Any]:
        return {"structured_outputs": {name: value}} if names else {f"guided_{name}": value}

    assert re.fullmatch(r"[ab]{3}-\d", completion(address, **fields("regex", r"[ab]{3}-[0-9]")))
    choices = ["a.b (c)", "x|y", "tab\there", "é€", "#&~-"]
    assert {completion(address, **fields("choice", choices), seed=seed) for seed in range(6)} <= set(choices)
    assert re.fullmatch("(ab)+c", completion(address, **fields("grammar", 'start: "ab"+ "c"')))


def test_each_of_several_answers(address: str) -> None:
    fields = {"structured_outputs": {"json": SCHEMA}, "prompt": "Say hello"}
    answer = post(address, "completions", n=3, **fields).json()
    texts = [choice["text"] for choice in answer["choices"]]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert texts == [completion(address, structured_outputs={"json": SCHEMA}, seed=seed) for seed in (3, 4, 5)]
    assert len(set(texts)) > 1


def test_any_object(address: str) -> None:
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        assert isinstance(json.loads(completion(address, **fields)), dict)


def test_json_is_on_one_line_unless_whitespace_is_asked_for(address: str) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    # The bias makes the model prefer whitespace.
    liked = {str(token): 60.0 for letter in " \n" for token in byte_level().encode(letter).ids}
    assert completion(address, guided_json=schema, logit_bias=liked) in ('{"a": 1}', '{"a":1}')
    free = {"guided_json": schema, "guided_whitespace_pattern": " {3}", "logit_bias": liked}
    assert completion(address, **free) == '{   "a"   :   1   }'


def test_the_openai_package(address: str) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="base",
            messages=[{"role": "user", "content": "Say hello"}],
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            logit_bias=BIAS,
            seed=3,
        )
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
        stream = client.chat.completions.create(
            model="base",
            messages=[{"role": "user", "content": "Say hello"}],
            response_format={"type": "json_object"},
            stream=True,
            logit_bias=BIAS,
            seed=3,
            max_tokens=200,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_regex": "("}, "unclosed group"),
        ({"guided_json": {"type": "nothing"}}, "nothing"),
        ({"guided_json": "{"}, "the guide is not JSON"),
        ({"guided_grammar": "start: nothing"}, "nothing"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex and guided_choice are given, and they differ"),
        ({"guided_choice": []}, "at least 1"),
        ({"guided_whitespace_pattern": " "}, "without a guide that makes JSON"),
        ({"guided_json": {}, "guided_whitespace_pattern": "("}, "unclosed group"),
        ({"guided_decoding_backend": "outlines"}, "'guidance' or 'auto'"),
        ({"response_format": {"type": "json_schema"}}, r"type 'json_schema' has \[\]; accepted: \['json_schema'\]"),
        ({"response_format": {"type": "text", "triggers": []}}, r"type 'text' has \['triggers'\]"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ],
)
def test_invalid_guides_are_answered_with_400(address: str, fields: dict[str, Any], message: str, stream: bool) -> None:
    response = post(address, "completions", prompt="a", stream=stream, **fields)
    assert response.status_code == 400
    assert re.search(message, response.json()["error"]["message"]), response.text


def test_text_is_any_text(address: str) -> None:
    assert post(address, "completions", prompt="a", response_format={"type": "text"}).status_code == 200
    assert "re" in completion(address, guided_regex="re", response_format={"type": "text"})


def test_a_server_without_llguidance_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llguidance.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    model = save_model(SPEC, tmp_path / "model")
    save_tokenizer(byte_level(), model)
    with http_server(build_engine(model, tmp_path), "--served_model_name", "base") as address:
        response = post(address, "completions", prompt="a", guided_regex="a")
        assert response.status_code == 400
        assert "pip install 'adaptrt[guided]'" in response.json()["error"]["message"]
        assert post(address, "completions", prompt="a").status_code == 200
