"""The flags of `adaptrt bench ENGINE` that say how requests come."""

from __future__ import annotations

import argparse
from typing import Any, cast

import pytest

from adaptrt._core import ConfigError
from adaptrt.tools.bench.engine_rows import add_arguments, engine_rows


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(flags)


@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan"])
@pytest.mark.parametrize("name", ["zipf", "rate", "cv"])
def test_numbers_that_are_no_load_are_refused(name: str, value: str) -> None:
    flags = parsed(f"--{name}", value, "--lora_dir", "adapter")
    with pytest.raises(ConfigError, match=rf"--{name} is {float(value)}; accepted: numbers above 0"):
        engine_rows(flags, cast(Any, None))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--rate", "2", "--concurrency", "3"], "--concurrency and --rate: expected one of them"),
        (["--cv", "2"], "--cv has no effect without --rate"),
        (["--zipf", "0.9"], "--zipf has no effect without --lora_dir"),
    ],
)
def test_flags_that_have_no_effect_are_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        engine_rows(parsed(*flags), cast(Any, None))
