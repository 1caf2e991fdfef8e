"""Families that need no special split: two ranks and three stages compute the same as one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import adaptrt
from adaptrt.formats.engine.plan import AllReduceOp, LinearOp
from adaptrt.runtime.engine import load_engine
from support.cut_models import CUT, FLOAT32_TOLERANCE, Cut
from support.families import FAMILIES, RELATIVES
from support.rank_script import answer_batches
from support.ranks import RankAnswer, answers_of, answers_of_engines

OTHERS = [name for name in (*FAMILIES, *RELATIVES) if name not in CUT]
PARTS = 2
"""Number of groups of families; one mpirun answers all families of a group."""


@pytest.mark.parametrize("part", range(PARTS))
def test_ranks_and_stages_compute_what_one_process_does(part: int, tmp_path: Path) -> None:
    """The base, LoRA, DoRA and LoRA with biases in one batch; test_families.py compares one process with
    transformers."""
    names = OTHERS[part::PARTS]
    cuts = [Cut(name, tmp_path / name) for name in names]
    expected = [answers_of_one_process(cut) for cut in cuts]
    ranks = answers_of_engines(2, [(cut.engine(2), [cut.cases()]) for cut in cuts], tmp_path, num_threads=1)
    stages = answers_of_engines(3, [(cut.engine(1, pp_size=3), [cut.cases()]) for cut in cuts], tmp_path, num_threads=1)
    for name, one, (of_ranks,), (of_stages,) in zip(names, expected, ranks, stages, strict=True):
        for answer, by_ranks, by_stages in zip(one, of_ranks, of_stages, strict=True):
            assert by_stages.same_bits(answer), name
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
