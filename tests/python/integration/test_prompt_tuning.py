"""Virtual tokens anywhere in prompts: their tables, the blocks that requests share, and refused inputs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import adaptrt
from support.models import load_model
from support.prompts import BLOCK, LENGTHS, VOCABULARY, Served, tokens_of, virtual_tokens_of, without_nan
from support.serving import Answer, collect, make_request


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Served:
    return Served("llama", tmp_path_factory.mktemp("plain-llama"))


@pytest.fixture
def executor(llama: Served) -> Iterator[adaptrt.Executor]:
    with llama.executor(max_beam_width=3) as made:
        yield made


def table(llama: Served, kind: str = "tuned") -> np.ndarray:
    return virtual_tokens_of(llama.adapters[kind])


def ask(executor: adaptrt.Executor, prompt: list[int], rows: np.ndarray | None = None, **fields: Any) -> Answer:
    """Answers a prompt; `rows` is the table of virtual tokens, whose ids follow the vocabulary."""
    config = None if rows is None else adaptrt.PromptTuningConfig(rows, fields.pop("extra_ids", None))
    request = make_request(prompt, fields.pop("num_tokens", 4), prompt_tuning_config=config, **fields)
    return without_nan(collect(executor, executor.enqueue_request(request)))


VIRTUAL = list(range(VOCABULARY, VOCABULARY + LENGTHS["tuned"]))


def test_tables_of_requests_are_what_adapters_of_the_name_are(llama: Served, executor: adaptrt.Executor) -> None:
    prompt = tokens_of(6, 20)
    named = without_nan(collect(executor, executor.enqueue_request(make_request(prompt, 4), adapter="tuned")))
    assert ask(executor, VIRTUAL + prompt, table(llama)).same_bits(named)
    config = adaptrt.PromptTuningConfig.from_peft(llama.adapters["tuned"], llama.engine)
    request = make_request(VIRTUAL + prompt, 4, prompt_tuning_config=config)
    assert without_nan(collect(executor, executor.enqueue_request(request))).same_bits(named)
    assert np.array_equal(config.embedding_table, table(llama))


def test_multimodal_embeddings_are_rows_of_the_tokens_after_the_vocabulary(
    llama: Served, executor: adaptrt.Executor
) -> None:
    rows, text = table(llama), tokens_of(6, 20)
    count = len(rows)
    expected = ask(executor, text[:3] + VIRTUAL[:2] + text[3:5] + VIRTUAL[2:] + text[5:], rows)
    # TensorRT-LLM's ids are any from the vocabulary's end on.
    prompt = text[:3] + [VOCABULARY] * 2 + text[3:5] + [VOCABULARY + 1] * (count - 2) + text[5:]
    places = adaptrt.MultimodalInput([[1], [2]], [3, 7], [2, count - 2])
    given = make_request(prompt, 4, multimodal_embedding=rows, multimodal_input=places)
    assert without_nan(collect(executor, executor.enqueue_request(given))).same_bits(expected)
    (number,) = executor.enqueue_requests([make_request(prompt, 4, multimodal_embedding=rows)])
    assert without_nan(collect(executor, number)).same_bits(expected)
    assert given.multimodal_embedding is rows
    for fields, complaint in (
        ({"multimodal_embedding": rows[1:]}, f"has {count - 1} rows, and input_token_ids has {count} tokens from"),
        (
            {"multimodal_embedding": np.concatenate([rows, rows])},
            f"has {2 * count} rows, and input_token_ids has {count}",
        ),
        ({"multimodal_input": places}, "multimodal_input is given without multimodal_embedding"),
        (
            {"multimodal_embedding": rows, "prompt_tuning_config": adaptrt.PromptTuningConfig(rows)},
            "given with prompt_tuning_config",
        ),
        (
            {"multimodal_embedding": rows, "multimodal_input": adaptrt.MultimodalInput([[1]], [3], [count])},
            "multimodal_input has other places",
        ),
        (
            {"multimodal_embedding": rows, "multimodal_input": adaptrt.MultimodalInput([[1]], [3], [])},
            "has 1 multimodal_positions and 0 multimodal_lengths",
        ),
        ({"multimodal_embedding": rows, "multimodal_input": 5}, "is of type int; expected MultimodalInput"),
    ):
        with pytest.raises(adaptrt.RequestError, match=complaint):
            executor.enqueue_request(make_request(prompt, 4, **fields))


def test_any_token_may_be_virtual_and_a_row_may_be_a_tokens_own(llama: Served, executor: adaptrt.Executor) -> None:
    """Rows copied from the model's own table act as their tokens, in any place and order."""
    embedding = load_model(llama.model).get_input_embeddings().weight.detach().numpy()
    tokens = tokens_of(7, 21)
    plain = ask(executor, tokens)
    rows = embedding[[tokens[20], tokens[3], tokens[3], tokens[9]]]
    mixed = [*tokens]
    mixed[3], mixed[9], mixed[20] = VOCABULARY + 2, VOCABULARY + 3, VOCABULARY
    answer = ask(executor, mixed, rows)
    assert np.array_equal(answer.context_logits, plain.context_logits)
    assert np.array_equal(answer.generation_logits, plain.generation_logits)
    assert [at for at, value in enumerate(answer.log_probs.prompt or []) if value is None] == [2, 8, 19]


def test_rows_of_prompts_may_be_asked_for(llama: Served, executor: adaptrt.Executor) -> None:
    embedding = load_model(llama.model).get_input_embeddings().weight.detach().numpy()
    tokens = tokens_of(16, 12)
    params = adaptrt.PoolingParams(adaptrt.PoolingType.MEAN)
    rows = []
    for prompt, config in (
        (tokens, None),
        ([VOCABULARY + 1, *tokens[1:]], adaptrt.PromptTuningConfig(embedding[[3, tokens[0]]])),
    ):
        request = adaptrt.Request(prompt, 0, pooling_params=params, prompt_tuning_config=config)
        (response,) = executor.await_responses(executor.enqueue_request(request))
        rows.append(np.asarray(response.result.pooled_output))
    assert np.array_equal(*rows)


def test_a_lora_acts_on_virtual_tokens_too(llama: Served, executor: adaptrt.Executor) -> None:
    embedding = load_model(llama.model).get_input_embeddings().weight.detach().numpy()
    tokens = tokens_of(8, 12)
    lora = adaptrt.LoraConfig.from_peft(1, llama.adapters["lora"], llama.engine)
    plain = ask(executor, tokens, lora=lora)
    answer = ask(executor, [VOCABULARY, *tokens[1:]], embedding[tokens[:1]], lora=lora)
    assert np.array_equal(answer.generation_logits, plain.generation_logits)


def reused_by(executor: adaptrt.Executor, **request: Any) -> int:
    """Returns the number of tokens whose KV a request reused."""
    before = executor.get_latest_iteration_stats()
    known = reused_by.known if not before else before[-1].kv_cache_stats.reused_tokens
    output = adaptrt.OutputConfig(exclude_input_from_output=True)
    request_id = executor.enqueue_request(adaptrt.Request(max_tokens=4, output_config=output, **request))
    (response,) = executor.await_responses(request_id)
    assert not response.has_error(), response.error_msg
    reused_by.known = executor.get_latest_iteration_stats()[-1].kv_cache_stats.reused_tokens
    return reused_by.known - known


reused_by.known = 0


@pytest.mark.parametrize("partial", [False, True])
def test_blocks_are_shared_between_requests_of_the_same_rows_alone(llama: Served, partial: bool) -> None:
    reused_by.known = 0
    rows = table(llama, "long")
    ids = list(range(VOCABULARY, VOCABULARY + len(rows)))
    head, tail = tokens_of(9, 2 * BLOCK), tokens_of(10, 2 * BLOCK + 3)
    prompt = [*head, *ids, *tail]
    config = adaptrt.KvCacheConfig(enable_partial_reuse=partial)
    whole = len(prompt) - 1 if partial else (len(prompt) - 1) // BLOCK * BLOCK
    # Requests with other rows share only the tokens before the first virtual token.
    before = len(head)

    def tuned(values: np.ndarray, extra_ids: list[int] | None = None) -> adaptrt.PromptTuningConfig:
        return adaptrt.PromptTuningConfig(values, extra_ids)

    changed = rows.copy()
    changed[-1, -1] += 1.0
    with adaptrt.Executor(
        llama.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(kv_cache_config=config)
    ) as executor:

        def reused(values: np.ndarray, extra_ids: list[int] | None = None, tokens: list[int] | None = None) -> int:
            return reused_by(executor, input_token_ids=tokens or prompt, prompt_tuning_config=tuned(values, extra_ids))

        assert reused(rows) == 0
        assert reused(rows.copy()) == whole  # other memory, the same rows
        # The table's last row shares its block with the first tokens after it.
        shared = before + len(rows) - 1 - (before + len(rows) - 1) % BLOCK
        assert reused(changed) == shared
        assert reused(changed) == whole
        assert reused(rows) == whole
        assert reused(rows * 2) == before
        assert reused(rows * 2) == whole
        # Other extra ids make other tokens, both virtual and ordinary.
        extra = [0] * before + [7] * len(rows) + [0] * len(tail)
        assert reused(rows, extra) == before
        assert reused(rows, extra) == whole
        assert reused(rows, [0] * len(prompt)) == whole
        assert reused(rows, [5, *[0] * (len(prompt) - 1)]) == 0
        # The table's order does not matter: a table with the same rows under the same ids shares the prefix.
        assert reused(np.concatenate([rows, changed])) == whole
        assert reused_by(executor, input_token_ids=[*head, *tail]) == before


def test_reused_blocks_change_no_bit(llama: Served) -> None:
    prompts = [VIRTUAL + tokens_of(11, 30), VIRTUAL + tokens_of(11, 24) + tokens_of(12, 9)]
    tables = [table(llama), table(llama, "other")]
    lora = adaptrt.LoraConfig.from_peft(1, llama.adapters["lora"], llama.engine)
    cases = [(prompt, rows, adapter) for prompt in prompts for rows in tables for adapter in (None, lora)]
    config = adaptrt.KvCacheConfig(enable_block_reuse=False)
    with llama.executor(kv_cache_config=config) as executor:
        alone = [ask(executor, prompt, rows, lora=adapter) for prompt, rows, adapter in cases]
    with llama.executor() as executor:
        for _ in range(2):
            for (prompt, rows, adapter), ours in zip(cases, alone, strict=True):
                output = adaptrt.OutputConfig(return_generation_logits=True, exclude_input_from_output=True)
                tuning = adaptrt.PromptTuningConfig(rows)
                request = adaptrt.Request(
                    prompt, 4, output_config=output, prompt_tuning_config=tuning, lora_config=adapter
                )
                result = executor.await_responses(executor.enqueue_request(request))[-1].result
                assert np.array_equal(result.generation_logits[0], ours.generation_logits)
        assert executor.get_latest_iteration_stats()[-1].kv_cache_stats.reused_blocks > 0


def draft_engine_stats(executor: adaptrt.Executor) -> adaptrt.DraftEngineStats:
    stats = executor.get_latest_iteration_stats()[-1].speculation_stats.draft_engine
    assert stats is not None
    return stats


def test_drafts_change_nothing(llama: Served, executor: adaptrt.Executor) -> None:
    """Lookahead on texts whose n-grams end in virtual tokens, and a draft engine, which has no virtual tokens."""
    rows, prompt = table(llama), [6, 3, VOCABULARY, VOCABULARY + 1, 4, 6, 3, VOCABULARY, 5, 6]
    biased = {"embedding_bias": [1e4 if token == 3 else 0.0 for token in range(VOCABULARY)], "num_tokens": 9}
    for fields in ({"num_tokens": 9}, biased):
        plain = ask(executor, prompt, rows, **dict(fields))
        lookahead = adaptrt.LookaheadDecodingConfig(4, 2, 4)
        assert ask(executor, prompt, rows, lookahead_config=lookahead, **dict(fields)).same_bits(plain)
        external = adaptrt.ExternalDraftTokensConfig(plain.tokens[:3])
        assert ask(executor, prompt, rows, external_draft_tokens_config=external, **dict(fields)).same_bits(plain)
    config = adaptrt.DraftTargetDecodingConfig(3, str(llama.engine))
    with llama.executor(draft_target_decoding_config=config) as drafting:
        assert ask(drafting, prompt, rows, num_tokens=9).same_bits(ask(executor, prompt, rows, num_tokens=9))
        assert draft_engine_stats(drafting).num_steps == 0
        ask(drafting, tokens_of(17, 9), num_tokens=9)
        stats = draft_engine_stats(drafting)
        assert stats.num_steps > 0
        assert not stats.error


def test_virtual_tokens_are_never_chosen_nor_penalised(llama: Served, executor: adaptrt.Executor) -> None:
    rows, prompt = table(llama), [*VIRTUAL, 3, VOCABULARY, 3]
    for sampling in (
        adaptrt.SamplingConfig(repetition_penalty=1.3),
        adaptrt.SamplingConfig(no_repeat_ngram_size=2),
        adaptrt.SamplingConfig(no_repeat_ngram_size=1, frequency_penalty=0.5),
    ):
        answer = ask(executor, prompt, rows, sampling_config=sampling, num_tokens=6)
        assert max(answer.tokens) < VOCABULARY
        if sampling.no_repeat_ngram_size == 1:
            assert len({3, *answer.tokens}) == 7


def test_beams_and_several_sequences_are_those_of_the_prompt(llama: Served, executor: adaptrt.Executor) -> None:
    rows, prompt = table(llama), VIRTUAL + tokens_of(13, 11)
    embedding = load_model(llama.model).get_input_embeddings().weight.detach().numpy()
    tokens = tokens_of(14, 12)
    output = adaptrt.OutputConfig(exclude_input_from_output=True)

    def beams(prompt: list[int], rows: np.ndarray | None) -> list[list[int]]:
        request = adaptrt.Request(
            prompt,
            5,
            sampling_config=adaptrt.SamplingConfig(beam_width=3, length_penalty=1.0),
            output_config=output,
            prompt_tuning_config=None if rows is None else adaptrt.PromptTuningConfig(rows),
        )
        (response,) = executor.await_responses(executor.enqueue_request(request))
        assert not response.has_error(), response.error_msg
        return [list(beam) for beam in response.result.output_token_ids]

    assert beams([*range(VOCABULARY, VOCABULARY + 12)], embedding[tokens]) == beams(tokens, None)
    sampling = adaptrt.SamplingConfig(top_k=5, seed=3)
    tuning = adaptrt.PromptTuningConfig(rows)
    two = adaptrt.Request(
        prompt, 4, sampling_config=sampling, output_config=output, num_return_sequences=2, prompt_tuning_config=tuning
    )
    results = {}
    request_id = executor.enqueue_request(two)
    while len(results) < 2:
        for response in executor.await_responses(request_id):
            results[response.result.sequence_index] = response.result.output_token_ids[0]
    for index in range(2):
        one = copy.copy(two)
        one.num_return_sequences = 1
        one.sampling_config = adaptrt.SamplingConfig(top_k=5, seed=3 + index)
        (response,) = executor.await_responses(executor.enqueue_request(one))
        assert response.result.output_token_ids[0] == results[index]


def test_tables_of_other_types_are_the_values_that_they_have(llama: Served, executor: adaptrt.Executor) -> None:
    rows, prompt = torch.from_numpy(table(llama)), [*VIRTUAL, 3, 4]
    assert ask(executor, prompt, rows).same_bits(ask(executor, prompt, rows.numpy()))
    assert ask(executor, prompt, rows.numpy()[:, ::-1][:, ::-1]).same_bits(ask(executor, prompt, rows.numpy()))
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(adaptrt.RequestError, match=rf"embedding_table is of {str(dtype)[6:]}; accepted: float32"):
            ask(executor, prompt, rows.to(dtype))
    config = adaptrt.PromptTuningConfig(rows.to(torch.bfloat16), list(range(7)))
    again = pickle.loads(pickle.dumps(config))
    assert again == config == copy.deepcopy(config)
    assert np.array_equal(config.embedding_table, rows.to(torch.bfloat16).float().numpy())
    assert config.input_token_extra_ids == list(range(7))
    assert config != adaptrt.PromptTuningConfig(rows.to(torch.bfloat16))
    # The request does not change if the caller changes the array later.
    values = rows.numpy().copy()
    copied = adaptrt.PromptTuningConfig(values)
    values[:] = 0
    assert np.array_equal(copied.embedding_table, rows.numpy())
    assert not copied.embedding_table.flags.writeable


@pytest.mark.parametrize("value", [None, [[1.0, 2.0]], np.ones((2, 36)), np.ones((2, 36), np.int32), "table"])
def test_a_table_of_no_type_of_engines_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="embedding_table"):
        adaptrt.PromptTuningConfig(value)
    with pytest.raises(TypeError, match="input_token_extra_ids"):
        adaptrt.PromptTuningConfig(np.ones((2, 36), np.float32), [-1])


def test_bad_input_is_refused_by_name(llama: Served, executor: adaptrt.Executor, tmp_path: Path) -> None:
    rows = table(llama)

    def refusal(prompt: list[int], values: np.ndarray, **fields: Any) -> str:
        with pytest.raises(adaptrt.RequestError) as error:
            ask(executor, prompt, values, **fields)
        return str(error.value)

    beyond = VOCABULARY + len(rows)
    last = f"the vocabulary is 0 to 60, and the rows of prompt_tuning_config.embedding_table are 61 to {beyond - 1}"
    assert f"input_token_ids[2] is {beyond} (and 1 more); {last}" in refusal([3, 61, beyond, 4, 99], rows)
    assert "input_token_ids[0] is -1" in refusal([-1], rows)
    accepted = "accepted: [virtual tokens, 36], as wide as the model's hidden states"
    for shape in ([5, 35], [36], [1, 5, 36], [0, 36]):
        text = ", ".join(map(str, shape))
        values = np.zeros(shape, np.float32)
        assert f"prompt_tuning_config.embedding_table is [{text}]; {accepted}" in refusal([3], values)
    for value in (np.nan, np.inf, -np.inf):
        changed = rows.copy()
        changed[2, 7] = value
        reason = f"embedding_table[2, 7] is {value}; accepted: finite values"
        assert reason in refusal(VIRTUAL, changed).replace("-nan", "nan")
    assert "input_token_extra_ids has 2 ids; accepted: one for each of the 3 tokens" in refusal(
        [3, 61, 4], rows, extra_ids=[1, 2]
    )
    # No other field accepts such ids.
    for fields in ({"end_id": 61}, {"stop_words": [[61]]}, {"bad_words": [[61]]}, {"pad_id": 61}):
        assert "the vocabulary" in refusal([61], rows, **fields)
    drafts = adaptrt.ExternalDraftTokensConfig([61])
    assert "external_draft_tokens_config" in refusal([61], rows, external_draft_tokens_config=drafts)
    with pytest.raises(adaptrt.RequestError, match=r"input_token_ids\[0\] is 61; the vocabulary is 0 to 60"):
        ask(executor, [61])

    def named(kind: str, request: adaptrt.Request) -> str:
        with pytest.raises((adaptrt.RequestError, adaptrt.AdapterError)) as error:
            executor.enqueue_request(request, adapter=kind)
        return str(error.value)

    tuning = adaptrt.PromptTuningConfig(rows)
    assert "prompt_tuning_config is given; accepted: None, because adapter 'tuned' brings virtual tokens" in named(
        "tuned", make_request([3], 1, prompt_tuning_config=tuning)
    )
    assert "adapter 'tuned' has virtual tokens, which are only for generation" in named(
        "tuned", adaptrt.Request([3], 0, pooling_params=adaptrt.PoolingParams())
    )
    assert "input_token_ids has 61; the vocabulary is 0 to 60" in named("tuned", make_request([3, 61], 1))
    assert "a prompt of 105 tokens and max_tokens 60 make 165 tokens" in named("tuned", make_request([3] * 100, 60))
    assert "virtual tokens do not fit into a LoraConfig" in named("tuned:0.5+lora:0.5", make_request([3], 1))
    with pytest.raises(
        adaptrt.AdapterError, match=r"virtual tokens do not fit into a LoraConfig; accepted: by its name"
    ):
        adaptrt.LoraConfig.from_peft(1, llama.adapters["tuned"], llama.engine)
    with pytest.raises(adaptrt.AdapterError, match="has no virtual tokens; accepted: PROMPT_TUNING and P_TUNING"):
        adaptrt.PromptTuningConfig.from_peft(llama.adapters["lora"], llama.engine)
