"""Every argument of LLM's methods, and its field in the Request that the executor gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers

import adaptrt
from adaptrt import GuidedDecodingParams, PoolingType, RequestError, SamplingConfig, SamplingParams
from adaptrt.runtime.adapter_versions import without_versions
from support.handed_over import CAPTURED, differences, flat
from support.models import ModelSpec, save_adapter, save_model
from support.pooled import save_random, save_sentence_transformer
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

SPEC = ModelSpec(vocab_size=272)
TOKENIZER = byte_level()
NOTHING: dict[str, Any] = {}
GUIDE = GuidedDecodingParams(GuidedDecodingParams.GuideType.REGEX, "a+")
SAMPLING = SamplingConfig(temperature=0.5, top_p=0.25, seed=7)
DEFAULTS = {
    "input_token_ids": [], "max_tokens": 0, "streaming": False, "priority": 0.5, "num_return_sequences": 1,
    "return_all_generated_tokens": False,
    "request_type": "REQUEST_TYPE_CONTEXT_AND_GENERATION", "sampling_config.beam_width": 1,
    "output_config.exclude_input_from_output": False, "output_config.return_context_logits": False,
    "output_config.return_encoder_output": False, "output_config.return_generation_logits": False,
    "output_config.return_log_probs": False, "output_config.return_perf_metrics": False,
    "output_config.return_prompt_log_probs": False, "output_config.top_log_probs": 0,
}  # fmt: skip


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


DRAWN = {
    "sampling_config.temperature": 0.5, "sampling_config.top_p": 0.25, "sampling_config.seed": 7,
    "sampling_config.top_k": 0, "sampling_config.min_p": 0.0, "sampling_config.min_tokens": 0,
    "sampling_config.repetition_penalty": 1.0, "sampling_config.presence_penalty": 0.0,
    "sampling_config.frequency_penalty": 0.0,
}  # fmt: skip
ADAPTER = {"adapter": "first"}
Row = tuple[Any, dict[str, Any]]
COMMON: dict[str, Row] = {
    "lora": ("first", ADAPTER),
    "max_tokens": (3, {"max_tokens": 3}),
    "sampling_params": (SamplingParams(temperature=0.5, top_p=0.25, seed=7, max_tokens=3), {**DRAWN, "max_tokens": 3}),
    "sampling_config": (
        SAMPLING,
        {"sampling_config.temperature": 0.5, "sampling_config.top_p": 0.25, "sampling_config.seed": 7},
    ),
    "guided_decoding_params": (
        GUIDE,
        {"guided_decoding_params.guide_type": "REGEX", "guided_decoding_params.guide": "a+"},
    ),
}
TEXT: Row = ("a", {"input_token_ids": ids("a")})
CHAT: dict[str, Row] = {
    **COMMON,
    "messages": ([{"role": "user", "content": "a"}], {"input_token_ids": ids("0a")}),
    "stop": ("x", NOTHING),
    "tools": ([{"type": "function"}], {"input_token_ids": ids("1hi")}),
    "template_variables": ({"mood": "sad"}, {"input_token_ids": ids("0sadhi")}),
}
VLLM = {"generate": ["lora_request", "use_tqdm"], "chat": ["lora_request", "use_tqdm", "chat_template_kwargs"]}
"""Names of vLLM that mean the same as other arguments."""
TABLES: dict[str, dict[str, Row]] = {
    "generate": {
        **COMMON,
        "prompts": TEXT,
        "stop": ("x", {"streaming": True}),
        "n": (2, {"num_return_sequences": 2}),
        "progress": (True, NOTHING),
        "lora_request": (adaptrt.LoRARequest("first", 1), ADAPTER),
        "use_tqdm": (True, NOTHING),
    },
    "stream": {**COMMON, "prompt": TEXT, "stop": ("x", NOTHING)},
    "generate_async": {
        **COMMON,
        "prompt": TEXT,
        "stop": ("x", {"streaming": True}),
        "streaming": (True, {"streaming": True}),
    },
    "chat": {
        **CHAT,
        "stop": ("x", {"streaming": True}),
        "n": (2, {"num_return_sequences": 2}),
        "progress": (True, NOTHING),
        "lora_request": (adaptrt.LoRARequest("first", 1), ADAPTER),
        "use_tqdm": (True, NOTHING),
        "chat_template_kwargs": ({"mood": "sad"}, {"input_token_ids": ids("0sadhi")}),
    },
    "chat_stream": CHAT,
    "embed": {
        "texts": TEXT,
        "lora": ("first", ADAPTER),
        "pooling_type": (PoolingType.LAST, {"pooling_params.pooling_type": "LAST"}),
        "normalize": (False, {"pooling_params.normalize": False}),
    },
    "classify": {"texts": TEXT, "lora": ("first", ADAPTER)},
}

ALL_ROWS = {"pooling_params.row_interval": 1}


class Captured(adaptrt.LLM):
    """An LLM whose executor refuses requests and stores the last one."""

    last: dict[str, Any]

    def __init__(self, engine: Path) -> None:
        super().__init__(engine, adaptrt.ExecutorConfig(num_threads=1))

        def refuse(request: adaptrt.Request, *, adapter: str | None = None) -> int:
            # The version of the adapter that the call has resolved.
            self.last = flat(request) | ({} if adapter is None else {"adapter": without_versions(adapter)})
            raise RequestError(CAPTURED)

        self.executor.enqueue_request = refuse  # type: ignore[method-assign]

    def request(self, method: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields, except those that are None, of the request that a call makes."""
        with pytest.raises(RequestError, match=CAPTURED):
            list(method(**arguments))  # a stream makes the request when its first piece is read
        return self.last


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captured]:
    root = tmp_path_factory.mktemp("llm")
    model = save_model(SPEC, root / "model")
    (model / "chat_template.jinja").write_text(
        "{{ (tools or []) | length }}{{ mood }}{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    yield from opened(model, save_adapter(model, root / "first", 0, r=4))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captured]:
    root = tmp_path_factory.mktemp("classifier")
    config = SPEC.config()
    config.num_labels, config.pad_token_id = 2, 2
    model = save_random(transformers.AutoModelForSequenceClassification.from_config(config), root / "model")
    yield from opened(model, save_adapter(save_model(SPEC, root / "causal"), root / "first", 0, r=4))


def opened(model: Path, adapter: Path) -> Iterator[Captured]:
    save_tokenizer(TOKENIZER, model)
    save_sentence_transformer(model, "mean_tokens", normalize=True)
    with Captured(build_engine(model, model.parent, lora_dir=adapter)) as made:
        yield made


def check(llm: Captured, name: str, first: Any, base: dict[str, Any]) -> None:
    """Checks the request with only the first argument, and the changes that each other argument makes."""
    method, table = getattr(llm, name), TABLES[name]
    names = [one for one in inspect.signature(method).parameters if one != "vllm_arguments"] + VLLM.get(name, [])
    assert set(table) == set(names), name
    assert llm.request(method, {names[0]: first}) == base, name
    for argument, (value, expected) in table.items():
        # Greedy search gives only one completion.
        others = {"sampling_config": SAMPLING} if argument == "n" else {}
        without = llm.request(method, {names[0]: first, **others})
        changed = llm.request(method, {names[0]: first, **others, argument: value})
        assert differences(without, changed) == expected, f"{name} {argument}"


def base_of(text: str, **fields: Any) -> dict[str, Any]:
    return {**DEFAULTS, "input_token_ids": ids(text), **fields}


def test_every_argument_arrives(llm: Captured) -> None:
    generated = {"end_id": 1, "output_config.exclude_input_from_output": True}
    for name in ("generate", "stream", "generate_async"):
        check(llm, name, "hi", base_of("hi", max_tokens=64, streaming=name == "stream", **generated))
    for name in ("chat", "chat_stream"):
        messages = [{"role": "user", "content": "hi"}]
        check(llm, name, messages, base_of("0hi", max_tokens=256, streaming=name == "chat_stream", **generated))
    pooling = {"pooling_params.pooling_type": "MEAN", "pooling_params.normalize": True, "pooling_params.layers": 0}
    check(llm, "embed", "hi", base_of("hi", **pooling, **ALL_ROWS))


def test_every_argument_of_classify_arrives(classifier: Captured) -> None:
    pooling = {"pooling_params.pooling_type": "LAST", "pooling_params.normalize": False, "pooling_params.layers": 1}
    check(classifier, "classify", "hi", base_of("hi", **pooling, **ALL_ROWS))
