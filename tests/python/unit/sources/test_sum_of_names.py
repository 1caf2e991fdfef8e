"""Names of weighted sums: accepted weights, and the maximum number of terms."""

from __future__ import annotations

import pytest

from adaptrt import AdapterError
from adaptrt.formats.sources.sum_of_names import MAX_TERMS, parse_sum


@pytest.mark.parametrize(("text", "weight"), [("1", 1.0), ("-0.5", -0.5), ("1e-3", 1e-3), (".25", 0.25), ("2.", 2.0)])
def test_plain_decimal_numbers_are_weights(text: str, weight: float) -> None:
    found = parse_sum(f"pirate:{text}")
    assert found is not None
    assert found.terms == (("pirate", weight),)


@pytest.mark.parametrize("text", ["1_0", "nan", "inf", "1e999", " 1", "1 ", "1\n", "\u0661", "", "0x1", "."])
def test_other_texts_are_no_weights(text: str) -> None:
    assert parse_sum(f"pirate:{text}") is None


def test_a_sum_has_at_most_so_many_terms() -> None:
    most = parse_sum("+".join(["pirate:0.1"] * MAX_TERMS))
    assert most is not None
    assert len(most.terms) == MAX_TERMS
    with pytest.raises(AdapterError, match=f"has {MAX_TERMS + 1} terms; expected at most {MAX_TERMS}"):
        parse_sum("+".join(["pirate:0.1"] * (MAX_TERMS + 1)))
