"""A name stands for one adapter, or for a weighted sum of several."""

from __future__ import annotations

from pathlib import Path

from adaptrt.runtime.named_adapter import AdapterSum, NamedAdapter


def test_a_sum_has_its_terms_adapters_and_the_first_ones_directory() -> None:
    first, second = (NamedAdapter(name, number, Path(name), "digest") for number, name in enumerate(("a", "b")))
    both = AdapterSum(7, ((first, 0.7), (second, 0.3)))
    assert both.adapters == (first, second)
    assert both.directory == Path("a")
    assert first.adapters == (first,)
