"""outlines with its defaults, over OpenAI's API and as a client of vLLM's server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import openai
import outlines
import pytest
from conftest import MODEL, Weather
from outlines.types import CFG, Regex

ASKED = "What is the weather in Paris?"
GRAMMAR = 'start: "red" | "blue"\n'


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("make", [outlines.from_openai, outlines.from_vllm])
def test_texts_and_forms(client: openai.OpenAI, make: object) -> None:
    model = make(client, MODEL)
    assert isinstance(model(ASKED, max_tokens=20), str)
    assert "".join(model.stream(ASKED, max_tokens=20))
    Weather.model_validate_json(model(ASKED, Weather, max_tokens=100))


def test_other_guides_of_vllm(client: openai.OpenAI) -> None:
    model = outlines.from_vllm(client, MODEL)
    assert model(ASKED, Literal["red", "blue"], max_tokens=20) in ("red", "blue")
    assert model(ASKED, Regex("[0-9]{3}"), max_tokens=20).isdigit()
    assert model(ASKED, CFG(GRAMMAR), max_tokens=20) in ("red", "blue")
