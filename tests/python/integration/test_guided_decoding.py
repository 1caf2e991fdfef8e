"""Guided outputs: a text that ends by itself always matches its guide, whatever the model prefers.

`--hypothesis-profile nightly` draws ten thousand schemas.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adaptrt
from support.guides import GuideType, ending_bias, json_schema, patterns, regex, schemas
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine
from support.tokenizers import SPECIAL, byte_level, save_tokenizer

SPEC = ModelSpec(vocab_size=270)
TOKENIZER = byte_level()
END = SPECIAL.index("</s>")
PROMPT = TOKENIZER.encode("Say hello").ids
BIAS = ending_bias(TOKENIZER, SPEC.vocab_size, END)
MAX_TOKENS = 400
ANY = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
Params = adaptrt.GuidedDecodingParams


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("guided")
    model = save_model(SPEC, directory / "model")
    save_tokenizer(TOKENIZER, model)
    save_adapter(model, directory / "adapter", 3, r=4)
    return build_engine(model, directory, max_batch_size=16)


@pytest.fixture(scope="module")
def executor(engine: Any) -> Iterator[adaptrt.Executor]:
    with adaptrt.Executor(engine, executor_config=adaptrt.ExecutorConfig(num_threads=1)) as executor:
        adapter = engine.parent / "adapter"
        executor.put_adapter(adaptrt.LoraConfig.from_peft(1, adapter, executor.engine))
        yield executor


def ask(executor: adaptrt.Executor, guide: Any, seed: int = 0, max_tokens: int = MAX_TOKENS, **fields: Any) -> int:
    request = adaptrt.Request(
        PROMPT,
        max_tokens,
        sampling_config=adaptrt.SamplingConfig(top_p=1.0, temperature=4.0, seed=seed),
        output_config=adaptrt.OutputConfig(exclude_input_from_output=True),
        guided_decoding_params=guide,
        **{"embedding_bias": BIAS, **fields},
    )
    return executor.enqueue_request(request)


def answer(executor: adaptrt.Executor, request_id: int) -> tuple[str, bool]:
    """Returns the text, and whether it ended by itself."""
    (response,) = executor.await_responses(request_id)
    assert not response.has_error(), response.error_msg
    result = response.result
    text = TOKENIZER.decode(result.output_token_ids[0], skip_special_tokens=False)
    return text, result.finish_reasons[0] is adaptrt.FinishReason.END_ID


FORMATS = jsonschema.FormatChecker()


@FORMATS.checks("date", raises=ValueError)
def is_date(value: object) -> bool:
    """Checks a date as llguidance's grammar does, which allows a 29th of February in every year."""
    if isinstance(value, str):
        datetime.date.fromisoformat(re.sub(r"^\d{4}(?=-02-29$)", "2000", value))
    return True


def check_schema(schema: Any, text: str) -> None:
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    validator.validate(json.loads(text))


@settings(deadline=None, suppress_health_check=ANY)
@given(drawn=st.lists(schemas, min_size=4, max_size=4), seed=st.integers(0, 2**32))
def test_json_follows_its_schema(executor: adaptrt.Executor, drawn: Sequence[Any], seed: int) -> None:
    lora = [None, adaptrt.LoraConfig(1)]
    ids = [ask(executor, json_schema(schema), seed + i, lora_config=lora[i % 2]) for i, schema in enumerate(drawn)]
    for schema, request_id in zip(drawn, ids, strict=True):
        text, is_whole = answer(executor, request_id)
        if is_whole:
            check_schema(schema, text)


@settings(deadline=None, suppress_health_check=ANY)
@given(drawn=st.lists(patterns, min_size=2, max_size=2), seed=st.integers(0, 2**32))
def test_texts_match_their_pattern(executor: adaptrt.Executor, drawn: Sequence[str], seed: int) -> None:
    ids = [ask(executor, regex(pattern), seed + i) for i, pattern in enumerate(drawn)]
    for pattern, request_id in zip(drawn, ids, strict=True):
        text, is_whole = answer(executor, request_id)
        assert is_whole
        assert re.fullmatch(pattern, text, re.DOTALL), (pattern, text)


def test_most_outputs_end_by_themselves(executor: adaptrt.Executor) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "list": {"type": "array", "items": {"type": "integer"}}},
        "required": ["name", "list"],
        "additionalProperties": False,
    }
    answers = [
        answer(executor, request_id) for request_id in [ask(executor, json_schema(schema), i) for i in range(16)]
    ]
    whole = [text for text, is_whole in answers if is_whole]
    assert len(whole) > 8
    for text in whole:
        check_schema(schema, text)
    assert len(set(whole)) > 4


def test_every_kind_of_guide(executor: adaptrt.Executor) -> None:
    def text_of(guide_type: Any, guide: str | None, **fields: Any) -> str:
        text, is_whole = answer(executor, ask(executor, Params(guide_type, guide), **fields))
        assert is_whole
        return text

    assert isinstance(json.loads(text_of(GuideType.JSON, None)), dict)
    assert text_of(GuideType.REGEX, "(yes|no)") in ("yes", "no")
    assert re.fullmatch("a+b", text_of(GuideType.EBNF_GRAMMAR, 'start: "a"+ "b"'))
    assert re.fullmatch("(ab){2}", text_of(GuideType.EBNF_GRAMMAR, 'root ::= pair pair\npair ::= "ab"'))
    tag = {"begin": "<f=a>", "schema": {"type": "integer", "minimum": 10, "maximum": 99}, "end": "</f>"}
    guide = json.dumps({"structures": [tag], "triggers": ["<f="]})
    # The bias is so strong that the model writes only the letters of the trigger, or ends.
    bias = np.full(SPEC.vocab_size, -200.0, np.float32)
    bias[TOKENIZER.encode("<f=").ids] = 0.0
    bias[END] = -8.0
    ids = [ask(executor, Params(GuideType.STRUCTURAL_TAG, guide), seed, embedding_bias=bias) for seed in range(32)]
    texts = [text for text, is_whole in (answer(executor, request_id) for request_id in ids) if is_whole]
    assert any("<f=" in text for text in texts)
    for text in texts:
        assert text.count("<f=") == len(re.findall(r"<f=a>\d\d</f>", text)), text


def test_greedy_and_log_probs_are_the_models(executor: adaptrt.Executor) -> None:
    request = adaptrt.Request(
        PROMPT,
        8,
        output_config=adaptrt.OutputConfig(return_log_probs=True, exclude_input_from_output=True, top_log_probs=3),
        guided_decoding_params=regex("[a-z]{6}"),
    )
    plain = adaptrt.Request(PROMPT, 1, output_config=request.output_config)
    guided, free = (executor.await_responses(executor.enqueue_request(each))[0].result for each in (request, plain))
    assert guided.top_log_probs[0][0] == free.top_log_probs[0][0]
    assert guided.log_probs[0][0] <= guided.top_log_probs[0][0][0][1]


def test_the_end_needs_no_end_id_and_min_tokens_needs_it(executor: adaptrt.Executor) -> None:
    for end_id in (None, END):
        assert answer(executor, ask(executor, regex("ab"), end_id=end_id)) == ("ab", True)
    (response,) = executor.await_responses(
        executor.enqueue_request(
            adaptrt.Request(
                PROMPT,
                9,
                sampling_config=adaptrt.SamplingConfig(min_tokens=3),
                end_id=END,
                guided_decoding_params=regex("ab"),
            )
        )
    )
    assert response.error_msg == "every token is forbidden"


def test_an_output_that_is_cut_is_a_beginning(executor: adaptrt.Executor) -> None:
    assert answer(executor, ask(executor, regex("abc"), max_tokens=2)) == ("ab", False)


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (Params(GuideType.JSON_SCHEMA, "{"), "the guide is not JSON: Expecting property name"),
        (Params(GuideType.JSON_SCHEMA, "[" * 100_000), "the guide is not JSON"),
        (Params(GuideType.JSON_SCHEMA, '{"type": "nothing"}'), "nothing"),
        (Params(GuideType.REGEX, "("), "unclosed group"),
        (Params(GuideType.EBNF_GRAMMAR, "start: nothing"), "nothing"),
        (Params(GuideType.STRUCTURAL_TAG, "{}"), "not a structural tag"),
    ],
)
def test_a_guide_that_cannot_be_compiled_fails_its_request(
    executor: adaptrt.Executor, guide: adaptrt.GuidedDecodingParams, message: str
) -> None:
    other = ask(executor, regex("[ab]{9}"))
    (response,) = executor.await_responses(ask(executor, guide))
    assert message in response.error_msg
    assert len(answer(executor, other)[0]) == 9
    with pytest.raises(adaptrt.RequestError, match=re.escape(message)):
        executor.check_guide(guide)
    executor.check_guide(regex("a"))


def test_a_guide_that_is_none_is_refused(executor: adaptrt.Executor) -> None:
    params = Params(GuideType.REGEX, "a")
    params.guide = None
    with pytest.raises(adaptrt.RequestError, match=r"guided_decoding_params\.guide is None"):
        ask(executor, params)
    params.guide_type, params.guide = GuideType.JSON, "{}"
    with pytest.raises(adaptrt.RequestError, match="guide is given, but guide_type is JSON"):
        executor.check_guide(params)


def test_without_llguidance_requests_with_guides_are_refused(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with adaptrt.Executor(engine) as executor:
        for call in (lambda: ask(executor, regex("a")), lambda: executor.check_guide(regex("a"))):
            with pytest.raises(adaptrt.RequestError, match=r"guided_decoding_params is given; .*adaptrt\[guided\]"):
                call()
        with pytest.raises(adaptrt.RequestError, match=r"adaptrt\[guided\]"):
            executor.enqueue_requests([adaptrt.Request([1], 1, guided_decoding_params=regex("a"))])
        executor.await_responses(executor.enqueue_request(adaptrt.Request([1], 1)))
    config = adaptrt.GuidedDecodingConfig(adaptrt.GuidedDecodingConfig.GuidedDecodingBackend.LLGUIDANCE)
    with pytest.raises(adaptrt.ConfigError, match=r"adaptrt\[guided\]"):
        adaptrt.Executor(engine, executor_config=adaptrt.ExecutorConfig(guided_decoding_config=config))


def test_a_configuration_names_the_tokenizer_and_its_ends(engine: Any) -> None:
    config = adaptrt.GuidedDecodingConfig(
        adaptrt.GuidedDecodingConfig.GuidedDecodingBackend.LLGUIDANCE,
        tokenizer_str=TOKENIZER.to_str(),
        stop_token_ids=[SPECIAL.index("<|im_end|>"), END],
    )
    executor_config = adaptrt.ExecutorConfig(guided_decoding_config=config)
    bias = np.zeros(SPEC.vocab_size, np.float32)
    bias[SPECIAL.index("<|im_end|>")] = 50.0
    with adaptrt.Executor(engine, executor_config=executor_config) as executor:
        ids = [executor.enqueue_requests([adaptrt.Request(PROMPT, 9, guided_decoding_params=regex("ab"))])[0]]
        ids.append(ask(executor, regex("a+"), embedding_bias=bias))
        texts = [executor.await_responses(request_id)[0].result.output_token_ids[0] for request_id in ids]
    assert TOKENIZER.decode(texts[0]).endswith("ab")
    assert TOKENIZER.decode(texts[1]) == "a"


def test_llm_takes_guides(engine: Any) -> None:
    guide = json_schema({"enum": [["ab"], 12]})
    with adaptrt.LLM(engine) as llm:
        answers = llm.generate(["a", "b"], guided_decoding_params=guide)
        answers.append(llm.generate("c", guided_decoding_params=guide))
        streamed = "".join(llm.stream("a", guided_decoding_params=guide))
    assert all(json.loads(each.text) in (["ab"], 12) for each in answers)
    assert all(each.finish_reason is adaptrt.FinishReason.END_ID for each in answers)
    assert streamed == answers[0].text
