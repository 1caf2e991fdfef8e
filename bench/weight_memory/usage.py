"""Writes the usage of random tokens, as `build --usage_text` does for a text: a random model has no meaningful text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from adaptrt import _core
from adaptrt.formats.engine.engine_config import EngineConfig
from adaptrt.formats.engine.weight_usage import WeightUsage, usage_names
from adaptrt.runtime.native_engine import load_native_engine
from adaptrt.runtime.text_quality import run_windows

TOKENS, WINDOW = 2048, 256


def write_usage(directory: Path, weight_memory: int) -> None:
    """Writes the usage into the engine's directory."""
    config = EngineConfig.load(directory)
    counter = _core.WeightUsage()
    engine = dataclasses.replace(load_native_engine(directory, config, 0, weight_memory), usage_counter=counter)
    tokens = np.random.default_rng(99).integers(100, 20000, TOKENS).tolist()
    for _ in run_windows([engine], tokens, WINDOW):
        pass
    counts = {name: tuple(counter.of_ops[at]) for at, (name, _) in usage_names(engine.storage.program).items()}
    (checksum,) = config.engine_checksums
    WeightUsage(engine_checksum=checksum, text="random tokens", tokens=counter.tokens, counts=counts).save(directory)
