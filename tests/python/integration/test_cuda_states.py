"""Models with states on backend cuda, on an emulated device: the same bits in any crowd, any chunks and after reuse."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import transformers

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.cuda_crowds import ADAPTERS, CROWD, ServedCuda, answers, ask, serve_alone
from support.emulated_cuda import emulate
from support.families import LINEAR_TARGETS, LLAMA, Family, rope, save_family
from support.models import save_adapter
from support.serving import collect, crowd_fields, make_request

# Three value heads share a key head; [b | a] has a number of columns that is no multiple of 8.
FAMILY = Family(
    transformers.Qwen3_5TextConfig,
    LLAMA + LINEAR_TARGETS,
    {
        "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": 56, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": None, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 10, "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4, "attention_bias": True,
        "rope_parameters": rope(theta=300.0, partial_rotary_factor=0.5, mrope_section=[2, 1, 1]),
    },
)  # fmt: skip
SIZES = BuildConfig(
    max_batch_size=4,
    max_num_tokens=24,
    max_seq_len=48,
    max_beam_width=2,
    tokens_per_block=8,
    backend="cuda",
    lora_config=LoraBuildConfig(max_lora_rank=8),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedCuda:
    return serve_alone(FAMILY, SIZES, tmp_path_factory.mktemp("states"))


def test_bits_are_the_same_alone_and_in_a_crowd(served: ServedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in other chunks, and without graphs."""
    emulate(monkeypatch, cuda_graphs=False)
    together, _ = answers(served.directory, [CROWD], max_num_tokens=13)
    for asked, first, second in zip(CROWD, together, served.alone, strict=True):
        assert first.same_bits(second), asked


# Emulated threads are slow, and the steps are many.
@pytest.mark.nightly
def test_bits_are_the_same_after_preemptions_and_with_reused_states(
    served: ServedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    longer = [ask(10, 0, 16), ask(11, 1, 16)]
    expected, _ = answers(served.directory, [longer])
    fields = crowd_fields("MAX_UTILIZATION", 48, reuse=True)
    found, stats = answers(served.directory, [longer, longer], **fields)
    for first, second in zip([*expected, *expected], found, strict=True):
        assert first.tokens == second.tokens
        assert first.generation_logits.tobytes() == second.generation_logits.tobytes()
    assert any(step.inflight_batching_stats.num_paused_requests for step in stats)
    assert stats[-1].state_stats is not None
    assert stats[-1].state_stats.reused_snapshots > 0


@pytest.mark.nightly
def test_beams_have_states_of_their_own(served: ServedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beam's log probs are those of a request that begins with its tokens."""
    emulate(monkeypatch)
    config = adaptrt.ExecutorConfig(max_beam_width=2)
    output = adaptrt.OutputConfig(return_log_probs=True, exclude_input_from_output=True)
    prompt = CROWD[2].prompt
    with adaptrt.Executor(served.directory / "engine", adaptrt.ModelType.DECODER_ONLY, config) as executor:
        beams = executor.enqueue_request(
            adaptrt.Request(prompt, 4, sampling_config=adaptrt.SamplingConfig(2), output_config=output)
        )
        result = executor.await_responses(beams)[-1].result
        assert result.output_token_ids[0] != result.output_token_ids[1]
        for tokens, log_probs in zip(result.output_token_ids, result.log_probs, strict=True):
            answer = collect(executor, executor.enqueue_request(make_request([*prompt, *tokens], 1)))
            assert answer.log_probs.prompt is not None
            assert answer.log_probs.prompt[-len(tokens) :] == log_probs


@pytest.mark.nightly
def test_bits_are_the_same_if_layers_are_copied_ahead_of_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    deep = dataclasses.replace(FAMILY, fields={**FAMILY.fields, "num_hidden_layers": 3, "layer_types": kinds})
    model = save_family(deep, tmp_path / "model", dtype=torch.bfloat16)
    for number in range(len(ADAPTERS)):
        save_adapter(model, tmp_path / f"adapter-{number}", seed=number, target_modules=FAMILY.targets, r=4)
    build(Checkpoint.of_model(model), SIZES, tmp_path / "engine")
    emulated = emulate(monkeypatch)
    with pytest.raises(adaptrt.ConfigError, match="weight_memory is 1; expected at least") as refused:
        answers(tmp_path, [], weight_memory=1)
    least = int(str(refused.value).split("expected at least ")[1].split(":")[0])
    expected, _ = answers(tmp_path, [CROWD[:2]])
    found, _ = answers(tmp_path, [CROWD[:2]], weight_memory=least)
    assert emulated.devices[-1].calls("wait") > 0
    for first, second in zip(expected, found, strict=True):
        assert first.same_bits(second)
