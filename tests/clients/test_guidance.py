"""guidance's VLLMModel, which sends each grammar under two names."""

from __future__ import annotations

import guidance
from conftest import MODEL
from guidance.models import experimental


def answer(address: str, grammar: object) -> str:
    model = experimental.VLLMModel(MODEL, base_url=address, api_key="none", echo=False)
    with guidance.user():
        model += "What is the weather in Paris?"
    with guidance.assistant():
        model += grammar
    return str(model["a"])


def test_select(address: str) -> None:
    assert answer(address, guidance.select(["red", "blue"], name="a")) in ("red", "blue")


def test_regex(address: str) -> None:
    assert answer(address, guidance.gen("a", regex="[0-9]{3}", max_tokens=20)).isdigit()


def test_json(address: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema["additionalProperties"] = False
    assert '"n":' in answer(address, guidance.json("a", schema=schema))
