"""Families that need no special split: two ranks and three stages compute the same as one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import adaptrt
from adaptrt.formats.engine.plan import AllReduceOp, LinearOp
from adaptrt.runtime.engine import load_engine
from support.cut_models import CUT, FLOAT32_TOLERANCE, Cut
from support.families import FAMILIES, RELATIVES
from support.rank_script import answer_batches
from support.ranks import RankAnswer, answers_of, answers_of_engines

OTHERS = [name for name in FAMILIES if name not in CUT]
SAME_OPS = [name for name in RELATIVES if name not in CUT]
# Sizes that differ from support/families.py, so that two ranks can divide the layers with states, or share a group.
WITH_STATES: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "falcon-h1": {},
    "falcon-h1-norm": {"mamba_n_groups": 1, "mamba_norm_before_gate": True},
    "qwen3-next": {"linear_num_key_heads": 1},
    "olmo-hybrid": {},
}
IN_STAGES = ["granite4-mamba-moe", "qwen3.5", "lfm2", "deepseek-v3", "gemma4-moe"]
# The last layer uses the keys and values of the one before it, which is on the same stage of three.
SHARED_IN_STAGES = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", *["full_attention"] * 3],
}


def test_ranks_and_stages_compute_what_one_process_does(tmp_path: Path) -> None:
    """The base, LoRA, DoRA and LoRA with biases in one batch; test_families.py compares one process with
    transformers."""
    cuts = {name: Cut(name, tmp_path / name) for name in [*OTHERS, *IN_STAGES]}
    cuts["gemma4-shared"] = Cut("gemma4-shared", tmp_path / "gemma4-shared", **SHARED_IN_STAGES)
    expected = [answers_of_one_process(cut) for cut in cuts.values()]
    check_ranks(cuts, expected, tmp_path)
    engines = [(cut.engine(1, pp_size=3), [cut.cases()]) for cut in cuts.values()]
    for name, one, (found,) in zip(
        cuts, expected, answers_of_engines(3, engines, tmp_path, num_threads=1), strict=True
    ):
        for answer, by_stages in zip(one, found, strict=True):
            assert by_stages.same_bits(answer), name


def test_ranks_compute_what_one_process_does(tmp_path: Path) -> None:
    """The base and LoRA. These families have the ops of others, so stages and other adapters would repeat them. Each
    declares how its layers are split."""
    cuts = {name: Cut(name, tmp_path / name, kinds=("lora",)) for name in [*SAME_OPS, "deepseek-v2"]}
    cuts |= {name: Cut(name, tmp_path / name, kinds=("lora",), **sizes) for name, sizes in WITH_STATES.items()}
    check_ranks(cuts, [answers_of_one_process(cut) for cut in cuts.values()], tmp_path)


def check_ranks(cuts: Mapping[str, Cut], expected: list[list[RankAnswer]], place: Path) -> None:
    """Compares two ranks with one process."""
    engines = [(cut.engine(2), [cut.cases()]) for cut in cuts.values()]
    for name, one, (found,) in zip(cuts, expected, answers_of_engines(2, engines, place, num_threads=1), strict=True):
        for answer, by_ranks in zip(one, found, strict=True):
            assert by_ranks.tokens == answer.tokens, name
            logits = answer.context_logits
            difference = np.abs(by_ranks.context_logits - logits).max()
            assert difference <= FLOAT32_TOLERANCE * (logits.max() - logits.min()), name


@pytest.mark.parametrize(
    ("name", "between"), [("gpt-neox", 1), ("cohere", 1), ("stablelm-parallel", 1), ("granite", 0)]
)
def test_sums_come_behind_layers_that_do_without_them(name: str, between: int, tmp_path: Path) -> None:
    """Attention's all-reduce follows the first layer of an MLP that reads the same norm; an MLP's all-reduce has no
    gap."""
    body = load_engine(Cut(name, tmp_path).engine(2)).storage.program.body
    made_at, found = dict[int, int](), list[int]()
    for at, op in enumerate(body):
        if isinstance(op, LinearOp):
            made_at[op.output] = at
        elif isinstance(op, AllReduceOp):
            found.append(at - made_at[op.input] - 1)
    assert found == [between, 0] * (len(found) // 2)


def answers_of_one_process(cut: Cut) -> list[RankAnswer]:
    with adaptrt.Executor(
        cut.engine(1), adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(num_threads=1)
    ) as executor:
        (answers,) = answers_of(answer_batches(executor, [cut.cases()]), [cut.cases()])
    return answers
