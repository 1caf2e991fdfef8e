"""Adapters whose initialisation changed the base, served with their initial adapter, against the trained models."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga

import adaptrt
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.tools.inspect_adapter import describe_adapter
from support.models import ALL_MODULES, ModelSpec, load_model, save_model
from support.served_kinds import FLOAT32_TOLERANCE, engine_of
from support.serving import Answer, collect, make_request

CONFIG = BuildConfig(
    max_batch_size=4,
    max_num_tokens=128,
    max_seq_len=96,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=8),
    plugin_config=PluginConfig(lora_plugin="auto"),
)
PROMPT = np.random.default_rng(5).integers(2, 61, 40).tolist()
SAMPLE = torch.tensor([np.random.default_rng(6).integers(2, 61, 90).tolist()])


def _corda(model: Any, config: peft.LoraConfig) -> None:
    preprocess_corda(model, config, run_model=lambda: model(SAMPLE))


def _lora_ga(model: Any, config: peft.LoraConfig) -> None:
    preprocess_loraga(model, config, lambda: model(SAMPLE, labels=SAMPLE).loss.backward())


def _nothing(model: Any, config: peft.LoraConfig) -> None:
    del model, config


INITS: dict[str, tuple[dict[str, Any], Callable[[Any, peft.LoraConfig], None]]] = {
    "pissa": ({}, _nothing),
    "olora": ({}, _nothing),
    "corda": ({"corda_config": CordaConfig(corda_method="kpm")}, _corda),
    "lora_ga": ({"lora_ga_config": peft.LoraGAConfig()}, _lora_ga),
}


class Trained:
    """An adapter, its initial adapter, and the trained model's logits, computed while PEFT still holds that model."""

    def __init__(self, model_directory: Path, directory: Path, init: str) -> None:
        fields, prepare = INITS[init]
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=ALL_MODULES, init_lora_weights=init, **fields
        )
        base = load_model(model_directory)
        prepare(base, config)
        model = peft.get_peft_model(base, config)
        self.initial, self.adapter = directory / "initial", directory / "adapter"
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(self.initial)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            model.peft_config["default"].init_lora_weights = init
            model.save_pretrained(self.adapter)
            self.logits = model.eval()(torch.tensor([PROMPT])).logits[0].numpy()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(ModelSpec(), tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory) -> Path:
    return engine_of(model, tmp_path_factory.mktemp("engine"), CONFIG)


@pytest.fixture(scope="module", params=list(INITS))
def trained(model: Path, request, tmp_path_factory) -> Trained:
    return Trained(model, tmp_path_factory.mktemp(request.param), request.param)


def check(answer: Answer, expected: np.ndarray) -> None:
    scale = expected.max() - expected.min()
    assert np.abs(answer.context_logits - expected).max() <= FLOAT32_TOLERANCE * scale


def test_it_is_what_was_trained(model: Path, engine: Path, trained: Trained, tmp_path: Path) -> None:
    with torch.no_grad():
        base = load_model(model)(torch.tensor([PROMPT])).logits[0].numpy()
    assert np.abs(base - trained.logits).max() > 0.05 * (base.max() - base.min())
    together = shutil.copytree(trained.adapter, tmp_path / "together")
    shutil.copytree(trained.initial, together / "initial_adapter")
    cache = adaptrt.PeftCacheConfig(host_cache_size=100_000)
    with adaptrt.Executor(
        engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(peft_cache_config=cache)
    ) as executor:
        given = adaptrt.LoraConfig.from_peft(1, together, executor.engine)
        answer = collect(executor, executor.enqueue_request(make_request(PROMPT, 1, given)))
        check(answer, trained.logits)

        def ask(name: str) -> Answer:
            return collect(executor, executor.enqueue_request(make_request(PROMPT, 1), adapter=name))

        executor.add_adapter("together", together)
        assert ask("together").same_bits(answer)
        for number in range(4):
            executor.add_adapter(f"other-{number}", together)
            ask(f"other-{number}")
        assert executor.lora_cache_stats().host_evictions > 0
        assert ask("together").same_bits(answer)
        with pytest.raises(adaptrt.AdapterError, match=r"give the initial adapter, or put it into .* initial_adapter"):
            executor.add_adapter("alone", trained.adapter)


def test_the_engine_carries_both(model: Path, engine: Path, trained: Trained, tmp_path: Path) -> None:
    del engine
    together = shutil.copytree(trained.adapter, tmp_path / "together")
    shutil.copytree(trained.initial, together / "initial_adapter")
    config = BuildConfig(
        max_batch_size=4, max_num_tokens=128, max_seq_len=96, tokens_per_block=8,
        lora_config=LoraBuildConfig(max_lora_rank=8, lora_dir=(together,)),
        plugin_config=PluginConfig(lora_plugin="auto"),
    )  # fmt: skip
    carrying = engine_of(model, tmp_path, config)
    assert describe_adapter(together, carrying).modules[0].rank == 8
    shutil.rmtree(together)
    with adaptrt.Executor(carrying, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        check(collect(executor, executor.enqueue_request(make_request(PROMPT, 1), adapter="together")), trained.logits)
    weights = carrying / "lora" / "0" / "initial_adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with (
        adaptrt.Executor(carrying, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor,
        pytest.raises(adaptrt.EngineError, match="adapter 'together' was changed after the build"),
    ):
        collect(executor, executor.enqueue_request(make_request(PROMPT, 1), adapter="together"))
