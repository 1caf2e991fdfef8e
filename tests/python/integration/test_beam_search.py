"""Beam search against transformers' generate(num_beams=...) in float32: the same sequences, scores within a
tolerance."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import adaptrt
from support.models import ATTENTION_MODULES, Beam, ModelSpec, Reference, save_adapter
from support.serving import build_random_engine

# Tolerance per token's log prob: both sides sum in float32 in different orders, over logits with a range of about ten.
TOLERANCE = 1e-4
# Maps transformers' early_stopping to ours.
EARLY_STOPPING = {True: 1, False: 0, "never": 2}

MODELS = {
    "llama": ModelSpec(),
    "llama3-rope": ModelSpec(
        vocab_size=311,
        extra=(("attention_bias", True), ("rope_parameters", {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        })),
    ),
    "mistral-sliding-window": ModelSpec(family="mistral", num_attention_heads=6, num_key_value_heads=3, extra=(
        ("sliding_window", 8),)),
    "qwen2": ModelSpec(family="qwen2", hidden_size=48, num_attention_heads=4, num_key_value_heads=4),
    "qwen3": ModelSpec(family="qwen3", head_dim=16, num_attention_heads=4, num_key_value_heads=2, extra=(
        ("sliding_window", None),)),
}  # fmt: skip
ADAPTERS = {
    "base": None,
    "lora": {"r": 4, "target_modules": ATTENTION_MODULES},
    "dora": {"r": 5, "use_dora": True},
}
WIDTHS_AND_PENALTIES = [(2, 0.0), (4, 1.0), (6, 2.0), (3, -0.7)]
PROMPT = [3, 44, 5, 60, 7, 3, 3, 12, 9]
MAX_TOKENS = 14


def request_of(
    prompt: list[int],
    num_beams: int,
    end_ids: list[int],
    early_stopping: bool | str,
    length_penalty: float,
    **fields: Any,
) -> adaptrt.Request:
    sampling = {name: fields.pop(name) for name in list(fields) if hasattr(adaptrt.SamplingConfig(), name)}
    return adaptrt.Request(
        prompt,
        fields.pop("max_tokens", MAX_TOKENS),
        sampling_config=adaptrt.SamplingConfig(
            num_beams, early_stopping=EARLY_STOPPING[early_stopping], length_penalty=length_penalty, **sampling
        ),
        output_config=adaptrt.OutputConfig(return_log_probs=True, exclude_input_from_output=True),
        end_id=end_ids[0] if end_ids else None,
        stop_words=[[token] for token in end_ids[1:]] or None,
        **fields,
    )


def answer(executor: adaptrt.Executor, request: adaptrt.Request) -> adaptrt.Result:
    (response,) = executor.await_responses(executor.enqueue_request(request), 60.0)
    assert not response.has_error(), response.error_msg
    assert response.result.is_final
    return response.result


def assert_same(result: adaptrt.Result, expected: list[Beam], end_id: int | None) -> None:
    assert result.output_token_ids == [
        beam.tokens[:-1] if beam.tokens[-1] == end_id else beam.tokens for beam in expected
    ]
    for beam, score, reason in zip(expected, result.cum_log_probs, result.finish_reasons, strict=True):
        assert score == pytest.approx(beam.score, abs=len(beam.tokens) * TOLERANCE)
        assert (reason is adaptrt.FinishReason.END_ID) == (beam.tokens[-1] == end_id)


@pytest.mark.parametrize("name", MODELS)
def test_every_family_and_adapter_kind(name: str, tmp_path: Path) -> None:
    spec = MODELS[name]
    model, engine = build_random_engine(spec, tmp_path, max_beam_width=6, tokens_per_block=4)
    config = adaptrt.ExecutorConfig(max_beam_width=6)
    with adaptrt.Executor(engine, executor_config=config) as executor:
        for task_id, (kind, settings) in enumerate(ADAPTERS.items()):
            directory = save_adapter(model, tmp_path / kind, task_id, **settings) if settings else None
            lora = adaptrt.LoraConfig.from_peft(task_id, directory, engine) if directory else None
            reference = Reference(model, directory)
            free_running = reference.search(PROMPT, 4, max_new_tokens=MAX_TOKENS)
            # Tokens that beams meet early, tokens that they meet late, and a second end token.
            ends = [[], [free_running[0].tokens[3]], [free_running[1].tokens[6], free_running[0].tokens[2]]]
            endings = set()
            # Each adapter kind combines the widths and penalties with different end tokens.
            for number, (end_ids, early_stopping) in enumerate(itertools.product(ends, EARLY_STOPPING), task_id):
                num_beams, length_penalty = WIDTHS_AND_PENALTIES[number % len(WIDTHS_AND_PENALTIES)]
                expected = reference.search(
                    PROMPT, num_beams, end_ids, length_penalty, early_stopping=early_stopping, max_new_tokens=MAX_TOKENS
                )
                request = request_of(PROMPT, num_beams, end_ids, early_stopping, length_penalty, lora_config=lora)
                assert_same(answer(executor, request), expected, end_ids[0] if end_ids else None)
                endings |= {len(beam.tokens) for beam in expected}
            assert min(endings) < MAX_TOKENS == max(endings)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Yields an executor whose steps hold fewer tokens than there are beams, and its reference."""
    directory = tmp_path_factory.mktemp("beams")
    model, engine = build_random_engine(ModelSpec(), directory, max_beam_width=8, tokens_per_block=4)
    config = adaptrt.ExecutorConfig(max_beam_width=8, enable_chunked_context=True, max_num_tokens=3)
    with adaptrt.Executor(engine, executor_config=config) as executor:
        yield executor, Reference(model)


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
        ({"min_new_tokens": 8}, {"min_tokens": 8}),
        ({"bad_words_ids": [[9], [44, 5], [3, 12, 20]]}, {"bad_words": [[9], [44, 5], [3, 12, 20]]}),
        (
            {"repetition_penalty": 0.8, "no_repeat_ngram_size": 3, "min_new_tokens": 4, "bad_words_ids": [[20]]},
            {"repetition_penalty": 0.8, "no_repeat_ngram_size": 3, "min_tokens": 4, "bad_words": [[20]]},
        ),
    ],
    ids=str,
)
def test_processors_act_on_each_beam(served: Any, settings: dict[str, Any], fields: dict[str, Any]) -> None:
    executor, reference = served
    free_running = reference.search(PROMPT, 4, max_new_tokens=MAX_TOKENS)
    for end_id in (free_running[0].tokens[1], free_running[2].tokens[4]):
        expected = reference.search(PROMPT, 4, [end_id], early_stopping=False, max_new_tokens=MAX_TOKENS, **settings)
        assert_same(answer(executor, request_of(PROMPT, 4, [end_id], False, 1.0, **fields)), expected, end_id)


def test_steps_too_small_for_all_beams_and_long_outputs(served: Any) -> None:
    executor, reference = served
    expected = reference.search(PROMPT, 8, early_stopping=True, max_new_tokens=60)
    assert_same(answer(executor, request_of(PROMPT, 8, [], True, 1.0, max_tokens=60)), expected, None)
    for count in (1, 3):
        request = request_of(PROMPT, 8, [], True, 1.0, max_tokens=60, num_return_sequences=count)
        assert_same(answer(executor, request), expected[:count], None)


def test_log_probs_are_those_of_each_beams_tokens(served: Any) -> None:
    executor, reference = served
    result = answer(executor, request_of(PROMPT, 3, [], False, 1.0))
    for tokens, log_probs, total in zip(result.output_token_ids, result.log_probs, result.cum_log_probs, strict=True):
        rows = reference.logits(PROMPT, tokens)[len(PROMPT) - 1 :].double().log_softmax(dim=1)
        expected = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
        assert log_probs == pytest.approx(expected, abs=TOLERANCE)
        assert total == pytest.approx(sum(log_probs), abs=1e-4)


def test_diversity_prefers_higher_beams(served: Any) -> None:
    executor, _ = served
    plain = answer(executor, request_of(PROMPT, 4, [], False, 0.0))
    diverse = answer(executor, request_of(PROMPT, 4, [], False, 0.0, beam_search_diversity_rate=3.0))
    assert diverse.output_token_ids != plain.output_token_ids
    assert answer(executor, request_of(PROMPT, 4, [], False, 0.0, beam_search_diversity_rate=0.0)).output_token_ids == (
        plain.output_token_ids
    )


def test_streams_have_the_beams_so_far_and_then_the_final_ones(served: Any) -> None:
    executor, _ = served
    whole = answer(executor, request_of(PROMPT, 3, [], False, 1.0))
    request_id = executor.enqueue_request(request_of(PROMPT, 3, [], False, 1.0, streaming=True))
    results: list[adaptrt.Result] = []
    while not results or not results[-1].is_final:
        results += [response.result for response in executor.await_responses(request_id, 60.0)]
    assert [[len(tokens) for tokens in result.output_token_ids] for result in results] == [
        [i + 1] * 3 for i in range(MAX_TOKENS)
    ]
    assert results[-1].output_token_ids == whole.output_token_ids
    assert results[-1].cum_log_probs == whole.cum_log_probs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_beams": 9}, "sampling_config.beam_width is 9; the engine was built for max_beam_width 8"),
        ({"top_k": 3}, "sampling_config.top_k is 3 with beam_width 2; accepted: None, 0, because nothing is drawn"),
        ({"top_p": 0.5}, "sampling_config.top_p is 0.5 with beam_width 2"),
        ({"min_p": 0.5}, "sampling_config.min_p is 0.5 with beam_width 2"),
        ({"temperature": 0.0}, "sampling_config.temperature is 0 with beam_width 2"),
        ({"num_return_sequences": 3}, "num_return_sequences is 3"),
        ({"length_penalty": float("nan")}, "sampling_config.length_penalty is nan"),
        ({"beam_search_diversity_rate": -1.0}, "sampling_config.beam_search_diversity_rate is -1"),
        ({"logits_post_processor": print}, "logits_post_processor is given with sampling_config.beam_width 2"),
        (
            {"output_config": adaptrt.OutputConfig(return_generation_logits=True)},
            "output_config.return_generation_logits is given with sampling_config.beam_width 2; accepted: False",
        ),
    ],
)
def test_options_that_exclude_beams_are_refused(served: Any, fields: dict[str, Any], message: str) -> None:
    executor, _ = served
    names = {"num_beams", "top_k", "top_p", "min_p", "temperature", "length_penalty", "beam_search_diversity_rate"}
    sampling = {name: value for name, value in fields.items() if name in names}
    config = adaptrt.SamplingConfig(sampling.pop("num_beams", 2), **sampling)
    request = adaptrt.Request(
        PROMPT, 4, sampling_config=config, **{name: value for name, value in fields.items() if name not in names}
    )
    with pytest.raises(adaptrt.RequestError) as error:
        executor.enqueue_request(request)
    assert message in str(error.value)
    assert answer(executor, request_of(PROMPT, 2, [], True, 0.0)).is_final


def test_both_limits_are_named_and_bad_ones_refused(tmp_path: Path) -> None:
    _, engine = build_random_engine(ModelSpec(), tmp_path, max_beam_width=4)
    with adaptrt.Executor(engine, executor_config=adaptrt.ExecutorConfig(max_beam_width=2)) as executor:
        request = adaptrt.Request(PROMPT, 4, sampling_config=adaptrt.SamplingConfig(3))
        with pytest.raises(adaptrt.RequestError, match="the executor's max_beam_width is 2, the engine's is 4"):
            executor.enqueue_request(request)
    with pytest.raises(adaptrt.ConfigError, match="max_beam_width is 5; the engine was built for 4 at most"):
        adaptrt.Executor(engine, executor_config=adaptrt.ExecutorConfig(max_beam_width=5))
