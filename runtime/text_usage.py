"""Measures which neurons and experts a text uses. An engine that does not fit into memory keeps those resident."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from .. import _core
from ..formats.engine.build_config import BuildConfig
from ..formats.engine.engine_config import EngineConfig, engine_file
from ..formats.engine.engine_file import EngineFile
from ..formats.engine.weight_usage import WeightUsage, gate_names, usage_names
from .native_engine import NativeEngine, load_native_engine
from .text_quality import DEFAULT_WINDOW, MeasuredEngine, longest_window, read_text, run_windows, window_problems


class TextUsage:
    """Runs a build's engine on a text; see builder.weight_usage.UsageMeasure."""

    def __init__(self, text: Path, model_dir: Path, limit: int) -> None:
        """Reads at most `limit` tokens. model_dir: model or checkpoint with the tokenizer.

        Raises ConfigError for files that cannot be read, and for a text that is too short.
        """
        self._text = text
        self._token_ids = read_text(text, model_dir, limit, "usage")

    def problems(self, config: BuildConfig) -> list[str]:
        """Returns the problems of a config whose limits leave no room for a window."""
        return window_problems(config, "usage_text")

    def measure(self, engine: Path, target: Path | None = None) -> WeightUsage:
        """Returns the usage of all tokens, except a last window of one token.

        target: an engine of another backend to which the counts apply; None: `engine`, which is a native one.
        """
        config = EngineConfig.load(engine)
        loaded = load_native_engine(engine, config)
        assert isinstance(loaded, NativeEngine)
        counter = _core.WeightUsage()
        window = min(DEFAULT_WINDOW, len(self._token_ids), longest_window(config.build_config))
        measured = MeasuredEngine(dataclasses.replace(loaded, usage_counter=counter))
        for _ in run_windows([measured], self._token_ids, window):
            pass
        program = loaded.storage.program
        (checksum,) = config.engine_checksums
        names = usage_names(program)
        if target is not None:
            (checksum,) = EngineConfig.load(target).engine_checksums
            wanted = set(usage_names(EngineFile(target / engine_file(0), checksum).program).values())
            names = {at: name for at, name in gate_names(program).items() if name in wanted}
        of_ops = counter.of_ops
        counts = {name: tuple(of_ops[at]) if at in of_ops else (0,) * size for at, (name, size) in names.items()}
        return WeightUsage(engine_checksum=checksum, text=self._text.name, tokens=counter.tokens, counts=counts)
