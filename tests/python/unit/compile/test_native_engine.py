"""The native engine against onnx.reference on the same graph: two independent implementations of one network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adaptrt._core import CpuEngine
from adaptrt.builder.network.onnx_graph import NetworkOptions
from adaptrt.formats.checkpoint.config import CheckpointConfig
from adaptrt.formats.engine.build_config import PluginConfig
from adaptrt.formats.models import llama
from adaptrt.formats.network.network import Network
from adaptrt.formats.network.operands import AttentionShape
from adaptrt.formats.network.ops import Attention
from adaptrt.runtime.engine import load_engine
from support.engines import SMALL, make_engine
from support.models import ModelSpec
from support.oracle import NetworkOracle, SequenceChunk, step_inputs

# Both compute in float32, in different orders.
TOLERANCE = 1e-4

MODELS = {
    "llama": ModelSpec(),
    "llama-head80-biases": ModelSpec(
        hidden_size=40, num_attention_heads=2, num_key_value_heads=2, head_dim=80,
        extra=(("attention_bias", True), ("mlp_bias", True)),
    ),
    "llama-tied-dynamic": ModelSpec(max_position_embeddings=10, tie_word_embeddings=True, extra=(
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),)),
    "llama-yarn": ModelSpec(extra=(("rope_parameters", {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}),)),
    "mistral-window": ModelSpec(family="mistral", extra=(("sliding_window", 5),)),
    "qwen2": ModelSpec(family="qwen2", num_attention_heads=4, num_key_value_heads=4),
    "qwen3": ModelSpec(family="qwen3", head_dim=80, num_attention_heads=4, num_key_value_heads=2),
}  # fmt: skip


@pytest.mark.parametrize("lora", ["disable", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_prefill_chunks_and_decode_of_a_batch(name: str, lora: str, tmp_path: Path) -> None:
    check_steps(MODELS[name], lora, tmp_path)


def test_heads_that_differ_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def declare_other_heads(network: Network, config: CheckpointConfig) -> None:
        """Declares Llama with a second layer that has half as many heads of twice the size."""
        family.declare(network, config)
        for at, op in enumerate(network.ops):
            if isinstance(op, Attention) and op.layer == 1:
                shape = AttentionShape(
                    num_attention_heads=op.shape.num_attention_heads // 2,
                    num_key_value_heads=op.shape.num_key_value_heads // 2,
                    head_dim=2 * op.shape.head_dim,
                )
                network.ops[at] = replace(op, shape=shape)

    family = llama.LLAMA
    monkeypatch.setattr(llama, "LLAMA", replace(family, declare=declare_other_heads))
    check_steps(ModelSpec(num_attention_heads=4, num_key_value_heads=2), "auto", tmp_path)


def check_steps(spec: ModelSpec, lora: str, tmp_path: Path) -> None:
    config = replace(SMALL, plugin_config=PluginConfig(lora_plugin=lora))
    make_engine(spec, tmp_path, config)
    engine = load_engine(tmp_path / "engine")
    native = CpuEngine(engine.program, engine.storage, 2)
    native.allocate_kv_blocks(32)
    oracle = NetworkOracle(tmp_path / "checkpoint", tmp_path, NetworkOptions(tokens_per_block=4))
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, spec.vocab_size, length).tolist() for length in (13, 4, 9)]
    blocks = rng.permutation(32)[:24].reshape(3, 8).tolist()
    for first, last in ((0, 4), (4, 9), (9, 10), (10, 13)):
        chunks = [
            SequenceChunk(prompt[first:last], first, len(prompt), blocks[sequence])
            for sequence, prompt in enumerate(prompts)
            if first < len(prompt)
        ]
        expected = oracle.step(chunks)
        inputs = step_inputs(chunks)
        del inputs["adapter_slots"]
        actual = native.step(token_ids=inputs.pop("input_ids"), **inputs)
        assert actual.shape == expected.shape
        assert np.abs(actual - expected).max() <= TOLERANCE * (expected.max() - expected.min())
