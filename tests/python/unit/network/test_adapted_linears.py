"""What is read from the graph of where adapters act is what the native compiler finds there."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptrt.builder.network.adapted_linears import adapted_linears
from adaptrt.builder.network.decoder import NetworkOptions
from support.engines import LORA, compile_model, make_checkpoint, make_network
from support.models import ModelSpec


@pytest.mark.parametrize("dora", [False, True])
def test_linears_are_the_native_engines_sites(tmp_path: Path, dora: bool) -> None:
    opened, model = make_network(
        make_checkpoint(ModelSpec(family="qwen3", extra=(("attention_bias", True),)), tmp_path),
        NetworkOptions(tokens_per_block=4, max_lora_rank=8, dora=dora),
    )
    found = [
        (linear.layer, linear.in_size, module, out_size)
        for linear in adapted_linears(model)
        for module, out_size in zip(linear.module_ids, linear.out_sizes, strict=True)
    ]
    lora = compile_model(opened, model, type(LORA)(max_rank=8, dora_enabled=dora, target_modules=())).program.lora
    assert lora is not None
    assert found == [
        (site.layer, site.in_size, part.module, part.out_size) for site in lora.sites for part in site.parts
    ]
    for linear in adapted_linears(model):
        assert opened.reader.specs[linear.weight].shape == (sum(linear.out_sizes), linear.in_size)
    assert {linear.weight for linear in adapted_linears(model)} == {
        name for name, spec in opened.reader.specs.items() if ".layers." in name and len(spec.shape) == 2
    }


def test_a_network_without_adapters_has_none(tmp_path: Path) -> None:
    _, model = make_network(make_checkpoint(ModelSpec(), tmp_path), NetworkOptions(tokens_per_block=4))
    assert adapted_linears(model) == []
