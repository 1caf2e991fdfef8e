"""vLLM's names for the options of a completion: their values, and their effect on the requests of an LLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import adaptrt
from adaptrt import FinishReason, RequestError, SamplingConfig, SamplingParams
from adaptrt.runtime.sampling_fields import SAMPLING_FIELDS
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine
from support.vllm_names import names_of

SPEC = ModelSpec()
PROMPT = [3, 4, 5]
REFUSED: dict[str, tuple[Any, str]] = {
    "n": (0, "n is 0; expected 1 or more"),
    "max_tokens": (0, "max_tokens is 0; expected 1 or more"),
    "min_tokens": (-1, "min_tokens is -1; expected 0 or more"),
    "temperature": (-0.5, "temperature is -0.5; expected 0 or more"),
    "top_p": (0, "top_p is 0; expected more than 0, at most 1"),
    "top_k": (-2, "top_k is -2; expected 1 or more, or -1 or 0 for no limit"),
    "min_p": (1.5, "min_p is 1.5; expected 0 to 1"),
    "repetition_penalty": (0, "repetition_penalty is 0; expected more than 0"),
    "presence_penalty": (3, "presence_penalty is 3; expected -2 to 2"),
    "frequency_penalty": ("1", "frequency_penalty is '1'; expected -2 to 2"),
    "seed": (1 << 64, f"seed is {1 << 64}; expected an integer of 64 bits"),
    "logprobs": (21, "logprobs is 21; expected 0 to 20"),
    "prompt_logprobs": (-1, "prompt_logprobs is -1; expected 0 to 20"),
    "stop": (["a", ""], "stop[1] is ''; expected a text"),
    "stop_token_ids": ([-1], "stop_token_ids[0] is -1; expected a token id"),
    "bad_words": (3, "bad_words is 3; expected a text or a list of texts"),
    "allowed_token_ids": ([], "allowed_token_ids is empty; expected one token id or more"),
    "logit_bias": ({3: 101}, "logit_bias[3] is 101; expected -100 to 100"),
    "ignore_eos": (1, "ignore_eos is 1; expected True or False"),
    "return_perf_metrics": (1, "return_perf_metrics is 1; expected True or False"),
    "include_eos": (None, "include_eos is None; expected True or False"),
    "include_stop_str_in_output": ("yes", "include_stop_str_in_output is 'yes'; expected True or False"),
    "skip_special_tokens": (0, "skip_special_tokens is 0; expected True or False"),
    "best_of": (2, "best_of is 2; expected None or 1: all generated completions are returned; give n"),
    "use_beam_search": (True, "use_beam_search is True; expected False or None: for beams, give sampling_config"),
    "length_penalty": (0.5, "length_penalty is 0.5; expected 1.0 or None"),
    "early_stopping": (True, "early_stopping is True; expected False or None"),
    "detokenize": (False, "detokenize is False; expected True or None"),
    "spaces_between_special_tokens": (False, "spaces_between_special_tokens is False; expected True or None"),
    "flat_logprobs": (True, "flat_logprobs is True; expected False or None"),
    "truncate_prompt_tokens": (5, "truncate_prompt_tokens is 5; expected None: prompts are used whole"),
    "logits_processors": ([print], "expected None or []: the executor's Request takes logits_post_processor"),
    "structured_outputs": ({}, "structured_outputs is {}; expected None: give guided_decoding_params"),
    "guided_decoding": ({}, "guided_decoding is {}; expected None: give guided_decoding_params"),
    "output_kind": (1, "output_kind is 1; expected None or 'CUMULATIVE' or 'FINAL_ONLY': stream() gives pieces"),
    "stream_interval": (5, "stream_interval is 5; expected None or 1: stream() gives each piece at once"),
    "skip_clone": (3, "skip_clone is 3; expected False or None or True"),
    "output_text_buffer_length": (4, "output_text_buffer_length is 4; expected 0 or None: stop gives it"),
    "watermarking": (True, "watermarking is True; expected None or False: texts have no watermarks"),
    "prompt_logprob_token_ids": (
        [[1]],
        "prompt_logprob_token_ids is [[1]]; expected None: logprobs and prompt_logprobs",
    ),
    "prompt_logprob_start": (3, "prompt_logprob_start is 3; expected None or 0: prompt_logprobs has all tokens"),
    "logprob_token_ids": (
        [1, 2],
        "logprob_token_ids is [1, 2]; expected None: logprobs and prompt_logprobs give up to 20",
    ),
    "repetition_detection": ({}, "repetition_detection is {}; expected None: give repetition_penalty or max_tokens"),
    "routed_experts_prompt_start": (2, "routed_experts_prompt_start is 2; expected 0 or None"),
    "trace_decode_token_ids": ([5], "trace_decode_token_ids is [5]; expected None: append the tokens to the prompt"),
    "skip_reading_prefix_cache": (True, "skip_reading_prefix_cache is True; expected None or False"),
    "thinking_token_budget": (9, "thinking_token_budget is 9; expected None: give max_tokens"),
    "extra_args": ({"a": 1}, "extra_args is {'a': 1}; expected None or {}"),
}


INT32_MAX = (1 << 31) - 1
# The smallest and largest accepted values, then refused values.
BOUNDS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "max_tokens": ((1, INT32_MAX), (0, INT32_MAX + 1)),
    "min_tokens": ((0, INT32_MAX), (-1, INT32_MAX + 1)),
    "n": ((1, INT32_MAX), (0, INT32_MAX + 1)),
    "temperature": ((0,), (-0.01, float("inf"))),
    "top_p": ((0.01, 1), (0, 1.01)),
    "top_k": ((-1, 0, INT32_MAX), (-2, INT32_MAX + 1)),
    "min_p": ((0, 1), (-0.01, 1.01)),
    "repetition_penalty": ((0.01,), (0, float("inf"))),
    "presence_penalty": ((-2, 2), (-2.01, 2.01)),
    "frequency_penalty": ((-2, 2), (-2.01, 2.01)),
    "seed": ((-(1 << 63), (1 << 64) - 1), (-(1 << 63) - 1, 1 << 64)),
    "logprobs": ((0, 20), (-1, 21)),
    "prompt_logprobs": ((0, 20), (-1, 21)),
}


class RequestOutputKind(Enum):
    """vLLM's."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def test_every_name_of_vllm_is_a_field() -> None:
    assert set(names_of("SamplingParams")) <= {field.name for field in dataclasses.fields(SamplingParams)}
    # Each field is refused with some value, so none is ignored.
    assert {field.name for field in dataclasses.fields(SamplingParams)} == REFUSED.keys()


def test_defaults_of_vllm_are_accepted() -> None:
    SamplingParams(
        best_of=None, length_penalty=1.0, detokenize=True, spaces_between_special_tokens=True, flat_logprobs=False,
        logits_processors=None, output_kind=RequestOutputKind.CUMULATIVE, stream_interval=None, skip_clone=False,
        output_text_buffer_length=0, routed_experts_prompt_start=0, skip_reading_prefix_cache=None, min_tokens=0,
    )  # fmt: skip
    assert SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    with pytest.raises(RequestError, match=r"output_kind is <RequestOutputKind\.DELTA"):
        SamplingParams(output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[adaptrt.LLM]:
    root = tmp_path_factory.mktemp("llm")
    model = save_model(SPEC, root / "model")
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SPEC.vocab_size)}, unk_token="w2"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(model / "tokenizer.json"))
    with adaptrt.LLM(build_engine(model, root, lora_dir=save_adapter(model, root / "first", 0, r=4))) as opened:
        yield opened


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True} | fields)


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_without_effect_is_refused_by_name(name: str) -> None:
    value, said = REFUSED[name]
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{name: value})
    assert said in str(refused.value)


def test_every_number_is_accepted_up_to_its_bounds() -> None:
    assert BOUNDS.keys() == SAMPLING_FIELDS.keys()
    for name, (accepted, refused) in BOUNDS.items():
        found = {value: SAMPLING_FIELDS[name].accepts(value) for value in (*accepted, *refused)}
        assert found == {**dict.fromkeys(accepted, True), **dict.fromkeys(refused, False)}, name


def test_every_field_is_checked() -> None:
    assert set(REFUSED) == set(SamplingParams.__dataclass_fields__)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match=r"SamplingParams: n is 0.*; top_p is 2"):
        SamplingParams(n=0, top_p=2)
    with pytest.raises(RequestError, match="min_tokens and stop are given; expected one of them"):
        SamplingParams(min_tokens=2, stop="x")


def test_a_value_that_asks_for_the_only_effect_is_taken() -> None:
    SamplingParams(
        n=3, best_of=3, use_beam_search=False, length_penalty=1, early_stopping=False, detokenize=True,
        spaces_between_special_tokens=True, flat_logprobs=False, logits_processors=[], extra_args={},
        skip_reading_prefix_cache=False, stop=[], stop_token_ids=[], bad_words=[], logit_bias={}, seed=-1, top_k=-1,
    )  # fmt: skip


def test_a_temperature_above_0_samples(llm: adaptrt.LLM) -> None:
    hot = SamplingParams(temperature=5.0, seed=3, max_tokens=8, ignore_eos=True)
    drawn = llm.generate(PROMPT, hot)
    config = SamplingConfig(temperature=5.0, top_p=1.0, seed=3)
    assert llm.generate(PROMPT, hot) == drawn != llm.generate(PROMPT, greedy(max_tokens=8))
    assert drawn.token_ids[:2] == llm.generate(PROMPT, max_tokens=2, sampling_config=config).token_ids
    unseeded = [llm.generate(PROMPT, SamplingParams(temperature=5.0, max_tokens=8)).token_ids for _ in range(3)]
    assert len(set(unseeded)) > 1
    assert llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4)) == llm.generate(PROMPT, max_tokens=4)


def test_the_length_is_64_unless_the_params_say_otherwise(llm: adaptrt.LLM) -> None:
    assert len(llm.generate(PROMPT, SamplingParams(temperature=0, ignore_eos=True)).token_ids) == 64
    assert len(llm.generate(PROMPT, greedy(max_tokens=70)).token_ids) == 70
    assert len(llm.generate(PROMPT, greedy(max_tokens=None), max_tokens=5).token_ids) == 5
    for twice in ({"max_tokens": 5}, {"stop": "x"}, {"n": 2}):
        with pytest.raises(RequestError, match=f"{next(iter(twice))} is .*, and sampling_params has"):
            llm.generate(PROMPT, greedy(stop="y", n=2), **twice)
    with pytest.raises(RequestError, match="sampling_params and sampling_config are given; expected one of them"):
        llm.generate(PROMPT, greedy(), sampling_config=SamplingConfig())
    with pytest.raises(RequestError, match=r"sampling_params is SamplingConfig.*; expected SamplingParams"):
        llm.generate(PROMPT, SamplingConfig())  # type: ignore[call-overload]


def test_each_prompt_may_have_its_own(llm: adaptrt.LLM) -> None:
    one, several = greedy(), SamplingParams(n=2, temperature=3.0, seed=5, max_tokens=4)
    both = llm.generate([PROMPT, PROMPT], [one, several])
    assert both == [llm.generate(PROMPT, one), llm.generate(PROMPT, several)]
    assert [len(part) for part in (both[1], llm.generate(PROMPT, greedy(n=1)))] == [2, 1]
    with pytest.raises(RequestError, match="sampling_params has 1 entries for 2 prompts; expected one per prompt"):
        llm.generate([PROMPT, PROMPT], [one])
    with pytest.raises(RequestError, match="n is 2 with greedy sampling_config"):
        llm.generate(PROMPT, greedy(n=2))


def test_a_completion_says_all_about_itself(llm: adaptrt.LLM) -> None:
    (name,) = llm.executor.adapters.names
    whole = llm.generate({"prompt": "w3 w4 w5"}, greedy(logprobs=2, prompt_logprobs=1), lora=name)
    assert (whole.prompt_token_ids, whole.adapter) == ((3, 4, 5), name)
    assert whole.log_probs is not None
    assert [entry.token_id for entry in whole.log_probs] == list(whole.token_ids)
    assert [(entry.top[0], len(entry.top)) for entry in whole.log_probs] == [
        ((entry.token_id, entry.log_prob), 2) for entry in whole.log_probs
    ]
    assert [whole.text[entry.text_offset :].split()[0] for entry in whole.log_probs] == whole.text.split()
    assert whole.cumulative_log_prob == sum(entry.log_prob for entry in whole.log_probs)
    assert whole.prompt_log_probs is not None
    assert [(entry.token_id, len(entry.top)) for entry in whole.prompt_log_probs] == [(4, 1), (5, 1)]
    plain = llm.generate(PROMPT, greedy())
    assert (plain.log_probs, plain.prompt_log_probs, plain.cumulative_log_prob, plain.adapter) == (None,) * 4
    # The same values arrive token by token.
    stopped = llm.generate(PROMPT, greedy(logprobs=2, prompt_logprobs=1, stop="none"), lora=name)
    assert stopped == whole


def test_log_probs_of_the_prompt_alone(llm: adaptrt.LLM) -> None:
    scored = llm.generate(PROMPT, greedy(prompt_logprobs=0))
    assert scored.log_probs is None
    assert [(entry.token_id, entry.top) for entry in scored.prompt_log_probs] == [(4, ()), (5, ())]


def test_stop_tokens_and_end_tokens_are_included_where_asked(llm: adaptrt.LLM) -> None:
    tokens = llm.generate(PROMPT, greedy()).token_ids
    stop = next(token for token in tokens[1:] if token not in tokens[:1])
    before = tokens[: tokens.index(stop)]
    short = llm.generate(PROMPT, greedy(stop_token_ids=[stop], logprobs=0))
    assert (short.token_ids, short.stop_reason, short.finish_reason) == (before, stop, FinishReason.STOP_WORDS)
    assert len(short.log_probs) == len(before)
    assert short.text == " ".join(f"w{token}" for token in before)
    kept = llm.generate(PROMPT, greedy(stop_token_ids=[stop], include_eos=True, logprobs=0))
    assert (kept.token_ids, kept.text, kept.stop_reason) == ((*before, stop), short.text, stop)
    assert [entry.token_id for entry in kept.log_probs] == [*before, stop]
    assert kept.log_probs[-1].text_offset == len(kept.text)
    shown = llm.generate(PROMPT, greedy(stop_token_ids=[stop], include_stop_str_in_output=True))
    assert (shown.token_ids, shown.text) == ((*before, stop), f"{short.text} w{stop}")
    late = llm.generate(PROMPT, greedy(stop_token_ids=[stop], min_tokens=5))
    assert len(late.token_ids) >= 5


def test_the_end_token_is_included_where_asked(llm: adaptrt.LLM) -> None:
    end = SPEC.config().eos_token_id
    biased = {"ignore_eos": False, "logit_bias": {end: 100}}
    plain = llm.generate(PROMPT, greedy(**biased))
    assert (plain.token_ids, plain.finish_reason, plain.stop_reason) == ((), FinishReason.END_ID, None)
    kept = llm.generate(PROMPT, greedy(**biased, include_eos=True, logprobs=0))
    assert (kept.token_ids, kept.text, kept.finish_reason) == ((end,), "", FinishReason.END_ID)
    assert [entry.token_id for entry in kept.log_probs] == [end]
    assert "".join(llm.stream(PROMPT, greedy(**biased, include_eos=True))) == ""
    assert llm.generate(PROMPT, greedy(logit_bias={end: 100})).token_ids == (end,) * 6


def test_a_stop_text_is_included_where_asked(llm: adaptrt.LLM) -> None:
    text = llm.generate(PROMPT, greedy()).text
    stop = text.split()[1]
    before = text[: text.find(stop)]
    assert llm.generate(PROMPT, greedy(stop=stop)).text == before
    kept = llm.generate(PROMPT, greedy(stop=[stop], include_stop_str_in_output=True))
    assert (kept.text, kept.stop_reason) == (before + stop, stop)
    assert "".join(llm.stream(PROMPT, greedy(stop=stop, include_stop_str_in_output=True))) == before + stop


def test_tokens_are_forbidden_and_allowed(llm: adaptrt.LLM) -> None:
    first = llm.generate(PROMPT, greedy()).token_ids[0]
    assert first not in llm.generate(PROMPT, greedy(bad_words=[f"w{first}"])).token_ids
    assert set(llm.generate(PROMPT, greedy(allowed_token_ids=[7, 9])).token_ids) <= {7, 9}
    assert llm.generate(PROMPT, greedy(allowed_token_ids=[7, 9], logit_bias={9: 100})).token_ids == (9,) * 6
    for field in ({"allowed_token_ids": [SPEC.vocab_size]}, {"logit_bias": {SPEC.vocab_size: 1}}):
        with pytest.raises(RequestError, match=f"has token {SPEC.vocab_size}; the vocabulary is 0 to"):
            llm.generate(PROMPT, greedy(**field))
    assert llm.executor.get_num_responses_ready() == 0


def test_the_model_recommends_how_to_sample(llm: adaptrt.LLM, tmp_path: Path) -> None:
    engine = llm.executor.engine.directory
    (tmp_path / "generation_config.json").write_text('{"temperature": 9.0, "top_k": 40, "top_p": null}')
    greedy_ids = llm.generate(PROMPT, max_tokens=8).token_ids
    with adaptrt.LLM(engine, generation_config=tmp_path) as hot:
        drawn = hot.generate(PROMPT, SamplingParams(seed=3, max_tokens=8))
        expected = SamplingParams(seed=3, max_tokens=8, temperature=9.0, top_k=40)
        assert drawn == llm.generate(PROMPT, expected) != llm.generate(PROMPT, SamplingParams(seed=3, max_tokens=8))
        assert len({hot.generate(PROMPT, max_tokens=8).token_ids for _ in range(4)}) > 1
        assert hot.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8)).token_ids == greedy_ids
        assert hot.generate(PROMPT, max_tokens=8, sampling_config=SamplingConfig()).token_ids == greedy_ids
    (engine / "generation_config.json").write_text('{"repetition_penalty": 9.0}')
    config = SamplingConfig(repetition_penalty=9.0)
    try:
        with adaptrt.LLM(engine) as penalised:
            expected_ids = llm.generate(PROMPT, max_tokens=40, sampling_config=config).token_ids
            assert expected_ids != llm.generate(PROMPT, max_tokens=40).token_ids
            assert penalised.generate(PROMPT, max_tokens=40).token_ids == expected_ids
        for off in (None, "vllm"):
            with adaptrt.LLM(engine, generation_config=off) as plain:
                assert plain.generate(PROMPT, max_tokens=8).token_ids == greedy_ids
        (engine / "generation_config.json").write_text('{"top_p": 2}')
        with pytest.raises(adaptrt.ConfigError, match=r"generation_config\.json: top_p is 2; expected more than 0"):
            adaptrt.LLM(engine)
    finally:
        (engine / "generation_config.json").unlink()
    with pytest.raises(adaptrt.ConfigError, match="generation_config is 'none', which has no generation_config"):
        adaptrt.LLM(engine, generation_config="none")
