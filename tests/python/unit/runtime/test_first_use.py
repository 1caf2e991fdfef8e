"""Sizes that an engine cannot have are refused before building, with the same error as from the executor."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptrt import LLM, ConfigError, DraftTargetDecodingConfig, ExecutorConfig, KvCacheConfig, PeftCacheConfig
from adaptrt._core import DType, QuantAlgo
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.model_cache import first_use as builder_first_use
from adaptrt.builder.model_cache.options import EngineOptions
from adaptrt.builder.model_cache.store import EngineCache
from adaptrt.common.progress import SilentProgress
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.engine.engine_file import EngineFile, EngineLayout
from adaptrt.formats.sources import find_model
from adaptrt.runtime import executor as executor_module
from adaptrt.runtime import first_use
from adaptrt.runtime.executor import Executor
from adaptrt.runtime.first_use import ModelOrEngine, check_config, make_engines
from support.models import ModelSpec, save_model
from support.tokenizers import byte_level, save_tokenizer

SPEC = ModelSpec(
    hidden_size=64, head_dim=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=96, vocab_size=300
)
SMALL = {"max_batch_size": 2, "max_num_tokens": 64, "max_seq_len": 96, "max_lora_rank": 8}
KINDS: dict[str, EngineOptions] = {
    "float32": EngineOptions(dtype=DType.FLOAT32, **SMALL),
    "compressed": EngineOptions(compress_weights=True, **SMALL),
    "int8": EngineOptions(
        quantization=QuantConfig(quant_algo=QuantAlgo.W8A16), int8_activations=True, int8_kv_cache=True, **SMALL
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(SPEC, tmp_path_factory.mktemp("first-use") / "model", dtype=torch.bfloat16)
    save_tokenizer(byte_level(), directory)
    return directory


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCache]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield EngineCache()


def planned(model: Path, kind: str) -> ModelOrEngine:
    return ModelOrEngine.of(find_model(model), KINDS[kind])


def bad_sizes(model: Path) -> dict[str, ExecutorConfig]:
    """Returns configurations that no engine of these tests accepts, by a part of their error."""
    draft = DraftTargetDecodingConfig(speculative_model_dir=str(model), kv_cache_size=1)
    drafts_adapters = copy.copy(draft)
    drafts_adapters.kv_cache_size = None
    drafts_adapters.peft_cache_config = PeftCacheConfig(host_cache_size=2)
    return {
        "host_cache_size gives the host level 1 bytes": ExecutorConfig(
            peft_cache_config=PeftCacheConfig(host_cache_size=1)
        ),
        "num_host_module_layer gives the host level": ExecutorConfig(
            peft_cache_config=PeftCacheConfig(num_host_module_layer=1)
        ),
        "device_cache_percent gives the device level 0 pages": ExecutorConfig(
            peft_cache_config=PeftCacheConfig(device_cache_percent=1e-15)
        ),
        "max_tokens is 1, less than one block": ExecutorConfig(kv_cache_config=KvCacheConfig(max_tokens=1)),
        "host_cache_size is 5000; one KV block takes": ExecutorConfig(
            kv_cache_config=KvCacheConfig(host_cache_size=5000, host_cache_dir=str(model))
        ),
        "weight_memory is 1; accepted: ": ExecutorConfig(weight_memory=1),
        "max_batch_size is 3": ExecutorConfig(max_batch_size=3),
        "kv_cache_size is 1, less than one KV block": ExecutorConfig(draft_target_decoding_config=draft),
        "host_cache_size gives the host level 2 bytes": ExecutorConfig(draft_target_decoding_config=drafts_adapters),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_size_is_refused_in_the_words_of_the_executor(
    saved: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelOrEngine.of(find_model(shutil.copytree(saved, tmp_path / "model")), KINDS[kind])
    with monkeypatch.context() as patch:
        patch.setattr(builder_first_use, "_make", lambda *_: pytest.fail("an engine is made"))
        said = {}
        for part, config in bad_sizes(model.directory).items():
            draft = model if config.draft_target_decoding_config is not None else None
            with pytest.raises(ConfigError, match=part) as refused:
                make_engines(config, model, draft, SilentProgress())
            said[part] = str(refused.value)
    engine = model.engine(SilentProgress())
    for part, config in bad_sizes(engine).items():
        config.num_threads = 1
        with pytest.raises(ConfigError) as refused:
            Executor(engine, executor_config=config)
        assert str(refused.value) == said[part]
        # An engine that exists is checked like one that does not.
        of_engine = ModelOrEngine(engine, None)
        with pytest.raises(ConfigError) as refused:
            check_config(config, of_engine, of_engine)
        assert str(refused.value) == said[part]
    assert not list(model.directory.glob("kv_cache*")), "a file was made for a size that is refused"


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_just_suffice_are_taken(saved: Path, kind: str) -> None:
    model = planned(saved, kind)
    needed: dict[str, int] = {}
    for part, words in (
        ("weight_memory", "accepted: "),
        ("host level 1 bytes", "needs "),
        ("; one KV block", "takes "),
    ):
        (config,) = (config for text, config in bad_sizes(saved).items() if part in text)
        with pytest.raises(ConfigError) as refused:
            check_config(config, model)
        needed[part] = int(str(refused.value).split(words)[1].split()[0].rstrip(";"))
    config = ExecutorConfig(
        num_threads=1,
        weight_memory=needed["weight_memory"],
        peft_cache_config=PeftCacheConfig(host_cache_size=needed["host level 1 bytes"]),
        kv_cache_config=KvCacheConfig(host_cache_size=needed["; one KV block"], host_cache_dir=str(saved.parent)),
    )
    check_config(config, model)
    with Executor(model.engine(SilentProgress()), executor_config=config):
        pass
    config.weight_memory = needed["weight_memory"] - 1
    with pytest.raises(ConfigError, match=f"weight_memory is {config.weight_memory}; accepted: "):
        check_config(config, model)


@pytest.mark.parametrize("kind", KINDS)
def test_the_planned_file_is_the_written_file_without_its_weights(saved: Path, kind: str) -> None:
    model = planned(saved, kind)
    assert model.plan is not None
    compiled = model.plan.compile(compress_weights=True)
    plan = EngineLayout.planned(compiled.program, compiled.tensors)
    made = EngineLayout.of_file(model.engine(SilentProgress()) / "rank0.engine")
    assert plan.program == made.program
    assert plan.num_bytes == made.num_bytes
    assert places(plan) == places(made)
    assert not plan.file_bytes.any()


def places(layout: EngineLayout) -> dict[str, tuple[str, int, int]]:
    """Returns type, offset and size of each tensor except padding."""
    begin = layout.file_bytes.ctypes.data
    return {
        name: (str(tensor.dtype), tensor.ctypes.data - begin, tensor.nbytes)
        for name, tensor in layout.tensors.items()
        if not name.startswith("__padding")
    }


def test_a_plan_reads_no_weights_unless_their_sizes_depend_on_them(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineFile, "__init__", lambda *_, **__: pytest.fail("a whole engine is read"))
    config = ExecutorConfig(weight_memory=1 << 30)
    for kind, options in KINDS.items():
        model = planned(saved, kind)
        assert model.plan is not None
        compiled = model.plan.compile()
        plain = [
            dataclasses.replace(tensor, pieces=lambda: pytest.fail("weights are packed")) for tensor in compiled.tensors
        ]
        EngineLayout.planned(compiled.program, plain)
        check_config(config, model)
        matrices = compiled.linear_matrices
        assert options.compress_weights is False or all(matrix.outliers is None for matrix in matrices)


def test_ranks_that_no_file_or_weight_memory_serves_are_refused_early(saved: Path, tmp_path: Path) -> None:
    convert_checkpoint(saved, tmp_path / "ranks", pp_size=2)
    model = ModelOrEngine.of(find_model(tmp_path / "ranks"), EngineOptions(**SMALL))
    with pytest.raises(ConfigError, match=r"weight_memory is 5; accepted: None and 0, because .*ranks is an engine of"):
        check_config(ExecutorConfig(weight_memory=5), model)
    file = KvCacheConfig(host_cache_size=1 << 30, host_cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="not known by their weights"):
        check_config(ExecutorConfig(kv_cache_config=file), model)
    with pytest.raises(ConfigError, match="host_cache_size gives the host level 1 bytes"):
        check_config(ExecutorConfig(peft_cache_config=PeftCacheConfig(host_cache_size=1)), model)
    check_config(ExecutorConfig(kv_cache_config=KvCacheConfig(max_attention_window=[96, 96])), model)


def test_llm_refuses_sizes_before_anything_is_built(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder_first_use, "_make", lambda *_: pytest.fail("an engine is made"))
    model = shutil.copytree(saved, tmp_path / "model")
    options = EngineOptions(**SMALL, max_beam_width=2)
    for part, config in bad_sizes(model).items():
        drafts = config.draft_target_decoding_config
        plain = ExecutorConfig() if drafts is not None else config
        with pytest.raises(ConfigError, match=part):
            LLM(model, plain, engine_options=options, speculative_config=drafts)
    with pytest.raises(ConfigError, match="kernels is 'nope'"):
        LLM(model, kernels="nope", engine_options=options)


def test_the_draft_models_engine_is_built_and_the_callers_config_stays(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = planned(saved, "float32")
    given = ExecutorConfig(
        max_batch_size=1,
        draft_target_decoding_config=DraftTargetDecodingConfig(speculative_model_dir=str(saved), max_draft_len=2),
    )
    engine, config = make_engines(given, model, model, SilentProgress())
    made, kept = config.draft_target_decoding_config, given.draft_target_decoding_config
    assert made is not None
    assert kept is not None
    assert (made.speculative_model_dir, made.max_draft_len) == (str(engine), 2)
    assert (kept.speculative_model_dir, config.max_batch_size) == (str(saved), 1)
    # The engine exists, so only the executor checks the sizes.
    monkeypatch.setattr(first_use, "check_config", lambda *_: pytest.fail("an engine is planned again"))
    assert make_engines(given, model, None, SilentProgress()) == (engine, given)


@pytest.mark.parametrize("compare", [True, False])
def test_vocabularies_are_compared_once(saved: Path, monkeypatch: pytest.MonkeyPatch, compare: bool) -> None:
    engine = planned(saved, "float32").engine(SilentProgress())
    compared: list[Any] = []
    count: Callable[..., None] = lambda *files: compared.append(files)  # noqa: E731
    monkeypatch.setattr(executor_module, "check_draft_vocabulary", count)
    monkeypatch.setattr(first_use, "check_draft_vocabulary", count)
    drafts = DraftTargetDecodingConfig(speculative_model_dir=str(engine))
    config = ExecutorConfig(num_threads=1, draft_target_decoding_config=drafts)
    with Executor(engine, executor_config=config, compare_vocabularies=compare):
        assert len(compared) == compare
    compared.clear()
    with LLM(engine, ExecutorConfig(num_threads=1), speculative_config=drafts):
        assert len(compared) == 1
