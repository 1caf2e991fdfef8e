"""Checks an executor's configuration by itself, before there is an engine."""

from __future__ import annotations

from .._core import ConfigError, ExecutorConfig
from .orchestrator.mode import without_parallel_config


def checked_config(config: ExecutorConfig) -> ExecutorConfig:
    """Returns the configuration for C++. Raises ConfigError that lists the problems of its fields."""
    config, problems = without_parallel_config(config)
    problems += config.validate()
    if problems:
        raise ConfigError("ExecutorConfig: " + "; ".join(problems))
    return config
