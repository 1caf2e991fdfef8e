"""Meaning of paths of PEFT adapters in each family, with and without the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from adaptrt import _core
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.adapter.names import parse_tensor_name
from adaptrt.formats.checkpoint.config import ParallelMapping
from adaptrt.formats.hugging_face.hf_config import load_hf_config
from adaptrt.formats.models.registry import declare
from adaptrt.formats.network.adapter_sites import AdaptedModules
from support.adapters import TENSORS, edit_config, edit_tensors
from support.families import FAMILIES, save_family
from support.models import ModelSpec, save_adapter, save_model


def modules_of(model: Path) -> AdaptedModules:
    return AdaptedModules(declare(load_hf_config(model, dtype=_core.DType.FLOAT32, mapping=ParallelMapping())))


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("model.layers.3.self_attn.q_proj", "attn_q"),
        ("layers.3.self_attn.q_proj", "attn_q"),
        ("model.layers.3.self_attn.qkv_proj", "attn_qkv"),
        ("model.layers.3.mlp.gate_up_proj", "mlp_gate_up"),
        ("model.layers.3.self_attn.dense", "attn_dense"),
        ("model.layers.3.mlp.fc2", "mlp_4h_to_h"),
        ("model.layers.3.mlp.c_fc", "mlp_h_to_4h"),
        ("transformer.h.3.attn.c_attn", "attn_qkv"),
        ("h.3.attn.c_proj", "attn_dense"),
        ("transformer.h.3.mlp.c_proj", "mlp_4h_to_h"),
        ("gpt_neox.layers.3.attention.dense", "attn_dense"),
        ("gpt_neox.layers.3.mlp.dense_4h_to_h", "mlp_4h_to_h"),
    ],
)
def test_paths_that_mean_one_thing_in_all_families(path: str, module: str) -> None:
    found = parse_tensor_name(f"base_model.model.{path}.lora_A.weight")
    assert not isinstance(found, str), found
    assert (found.key.layer, found.key.module.name, found.key.path) == (3, module, path)


@pytest.mark.parametrize("path", ["transformer.layers.3.self_attn.q_proj", "gpt_neox.h.3.attention.dense"])
def test_paths_of_no_family_are_refused(path: str) -> None:
    assert isinstance(parse_tensor_name(f"base_model.model.{path}.lora_A.weight"), str)


def test_an_order_that_depends_on_the_model_needs_the_model(tmp_path: Path) -> None:
    """GPT-NeoX interleaves q, k and v by head; the module has all of q, all of k, all of v."""
    family = FAMILIES["gpt-neox"]
    model = save_family(family, tmp_path / "model")
    adapter = save_adapter(model, tmp_path / "adapter", 0, r=3, lora_alpha=3, target_modules=["query_key_value"])
    with pytest.raises(_core.AdapterError, match=r"order of the outputs of attention\.query_key_value depends"):
        convert_adapter(adapter, storage_dtype="float32")
    converted = convert_adapter(adapter, storage_dtype="float32", base=model)
    assert converted.config[0, 0].tolist() == [0, 0, 3, 0]
    tensors = load_file(adapter / TENSORS)
    b = tensors["base_model.model.gpt_neox.layers.0.attention.query_key_value.lora_B.weight"]
    heads = b.reshape(3, 3, 12, 3)  # [head, one of q, k and v, element, rank]
    expected = np.concatenate([heads[:, part].reshape(36, 3) for part in range(3)])
    np.testing.assert_array_equal(converted.weights[0, 0, 3 * 36 :].reshape(108, 3), expected)


def test_a_layer_that_the_model_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    """An adapter of q_proj does not fit a model with qkv_proj; PEFT refuses it as well."""
    llama = save_model(ModelSpec(intermediate_size=38, num_hidden_layers=3), tmp_path / "llama")
    phi3 = save_family(FAMILIES["phi3"], tmp_path / "phi3")
    adapter = save_adapter(llama, tmp_path / "adapter", 0, r=3, target_modules=["q_proj"])
    with pytest.raises(_core.AdapterError) as error:
        convert_adapter(adapter, storage_dtype="float32", modules=modules_of(phi3))
    assert str(error.value).endswith(
        "module 'model.layers.0.self_attn.q_proj' does not exist in the model, which has embed_tokens, qkv_proj, "
        "o_proj, gate_up_proj, down_proj, lm_head (and for 2 other layers)"
    )


def test_a_fused_layer_is_served_by_a_model_that_has_its_parts(tmp_path: Path) -> None:
    phi3 = save_family(FAMILIES["phi3"], tmp_path / "phi3")
    llama = save_model(ModelSpec(intermediate_size=38, num_hidden_layers=3), tmp_path / "llama")
    adapter = save_adapter(phi3, tmp_path / "adapter", 0, r=3, target_modules=["gate_up_proj", "qkv_proj"])
    by_llama = convert_adapter(adapter, storage_dtype="float32", modules=modules_of(llama))
    by_phi3 = convert_adapter(adapter, storage_dtype="float32", modules=modules_of(phi3))
    np.testing.assert_array_equal(by_llama.weights, by_phi3.weights)
    np.testing.assert_array_equal(by_llama.config, by_phi3.config)


def test_a_fused_layer_beside_its_part_is_refused(tmp_path: Path) -> None:
    phi3 = save_family(FAMILIES["phi3"], tmp_path / "phi3")
    adapter = save_adapter(phi3, tmp_path / "adapter", 0, r=3, target_modules=["qkv_proj"])
    edit_tensors(adapter, lambda t: {**t, **{n.replace("qkv_proj", "q_proj"): v for n, v in t.items()}})
    edit_config(adapter, target_modules=["qkv_proj", "q_proj"])
    with pytest.raises(_core.AdapterError, match=r"qkv_proj' and its part .*q_proj' are both"):
        convert_adapter(adapter, storage_dtype="float32")
