"""Values in errors have one length, wherever the error is raised."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from adaptrt import ConfigError, RequestError
from adaptrt.common.number_flags import integer, seconds
from adaptrt.common.shown_value import cut, shown
from adaptrt.formats.sources import find_model
from adaptrt.runtime.llm_prompts import text_or_ids

LONG = "7" * 5000


def test_long_values_are_cut_to_one_length() -> None:
    assert (shown("a"), cut("a")) == ("'a'", "a")
    assert (shown("b" * 58), cut("b" * 60)) == (f"'{'b' * 58}'", "b" * 60)
    assert (shown("b" * 59), cut("b" * 61)) == (f"'{'b' * 56}...", f"{'b' * 57}...")


@pytest.mark.parametrize(
    ("use", "error", "said"),
    [
        (lambda: integer(0)(LONG), argparse.ArgumentTypeError, f"it is {cut(LONG)}; "),
        (lambda: seconds()(LONG), argparse.ArgumentTypeError, f"it is {cut(LONG)}; "),
        (lambda: find_model(LONG), ConfigError, f"name is {shown(LONG)}; "),
        (lambda: text_or_ids({"prompt": [LONG]}, "it"), RequestError, f"it is {shown({'prompt': [LONG]})}; "),
    ],
)
def test_every_surface_shows_that_length(use: Callable[[], object], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        use()
    assert str(raised.value).startswith(said)
