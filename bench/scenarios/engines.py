"""The engines of a scenario file, built once in the work directory and kept there."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from adaptrt import AdaptrtError, ConfigError, EngineError, __version__
from adaptrt.runtime.engine import load_engine
from adaptrt.runtime.native_engine import NativeEngine
from adaptrt.tools.bench.executors import load_native_engine
from adaptrt.tools.bench.runner import Progress

from .child import run_module
from .families import write_family
from .kinds import EngineSpec, Generation, ScenarioFile, engines_of
from .model import BenchModel, write_model
from .tokenizer import write_tokenizer


class NotBuiltError(Exception):
    """An engine could not be built; the message is the builder's."""


class EngineShelf:
    """Finds or builds engines and their models."""

    def __init__(self, work_dir: Path, progress: Progress) -> None:
        self._work_dir = work_dir
        self._progress = progress

    def prepare(self, file: ScenarioFile) -> tuple[dict[str, Path], dict[str, str]]:
        """Returns (directories of the engines that scenarios use, reasons why others are missing), both by name.

        Raises ConfigError with the reason if a missing engine is not optional.
        """
        directories, reasons = {}, {}
        used = {name for scenario in file.scenarios for name in engines_of(scenario)}
        with_guides = {s.engine for s in file.scenarios if isinstance(s, Generation) and s.text == "json"}
        for spec in (spec for spec in file.engines.values() if spec.name in used):
            try:
                directories[spec.name] = self._engine(spec, file.model, has_tokenizer=spec.name in with_guides)
            except (NotBuiltError, AdaptrtError) as error:
                if not spec.optional:
                    raise ConfigError(f"engine '{spec.name}' is not available: {error}") from error
                reasons[spec.name] = str(error)
        return directories, reasons

    def load(self, file: ScenarioFile, directories: Mapping[str, Path]) -> dict[str, NativeEngine]:
        """Loads engines with the memory for weights that the file gives them."""
        return {name: load_native_engine(path, file.engines[name].weight_memory) for name, path in directories.items()}

    def model(self, model: BenchModel) -> Path:
        """Hugging Face directory of a model."""
        directory = self._work_dir / f"model-{_digest(asdict(model))}"
        if not (directory / "config.json").exists():
            self._progress(f"making a random model in {directory}")
            partial = _fresh(directory)
            write_model(model, partial)
            partial.rename(directory)
        return directory

    def _engine(self, spec: EngineSpec, model: BenchModel | None, *, has_tokenizer: bool) -> Path:
        if spec.directory is not None:
            if not spec.directory.is_dir():
                raise NotBuiltError(f"{spec.directory}: is not a directory")
            return spec.directory
        shape = asdict(model) if spec.is_of_model and model is not None else None
        identity = {**asdict(spec), "directory": None, "optional": None, "name": None, "weight_memory": None}
        engine = self._work_dir / f"engine-{_digest([__version__, shape, identity, has_tokenizer])}"
        if not self._is_usable(engine):
            directory = self._model_of(spec, model)
            if has_tokenizer and not (directory / "tokenizer.json").exists():
                vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
                write_tokenizer(vocab_size, directory)
            self._progress(f"building engine '{spec.name}'")
            self._build(spec, directory, engine)
            if spec.family is not None:
                shutil.rmtree(directory)
        return engine

    def _model_of(self, spec: EngineSpec, model: BenchModel | None) -> Path:
        """Hugging Face directory that an engine is built of."""
        if spec.model_dir is not None:
            return spec.model_dir
        if spec.family is None:
            assert model is not None  # The reader of scenario files checks this.
            return self.model(model)
        directory = self._work_dir / f"family-{spec.family}"
        shutil.rmtree(directory, ignore_errors=True)
        write_family(spec.family, directory)
        return directory

    def _build(self, spec: EngineSpec, model: Path, engine: Path) -> None:
        if spec.weights is not None:
            limits = (spec.max_batch_size, spec.max_num_tokens, spec.max_seq_len)
            _run("scenarios.weight_formats", model, engine, spec.weights, *limits)
            return
        source: list[object] = ["--model_dir", model, "--dtype", spec.dtype]
        if spec.convert_flags:
            checkpoint = engine.with_name(f"{engine.name}.checkpoint")
            shutil.rmtree(checkpoint, ignore_errors=True)
            _run("adaptrt.builder.cli", "convert-checkpoint", *source, "--output_dir", checkpoint, *spec.convert_flags)
            source = ["--checkpoint_dir", checkpoint]
        _run("adaptrt.builder.cli", "build", *source, "--output_dir", engine, *_limits(spec), *_adapters(spec),
             *spec.build_flags)  # fmt: skip
        if spec.convert_flags:
            shutil.rmtree(checkpoint)

    def _is_usable(self, engine: Path) -> bool:
        """True if the engine exists and this version of AdaptRT can load it."""
        if not (engine / "config.json").exists():
            return False
        try:
            load_engine(engine)
        except EngineError as error:
            self._progress(f"building {engine} again, because it cannot be loaded: {str(error)[:200]}")
            return False
        return True


def _limits(spec: EngineSpec) -> list[str]:
    names = ("max_batch_size", "max_num_tokens", "max_seq_len")
    return [text for name in names for text in (f"--{name}", str(getattr(spec, name)))]


def _adapters(spec: EngineSpec) -> list[str]:
    if not spec.lora:
        return []
    dora = "enable" if spec.dora else "disable"
    return ["--lora_plugin", "auto", "--dora_plugin", dora, "--max_lora_rank", str(spec.max_lora_rank)]


def _run(module: str, *arguments: object) -> None:
    """Runs a module in its own process, so that its memory does not count as this process's."""
    done = run_module(module, *arguments)
    if done.returncode != 0:
        raise NotBuiltError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"{module} failed")


def _fresh(directory: Path) -> Path:
    """Temporary path for a directory that is renamed when it is complete."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    number = 0
    while (partial := directory.with_name(f"{directory.name}.partial{number}")).exists():
        number += 1
    return partial


def _digest(identity: object) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:12]
