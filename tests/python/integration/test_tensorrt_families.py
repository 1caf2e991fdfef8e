"""Every kind of op in a TensorRT plan: the plan's network with emulated kernels against the native engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import adaptrt
from adaptrt._core import DType
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig, TensorRtBuildConfig
from adaptrt.runtime.engine import LoadedEngine, load_engine
from support.emulated_engine import emulated_engine
from support.families import FAMILIES, RELATIVES, Family, save_family
from support.models import save_adapter
from support.serving import Answer, collect, make_request
from support.stand_in_engine import check_answer
from support.tensorrt_plans import adapter_nodes, attention_layers, needs_tensorrt_rtx

pytestmark = needs_tensorrt_rtx

SIZES = BuildConfig(
    max_batch_size=4,
    max_num_tokens=24,
    max_seq_len=64,
    tokens_per_block=16,
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
    lora_config=LoraBuildConfig(max_lora_rank=8),
)
# Together they have every op. Only heads of size 64 have kernels for tensor cores.
NAMES = {
    "gemma2": {"head_dim": 64},  # norms after layers, gated GELU, windows, soft caps of scores and logits
    "phi2": {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 128},  # parallel, partly rotated
    "gpt2-layer-scales": {},  # learned positions, layer norms, exact GELU
    "cohere2": {"logit_scale": 0.7},  # neighbouring elements rotated, or no rotation
    "phi4-mini-longrope": {},
    "olmo3": {},  # norms of all heads, two rotary tables
}
ADAPTERS = ({"r": 3}, {"r": 8, "use_dora": True})
# (prompt length, adapter or None): below and above the windows and longrope's 24 tokens, in chunks of at most 24.
CROWD = (3, None), (19, 0), (40, 1)
# The network rounds activations to the type after every operator; the native engine keeps them in float32.
TOLERANCES = {DType.FLOAT16: 0.008, DType.BFLOAT16: 0.08}


def family_of(name: str) -> Family:
    family = {**FAMILIES, **RELATIVES}[name]
    fields = {**family.fields, **NAMES[name], "n_layer" if "n_layer" in family.fields else "num_hidden_layers": 2}
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:2]
    return dataclasses.replace(family, fields=fields)


def answers_of(engine: LoadedEngine, adapters: list[Path]) -> list[Answer]:
    rng = np.random.default_rng(5)
    config = adaptrt.ExecutorConfig(enable_chunked_context=True, num_threads=1)
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
        ids = []
        for length, adapter in CROWD:
            lora = None if adapter is None else adaptrt.LoraConfig.from_peft(adapter, adapters[adapter], engine)
            ids.append(executor.enqueue_request(make_request(rng.integers(2, 61, length).tolist(), 3, lora)))
        return [collect(executor, request_id) for request_id in ids]


@pytest.mark.parametrize(("name", "dtype"), [(name, list(TOLERANCES)[number % 2]) for number, name in enumerate(NAMES)])
def test_a_plan_and_its_network(name: str, dtype: DType, tmp_path: Path) -> None:
    family = family_of(name)
    model = save_family(family, tmp_path / "model")
    convert_checkpoint(model, tmp_path / "checkpoint", dtype=dtype)
    build(tmp_path / "checkpoint", SIZES, tmp_path / "native")
    options = TensorRtBuildConfig(compute_capability=("8.6",), weights="external")
    tensorrt = dataclasses.replace(SIZES, backend="tensorrt", tensorrt_config=options)
    report = build(tmp_path / "checkpoint", tensorrt, tmp_path / "tensorrt")

    (plan,), (built,) = report.compiled.plans.files, report.compiled.built
    assert len(adapter_nodes(report.directory / plan.stored.file)) >= 4 * 2
    for profile in (0, 1):
        assert len(attention_layers(built.layers, profile=profile)) == 2

    adapters = [
        save_adapter(model, tmp_path / f"{number}", number, target_modules=family.targets, **fields)
        for number, fields in enumerate(ADAPTERS)
    ]
    expected = answers_of(load_engine(tmp_path / "native"), adapters)
    actual = answers_of(emulated_engine(tmp_path / "tensorrt", tmp_path / "checkpoint"), adapters)
    for pair in zip(actual, expected, strict=True):
        check_answer(*pair, TOLERANCES[dtype])
