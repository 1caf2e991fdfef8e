"""Prompts with images for Qwen-VL against transformers + PEFT in float32, with adapters on all parts of the models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from adaptrt import (
    LLM,
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    LookaheadDecodingConfig,
    OutputConfig,
    PeftCacheConfig,
    PromptTuningConfig,
    Request,
    RequestError,
    SamplingConfig,
    SamplingParams,
    SchedulerConfig,
)
from adaptrt.runtime.images.opened import ImageLimits, open_image
from support.seeing import check_crowd, engine_of_model, question, random_image
from support.seeing_qwen import ADAPTERS, QwenReference, save_adapters, save_model

# The tower's rows and the model's logits are sums in float32, in another order than torch's.
TOLERANCE = 1e-4
LENGTH = 6
WITH_BEAMS = ExecutorConfig(max_beam_width=2)
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0, logprobs=0, ignore_eos=True)
WIDE, SMALL, TALL = random_image(61, 37, 1), random_image(5, 9, 2, "L"), random_image(3, 90, 3)
QUESTION = question("what is this ", WIDE, " and ", SMALL, " red")


ADAPTERS_OF = {
    "qwen2-vl": ["everything"],
    "qwen2.5-vl": list(ADAPTERS),
    "qwen3-vl": list(ADAPTERS),
    "qwen3-vl-moe": ["everything"],
    "qwen3.5-vl": ["everything"],
    "qwen3.5-moe-vl": ["everything"],
}
"""Models, with adapters that are compared. Those with one adapter have the parts of the others."""
BOTH = pytest.mark.parametrize("seeing", ["qwen2.5-vl", "qwen3-vl"], indirect=True, scope="module")


class Seeing:
    """A model, its engine and its adapters."""

    def __init__(self, name: str, directory: Path) -> None:
        self.model = save_model(name, directory / "model")
        self.engine = engine_of_model(self.model, directory / "engine", max_beam_width=2)
        self.adapters = save_adapters(self.model, directory / "adapters", ADAPTERS_OF[name])

    def reference(self, adapter: str | None) -> QwenReference:
        return QwenReference(self.model, None if adapter is None else self.adapters[adapter])


@pytest.fixture(scope="module")
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(request.param, tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def llm(seeing: Seeing) -> Iterator[LLM]:
    with LLM(seeing.engine) as made:
        for name, directory in seeing.adapters.items():
            made.load_lora(name, directory)
        yield made


@pytest.mark.parametrize(
    ("seeing", "adapter"),
    [(name, adapter) for name, adapters in ADAPTERS_OF.items() for adapter in (None, *adapters)],
    indirect=["seeing"],
    scope="module",
)
def test_rows_and_answers_are_those_of_transformers(seeing: Seeing, llm: LLM, adapter: str | None) -> None:
    reference = seeing.reference(adapter)
    tower = llm._vision._running()
    for image in (WIDE, TALL):
        tiles = tower.model.tiles(open_image(image, "image", ImageLimits()), "image")
        (rows,) = tower.rows([tiles], None if adapter is None else llm.executor.adapters.get(adapter))
        expected = reference.rows(image)
        assert np.abs(rows - expected).max() <= TOLERANCE * np.ptp(expected)
    prompt, tokens, scores = reference.answer(QUESTION, LENGTH)
    found = llm.chat(QUESTION, GREEDY, lora=adapter)
    assert list(found.prompt_token_ids) == prompt
    assert list(found.token_ids) == tokens
    np.testing.assert_allclose([one.log_prob for one in found.log_probs], scores, atol=TOLERANCE)


@BOTH
def test_a_crowd_changes_no_bit(seeing: Seeing, llm: LLM) -> None:
    """Prompts are longer than a step, so they are computed in chunks."""
    crowd = [
        (None, QUESTION),
        ("everything", question("what is this")),
        ("tower", question(SMALL, "red")),
        ("dora", question(TALL)),
        ("merger", question(random_image(30, 90, 3), SMALL, SMALL)),
    ]
    check_crowd(llm, seeing.engine, seeing.adapters, crowd, GREEDY)


@pytest.mark.parametrize("seeing", ["qwen3-vl"], indirect=True, scope="module")
def test_preemption_drafts_and_beams_change_no_bit(seeing: Seeing) -> None:
    conversations = [QUESTION, question(TALL, "red red red"), question(SMALL, "what is this")]
    names = [None, "everything", "dora"]
    config = ExecutorConfig(
        scheduler_config=SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
        kv_cache_config=KvCacheConfig(enable_block_reuse=False, max_tokens=320),
        peft_cache_config=PeftCacheConfig(num_ensure_workers=0),  # so all start in the same step
        max_beam_width=2,
    )
    drafts = LookaheadDecodingConfig(2, 3, 4)
    with LLM(seeing.engine, config, speculative_config=drafts) as small, LLM(seeing.engine, WITH_BEAMS) as large:
        for llm in (small, large):
            for name in names[1:]:
                llm.load_lora(name, seeing.adapters[name])
        prompts = [large.chat_prompt(asked, lora=name) for asked, name in zip(conversations, names, strict=True)]
        for prompt, name in zip(prompts, names, strict=True):
            answer(small, enqueue(small, prompt, name, 1, 1))  # adapters are in the cache from now on
        asked = [
            (prompt, name, beams, tokens)
            for beams, tokens in ((1, 200), (2, 60))
            for prompt, name in zip(prompts, names, strict=True)
        ]
        together = [enqueue(small, *one) for one in asked]
        for one, queued in zip(asked, together, strict=True):
            assert answer(small, queued) == answer(large, enqueue(large, *one))
        steps = small.executor.get_latest_iteration_stats()
    assert max(step.inflight_batching_stats.num_paused_requests for step in steps) > 0
    assert sum(step.spec_decoding_stats.num_accepted_tokens for step in steps if step.spec_decoding_stats) > 0


def enqueue(
    llm: LLM, prompt: tuple[list[int], PromptTuningConfig | None], adapter: str | None, beams: int, tokens: int
) -> int:
    ids, rows = prompt
    request = Request(
        ids,
        tokens,
        sampling_config=SamplingConfig(beam_width=beams),
        output_config=OutputConfig(return_log_probs=True),
        prompt_tuning_config=rows,
    )
    return llm.executor.enqueue_request(request, adapter=adapter)


def answer(llm: LLM, queued: int) -> tuple[list[list[int]], list[list[float]]]:
    """Returns the tokens and the log probs of a request's beams."""
    (response,) = llm.executor.await_responses(queued)
    assert not response.has_error(), response.error_msg
    return response.result.output_token_ids, response.result.log_probs


@BOTH
def test_prefixes_with_images_are_reused_by_content_and_shape(llm: LLM) -> None:
    def ask(image: Any) -> Any:
        return llm.chat(question(image, " what is this red and blue"), GREEDY)

    once = ask(random_image(61, 37, 11))
    again = ask(random_image(61, 37, 11))
    assert (again.num_cached_tokens or 0) >= 20
    assert again.token_ids == once.token_ids
    assert (ask(random_image(61, 37, 12)).num_cached_tokens or 0) < 8
    # The rows of images of one colour are equal, but not their positions.
    ask(Image.new("RGB", (8, 32)))
    assert (ask(Image.new("RGB", (16, 16))).num_cached_tokens or 0) < 4


@BOTH
def test_videos_and_narrow_images_are_refused(llm: LLM) -> None:
    for conversation, complaint in (
        (question(random_image(201, 1)), "expected a side up to 200 times as long"),
        ([{"role": "user", "content": [{"type": "video", "video": "x"}]}], "video"),
        (question(SMALL, "what <|image_pad|>"), "for 1 images"),
    ):
        with pytest.raises(RequestError, match=complaint):
            llm.chat(conversation, GREEDY)
    with pytest.raises(RequestError, match="rows of this model have 4 coordinates"):
        llm.executor.enqueue_request(Request([61], 1, multimodal_embedding=np.zeros((1, 8), np.float32)))


@pytest.mark.parametrize("seeing", ["qwen3-vl"], indirect=True, scope="module")
def test_images_that_no_prompt_has_room_for_are_refused(seeing: Seeing, tmp_path: Path) -> None:
    engine = engine_of_model(seeing.model, tmp_path / "engine", max_seq_len=16)
    with LLM(engine) as llm, pytest.raises(RequestError, match=r"has 72 patches; .* of up to 64"):
        llm.chat(question(WIDE), GREEDY)
