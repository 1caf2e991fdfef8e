"""Latent attention on backend cuda, on an emulated device: the same bits in any crowd, any chunks."""

from __future__ import annotations

import pytest
import transformers

from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.cuda_crowds import CROWD, ServedCuda, answers, serve_alone
from support.emulated_cuda import emulate
from support.families import LATENT_TARGETS, Family

# A compressed row has 40 elements, which is no multiple of 16.
FAMILY = Family(
    transformers.DeepseekV3Config,
    ["q_a_proj", "q_b_proj", *LATENT_TARGETS],
    {
        "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 3, "intermediate_size": 56, "max_position_embeddings": 128, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": None, "q_lora_rank": 24, "kv_lora_rank": 24, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 16, "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
        "topk_group": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    },
)  # fmt: skip
SIZES = BuildConfig(
    max_batch_size=4,
    max_num_tokens=24,
    max_seq_len=48,
    tokens_per_block=8,
    backend="cuda",
    lora_config=LoraBuildConfig(max_lora_rank=8),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedCuda:
    return serve_alone(FAMILY, SIZES, tmp_path_factory.mktemp("latent"))


# Emulated threads are slow. In every run, tests/cpp compares the bits of each kernel.
@pytest.mark.nightly
def test_bits_are_the_same_alone_and_in_a_crowd(served: ServedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in other chunks, and without graphs."""
    emulate(monkeypatch, cuda_graphs=False)
    together, _ = answers(served.directory, [CROWD], max_num_tokens=13)
    for asked, first, second in zip(CROWD, together, served.alone, strict=True):
        assert first.same_bits(second), asked
