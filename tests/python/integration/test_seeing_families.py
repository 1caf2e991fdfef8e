"""Prompts with images against transformers + PEFT in float32, for each family whose tower differs from SmolVLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaptrt import LLM, SamplingParams
from support.seeing import (
    GEMMA3,
    LLAVA,
    PIXTRAL,
    SeeingModel,
    SeeingReference,
    engine_of_model,
    question,
    random_image,
    save_adapters,
    save_model,
)

# The tower's rows and the model's logits are sums in float32, in another order than torch's.
TOLERANCE = 1e-4
LENGTH = 5
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0, logprobs=0, ignore_eos=True)
LARGE, SMALL = random_image(61, 47, 1), random_image(5, 9, 2)
QUESTION = question(LARGE, "what is this", SMALL, "and red")


class Seeing:
    """A model, its engine and its adapters."""

    def __init__(self, model: SeeingModel, directory: Path) -> None:
        self.kind = model
        self.model = save_model(directory / "model", model)
        self.engine = engine_of_model(self.model, directory / "engine")
        self.adapters = save_adapters(self.model, directory / "adapters", model)

    def llm(self) -> LLM:
        llm = LLM(self.engine)
        for name, adapter in self.adapters.items():
            llm.load_lora(name, adapter)
        return llm


@pytest.fixture(scope="module", params=[LLAVA, GEMMA3, PIXTRAL], ids=lambda model: model.family)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(request.param, tmp_path_factory.mktemp("seeing"))


def log_probs(answer: Any) -> list[float]:
    return [one.log_prob for one in answer.log_probs]


def test_a_crowd_answers_as_transformers_and_as_each_request_alone(seeing: Seeing) -> None:
    names = [None, *seeing.adapters]
    with seeing.llm() as llm:
        answers = llm.chat([QUESTION] * len(names), GREEDY, lora=list(names))
    for name, found in zip(names, answers, strict=True):
        reference = SeeingReference(seeing.model, None if name is None else seeing.adapters[name], seeing.kind)
        prompt, tokens, scores = reference.answer(QUESTION, LENGTH)
        assert list(found.prompt_token_ids) == prompt
        assert list(found.token_ids) == tokens
        np.testing.assert_allclose(log_probs(found), scores, atol=TOLERANCE)
    assert len({tuple(log_probs(found)) for found in answers}) == len(names)
    with seeing.llm() as llm:
        for name, found in zip(names, answers, strict=True):
            assert log_probs(llm.chat(QUESTION, GREEDY, lora=name)) == log_probs(found)


def test_prefixes_with_images_are_reused_by_content(seeing: Seeing) -> None:
    with seeing.llm() as llm:

        def cached(image: Any) -> int:
            return llm.chat(question(image, "what is this red and blue " * 4), GREEDY).num_cached_tokens or 0

        cached(LARGE)
        assert cached(LARGE) >= 16
        assert cached(random_image(61, 47, 12)) < 16
