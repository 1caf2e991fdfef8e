"""Checks that the comparisons of a scenario file are possible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from adaptrt.tools.bench.scenario_types import Decode, Prefill, Scenario

from .kinds import Comparison, ScenarioFile
from .scenario_errors import Place

SAME_IN_TURN: Final = {"requests": "requests", "input_length": "input", "output_length": "output"}
"""Properties that alternating scenarios must share, with their names in a scenario file."""


def check_comparisons(file: ScenarioFile, place: Place) -> None:
    """Notes every comparison that is impossible."""
    by_name = {scenario.name: scenario for scenario in file.scenarios}
    for scenario in file.scenarios:
        comparisons = file.comparisons[scenario.name]
        if sum(comparison.measure == "alternating" for comparison in comparisons) > 1:
            place.complain((), f'has "{scenario.name}" alternate with two scenarios; its value would be that of either')
        for comparison in comparisons:
            base = scenario if comparison.base is None else by_name.get(comparison.base)
            if base is None:
                place.complain((), f'compares "{scenario.name}" with "{comparison.base}", which is not a scenario')
                continue
            for problem in _problems(file, scenario, comparison, base):
                place.complain((), f'compares "{scenario.name}" {problem}')


def _problems(file: ScenarioFile, scenario: Scenario, comparison: Comparison, base: Scenario) -> Iterator[str]:
    """Yields the reasons why a scenario cannot be compared with `base`, which is the scenario itself if "with" is
    missing.
    """
    if base.unit != scenario.unit:
        yield f'with "{base.name}", which has another unit'
    if comparison.measure == "alternating":
        yield from _problems_in_turn(scenario, base)
    if comparison.measure == "roofline":
        if not (isinstance(scenario, (Prefill, Decode)) and isinstance(base, (Prefill, Decode))):
            yield "by roofline; only prefill and decode have one"
        for alternating in dict.fromkeys(one.name for one in (scenario, base) if file.alternating(one) is not None):
            yield f'by roofline, but "{alternating}" alternates with a scenario, and no limits are measured beside that'


def _problems_in_turn(scenario: Scenario, base: Scenario) -> Iterator[str]:
    if not isinstance(scenario, Decode) or not isinstance(base, Decode):
        yield f'with "{base.name}" by alternating; only decode scenarios alternate'
        return
    for name, written in SAME_IN_TURN.items():
        ours, theirs = getattr(scenario, name), getattr(base, name)
        if ours != theirs:
            yield f'with "{base.name}" by alternating, but {written} is {ours} here and {theirs} there'
