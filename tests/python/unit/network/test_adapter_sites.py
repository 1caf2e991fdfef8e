"""Adapter sites: a network determines those of engines and of its graph, and the meaning of PEFT paths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from onnx import helper

from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.network.onnx_graph import NetworkOptions
from adaptrt.formats.engine.build_config import PluginConfig
from adaptrt.formats.network.adapter_sites import AdaptedModules, adapter_sites, module_id
from support.engines import SMALL, compile_model, make_checkpoint, make_graph
from support.models import ModelSpec


@pytest.mark.parametrize("dora", [False, True])
def test_sites_are_those_of_the_engine_and_the_nodes_of_the_graph(tmp_path: Path, dora: bool) -> None:
    spec = ModelSpec(family="qwen3", extra=(("attention_bias", True),))
    opened = Checkpoint.open(make_checkpoint(spec, tmp_path))
    sites = adapter_sites(opened.network)
    expected = [
        (site.layer, site.in_size, module_id(part), site.outputs_of(part)) for site in sites for part in site.parts
    ]
    plugins = PluginConfig(lora_plugin="auto", dora_plugin="enable" if dora else "disable")
    lora = compile_model(opened, replace(SMALL, plugin_config=plugins)).program.lora
    assert lora is not None
    assert expected == [
        (site.layer, site.in_size, part.module, part.out_size) for site in lora.sites for part in site.parts
    ]
    # Plugins act only on layers.
    assert [expected[0][2:], expected[-1][2:]] == [(27, 36), (26, 61)]
    sites, expected = sites[1:-1], expected[1:-1]
    graph = make_graph(opened, NetworkOptions(tokens_per_block=4, max_lora_rank=8, dora=dora)).graph
    nodes = [node for node in graph.node if node.op_type == ("Dora" if dora else "Lora")]
    found = []
    for node, weight in zip(nodes, (weight for site in sites for weight in site.weights), strict=True):
        attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        parts = zip(attributes["module_ids"], attributes["out_sizes"], strict=True)
        found += [(attributes["layer"], weight.inputs, module, size) for module, size in parts]
        gemm = next(made for made in graph.node if made.output[0] == node.input[1])
        assert gemm.input[1] == f"{weight.name}.weight"
        assert opened.ranks[0].reader.specs[gemm.input[1]].shape == (weight.outputs, weight.inputs)
    assert found == expected
    assert {f"{weight.name}.weight" for site in sites for weight in site.weights} == {
        name for name, spec in opened.ranks[0].reader.specs.items() if ".layers." in name and len(spec.shape) == 2
    }


def test_paths_of_hugging_faces_modules(tmp_path: Path) -> None:
    spec = ModelSpec(num_attention_heads=4, num_key_value_heads=2)
    modules = AdaptedModules(Checkpoint.open(make_checkpoint(spec, tmp_path)).network)
    found = modules.find("model.layers.1.self_attn.k_proj")
    assert found is not None
    assert (found.layer, found.module, found.in_size, found.out_size) == (1, "attn_k", 36, 24)
    assert modules.find("layers.1.self_attn.k_proj") == found
    assert modules.find("model.layers.2.self_attn.k_proj") is None
    assert modules.find("model.layers.1.self_attn.qkv_proj") is None
    assert len(modules.by_path) == 2 * 7 + 2
    head, embedding = modules.find("lm_head"), modules.find("embed_tokens")
    assert head is not None
    assert (head.module, head.in_size, head.out_size, head.tied_to) == ("lm_head", 36, 61, None)
    assert embedding == modules.find("model.embed_tokens")
    assert embedding is not None
    assert (embedding.module, embedding.in_size, embedding.out_size) == ("embedding", 61, 36)
    assert modules.sizes_of(1, "attn_qkv") == (36, 48 + 24 + 24)
    assert modules.sizes_of(0, "mlp_gate_up") == (36, 74)
    assert modules.sizes_of(2, "attn_q") is None
    assert modules.sizes_of(0, "moe_router") is None


def test_a_graph_without_adapters_has_no_nodes_for_them(tmp_path: Path) -> None:
    opened = Checkpoint.open(make_checkpoint(ModelSpec(), tmp_path))
    graph = make_graph(opened, NetworkOptions(tokens_per_block=4)).graph
    assert not {node.op_type for node in graph.node} & {"Lora", "Dora"}
