"""LLM's prompts in each format of vLLM and TensorRT-LLM, and sampling configs that are greedy."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import adaptrt
from adaptrt.runtime.llm_prompts import has_idle_temperature, is_greedy, is_one_prompt, listed_prompts


@pytest.mark.parametrize(
    ("prompts", "is_one", "listed"),
    [
        ("a text", True, ["a text"]),
        ("", True, [""]),
        ({"prompt": "a"}, True, ["a"]),
        ({"prompt": "a", "prompt_token_ids": None, "multi_modal_data": None}, True, ["a"]),
        ({"prompt_token_ids": [4, 5]}, True, [[4, 5]]),
        ({"prompt_token_ids": (4,), "prompt": "what they were made of"}, True, [[4]]),
        ([4, 5], True, [[4, 5]]),
        ((np.int64(4), 5), True, [[4, 5]]),
        ([[4, 5]], False, [[4, 5]]),
        ([[4], np.array([5, 6]), (7,)], False, [[4], [5, 6], [7]]),
        (["a", "b"], False, ["a", "b"]),
        (["a", [4], {"prompt": "b"}, {"prompt_token_ids": [5]}], False, ["a", [4], "b", [5]]),
        ([[]], False, [[]]),
        ([], False, []),
    ],
)
def test_forms_of_prompts(prompts: Any, is_one: bool, listed: list[Any]) -> None:
    assert is_one_prompt(prompts) is is_one
    found = listed_prompts(prompts)
    assert found == listed
    assert all(type(token) is int for prompt in found if isinstance(prompt, list) for token in prompt)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (3, "prompts is 3; expected a prompt or a list of prompts"),
        (None, "prompts is None; expected a prompt or a list of prompts"),
        (["a", 3], "prompts[1] is 3; expected a text, token ids, or a dictionary with 'prompt' or 'prompt_token_ids'"),
        (["a", b"b"], "prompts[1] is b'b'; expected a text"),
        ([4, "a"], "prompts[1] is 'a'; expected a token id"),
        ([4, 5.0], "prompts[1] is 5.0; expected a token id"),
        ([4, True], "prompts[1] is True; expected a token id"),
        ([[4], ["a"]], "prompts[1][0] is 'a'; expected a token id"),
        ({}, "prompts is {}; expected a text as 'prompt', or 'prompt_token_ids'"),
        ({"prompt": 3}, "prompts is {'prompt': 3}; expected a text as 'prompt'"),
        (
            {"prompt": "a", "multi_modal_data": {"video": 1}},
            "prompts['multi_modal_data'] is {'video': 1}; expected {'image': an image or a list of images}",
        ),
        (
            {"prompt_token_ids": [4], "multi_modal_data": {"image": 1}},
            "prompts has 'multi_modal_data' with ['prompt_token_ids']; expected a text as 'prompt'",
        ),
        ([{"text": "a"}], "prompts[0] has the key 'text'; expected 'prompt' or 'prompt_token_ids'"),
        ({"prompt_token_ids": "a"}, "prompts['prompt_token_ids'] is 'a'; expected"),
        ({"prompt_token_ids": [4, None]}, "prompts['prompt_token_ids'][1] is None; expected a token id"),
    ],
)
def test_invalid_prompts_are_refused_by_name(prompts: Any, said: str) -> None:
    with pytest.raises(adaptrt.RequestError, match=f"^{re.escape(said)}"):
        listed_prompts(prompts)


@pytest.mark.parametrize(
    ("fields", "greedy", "idle"),
    [
        ({}, True, False),
        ({"temperature": 0.8}, True, True),
        ({"temperature": 0.8, "seed": 3, "top_k": 0, "min_p": 0.0}, True, True),
        ({"temperature": 0.0}, True, False),
        ({"temperature": 0.8, "top_k": 1}, True, False),
        ({"temperature": 0.8, "top_k": 2}, False, False),
        ({"temperature": 0.8, "top_p": 1.0}, False, False),
        ({"temperature": 0.8, "min_p": 0.1}, False, False),
        ({"temperature": 0.0, "top_p": 0.5}, True, False),
        ({"temperature": 0.8, "beam_width": 2}, True, False),
    ],
)
def test_sampling_that_is_greedy(fields: dict[str, Any], greedy: bool, idle: bool) -> None:
    sampling = adaptrt.SamplingConfig(**fields)
    assert is_greedy(sampling) is greedy
    assert has_idle_temperature(sampling) is idle
