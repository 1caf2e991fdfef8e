"""Engines whose ranks share both matrices of adapters: the results of one process, and smaller pages per rank."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import adaptrt
from adaptrt._core import ConfigError, DType, LoraCache, LoraCacheSizes
from adaptrt.builder.build import build
from adaptrt.builder.cli import main as command_line
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.tools.bench.executors import load_native_engine
from support.cut_models import CONFIG, Cut, check_crowds, prompt_of
from support.models import Reference, save_adapter
from support.rank_script import answer_batches
from support.ranks import answers_of, answers_of_ranks

# Four ranks divide neither the three panels of outputs nor the adapters' ranks, one of which is less than four.
SIZES = {"hidden_size": 136, "num_attention_heads": 4, "num_key_value_heads": 2}
FIELDS = {
    "granite": SIZES,
    "phi3": SIZES,
    "gpt2": {"n_embd": 136, "n_head": 4},
    "llama-relu": SIZES,
    "olmo2": SIZES,
    "mixtral": SIZES,
}


@pytest.fixture(scope="module")
def granite(tmp_path_factory) -> Cut:
    return Cut("granite", tmp_path_factory.mktemp("granite"), **SIZES, num_hidden_layers=2)


def test_ranks_that_share_both_matrices_compute_what_one_does(tmp_path: Path) -> None:
    """LoRA, DoRA and biases of three adapter ranks in one batch, then each request alone, with other chunks and
    threads."""
    cuts = {family: Cut(family, tmp_path / family, **fields) for family, fields in FIELDS.items()}
    check_crowds(cuts, tmp_path, fully_sharded=True)


def test_four_ranks_of_which_some_have_nothing(granite: Cut, tmp_path: Path) -> None:
    """Two runs give the same bits; only one rank holds the adapter of rank 1."""
    thin = save_adapter(granite.model, tmp_path / "thin", 9, r=1, use_dora=True, target_modules=["q_proj", "o_proj"])
    cases = [*granite.cases(), {"adapter": str(thin), "task": 9, "prompt": prompt_of(23, 9), "tokens": 8}]
    batches = [cases, cases, *([case] for case in cases)]
    crowd, again, *alone = answers_of_ranks(4, granite.engine(4, fully_sharded=True), batches, tmp_path, num_threads=1)
    granite.check(crowd[:-1])
    expected = Reference(granite.model, thin).logits(cases[-1]["prompt"]).numpy()
    assert np.abs(crowd[-1].context_logits - expected).max() <= 1e-4 * (expected.max() - expected.min())
    assert all(first.same_bits(second) for first, second in zip(crowd, again, strict=True))
    assert all(answer.same_bits(by_itself) for answer, (by_itself,) in zip(crowd, alone, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_that_exchange_while_a_sum_goes_on(ranks: int, tmp_path: Path) -> None:
    """The MLP reads attention's norm. With four ranks the sum has two exchanges, one after the other."""
    cut = Cut("cohere", tmp_path, **SIZES)
    cases = cut.cases()
    engine = cut.engine(ranks, fully_sharded=True)
    crowd, *alone = answers_of_ranks(ranks, engine, [cases, *([case] for case in cases)], tmp_path, num_threads=1)
    cut.check(crowd)
    assert all(answer.same_bits(by_itself) for answer, (by_itself,) in zip(crowd, alone, strict=True))


@pytest.mark.parametrize(("tp_size", "moe_ep_size"), [(2, None), (2, 2), pytest.param(4, 2, marks=pytest.mark.nightly)])
def test_experts(tp_size: int, moe_ep_size: int | None, tmp_path: Path) -> None:
    """Experts that all ranks share, experts that one rank holds whole, and experts that two of four ranks share."""
    cut = Cut("qwen3-moe", tmp_path, **SIZES)
    engine = cut.engine(tp_size, moe_ep_size=moe_ep_size, fully_sharded=True)
    cases = cut.cases()
    crowd, *alone = answers_of_ranks(tp_size, engine, [cases, *([case] for case in cases)], tmp_path, num_threads=1)
    cut.check(crowd)
    assert all(answer.same_bits(by_itself) for answer, (by_itself,) in zip(crowd, alone, strict=True))


def test_stages_and_the_orchestrator_change_no_bit(granite: Cut, tmp_path: Path) -> None:
    cases = granite.cases()
    (expected,) = answers_of_ranks(2, granite.engine(2, fully_sharded=True), [cases], tmp_path, num_threads=1)
    engine = granite.engine(2, pp_size=2, fully_sharded=True)
    (staged,) = answers_of_ranks(4, engine, [cases], tmp_path, num_threads=1)
    parallel = adaptrt.ParallelConfig(
        communication_mode=adaptrt.CommunicationMode.ORCHESTRATOR, orchestrator_config=adaptrt.OrchestratorConfig()
    )
    config = adaptrt.ExecutorConfig(parallel_config=parallel, num_threads=1)
    with adaptrt.Executor(granite.engine(2, fully_sharded=True), adaptrt.ModelType.DECODER_ONLY, config) as executor:
        (orchestrated,) = answers_of(answer_batches(executor, [cases]), [cases])
    for answer, by_stages, by_workers in zip(expected, staged, orchestrated, strict=True):
        assert answer.same_bits(by_stages)
        assert answer.same_bits(by_workers)


def test_sixteen_bits(granite: Cut, tmp_path: Path) -> None:
    """The ranks gather x A^T in bfloat16; test_parity.py gives the reason for the tolerance."""
    engine = granite.engine(2, DType.BFLOAT16, fully_sharded=True)
    (answers,) = answers_of_ranks(2, engine, [granite.cases()], tmp_path)
    for adapter, case, answer in zip(granite.adapters.values(), granite.cases(), answers, strict=True):
        expected = Reference(granite.model, adapter).logits(case["prompt"]).numpy()
        assert np.abs(answer.context_logits - expected).max() <= 0.08 * (expected.max() - expected.min())


def test_a_rank_holds_more_adapters(tmp_path: Path) -> None:
    """With sharding, each of four ranks needs a fourth of both matrices instead of one whole matrix and a fourth."""
    cut = Cut("granite", tmp_path, **{**SIZES, "hidden_size": 256, "intermediate_size": 256})
    pages = {}
    for fully_sharded in (False, True):
        engine = load_native_engine(cut.engine(4, fully_sharded=fully_sharded))
        cache = LoraCache(engine.program.lora, LoraCacheSizes(1 << 24, 1 << 16, 64))
        adapter = cache.admit(adaptrt.LoraConfig.from_peft(1, cut.adapters["lora"], engine))
        pages[fully_sharded] = cache.pages_needed(adapter)
    assert pages[True] <= 0.5 * pages[False]


def test_unsupported_shardings_are_refused_by_name(granite: Cut, tmp_path: Path) -> None:
    def refused(model: Path, match: str, *, lora: bool = True, **sizes: int) -> None:
        checkpoint = tmp_path / f"checkpoint{len(list(tmp_path.iterdir()))}"
        convert_checkpoint(model, checkpoint, **sizes)
        config = dataclasses.replace(
            CONFIG, lora_config=dataclasses.replace(CONFIG.lora_config, fully_sharded_loras=True)
        )
        if not lora:
            plugins = dataclasses.replace(CONFIG.plugin_config, lora_plugin="disable", dora_plugin="disable")
            config = dataclasses.replace(config, plugin_config=plugins)
        with pytest.raises(ConfigError, match=match):
            build(checkpoint, config, tmp_path / "engine")

    refused(granite.model, "fully_sharded_loras needs a checkpoint that was converted with a --tp_size above 1")
    refused(granite.model, "fully_sharded_loras needs lora_plugin auto", lora=False, tp_size=2)


def test_the_flag_is_in_config_json(granite: Cut, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "fully_sharded_loras" not in (granite.engine(2) / "config.json").read_text()
    convert_checkpoint(granite.model, tmp_path / "checkpoint", tp_size=2)
    engine = tmp_path / "engine"
    flags = ["--lora_plugin", "auto", "--fully_sharded_loras", "--max_num_tokens", "128", "--max_batch_size", "8"]
    command = ["build", "--checkpoint_dir", str(tmp_path / "checkpoint"), "--output_dir", str(engine), *flags]
    assert command_line(command) == 0
    assert "both matrices" in capsys.readouterr().out
    config = json.loads((engine / "config.json").read_text())
    assert config["build_config"]["lora_config"]["fully_sharded_loras"] is True
