"""A declared network is reused for configs that differ only in weight storage, and equals a new declaration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adaptrt._core import QuantAlgo
from adaptrt.formats.checkpoint.config import CheckpointConfig
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.models.registry import FAMILIES, TOWERS, declare, specimen
from adaptrt.formats.network.network import Network
from adaptrt.formats.network.ops import Experts, Linear

PLAIN = QuantConfig(quant_algo=QuantAlgo.W8A16)


def names_of_layers(network: Network) -> list[str]:
    layers = [op.weights for op in network.ops if isinstance(op, Linear) and op.output != network.logits]
    layers += [(*op.gate, *op.up, *op.down) for op in network.ops if isinstance(op, Experts)]
    return [str(weight.name) for weights in layers for weight in weights]


def variants(known: Network) -> list[CheckpointConfig]:
    config, names = known.config, names_of_layers(known)
    exclusions = ((), ("lm_head",), (names[0], names[-1]), (*names[1:], "lm_head"))
    return [
        replace(config, int8_kv_cache=not config.is_encoder_only),
        *(replace(config, quantization=replace(PLAIN, exclude_modules=excluded)) for excluded in exclusions),
    ]


def test_the_table_names_each_family_by_its_architecture() -> None:
    found = {name: family.architecture for table in (FAMILIES, TOWERS) for name, family in table.items()}
    assert list(found) == list(found.values())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_stored_network_is_the_declared_one(name: str, tied: bool) -> None:
    known = declare(replace(specimen(FAMILIES[name]).config, share_embedding_table=tied))
    before = list(known.ops)
    for config in variants(known):
        stored, declared = declare(config, known), declare(config)
        assert stored.config == config
        assert stored.ops == declared.ops
        assert (stored.logits, stored.layer_ops) == (declared.logits, declared.layer_ops)
        assert known.stored_as(config) is not None
    assert known.ops == before


def test_another_network_is_declared_anew() -> None:
    config = specimen(FAMILIES["LlamaForCausalLM"]).config
    known = declare(replace(config, quantization=replace(PLAIN, exclude_modules=("lm_head",))))
    for other in (replace(config, vocab_size=9), replace(config, quantization=PLAIN)):
        assert known.stored_as(other) is None
        assert declare(other, known).ops == declare(other).ops
