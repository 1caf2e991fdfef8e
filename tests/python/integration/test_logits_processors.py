"""Sampling against transformers' logits processors and warpers: the same logits give the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adaptrt
from support.models import ModelSpec, Reference
from support.serving import build_random_engine

SPEC = ModelSpec(num_key_value_heads=3)
PROMPT = [3, 44, 5, 60, 7, 3, 3, 12]
END_ID = 9
MAX_TOKENS = 14
# A draw this close to the border between two tokens may select either, because the engine's logits differ from
# transformers' by a relative error of up to 1e-4.
UNDECIDED: Final = 1e-3
_MASK: Final = 0xFFFFFFFF


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[adaptrt.Executor, Reference]]:
    model, engine = build_random_engine(SPEC, tmp_path_factory.mktemp("processors"), tokens_per_block=4)
    config = adaptrt.ExecutorConfig(num_threads=1)
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
        yield executor, Reference(model)


def uniform(seed: int, position: int) -> float:
    """Returns number `position` of the stream `seed`, as documented: Philox4x32-10, 53 bits."""
    counter, key = [position & _MASK, position >> 32, 0, 0], [seed & _MASK, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [second >> 32 ^ counter[1] ^ key[0], second & _MASK, first >> 32 ^ counter[3] ^ key[1], first & _MASK]
        key = [key[0] + 0x9E3779B9 & _MASK, key[1] + 0xBB67AE85 & _MASK]
    return ((counter[0] << 32 | counter[1]) >> 11) * 2.0**-53


def processors(fields: dict[str, Any], bad_words: list[list[int]], bias: torch.Tensor | None) -> list[Any]:
    """Returns transformers' processors for a configuration, in the order in which they apply."""
    found: list[Any] = []
    if bias is not None:
        found.append(lambda _, scores: scores + bias)
    if "repetition_penalty" in fields:
        found.append(transformers.RepetitionPenaltyLogitsProcessor(fields["repetition_penalty"]))
    if bad_words:
        found.append(transformers.NoBadWordsLogitsProcessor(bad_words))
    if "no_repeat_ngram_size" in fields:
        found.append(transformers.NoRepeatNGramLogitsProcessor(fields["no_repeat_ngram_size"]))
    if "min_tokens" in fields:
        found.append(
            transformers.MinNewTokensLengthLogitsProcessor(len(PROMPT), fields["min_tokens"], END_ID, device="cpu")
        )
    return found


def warpers(fields: dict[str, Any], generated: Sequence[int]) -> list[Any]:
    """Returns transformers' warpers for the token after `generated`; top_p decays as in TensorRT-LLM."""
    found: list[Any] = []
    if "temperature" in fields:
        found.append(transformers.TemperatureLogitsWarper(fields["temperature"]))
    if "top_k" in fields:
        found.append(transformers.TopKLogitsWarper(fields["top_k"]))
    if "top_p" in fields:
        top_p = fields["top_p"]
        for token in generated:
            decayed = max(top_p * fields.get("top_p_decay", 1.0), fields.get("top_p_min", 1e-6))
            top_p = fields["top_p"] if token == fields.get("top_p_reset_ids") else decayed
        found.append(transformers.TopPLogitsWarper(top_p))
    if "min_p" in fields:
        found.append(transformers.MinPLogitsWarper(fields["min_p"]))
    return found


def possible_tokens(scores: torch.Tensor, draw: float | None) -> set[int]:
    """Returns the most likely token, or the one that a draw selects; also a second one where rounding decides."""
    if draw is None:
        best = scores.max()
        return set(torch.nonzero(scores >= best - UNDECIDED).flatten().tolist())
    cumulative = torch.softmax(scores.double(), -1).cumsum(-1)
    ends = torch.tensor([draw - UNDECIDED, draw, draw + UNDECIDED], dtype=torch.float64).clamp(0, cumulative[-1].item())
    return {int(token) for token in torch.searchsorted(cumulative, ends, right=True).clamp(max=len(cumulative) - 1)}


words = st.lists(st.lists(st.sampled_from([*PROMPT, 1, 2]), min_size=1, max_size=3), max_size=3)
configurations = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0.3, 3.0),
        "top_k": st.integers(1, 61),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.01, 0.5),
        "repetition_penalty": st.floats(0.7, 2.0),
        "no_repeat_ngram_size": st.integers(1, 3),
        "min_tokens": st.integers(1, 20),
    },
)
decays = st.fixed_dictionaries(
    {"top_p_decay": st.floats(0.5, 1.0)},
    optional={"top_p_min": st.floats(0.05, 0.6), "top_p_reset_ids": st.integers(0, 60)},
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=configurations,
    decay=st.none() | decays,
    bad_words=words,
    bias_seed=st.none() | st.integers(0, 9),
    seed=st.integers(0, 2**64 - 1),
    num_sequences=st.integers(1, 3),
)
def test_tokens_are_those_of_transformers_processors(
    served: tuple[adaptrt.Executor, Reference],
    fields: dict[str, Any],
    decay: dict[str, Any] | None,
    bad_words: list[list[int]],
    bias_seed: int | None,
    seed: int,
    num_sequences: int,
) -> None:
    executor, reference = served
    if decay is not None and "top_p" in fields:
        fields = {**fields, **decay}
    bias = None
    if bias_seed is not None:
        bias = torch.randn(SPEC.vocab_size, generator=torch.Generator().manual_seed(bias_seed))
    request = adaptrt.Request(
        PROMPT,
        MAX_TOKENS,
        sampling_config=adaptrt.SamplingConfig(seed=seed, **fields),
        output_config=adaptrt.OutputConfig(exclude_input_from_output=True),
        end_id=END_ID,
        bad_words=bad_words or None,
        embedding_bias=bias,
        num_return_sequences=num_sequences,
    )
    request_id = executor.enqueue_request(request)
    results: list[adaptrt.Result] = []
    while not results or not results[-1].is_final:
        results += [response.result for response in executor.await_responses(request_id)]
    assert sorted(result.sequence_index for result in results) == list(range(num_sequences))
    for result in results:
        generated = list(result.output_token_ids[0])
        if result.finish_reasons[0] is adaptrt.FinishReason.END_ID:
            generated.append(END_ID)
        assert generated
        check_tokens(reference, generated, fields, bad_words, bias, (seed + result.sequence_index) % 2**64)


def check_tokens(
    reference: Reference,
    generated: list[int],
    fields: dict[str, Any],
    bad_words: list[list[int]],
    bias: torch.Tensor | None,
    seed: int,
) -> None:
    """Each generated token must be one that transformers' processors and the seed's draw allow."""
    draws = not {"top_k", "top_p", "min_p"}.isdisjoint(fields) and fields.get("top_k") != 1
    logits = reference.logits(PROMPT, generated)[len(PROMPT) - 1 :]
    for position, token in enumerate(generated):
        ids = torch.tensor([[*PROMPT, *generated[:position]]])
        scores = logits[position : position + 1].clone()
        steps = processors(fields, bad_words, bias) + (warpers(fields, generated[:position]) if draws else [])
        for process in steps:
            scores = process(ids, scores)
        assert token in possible_tokens(scores[0], uniform(seed, position) if draws else None), position
