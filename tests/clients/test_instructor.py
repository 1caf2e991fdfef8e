"""instructor, in its modes: a function by name, strict functions, and JSON schemas."""

from __future__ import annotations

import instructor
import openai
import pytest
from conftest import MODEL, Weather


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_an_answer_with_a_form(address: str, mode: instructor.Mode) -> None:
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        answer = instructor.from_openai(client, mode=mode).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the weather in Paris?"}],
            response_model=Weather,
            max_tokens=200,
            max_retries=0,
        )
    assert isinstance(answer, Weather)


def test_its_default_mode(address: str) -> None:
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        answer = instructor.from_openai(client).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the weather in Paris?"}],
            response_model=Weather,
            max_tokens=200,
            max_retries=0,
        )
    assert isinstance(answer, Weather)
