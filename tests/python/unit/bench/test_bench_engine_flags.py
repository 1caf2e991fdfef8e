"""Flags of `adaptrt bench ENGINE` that set how requests arrive."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any, cast

import pytest

from adaptrt._core import ConfigError
from adaptrt.tools.bench.engine_rows import add_arguments, engine_rows
from adaptrt.tools.bench.scenario_types import Decode, Serve


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
    ("flags", "concurrency", "rate", "cv", "title"),
    [
        ([], 8, None, 1.0, "8 requests at a time"),
        (["--concurrency", "3"], 3, None, 1.0, "3 requests at a time"),
        (["--rate", "2.5"], None, 2.5, 1.0, "2.5 requests/s"),
        (["--rate", "2.5", "--cv", "4"], None, 2.5, 4.0, "2.5 requests/s"),
    ],
)
def test_requests_come_in_a_closed_or_an_open_loop(
    flags: list[str], concurrency: int | None, rate: float | None, cv: float, title: str
) -> None:
    build_config = SimpleNamespace(max_batch_size=8)
    engine: Any = SimpleNamespace(config=SimpleNamespace(build_config=build_config))
    _, decode, serve = engine_rows(parsed(*flags), engine)
    assert isinstance(decode, Decode)
    assert decode.requests == (concurrency or 8)
    assert isinstance(serve, Serve)
    assert (serve.concurrency, serve.rate, serve.cv, serve.title) == (concurrency, rate, cv, title)


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
