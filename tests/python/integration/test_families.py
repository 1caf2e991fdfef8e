"""Every family against transformers + PEFT in float32: the same greedy tokens, logits within a stated tolerance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.network.onnx_graph import NetworkOptions
from support.families import FAMILIES, Family, save_family
from support.models import Reference, save_adapter
from support.oracle import NetworkOracle, SequenceChunk
from support.serving import Answer, collect, make_request

# Both sides sum in float32 but in another order, and exp, tanh and erf are polynomials here; over a few layers the
# differences stay some 1e-6 of the range.
FLOAT32_TOLERANCE = 1e-4
CONFIG = BuildConfig(
    max_batch_size=8,
    max_num_tokens=128,
    max_seq_len=256,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=16),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
ADAPTERS = {"lora": {"r": 5}, "rslora": {"r": 16, "use_rslora": True}, "dora": {"r": 4, "use_dora": True}}
LENGTHS = [3, 17, 40, 90]


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng((seed, length)).integers(2, 61, length).tolist()


class Served:
    """A family's model, its adapters on every linear layer, and its engine."""

    def __init__(self, family: Family, directory: Path) -> None:
        self.model = save_family(family, directory / "model")
        self.adapters: dict[str, Path | None] = {"base": None}
        for seed, (name, settings) in enumerate(ADAPTERS.items()):
            fields = {"target_modules": family.targets, **settings}
            self.adapters[name] = save_adapter(self.model, directory / name, seed, **fields)
        convert_checkpoint(self.model, directory / "checkpoint")
        build(directory / "checkpoint", CONFIG, directory / "engine")
        self.directory = directory
        self.engine = directory / "engine"

    def lora(self, number: int, name: str) -> adaptrt.LoraConfig | None:
        adapter = self.adapters[name]
        return None if adapter is None else adaptrt.LoraConfig.from_peft(number, adapter, self.engine)

    def answers(self, cases: list[tuple[str, list[int]]], **fields: object) -> list[Answer]:
        """What each (adapter, prompt) gives, all of them at once."""
        names = list(self.adapters)
        config = adaptrt.ExecutorConfig(**fields)
        with adaptrt.Executor(self.engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
            requests = [make_request(prompt, 10, self.lora(names.index(name), name)) for name, prompt in cases]
            return [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, tmp_path_factory) -> Served:
    return Served(FAMILIES[request.param], tmp_path_factory.mktemp(request.param))


def cases(served: Served) -> list[tuple[str, list[int]]]:
    return [
        (name, prompt_of(length, seed))
        for seed, (name, length) in enumerate(zip(served.adapters, LENGTHS, strict=True))
    ]


def test_every_kind_of_adapter_in_one_batch(served: Served) -> None:
    for (name, prompt), answer in zip(cases(served), served.answers(cases(served)), strict=True):
        expected = Reference(served.model, served.adapters[name]).logits(prompt, answer.tokens).numpy()
        actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
        scale = expected.max() - expected.min()
        assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * scale, name
        assert answer.tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist()


def test_a_crowd_changes_no_bit(served: Served) -> None:
    chunks = {"enable_chunked_context": True, "max_num_tokens": 16, "num_threads": 3}
    together = served.answers(cases(served), **chunks)
    for case, answer in zip(cases(served), together, strict=True):
        (alone,) = served.answers([case], num_threads=1)
        assert answer.same_bits(alone), case[0]


def test_the_graph_computes_the_same(served: Served, tmp_path: Path) -> None:
    oracle = NetworkOracle(served.directory / "checkpoint", tmp_path, NetworkOptions(tokens_per_block=8))
    prompt = prompt_of(40, 5)
    logits = [
        oracle.step([SequenceChunk(prompt[first:last], first, len(prompt), [5, 3, 9, 1, 2])])
        for first, last in ((0, 23), (23, 39), (39, 40))
    ]
    expected = Reference(served.model).logits(prompt).numpy()
    scale = expected.max() - expected.min()
    assert np.abs(np.concatenate(logits) - expected).max() <= FLOAT32_TOLERANCE * scale
