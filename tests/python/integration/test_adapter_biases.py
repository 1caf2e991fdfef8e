"""Adapters that add to outputs (lora_bias, trained biases, IA3 over biases) against PEFT in float32."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest

import adaptrt
from adaptrt.builder.cli import main as command_line
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.families import FAMILIES, save_family
from support.kinds import save_kind
from support.models import ModelSpec, Reference, save_model
from support.pooled import hidden_states, load_bare, run_pooled
from support.served_kinds import FLOAT32_TOLERANCE, ServedKinds, engine_of
from support.serving import collect, make_request

CONFIG = BuildConfig(
    max_batch_size=16,
    max_num_tokens=256,
    max_seq_len=128,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=16),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
ALL_STATES = adaptrt.PoolingParams(adaptrt.PoolingType.ALL)
# The layers with biases, and one layer without, if the family has any. Norms of the last four families have biases too;
# bias "all" trains all of them.
TARGETS = {
    "qwen2": (["q_proj", "k_proj", "v_proj"], ["o_proj"]),
    "qwen2-moe": (["q_proj", "k_proj", "v_proj"], ["o_proj"]),
    "gpt2": (["c_attn", "c_proj", "c_fc"], []),
    "gpt-neox": (["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"], []),
    "phi2": (["q_proj", "k_proj", "v_proj", "fc1", "fc2"], []),
    "starcoder2": (["q_proj", "k_proj", "v_proj", "c_fc", "c_proj"], []),
}


def kinds(name: str) -> dict[str, Any]:
    biased, others = TARGETS[name]
    of_all: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": [*biased, *others]}
    conv1d = {"fan_in_fan_out": True} if name == "gpt2" else {}
    made = {
        "plain": peft.LoraConfig(r=5, **conv1d, **of_all),
        "lora-bias": peft.LoraConfig(
            r=4, lora_alpha=6, lora_bias=True, target_modules=biased, task_type="CAUSAL_LM", **conv1d
        ),
        "trained": peft.LoraConfig(r=3, bias="lora_only", **conv1d, **of_all),
        "dora-trained": peft.LoraConfig(r=2, use_dora=True, bias="lora_only", **conv1d, **of_all),
        "both": peft.LoraConfig(
            r=2, bias="lora_only", lora_bias=True, target_modules=biased, task_type="CAUSAL_LM", **conv1d
        ),
        "vera-trained": peft.VeraConfig(r=7, projection_prng_key=11, bias="vera_only", **conv1d, **of_all),
        "ia3": peft.IA3Config(target_modules=biased, feedforward_modules=[], task_type="CAUSAL_LM"),
    }
    # Some trained biases belong to layers without A and B.
    made["all"] = peft.LoraConfig(r=2, bias="all", target_modules=[*others, biased[0]], task_type="CAUSAL_LM", **conv1d)
    return made


@pytest.fixture(scope="module", params=list(TARGETS))
def served(request, tmp_path_factory) -> ServedKinds:
    name, directory = request.param, tmp_path_factory.mktemp(request.param)
    if name == "qwen2":
        model = save_model(ModelSpec(family=name), directory / "model")
    else:
        model = save_family(FAMILIES[name], directory / "model")
    adapters = {
        kind: save_kind(model, directory / kind, config, seed)
        for seed, (kind, config) in enumerate(kinds(name).items())
    }
    return ServedKinds(model, engine_of(model, directory, CONFIG), adapters, new_tokens=8)


def test_all_of_them_in_one_batch_are_what_peft_computes(served: ServedKinds) -> None:
    served.check_against_peft()


def test_a_crowd_changes_no_bit(served: ServedKinds) -> None:
    served.check_crowd()


def test_they_come_back_after_eviction(served: ServedKinds) -> None:
    loras = [adaptrt.LoraConfig.from_peft(1, directory, served.engine) for directory in served.adapters.values()]
    served.check_eviction(sum(np.asarray(lora.weights).nbytes for lora in loras) // 3)


def test_an_engine_without_dora_adds_biases(tmp_path: Path) -> None:
    model = save_model(ModelSpec(family="qwen2"), tmp_path / "model")
    engine = engine_of(model, tmp_path, dataclasses.replace(CONFIG, plugin_config=PluginConfig(lora_plugin="auto")))
    made = kinds("qwen2")
    trained = save_kind(model, tmp_path / "trained", made["trained"], 1)
    prompt = list(range(2, 30))
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        executor.add_adapter("trained", trained)
        answer = collect(executor, executor.enqueue_request(make_request(prompt, 1), adapter="trained"))
        with pytest.raises(adaptrt.AdapterError, match="it has a magnitude, but this engine was built without DoRA"):
            executor.add_adapter("ia3", save_kind(model, tmp_path / "ia3", made["ia3"], 1))
    expected = Reference(model, trained).logits(prompt).numpy()
    assert np.abs(answer.context_logits - expected).max() <= FLOAT32_TOLERANCE * (expected.max() - expected.min())


def test_hidden_states_have_what_was_trained_of_the_last_norm(tmp_path: Path) -> None:
    model = save_family(FAMILIES["gpt2"], tmp_path / "model")
    engine = engine_of(model, tmp_path, CONFIG)
    adapter = save_kind(model, tmp_path / "all", kinds("gpt2")["all"], 1)
    prompts = [list(range(2, 30)), [7, 3, 9]]
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        lora = adaptrt.LoraConfig.from_peft(1, adapter, engine)
        rows = [run_pooled(executor, prompt, ALL_STATES, lora_config=lora) for prompt in prompts]
        base = run_pooled(executor, prompts[0], ALL_STATES)
    for prompt, found in zip(prompts, rows, strict=True):
        np.testing.assert_allclose(found, hidden_states(load_bare(model, adapter), prompt), atol=FLOAT32_TOLERANCE)
    assert np.abs(rows[0] - base).max() > 0.01


def test_inspect_tells_norms_from_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_family(FAMILIES["gpt2"], tmp_path / "model")
    engine = engine_of(model, tmp_path, CONFIG)
    adapter = save_kind(model, tmp_path / "all", kinds("gpt2")["all"], 1)
    capsys.readouterr()
    assert command_line(["inspect", str(adapter), "--engine", str(engine)]) == 0
    told = capsys.readouterr().out
    assert "norm         biases of norms 0-6\n" in told
    assert "attn_dense   rank 1, scale 1 with biases in layers 0-2\n" in told
