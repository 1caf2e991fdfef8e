"""ReLU-gated MLPs on backend cuda whose neurons do not all fit on an emulated device: the same bits as if they did."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.mistral.modeling_mistral import MistralMLP

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.formats.engine.build_config import DISABLE, BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.formats.engine.weight_usage import WeightUsage
from adaptrt.runtime.engine import load_engine
from support.adapter_crowds import Asked
from support.emulated_cuda import EmulatedCuda, emulate
from support.families import save_family
from support.models import Reference, save_adapter
from support.relu_gates import GATES, FatRelu, double_relu, published
from support.serving import Answer, collect, make_request, run_command

# See test_cuda_families.py and test_cuda_emulated.py. FatReLU jumps at its threshold, so the row of a gate that is
# rounded to the other side differs more. Most rows have no such gate.
TOLERANCE = {"relu": 0.03, "fatrelu": 0.05, "drelu": 0.006}
MEDIAN_TOLERANCE = {"relu": 0.03, "fatrelu": 0.006, "drelu": 0.006}
DTYPES = {"relu": torch.bfloat16, "fatrelu": torch.float16, "drelu": torch.float16}
LAYERS, HIDDEN, NEURONS = 5, 64, 136
FIELDS: dict[str, Any] = {
    "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": NEURONS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96,
}  # fmt: skip
MLP = ["gate_proj", "up_proj", "down_proj"]
ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 4, "target_modules": MLP},
    {"r": 3, "target_modules": ["q_proj", *MLP], "use_dora": True},
    {"r": 2, "target_modules": ["gate_proj"]},
    {"r": 8, "target_modules": ["up_proj"], "use_rslora": True},
    {"r": 2, "target_modules": ["down_proj"], "use_dora": True},
)
DEMO = Path(__file__).resolve().parents[3] / "examples" / "demo" / "model"
CONFIG = BuildConfig(
    max_batch_size=10,
    max_num_tokens=24,
    max_seq_len=64,
    tokens_per_block=16,
    backend="cuda",
    lora_config=LoraBuildConfig(max_lora_rank=8),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)


def ask(prompt_length: int, adapter: int | None, max_tokens: int) -> Asked:
    rng = np.random.default_rng(100 * prompt_length + max_tokens)
    return Asked(rng.integers(2, FIELDS["vocab_size"], prompt_length).tolist(), adapter, max_tokens)


# Steps of the crowd have from 1 to 24 rows, and prompts have chunks.
CROWD = (ask(30, 0, 3), ask(1, None, 4), ask(13, 1, 3), ask(6, 2, 2), ask(9, 3, 2), ask(3, 4, 3))


@dataclass(frozen=True)
class Served:
    """A model, its adapters and its engine. The model is also in the form that transformers reads."""

    directory: Path
    name: str

    def reference(self, adapter: int | None) -> Reference:
        return Reference(self.directory / "model", None if adapter is None else self.directory / f"adapter-{adapter}")

    def budget(self, share: float) -> int:
        """Bytes of weights with which about this share of the neurons stays on the device."""
        with pytest.raises(adaptrt.ConfigError, match="weight_memory is 1; expected at least") as refused:
            answers(self, [], weight_memory=1)
        outside, layer = map(int, re.findall(r"(\d+) bytes", str(refused.value)))
        mlp = 2 * NEURONS * HIDDEN * 2
        tables = LAYERS * (4 * NEURONS // 256 * 256 + 256 + 2 * 256)
        # The last layer's section has no norm, q, k and v of a next layer.
        missing = 4 * HIDDEN + 2 * HIDDEN * 2 * HIDDEN
        return outside + LAYERS * (layer - mlp) - missing + 2 * mlp + tables + int(share * LAYERS * mlp)


@pytest.fixture(autouse=True)
def oracle_code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives transformers the activations that the published models' own code uses."""
    monkeypatch.setitem(ACT2FN, "fatrelu", FatRelu)
    if "drelu" in request.node.name:
        monkeypatch.setattr(MistralMLP, "forward", double_relu)


@pytest.fixture(scope="module", params=GATES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    name = request.param
    gate, directory = GATES[name], tmp_path_factory.mktemp(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ACT2FN, "fatrelu", FatRelu)
        family = replace(gate.family, fields={**gate.family.fields, **FIELDS})
        model = save_family(family, directory / "model", dtype=DTYPES[name])
        for number, lora in enumerate(ADAPTERS):
            save_adapter(model, directory / f"adapter-{number}", seed=number, **lora)
    published(directory / "model", directory / "published", **gate.published)
    build(Checkpoint.of_model(directory / "published"), CONFIG, directory / "engine")
    return Served(directory, name)


def answers(served: Served, groups: Sequence[Sequence[Asked]], **fields: Any) -> list[Answer]:
    """Runs the groups one after the other; all requests of a group at once. fields: of ExecutorConfig."""
    config = adaptrt.ExecutorConfig(**{"enable_chunked_context": True, **fields})
    with adaptrt.Executor(served.directory / "engine", adaptrt.ModelType.DECODER_ONLY, config) as executor:
        loras = [
            adaptrt.LoraConfig.from_peft(number, served.directory / f"adapter-{number}", executor.engine)
            for number in range(len(ADAPTERS))
        ]
        found = []
        for group in groups:
            requests = [
                make_request(one.prompt, one.max_tokens, None if one.adapter is None else loras[one.adapter])
                for one in group
            ]
            ids = [executor.enqueue_request(request) for request in requests]
            found += [collect(executor, request_id) for request_id in ids]
        return found


def calls(emulated: EmulatedCuda, name: str) -> int:
    """Number of calls of the last engine's device."""
    found: int = emulated.devices[-1].calls(name)
    return found


def test_logits_are_those_of_transformers_and_peft(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """With most neurons in host memory."""
    emulate(monkeypatch)
    found = answers(served, [CROWD], weight_memory=served.budget(0.4))
    medians = []
    for asked, answer in zip(CROWD, found, strict=True):
        expected = served.reference(asked.adapter).logits(asked.prompt, answer.tokens).numpy()
        actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
        of_rows = np.abs(actual - expected).max(axis=1) / (expected.max() - expected.min())
        assert of_rows.max() <= TOLERANCE[served.name]
        medians.append(np.median(of_rows))
    assert np.median(medians) <= MEDIAN_TOLERANCE[served.name]


@pytest.mark.parametrize("served", ["relu", pytest.param("fatrelu", marks=pytest.mark.nightly), "drelu"], indirect=True)
def test_bits_are_the_same_wherever_the_neurons_are(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and in a crowd, in other chunks, with and without graphs."""
    emulated = emulate(monkeypatch)
    whole = answers(served, [CROWD])
    assert calls(emulated, "wait") == 0
    for share, groups, fields in (
        (0.0, [CROWD], {}),
        (0.4, [[asked] for asked in CROWD], {}),
        (0.4, [CROWD], {"max_num_tokens": 16}),
    ):
        found = answers(served, groups, weight_memory=served.budget(share), **fields)
        assert calls(emulated, "wait") > 0  # Prompts copy whole MLPs ahead of use.
        assert calls(emulated, "capture") > 0  # Decodes do not, so they are graphs.
        for asked, first, second in zip(CROWD, whole, found, strict=True):
            assert first.same_bits(second), (asked, share)


@pytest.mark.parametrize("served", ["relu"], indirect=True)
def test_a_step_of_few_rows_copies_no_layer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = emulate(monkeypatch)
    short = [ask(8, 0, 4)]
    answers(served, [short], weight_memory=served.budget(0.1))
    assert calls(emulated, "wait") == 0
    answers(served, [short], weight_memory=served.budget(0.0) - 2000)  # Too little for gates and attention.
    assert calls(emulated, "wait") > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_text_says_which_neurons_stay_on_the_device(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build runs the same model on the CPU, because it needs no GPU."""
    shutil.copytree(DEMO, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    (tmp_path / "text.txt").write_text("a text of some words\n" * 9)
    run_command(
        "build", "--model_dir", tmp_path / "model", "--dtype", dtype, "--output_dir", tmp_path / "engine",
        "--backend", "cuda", "--max_seq_len", 128, "--max_num_tokens", 64, "--max_batch_size", 4,
        "--usage_text", tmp_path / "text.txt", "--usage_tokens", 40,
    )  # fmt: skip
    engine = load_engine(tmp_path / "engine", weight_memory=1 << 40)
    usage = WeightUsage.load(tmp_path / "engine", engine.config.engine_checksums[0], engine.storage.program)
    assert usage is not None
    assert (usage.text, usage.tokens) == ("text.txt", 40)
    assert len(usage.counts) == config["num_hidden_layers"]
    assert all(0 < max(counts) <= 40 and len(set(counts)) > 3 for counts in usage.counts.values())
    emulated = emulate(monkeypatch)
    engine.start(adaptrt.ExecutorConfig())
    assert emulated.neuron_usage == [
        usage.counts[f"transformer.layers.{layer}.mlp.gate.neurons"] for layer in range(config["num_hidden_layers"])
    ]
    engine.with_weight_memory(0).start(adaptrt.ExecutorConfig())
    assert emulated.neuron_usage == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine", "model", "text.txt"]


@pytest.mark.parametrize("served", ["relu"], indirect=True)
def test_layers_stream_whole_if_the_build_disables_sparse_mlps(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated = emulate(monkeypatch)
    disabled = dataclasses.replace(served, directory=tmp_path)
    for number in range(len(ADAPTERS)):
        (tmp_path / f"adapter-{number}").symlink_to(served.directory / f"adapter-{number}")
    build(Checkpoint.of_model(served.directory / "published"), replace(CONFIG, sparse_mlp=DISABLE), tmp_path / "engine")
    limited = answers(disabled, [CROWD[1:3]], weight_memory=served.budget(0.1))
    assert calls(emulated, "capture") == 0
    for first, second in zip(answers(served, [CROWD[1:3]]), limited, strict=True):
        assert first.same_bits(second)
