"""A limit is declared once: flags, config.json, checks and the options of first use follow from its declaration."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from typing import Any

import pytest

from adaptrt.builder.commands import build, engine_flags
from adaptrt.builder.engine.problems import problems_of
from adaptrt.builder.model_cache.options import SERVING_DEFAULTS, SERVING_LIMITS, EngineOptions
from adaptrt.common.json_fields import JsonFields
from adaptrt.formats.engine.build_config import LIMITS, LORA_LIMITS, BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.formats.models.registry import FAMILIES, specimen

ALL = {**LIMITS, **LORA_LIMITS}
MODEL = replace(specimen(FAMILIES["LlamaForCausalLM"]).config, max_position_embeddings=64)
OTHERS = {"long_lora_scaling_factors": (2, 4)}
"""Values of limits that do not accept 3."""


def chosen(name: str) -> Any:
    return OTHERS.get(name, 3)


def flags(name: str) -> list[str]:
    value = chosen(name)
    return [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]


def with_limit(name: str, value: Any) -> BuildConfig:
    config = BuildConfig(plugin_config=PluginConfig(lora_plugin="auto"))
    if name in LIMITS:
        return replace(config, **{name: value})
    return replace(config, lora_config=LoraBuildConfig(**{name: value}))


def problems(name: str, value: Any) -> str:
    return "; ".join(problems_of(with_limit(name, value).with_defaults(MODEL), MODEL))


@pytest.mark.parametrize("name", ALL)
def test_a_flag_becomes_a_field_of_the_build_config_and_of_config_json(name: str) -> None:
    parser = argparse.ArgumentParser()
    build.add_arguments(parser)
    required = ["--model_dir", "model", "--lora_plugin", "auto"]
    assert build.config_of(parser.parse_args(required)) == BuildConfig(plugin_config=PluginConfig(lora_plugin="auto"))
    config = build.config_of(parser.parse_args([*required, *flags(name)]))
    assert config == with_limit(name, chosen(name))
    source = JsonFields(config.with_defaults(MODEL).to_dict())
    assert BuildConfig.from_fields(source) == config.with_defaults(MODEL)
    assert source.problems == []


def test_first_use_takes_all_limits_but_those_that_need_no_choice() -> None:
    assert set(SERVING_LIMITS) == set(ALL) - {"max_encoder_input_len", "tokens_per_block"}
    assert all(item.default is None for item in fields(EngineOptions) if item.name in ALL)
    assert SERVING_DEFAULTS.keys() <= SERVING_LIMITS.keys()


@pytest.mark.parametrize("name", SERVING_LIMITS)
def test_a_flag_of_first_use_becomes_a_field_of_the_build_config(name: str) -> None:
    parser = argparse.ArgumentParser()
    engine_flags.add_arguments(parser)
    options = engine_flags.engine_options_of(parser.parse_args(flags(name)))
    assert options == EngineOptions(**{name: chosen(name)})
    assert options.given == (name,)
    built = options.build_config(MODEL)
    assert getattr(built if name in LIMITS else built.lora_config, name) == chosen(name)
    assert built != EngineOptions().build_config(MODEL)


@pytest.mark.parametrize("name", [name for name, limit in ALL.items() if limit.maximum is not None])
def test_a_limit_outside_of_its_range_is_refused(name: str) -> None:
    limit = ALL[name]
    assert limit.maximum is not None
    for value in (limit.minimum - 1, limit.maximum + 1):
        given = (value,) if limit.is_list else value
        expected = f"they must be ascending, and each of them {limit.minimum} to {limit.maximum}"
        said = expected if limit.is_list else f"{name} is {value}; it must be {limit.minimum} to {limit.maximum}"
        assert said in problems(name, given)
    for value in (limit.minimum, limit.maximum):
        assert f"{limit.minimum} to {limit.maximum}" not in problems(name, (value,) if limit.is_list else value)


@pytest.mark.parametrize("name", [name for name, limit in LORA_LIMITS.items() if limit.is_omitted])
def test_engines_from_before_a_limit_have_its_default(name: str) -> None:
    config = BuildConfig().with_defaults(MODEL)
    content = config.to_dict()
    assert name not in content["lora_config"]
    assert BuildConfig.from_fields(JsonFields(content)) == config
