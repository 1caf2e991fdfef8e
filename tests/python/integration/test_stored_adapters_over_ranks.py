"""Adapters that ranks and stages store in twelve bits or as int8: the results of exact ones, and of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import adaptrt
from adaptrt._core import DType
from support.cut_models import FLOAT32_TOLERANCE, Cut
from support.rank_script import answer_batches
from support.ranks import EngineRun, RankAnswer, answers_of, answers_of_runs

# Wide enough that a rank's part of each matrix becomes smaller.
SIZES = {"hidden_size": 136, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Cut:
    return Cut("granite", tmp_path_factory.mktemp("granite"), **SIZES)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Cut:
    return Cut("qwen3-moe", tmp_path_factory.mktemp("experts"), **SIZES)


def run_of(cut: Cut, engine: Path, storage: str) -> EngineRun:
    return engine, [cut.cases()], {"num_threads": 1, "lora_storage": storage}


def test_compressed_adapters_change_no_bit(granite: Cut, tmp_path: Path) -> None:
    sharded = granite.engine(2, DType.BFLOAT16, fully_sharded=True)
    staged = granite.engine(1, DType.BFLOAT16, pp_size=2)
    runs = [run_of(granite, engine, storage) for engine in (sharded, staged) for storage in ("exact", "compressed")]
    found = answers_of_runs(2, runs, tmp_path)
    for (exact,), (compressed,) in zip(found[::2], found[1::2], strict=True):
        assert all(one.same_bits(other) for one, other in zip(exact, compressed, strict=True))


def test_int8_adapters_are_those_of_one_process(granite: Cut, experts: Cut, tmp_path: Path) -> None:
    engines = [
        (granite, granite.engine(2)),
        (granite, granite.engine(2, fully_sharded=True)),
        (experts, experts.engine(2, moe_ep_size=2)),
        (granite, granite.engine(1, pp_size=2)),
    ]
    alone = (engines[1][1], [[case] for case in granite.cases()], {"num_threads": 2, "lora_storage": "int8"})
    *found, by_themselves = answers_of_runs(2, [*(run_of(cut, made, "int8") for cut, made in engines), alone], tmp_path)
    expected, exact = {}, {}
    for cut in (granite, experts):
        (expected[cut],), (exact[cut],) = answers_of_runs(
            1, [run_of(cut, cut.engine(1), storage) for storage in ("int8", "exact")], tmp_path
        )
    for (cut, engine), (answers,) in zip(engines, found, strict=True):
        for one, by_ranks, rounded in zip(expected[cut], answers, exact[cut], strict=True):
            assert by_ranks.tokens == one.tokens, engine
            assert difference(by_ranks, one) <= FLOAT32_TOLERANCE, engine
            if rounded is not exact[cut][0]:  # the base
                assert difference(by_ranks, rounded) > 2 * FLOAT32_TOLERANCE, engine
    assert all(one.same_bits(by_stages) for one, by_stages in zip(expected[granite], found[-1][0], strict=True))
    for answer, (by_itself,) in zip(found[1][0], by_themselves, strict=True):
        assert answer.same_bits(by_itself)
    parallel = adaptrt.ParallelConfig(
        communication_mode=adaptrt.CommunicationMode.ORCHESTRATOR, orchestrator_config=adaptrt.OrchestratorConfig()
    )
    cache = adaptrt.PeftCacheConfig(lora_storage="int8")
    config = adaptrt.ExecutorConfig(parallel_config=parallel, num_threads=1, peft_cache_config=cache)
    with adaptrt.Executor(engines[0][1], adaptrt.ModelType.DECODER_ONLY, config) as executor:
        (orchestrated,) = answers_of(answer_batches(executor, [granite.cases()]), [granite.cases()])
    assert all(answer.same_bits(by_workers) for answer, by_workers in zip(found[0][0], orchestrated, strict=True))


def difference(one: RankAnswer, other: RankAnswer) -> float:
    """The largest difference of logits, relative to their range."""
    logits = other.context_logits
    return float(np.abs(one.context_logits - logits).max() / (logits.max() - logits.min()))
