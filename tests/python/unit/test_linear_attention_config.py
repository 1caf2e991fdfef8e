"""Configs and checkpoints of families with linear attention."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adaptrt import _core
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.engine.build_config import TENSORRT, BuildConfig, TensorRtBuildConfig
from adaptrt.formats.models.qwen3_5 import Qwen35Config
from support.families import LINEAR_TARGETS, RECURRENT, save_family
from support.hf_configs import QWEN3_5, read_config
from support.models import save_adapter

TEXT = QWEN3_5["text_config"]


@pytest.fixture
def load(tmp_path: Path) -> Any:
    return partial(read_config, tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(RECURRENT["qwen3.5-vl"], tmp_path_factory.mktemp("qwen3.5-vl") / "model")


def test_a_published_config_is_read(load: Any) -> None:
    config = load(QWEN3_5)
    assert isinstance(config, Qwen35Config)
    assert config.linear_layers == (0, 1, 2)
    assert config.has_states
    assert (config.head_size, config.rotary_size, config.rotary_base) == (256, 64, 1e7)
    assert (config.delta_shape.key_size, config.delta_shape.value_size) == (2048, 2048)
    assert config.share_embedding_table


def test_the_interval_decides_without_layer_types(load: Any) -> None:
    text = {name: value for name, value in TEXT.items() if name != "layer_types"}
    assert load(QWEN3_5, text_config={**text, "full_attention_interval": 2}).linear_layers == (0, 2)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is false; only true is supported"),
        ({"mamba_ssm_dtype": "bfloat16"}, 'mamba_ssm_dtype is "bfloat16"; only "float32" is supported'),
        ({"layer_types": ["linear_attention"]}, "expected 4 times linear_attention or full_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "expected 4 times linear_attention or full_attention"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads 16 is not a multiple of linear_num_key_heads 3"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ({"mtp_loss": 1}, "mtp_loss is 1: an unknown field"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]; only \[\] is supported"),
        (
            {"rope_parameters": {**TEXT["rope_parameters"], "mrope_section": [24, 20, 20]}},
            "expected three integers whose sum is half of the head's rotated elements, 32",
        ),
    ],
)
def test_fields_that_cannot_be_served_are_named(load: Any, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(_core.CheckpointError, match=complaint):
        load(QWEN3_5, text_config={**TEXT, **changes})


def test_tensorrt_is_refused(model: Path, tmp_path: Path) -> None:
    convert_checkpoint(model, tmp_path / "checkpoint", dtype=_core.DType.BFLOAT16)
    tensorrt = BuildConfig(max_seq_len=64, backend=TENSORRT, tensorrt_config=TensorRtBuildConfig())
    with pytest.raises(_core.ConfigError, match="keeps states, which need backend native"):
        build(tmp_path / "checkpoint", tensorrt, tmp_path / "engine")


def test_text_and_its_heads_for_several_tokens(model: Path, tmp_path: Path) -> None:
    """Heads that predict several tokens and the vision tower are left out; both layouts are the same text."""
    tensors = load_file(model / "model.safetensors")
    text = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in tensors.items()
        if not name.startswith("model.visual.")
    }
    made = tmp_path / "text"
    config = RECURRENT["qwen3.5"].config()
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.save_pretrained(made)
    save_file({**text, "mtp.fc.weight": np.zeros((2, 2), np.float32)}, made / "model.safetensors")
    convert_checkpoint(model, tmp_path / "1", dtype=_core.DType.FLOAT32)
    converted = convert_checkpoint(made, tmp_path / "2", dtype=_core.DType.FLOAT32)
    assert converted.left_out.describe() == ["1 tensor of heads that predict several tokens (MTP), which are not used"]
    weights = [(tmp_path / name / "rank0.safetensors").read_bytes() for name in ("1", "2")]
    assert weights[0] == weights[1]
    save_file({**text, "mtq.fc.weight": np.zeros((2, 2), np.float32)}, made / "model.safetensors")
    with pytest.raises(_core.CheckpointError, match=r"mtq\.fc\.weight"):
        convert_checkpoint(made, tmp_path / "3", dtype=_core.DType.FLOAT32)


def test_queries_and_gates_alternate_in_adapters(tmp_path: Path) -> None:
    """The rows of B of q_proj are [q | gate] of each head; those of the module are all of q, then all gates."""
    family = RECURRENT["qwen3.5"]
    base = save_family(family, tmp_path / "model")
    adapter = save_adapter(base, tmp_path / "adapter", 0, r=3, lora_alpha=3, target_modules=["q_proj", *LINEAR_TARGETS])
    made = convert_adapter(adapter, storage_dtype="float32", base=base)
    ids = {info.name: info.id for info in _core.lora_modules()}
    row = next(row for row, of_row in enumerate(made.config[0]) if of_row[0] == ids["attn_q_gate"])
    assert made.config[0, row, 1] == 1  # the layer with attention
    b = load_file(adapter / "adapter_model.safetensors")[
        "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    ]
    heads = b.reshape(4, 2, 20, 3)
    expected = np.concatenate([heads[:, 0].reshape(-1, 3), heads[:, 1].reshape(-1, 3)])
    found = made.weights[0, row, 3 * 40 : 3 * 40 + expected.size].reshape(expected.shape)
    np.testing.assert_array_equal(found, expected)
