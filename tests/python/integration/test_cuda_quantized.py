"""Engines of backend cuda with int8 and int4 weights, on an emulated device, against transformers + PEFT with the
values that these weights stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import adaptrt
from adaptrt._core import QuantAlgo
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.dequantized import dequantized_model
from support.emulated_cuda import emulate
from support.models import ALL_MODULES, ATTENTION_MODULES, ModelSpec, Reference, save_adapter, save_model
from support.serving import Answer, collect, make_request

# Layers have 64, 96 and 128 inputs, and the last group of 96 is smaller than the others. The vocabulary is odd.
SPEC = ModelSpec(
    vocab_size=97,
    hidden_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    intermediate_size=96,
)
SIZES = BuildConfig(
    max_batch_size=4,
    max_num_tokens=24,
    max_seq_len=64,
    tokens_per_block=16,
    backend="cuda",
    lora_config=LoraBuildConfig(max_lora_rank=4),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
# Maximum difference of logits relative to their range: see test_cuda_emulated.py.
TOLERANCE = {"float16": 0.004, "bfloat16": 0.03}
# Tokens use all experts: where two are nearly tied, rounding chooses other ones.
EXPERTS = replace(SPEC, family="mixtral", extra=(("num_local_experts", 4), ("num_experts_per_tok", 4)))
WAYS = {
    "w8a16": (SPEC, QuantConfig(quant_algo=QuantAlgo.W8A16), "float16"),
    "w4a16": (SPEC, QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=64), "float16"),
    "w4a16 zeros": (SPEC, QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=32, has_zero_point=True), "bfloat16"),
    "w4a16 experts": (EXPERTS, QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=32, has_zero_point=True), "float16"),
}
PROMPTS = [np.random.default_rng(length).integers(2, 97, length).tolist() for length in (30, 9, 12)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name == "w4a16" else name for name in WAYS]
)
def test_logits_and_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests for the base model, LoRA and DoRA: logits in one batch, with a prompt in chunks, and bits alone."""
    emulate(monkeypatch)
    spec, how, dtype = WAYS[name]
    model = save_model(spec, tmp_path / "model", dtype=getattr(torch, dtype))
    modules = ATTENTION_MODULES if spec is EXPERTS else ALL_MODULES
    dequantized = dequantized_model(model, tmp_path / "dequantized", how)
    lora = save_adapter(model, tmp_path / "lora", seed=1, r=4, target_modules=modules)
    dora = save_adapter(dequantized, tmp_path / "dora", seed=2, r=3, target_modules=modules, use_dora=True)
    convert_checkpoint(model, tmp_path / "checkpoint", dtype=getattr(adaptrt.DType, dtype.upper()), quantization=how)
    build(tmp_path / "checkpoint", SIZES, tmp_path / "engine")
    adapters = (None, lora, dora)
    config = adaptrt.ExecutorConfig(enable_chunked_context=True)
    with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY, config) as executor:

        def ask(number: int) -> int:
            path = adapters[number]
            given = None if path is None else adaptrt.LoraConfig.from_peft(number, path, executor.engine)
            return executor.enqueue_request(make_request(PROMPTS[number], 2, given))

        together = [collect(executor, request_id) for request_id in [ask(number) for number in range(3)]]
        alone = [collect(executor, ask(number)) for number in range(3)]
    for number, answer in enumerate(together):
        assert answer.same_bits(alone[number])
        assert difference(answer, Reference(dequantized, adapters[number]), PROMPTS[number]) <= TOLERANCE[dtype]
    # So the comparison would notice weights that are not quantised, and adapters without effect.
    assert difference(together[0], Reference(model), PROMPTS[0]) > 2 * TOLERANCE["float16"]
    for number in (1, 2):
        assert difference(together[number], Reference(dequantized), PROMPTS[number]) > 2 * TOLERANCE[dtype]


def difference(answer: Answer, reference: Reference, prompt: list[int]) -> float:
    """Returns the maximum difference of logits relative to the range of the reference's."""
    expected = reference.logits(prompt, answer.tokens).numpy()
    actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max() / (expected.max() - expected.min()))
