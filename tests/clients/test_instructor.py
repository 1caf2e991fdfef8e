"""instructor in its modes: a function by name, strict functions, and JSON schemas."""

from __future__ import annotations

import instructor
import openai
import pytest
from conftest import MODEL, Weather


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": instructor.Mode.TOOLS}, {"mode": instructor.Mode.JSON_SCHEMA}],
    ids=["default", "tools", "schema"],
)
def test_an_answer_with_a_form(address: str, options: dict[str, instructor.Mode]) -> None:
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        answer = instructor.from_openai(client, **options).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the weather in Paris?"}],
            response_model=Weather,
            max_tokens=200,
            max_retries=0,
        )
    assert isinstance(answer, Weather)
