"""Embeddings against transformers' hidden states: models with and without lm_head, adapters, and batches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import adaptrt
from adaptrt import PoolingParams, PoolingType
from support.models import ModelSpec
from support.pooled import (
    hidden_states,
    load_bare,
    pooled,
    rows_of,
    run_pooled,
    save_pooled_adapter,
    save_random,
    save_sentence_transformer,
    save_word_tokenizer,
)
from support.serving import build_engine

SPEC = ModelSpec("qwen3", num_key_value_heads=3)
PROMPTS = [[7], [3, 44, 5, 60, 7, 3, 3, 12], [*range(2, 60), *range(2, 40)]]
TYPES = [PoolingType.LAST, PoolingType.CLS, PoolingType.MEAN, PoolingType.ALL]
# Tolerance relative to the range of the values: float32 sums in different orders.
TOLERANCE = 1e-4
# bfloat16 keeps eight bits at each of about forty consecutive roundings.
BFLOAT16_TOLERANCE = 0.05


def text_of(prompt: list[int]) -> str:
    return " ".join(f"t{token}" for token in prompt)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a Qwen3Model without the layers around its decoder, and with sentence-transformers' files."""
    directory = tmp_path_factory.mktemp("embeddings") / "model"
    save_random(transformers.AutoModel.from_config(SPEC.config()), directory)
    save_sentence_transformer(directory, "lasttoken", normalize=True)
    save_word_tokenizer(directory, SPEC.vocab_size)
    return directory


@pytest.fixture(scope="module")
def adapters(model: Path) -> dict[str, Path]:
    bare = {"task_type": "FEATURE_EXTRACTION", "r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    made = {"lora": {**bare, "seed": 1}, "dora": {**bare, "seed": 2, "use_dora": True}}
    for name, fields in made.items():
        save_pooled_adapter(load_bare(model), model.parent / name, **fields)
    return {name: model.parent / name for name in made}


@pytest.fixture(scope="module")
def engine(model: Path) -> Path:
    return build_engine(model, model.parent, max_num_tokens=256)


@pytest.fixture(scope="module")
def llm(engine: Path, adapters: dict[str, Path]) -> Iterator[adaptrt.LLM]:
    with adaptrt.LLM(engine) as made:
        for name, directory in adapters.items():
            made.executor.add_adapter(name, directory)
        yield made


def check(actual: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * float(np.ptp(expected))


@pytest.mark.parametrize("adapter", [None, "lora", "dora"])
def test_rows_are_transformers_hidden_states(llm, model, adapters, adapter: str | None) -> None:
    reference = load_bare(model, adapters.get(adapter))
    for prompt in PROMPTS:
        states = hidden_states(reference, prompt)
        for pooling_type in TYPES:
            for normalize in (False, True):
                params = PoolingParams(pooling_type, normalize=normalize)
                rows = run_pooled(llm.executor, prompt, params, adapter)
                check(rows, pooled(states, pooling_type, normalize=normalize))


def test_llm_embeds_as_the_models_files_say(llm, model, adapters) -> None:
    texts = [text_of(prompt) for prompt in PROMPTS]
    names = [None, "lora", "dora"]
    found = llm.embed(texts, lora=names)
    for prompt, name, rows in zip(PROMPTS, names, found, strict=True):
        # The tokenizer ends a text with </s>; the embedding is the hidden state of that token.
        states = hidden_states(load_bare(model, adapters.get(name)), [*prompt, 1])
        check(rows, pooled(states, PoolingType.LAST, normalize=True))
    one = llm.embed(texts[1], lora="lora")
    assert one.tobytes() == found[1].tobytes()
    stated = llm.embed(texts[1], pooling_type=PoolingType.MEAN, normalize=False)
    check(stated, pooled(hidden_states(load_bare(model), [*PROMPTS[1], 1]), PoolingType.MEAN))


def test_invalid_embedding_requests_are_refused_by_name(llm) -> None:
    with pytest.raises(adaptrt.RequestError, match="pooling_type is ALL; accepted: LAST, CLS, MEAN"):
        llm.embed("t3", pooling_type=PoolingType.ALL)
    with pytest.raises(adaptrt.AdapterError, match="has no adapter named 'nobody'"):
        llm.embed(["t3", "t4"], lora=[None, "nobody"])
    with pytest.raises(adaptrt.RequestError, match="lora has 1 names for 2 prompts"):
        llm.embed(["t3", "t4"], lora=["lora"])
    with pytest.raises(adaptrt.RequestError, match="max_input_len is 640"):
        llm.embed(["t3", text_of([5] * 700)])
    with pytest.raises(adaptrt.RequestError, match=r"pooling_params is None.* the model has no lm_head"):
        llm.generate("t3")
    with pytest.raises(adaptrt.RequestError, match="max_tokens 3 is given with pooling_params"):
        llm.executor.enqueue_request(adaptrt.Request([3], 3, pooling_params=PoolingParams()))
    with pytest.raises(TypeError, match=r"PoolingParams.pooling_type is 'last'.*accepted: PoolingType"):
        PoolingParams("last")
    check(llm.embed("t3"), llm.embed("t3"))


def test_classifiers_layers_are_applied_to_rows(llm) -> None:
    generator = np.random.default_rng(3)
    weight, bias = generator.normal(size=(5, SPEC.hidden_size)), generator.normal(size=5)
    layer = adaptrt.PoolingLayer(weight, bias, adaptrt.PoolingActivation.TANH)
    rows = run_pooled(llm.executor, PROMPTS[1], PoolingParams(PoolingType.ALL))
    made = run_pooled(llm.executor, PROMPTS[1], PoolingParams(PoolingType.ALL, [layer]))
    np.testing.assert_allclose(made, np.tanh(rows.astype(np.float64) @ weight.T + bias), atol=1e-5)


@pytest.mark.parametrize("fields", [{"max_num_tokens": 5}, {"max_num_tokens": 33, "num_threads": 2}])
def test_bits_do_not_depend_on_chunks_or_company(llm, engine, adapters, fields: dict[str, Any]) -> None:
    """The other executor computes prompts in chunks, all of them at once."""
    config = adaptrt.ExecutorConfig(enable_chunked_context=True, **fields)
    cases = [(p, t, name) for p in range(len(PROMPTS)) for t in TYPES for name in (None, "lora", "dora")]
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
        for name, directory in adapters.items():
            executor.add_adapter(name, directory)
        for _ in range(2):  # the second time the prefixes are cached
            ids = [
                executor.enqueue_request(
                    adaptrt.Request(PROMPTS[prompt], 0, pooling_params=PoolingParams(pooling_type)), adapter=name
                )
                for prompt, pooling_type, name in cases
            ]
            for request_id, (prompt, pooling_type, name) in zip(ids, cases, strict=True):
                alone = run_pooled(llm.executor, PROMPTS[prompt], PoolingParams(pooling_type), name)
                assert rows_of(executor, request_id).tobytes() == alone.tobytes()


FAMILIES = {
    "llama": transformers.LlamaConfig(**(shared := {
        "vocab_size": 61, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 12, "intermediate_size": 37, "max_position_embeddings": 1024,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
    })),
    "gemma2": transformers.Gemma2Config(**{**shared, "pad_token_id": 0, "query_pre_attn_scalar": 20}),
    "gpt2": transformers.GPT2Config(
        vocab_size=61, n_embd=36, n_layer=2, n_head=3, n_positions=1024, bos_token_id=0, eos_token_id=1
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_models_with_a_head_embed_beside_what_they_generate(family: str, tmp_path: Path) -> None:
    causal = transformers.AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation="eager")
    directory = save_random(causal, tmp_path / "model")
    engine = build_engine(directory, tmp_path, lora_plugin="disable", dora_plugin="disable")
    reference = load_bare(directory)
    with adaptrt.Executor(engine) as executor:
        assert executor.engine_info.has_logits
        generated = executor.enqueue_request(adaptrt.Request(PROMPTS[1], 4))
        for prompt in PROMPTS:
            states = hidden_states(reference, prompt)
            for pooling_type in TYPES:
                check(run_pooled(executor, prompt, PoolingParams(pooling_type)), pooled(states, pooling_type))
        (response,) = executor.await_responses(generated)
        assert len(response.result.output_token_ids[0]) == len(PROMPTS[1]) + 4
        assert response.result.pooled_output is None


def test_models_that_do_not_say_how_are_asked_to(tmp_path: Path) -> None:
    directory = save_random(transformers.AutoModelForCausalLM.from_config(SPEC.config()), tmp_path / "model")
    save_word_tokenizer(directory, SPEC.vocab_size)
    engine = build_engine(directory, tmp_path, lora_plugin="disable", dora_plugin="disable")
    with adaptrt.LLM(engine) as llm:
        with pytest.raises(adaptrt.RequestError, match=r"does not say how embeddings are pooled.*state pooling_type"):
            llm.embed("t3 t4")
        with pytest.raises(adaptrt.RequestError, match="does not say how"):
            llm.embed("t3 t4", pooling_type=PoolingType.LAST)
        rows = llm.embed("t3 t4", pooling_type=PoolingType.LAST, normalize=False)
        check(rows, hidden_states(load_bare(directory), [3, 4, 1])[-1])


def test_a_causal_model_that_was_saved_without_its_head(tmp_path: Path) -> None:
    """The config.json still names the class of the model that was trained."""
    directory = save_random(transformers.AutoModel.from_config(SPEC.config()), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    save_word_tokenizer(directory, SPEC.vocab_size)
    with pytest.raises(adaptrt.CheckpointError, match=r"missing tensors: lm_head\.weight"):
        adaptrt.LLM(directory)
    save_sentence_transformer(directory, "mean_tokens", normalize=False)
    engine = build_engine(directory, tmp_path)
    with adaptrt.LLM(engine) as llm:
        assert not llm.executor.engine_info.has_logits
        check(llm.embed("t3 t4"), hidden_states(load_bare(directory), [3, 4, 1]).mean(axis=0))


def test_bfloat16_stays_close(model: Path, tmp_path: Path) -> None:
    engine = build_engine(model, tmp_path, "bfloat16")
    reference = load_bare(model)
    with adaptrt.Executor(engine) as executor:
        for prompt in PROMPTS:
            states = hidden_states(reference, prompt)
            for pooling_type in TYPES:
                check(
                    run_pooled(executor, prompt, PoolingParams(pooling_type)),
                    pooled(states, pooling_type),
                    BFLOAT16_TOLERANCE,
                )


def test_an_engine_of_first_use_is_made_anew_when_its_pooling_changes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = Path(shutil.copytree(model, tmp_path / "model"))
    with adaptrt.LLM(directory) as llm:
        last = llm.embed("t3 t4")
    save_sentence_transformer(directory, "cls_token", normalize=True)
    with adaptrt.LLM(directory) as llm:
        first = llm.embed("t3 t4")
    reference = hidden_states(load_bare(model), [3, 4, 1])
    check(last, pooled(reference, PoolingType.LAST, normalize=True))
    check(first, pooled(reference, PoolingType.CLS, normalize=True))
