"""What bench/ranks makes of the messages of a step."""

from __future__ import annotations

import pytest
from ranks.message_model import Shape, Step, Wire, chunks_of

SHAPE = Shape(hidden=1024, layers=4, intermediate=2048, attention=1536, heads=1024, vocabulary=32000)


def step(rows: int, *, stages: int = 1, overlaps: bool = True) -> Step:
    return Step(SHAPE, rows, 1, stages, overlaps)


def test_every_message_costs_a_delay_where_nothing_hides_it() -> None:
    """A command, two sums a layer, and logits; of a pipeline rows and logits: its first stage is not told."""
    assert step(1).seconds(0.5, Wire(1e-3, 0.0)) == pytest.approx(0.5 + (2 * SHAPE.layers + 2) * 1e-3)
    assert step(1, stages=2).seconds(0.5, Wire(1e-3, 0.0)) == pytest.approx(0.5 + 2e-3)


def test_sums_are_cut_where_messages_are_long_enough() -> None:
    assert [chunks_of(rows, 1024, 2) for rows in (1, 16, 127, 128, 512)] == [1, 1, 1, 2, 8]
    assert chunks_of(512, 1024, 8) == 1
    assert chunks_of(512, 8192, 8) == 8
    assert chunks_of(100_000, 256, 2) == 4  # panels


def test_sums_that_go_on_meanwhile_cost_what_is_left_of_them() -> None:
    """At most an eighth, where the layer takes longer than its sum; a wire that is slower is what is waited for."""
    free, wire = Wire(0.0, 0.0), Wire(0.0, 1e-9)
    long, behind = step(512), step(512, overlaps=False)
    sums = (2 * SHAPE.layers - 2) * 4 * 512 * SHAPE.hidden * 1e-9
    assert behind.seconds(10.0, wire) - behind.seconds(10.0, free) == pytest.approx(sums, rel=0.01)
    assert long.seconds(10.0, wire) - long.seconds(10.0, free) == pytest.approx(sums / 8, rel=0.1)
    assert long.seconds(0.0, wire) == pytest.approx(behind.seconds(0.0, wire))
    assert long.seconds(10.0, free) == pytest.approx(10.0)


def test_a_pipeline_overlaps_its_pieces() -> None:
    """Eight of 64 tokens: nine times what a stage takes for one."""
    assert step(512, stages=2).seconds(1.6, Wire(0.0, 0.0)) == pytest.approx(0.9)
    assert step(127, stages=2).seconds(1.6, Wire(0.0, 0.0)) == pytest.approx(1.6)


@pytest.mark.parametrize("rows", [1, 16, 512])
@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_computed_is_found_again(rows: int, stages: int) -> None:
    wire = Wire(2e-4, 1e-8)
    made = step(rows, stages=stages)
    assert made.work(made.seconds(0.7, wire), wire) == pytest.approx(0.7)
