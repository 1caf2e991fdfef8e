"""Encoders: hidden states against transformers + PEFT in float32, batches of many requests, and refused inputs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

import adaptrt
from adaptrt import CheckpointError, ConfigError, PoolingParams, PoolingType, RequestError, _core
from adaptrt._core import DType, QuantAlgo
from adaptrt.builder.build import build
from adaptrt.builder.cli import main as command_line
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.checkpoint.quantization import QuantConfig
from support.encoders import BUILD, MODELS, ROBERTA_FIELDS, VOCAB_SIZE, Encoder, engine_of, save_encoder
from support.pooled import (
    hidden_states,
    load_bare,
    pooled,
    rows_of,
    run_pooled,
    save_pooled_adapter,
    save_sentence_transformer,
    save_word_tokenizer,
)

# The same tolerance as in test_embeddings.py: both sides sum in float32, in different orders.
TOLERANCE = 1e-4
TYPES = [PoolingType.LAST, PoolingType.CLS, PoolingType.MEAN, PoolingType.ALL]
PROMPTS = [[7], [2, 44, 5, 60, 7, 3, 3, 1], [*range(2, 60), *range(2, 60)], list(range(3, 36))]
ADAPTERS = {"lora": {"r": 5}, "rslora": {"r": 16, "use_rslora": True}, "dora": {"r": 4, "use_dora": True}}
ENCODER = adaptrt.ModelType.ENCODER_ONLY


class Served:
    """A model, its adapters on every linear layer, one of them on the embedding too, and its engine."""

    def __init__(self, name: str, directory: Path) -> None:
        self.kind: Encoder = MODELS[name]
        self.directory = directory
        self.model = save_encoder(self.kind, directory / "model")
        save_sentence_transformer(self.model, "mean_tokens", normalize=True)
        save_word_tokenizer(self.model, VOCAB_SIZE)
        self.adapters: dict[str | None, Path | None] = {None: None}
        for seed, (adapter, fields) in enumerate(ADAPTERS.items()):
            targets = self.kind.targets if adapter != "rslora" else [*self.kind.targets, self.kind.embedding]
            settings = {"task_type": "FEATURE_EXTRACTION", "target_modules": targets, **fields}
            path = save_pooled_adapter(load_bare(self.model), directory / adapter, seed, **settings)
            self.adapters[adapter] = path
        self.engine = engine_of(self.model, directory / "engine")

    def executor(self, engine: Path | None = None, **fields: Any) -> adaptrt.Executor:
        executor = adaptrt.Executor(engine or self.engine, ENCODER, adaptrt.ExecutorConfig(**fields))
        for name, directory in self.adapters.items():
            if name is not None and directory is not None:
                executor.add_adapter(name, directory)
        return executor

    def states(self, prompt: list[int], adapter: str | None = None) -> np.ndarray:
        return hidden_states(load_bare(self.model, self.adapters[adapter]), prompt)


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def executor(served: Served) -> Iterator[adaptrt.Executor]:
    with served.executor() as made:
        yield made


def check(actual: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * float(np.ptp(expected))


@pytest.mark.parametrize("adapter", [None, *ADAPTERS])
def test_rows_are_transformers_hidden_states(served: Served, executor: adaptrt.Executor, adapter: str | None) -> None:
    for prompt in PROMPTS:
        states = served.states(prompt, adapter)
        for pooling_type in TYPES:
            params = PoolingParams(pooling_type, normalize=True)
            check(run_pooled(executor, prompt, params, adapter), pooled(states, pooling_type, normalize=True))


def test_the_encoders_output_is_there_as_tensorrt_llm_asks_for_it(served: Served, executor: adaptrt.Executor) -> None:
    output = adaptrt.OutputConfig(return_encoder_output=True)
    for max_tokens, adapter in ((0, None), (1, "dora")):
        request_id = executor.enqueue_request(
            adaptrt.Request(PROMPTS[2], max_tokens, output_config=output), adapter=adapter
        )
        (response,) = executor.await_responses(request_id)
        assert not response.has_error(), response.error_msg
        check(np.asarray(response.result.encoder_output), served.states(PROMPTS[2], adapter))
        assert response.result.pooled_output is None
    assert executor.engine_info.has_kv_cache is False
    assert executor.num_kv_blocks == 0


def test_rows_may_replace_tokens(served: Served, executor: adaptrt.Executor) -> None:
    """Rows of the model's own table have the same hidden states as their tokens; vision towers get all rows so."""
    prompt = PROMPTS[1]
    model = load_bare(served.model)
    table = model.get_input_embeddings().weight.detach().numpy()[prompt[2:5]]
    virtual = [*prompt[:2], *range(VOCAB_SIZE, VOCAB_SIZE + 3), *prompt[5:]]
    params = PoolingParams(PoolingType.ALL)
    rows = run_pooled(
        executor, virtual, params, "lora", prompt_tuning_config=adaptrt.PromptTuningConfig(np.ascontiguousarray(table))
    )
    np.testing.assert_array_equal(rows, run_pooled(executor, prompt, params, "lora"))


def test_llm_embeds_whatever_padding_the_tokenizer_has(served: Served, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(served.model / "tokenizer.json"))
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = ["t5 t6 t7", " ".join(f"t{token}" for token in PROMPTS[2])]
    with adaptrt.LLM(served.engine, tokenizer=tmp_path) as llm:
        for adapter in (None, "lora"):
            if adapter is not None:
                llm.executor.add_adapter(adapter, served.adapters[adapter])
            rows = llm.embed(texts, lora=adapter)
            for prompt, row in zip(([5, 6, 7, 1], [*PROMPTS[2], 1]), rows, strict=True):
                check(row, pooled(served.states(prompt, adapter), PoolingType.MEAN, normalize=True))
        with pytest.raises(RequestError, match="the engine is an encoder and generates nothing"):
            llm.generate("t3")


@pytest.mark.parametrize("kernels", _core.cpu_kernels())
@pytest.mark.parametrize(
    ("policy", "chunking"),
    [
        ("GUARANTEED_NO_EVICT", "FIRST_COME_FIRST_SERVED"),
        ("MAX_UTILIZATION", "EQUAL_PROGRESS"),
        ("STATIC_BATCH", "EQUAL_PROGRESS"),
    ],
)
def test_a_crowd_changes_no_bit(
    served: Served, executor: adaptrt.Executor, kernels: str, policy: str, chunking: str
) -> None:
    scheduler = adaptrt.SchedulerConfig(
        getattr(adaptrt.CapacitySchedulerPolicy, policy), getattr(adaptrt.ContextChunkingPolicy, chunking)
    )
    cases = [(prompt, kind, name) for prompt in PROMPTS for kind in TYPES for name in (None, *ADAPTERS)]
    fields = {"enable_chunked_context": True, "max_num_tokens": 130, "kernels": kernels, "num_threads": 3}
    with served.executor(scheduler_config=scheduler, **fields) as crowded:
        ids = [
            crowded.enqueue_request(adaptrt.Request(prompt, 0, pooling_params=PoolingParams(kind)), adapter=name)
            for prompt, kind, name in cases
        ]
        found = [rows_of(crowded, request_id) for request_id in ids]
    with served.executor(kernels=kernels, num_threads=1) as alone:
        for (prompt, kind, name), rows in zip(cases, found, strict=True):
            assert rows.tobytes() == run_pooled(alone, prompt, PoolingParams(kind), name).tobytes()


# Up to five layers each round to 8 or 11 bits, or have 8-bit weights. Random weights amplify this more than trained
# ones.
@pytest.mark.parametrize(("dtype", "tolerance"), [(DType.BFLOAT16, 0.08), (DType.FLOAT16, 0.01)])
def test_sixteen_bit_engines(served: Served, dtype: DType, tolerance: float, tmp_path: Path) -> None:
    check_engine(served, engine_of(served.model, tmp_path / "engine", dtype=dtype), tolerance)


@pytest.mark.parametrize(("algo", "tolerance"), [(QuantAlgo.W8A16, 0.08), (QuantAlgo.W8A8, 0.15)])
def test_quantised_engines(served: Served, algo: QuantAlgo, tolerance: float, tmp_path: Path) -> None:
    engine = engine_of(served.model, tmp_path / "engine", quantization=QuantConfig(quant_algo=algo))
    check_engine(served, engine, tolerance)


def check_engine(served: Served, engine: Path, tolerance: float) -> None:
    with served.executor(engine) as executor:
        for adapter in (None, "dora"):
            rows = run_pooled(executor, PROMPTS[2], PoolingParams(PoolingType.ALL), adapter)
            check(rows, served.states(PROMPTS[2], adapter), tolerance)


def test_two_steps_make_the_same_engine(served: Served, tmp_path: Path) -> None:
    convert_checkpoint(served.model, tmp_path / "checkpoint")
    assert (
        command_line(["convert-checkpoint", "--model_dir", str(served.model), "--output_dir", str(tmp_path / "c")]) == 0
    )
    build(tmp_path / "checkpoint", BUILD, tmp_path / "engine")
    assert (tmp_path / "engine" / "rank0.engine").read_bytes() == (served.engine / "rank0.engine").read_bytes()


def test_engines_carry_adapters(served: Served, tmp_path: Path) -> None:
    lora = dataclasses.replace(BUILD.lora_config, lora_dir=(served.adapters["dora"],))
    engine = engine_of(served.model, tmp_path / "engine", dataclasses.replace(BUILD, lora_config=lora))
    with adaptrt.Executor(engine, ENCODER) as executor:
        rows = run_pooled(executor, PROMPTS[1], PoolingParams(PoolingType.ALL), "dora")
        check(rows, served.states(PROMPTS[1], "dora"))


def test_requests_that_an_encoder_cannot_answer_are_refused(served: Served) -> None:
    with served.executor(max_num_tokens=40) as executor:
        for request, message in (
            (adaptrt.Request([3, 4], 5), "the engine is an encoder and generates nothing"),
            (
                adaptrt.Request([3] * 41, 0, pooling_params=PoolingParams()),
                "41 tokens, a step takes max_num_tokens = 40 and the engine computes prompts whole",
            ),
            (adaptrt.Request([3] * 201, 0, pooling_params=PoolingParams()), "max_input_len is 200"),
            (adaptrt.Request([3, VOCAB_SIZE], 0, pooling_params=PoolingParams()), r"input_token_ids\[1\] is 61"),
        ):
            with pytest.raises(RequestError, match=message):
                executor.enqueue_request(request)
        assert len(run_pooled(executor, [3] * 40, PoolingParams(PoolingType.ALL))) == 40


def test_configurations_that_cannot_be_are_refused(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model_type is DECODER_ONLY; .* is an engine of ENCODER_ONLY"):
        adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY)
    config = adaptrt.ExecutorConfig(kv_cache_config=adaptrt.KvCacheConfig(max_tokens=64))
    with pytest.raises(ConfigError, match=r"kv_cache_config\.max_tokens is given.*keeps no keys and values"):
        adaptrt.Executor(served.engine, ENCODER, config)
    for fields, message in (
        ({"max_input_len": 200, "max_num_tokens": 100}, "max_input_len 200 is above max_num_tokens 100"),
        ({"max_beam_width": 2}, "max_beam_width is 2; accepted: 1"),
        ({"max_seq_len": 201}, "max_seq_len 201 is above the model's max_position_embeddings 200"),
        ({"backend": "tensorrt"}, "has no lm_head; such models need backend native"),
    ):
        if "max_seq_len" in fields and served.kind.config_class is not transformers.BertConfig:
            continue
        with pytest.raises(ConfigError, match=message):
            engine_of(served.model, tmp_path / "engine", dataclasses.replace(BUILD, **fields))
    with pytest.raises(ConfigError, match=r"int8_kv_cache: .* keeps no keys and values"):
        engine_of(served.model, tmp_path / "engine", int8_kv_cache=True)
    with pytest.raises(ConfigError, match=r"int8_kv_cache: .* keeps no keys and values"):
        convert_checkpoint(served.model, tmp_path / "checkpoint", int8_kv_cache=True)
    assert not (tmp_path / "engine").exists()
    small = engine_of(served.model, tmp_path / "small", dataclasses.replace(BUILD, max_num_tokens=100))
    with adaptrt.Executor(small, ENCODER) as executor:
        assert executor.engine_info.max_input_len == 100


def changed(model: Path, directory: Path, **fields: Any) -> Path:
    """Copies a model with other fields in its config.json; `...` removes a field."""
    directory.mkdir()
    config = {**json.loads((model / "config.json").read_text()), **fields}
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    save_file(load_file(model / "model.safetensors"), directory / "model.safetensors")
    return directory


REFUSED = {
    "bert": [
        ({"is_decoder": True}, "is_decoder is true; only false is supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ({"add_cross_attention": True}, "add_cross_attention is true"),
        ({"type_vocab_size": 2}, r"token_type_embeddings.weight' is \[3, 36\], but config.json makes it \[2, 36\]"),
        ({"embedding_size": 12}, "embedding_size is 12: an unknown field"),
        ({"num_attention_heads": 5}, "hidden_size 36 is not a multiple of num_attention_heads 5"),
        ({"architectures": ["BertForQuestionAnswering"]}, "architectures is .*accepted: one of"),
    ],
    "roberta": [
        ({"is_decoder": True}, "is_decoder is true; only false is supported"),
        ({"embedding_size": 12}, "embedding_size is 12: an unknown field"),
        ({"architectures": ["RobertaForMultipleChoice"]}, "architectures is .*accepted: one of"),
    ],
    "distilbert": [
        ({"activation": "tanh"}, "activation is 'tanh'"),
        ({"n_heads": 5}, "hidden_size 36 is not a multiple of num_attention_heads 5"),
    ],
    "modernbert": [
        ({"layer_types": ["full_attention"]}, "layer_types is .*expected 5 times"),
        ({"layer_types": None, "global_attn_every_n_layers": 0}, "global_attn_every_n_layers is 0"),
        ({"local_rope_theta": None, "rope_parameters": ...}, "local_rope_theta is null; expected a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling is given; accepted: rope_parameters"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ({"classifier_pooling": "max"}, "classifier_pooling is 'max'"),
        ({"norm_bias": True}, r"missing tensors: .*norm\.bias"),
    ],
}


@pytest.mark.parametrize(("name", "at"), [(name, at) for name, cases in REFUSED.items() for at in range(len(cases))])
def test_fields_that_are_not_served_are_refused_by_name(name: str, at: int, tmp_path: Path) -> None:
    fields, message = REFUSED[name][at]
    model = changed(save_encoder(MODELS[name], tmp_path / "model"), tmp_path / "changed", **fields)
    with pytest.raises(CheckpointError) as caught:
        engine_of(model, tmp_path / "engine")
    assert re.search(message, str(caught.value).replace('"', "'")), caught.value


def test_older_modernbert_configs_say_the_same(tmp_path: Path) -> None:
    """transformers 4 stores numbers where transformers 5 stores lists and objects."""
    model = save_encoder(MODELS["modernbert"], tmp_path / "model")
    older = {"layer_types": ..., "rope_parameters": ..., "global_attn_every_n_layers": 3}
    thetas = {"global_rope_theta": 300.0, "local_rope_theta": 20.0, "reference_compile": False}
    engine = engine_of(changed(model, tmp_path / "older", **older, **thetas), tmp_path / "engine")
    with adaptrt.Executor(engine, ENCODER) as executor:
        rows = run_pooled(executor, PROMPTS[2], PoolingParams(PoolingType.ALL))
    check(rows, hidden_states(load_bare(model), PROMPTS[2]))


@pytest.mark.parametrize("name", ["bert", "modernbert", "roberta", "distilbert"])
def test_models_of_masked_tokens_are_encoders_too(name: str, tmp_path: Path) -> None:
    """Masked language models as published: the head is ignored, and BERT's norms may have TensorFlow's names."""
    model = save_encoder(MODELS[name], tmp_path / "model", transformers.AutoModelForMaskedLM)
    tensors = load_file(model / "model.safetensors")
    if name == "bert":
        tensors = {
            k.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): v for k, v in tensors.items()
        }
        assert any("gamma" in key for key in tensors)
        tensors["bert.embeddings.position_ids"] = np.arange(200)[None]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    engine = engine_of(model, tmp_path / "engine")
    with adaptrt.Executor(engine, ENCODER) as executor:
        rows = run_pooled(executor, PROMPTS[2], PoolingParams(PoolingType.ALL))
    check(rows, hidden_states(load_bare(model), PROMPTS[2]))


def test_positions_begin_behind_the_padding_token(tmp_path: Path) -> None:
    """XLM-RoBERTa's padding token is 1, so two of its 514 positions belong to no token."""
    fields = {**ROBERTA_FIELDS, "pad_token_id": 1, "max_position_embeddings": 66}
    model = save_encoder(dataclasses.replace(MODELS["roberta"], config_class=transformers.XLMRobertaConfig,
                                             fields=fields), tmp_path / "model")  # fmt: skip
    adapter = save_pooled_adapter(
        load_bare(model), tmp_path / "dense", 3, "FEATURE_EXTRACTION", target_modules=["query", "dense"]
    )
    assert any(".pooler.dense" in name for name in load_file(adapter / "adapter_model.safetensors"))
    prompt = [*range(2, 60), *range(2, 8)]
    with adaptrt.Executor(engine_of(model, tmp_path / "engine"), ENCODER) as executor:
        assert executor.engine_info.max_input_len == 64
        executor.add_adapter("dense", adapter)
        for name, directory in ((None, None), ("dense", adapter)):
            rows = run_pooled(executor, prompt, PoolingParams(PoolingType.ALL), name)
            check(rows, hidden_states(load_bare(model, directory), prompt))
    for field, message in (({"pad_token_id": None}, "pad_token_id"), ({"max_position_embeddings": 2}, "is 2")):
        broken = changed(model, tmp_path / message.replace(" ", ""), **field)
        with pytest.raises(CheckpointError, match=message):
            engine_of(broken, tmp_path / "none")


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model = save_encoder(MODELS["bert"], tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    for name in ("embeddings.token_type_embeddings.weight", "embeddings.position_embeddings.weight"):
        damaged = {**tensors, name: np.full_like(tensors[name], np.nan)}
        save_file(damaged, model / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"tensor '{name}': holds nan"):
            engine_of(model, tmp_path / "engine")
    del tensors["embeddings.token_type_embeddings.weight"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensors: bert\.embeddings\.token_type_embeddings\.weight"):
        engine_of(model, tmp_path / "engine")


def test_adapters_of_other_models_are_refused(served: Served, executor: adaptrt.Executor, tmp_path: Path) -> None:
    directory = served.adapters["lora"]
    assert directory is not None
    fields = json.loads((directory / "adapter_config.json").read_text())
    (tmp_path / "adapter_model.safetensors").write_bytes((directory / "adapter_model.safetensors").read_bytes())
    for task in ("CAUSAL_LM", "SEQ_2_SEQ_LM", "QUESTION_ANS"):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**fields, "task_type": task}))
        with pytest.raises(adaptrt.AdapterError, match=f'task_type = "{task}".*accepted: FEATURE_EXTRACTION'):
            executor.add_adapter("other", tmp_path)


def test_inspect_tells_of_encoders(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["inspect", str(served.engine)]) == 0
    said = capsys.readouterr().out
    assert "none: it is an encoder" in said
    assert "the mean of all, normalised" in said
