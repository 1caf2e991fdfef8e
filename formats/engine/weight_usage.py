"""weight_usage.json: how often a text used the neurons and experts of an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import xxhash

from ..._core import EngineError, LinearEpilogue, MatrixLayout
from ...common.json_fields import JsonFields, load_json_object
from .build_config import BuildConfig
from .plan import ExpertsOp, LinearOp, Program

USAGE_FILE: Final = "weight_usage.json"
_FORMAT: Final = "adaptrt.weight_usage"
_FORMAT_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class WeightUsage:
    """Counts that tell executors which weights to keep in memory first, if weight_memory cannot hold all."""

    engine_checksum: str
    """Checksum of the engine that was run."""
    text: str
    """Name of the file."""
    tokens: int
    """Number of tokens that were run, from the beginning of the text. Each token used every layer."""
    counts: Mapping[str, tuple[int, ...]]
    """Counts by name from usage_names(): how often each neuron's gate was open, or each expert was chosen."""

    def save(self, directory: Path) -> None:
        """Writes the file."""
        content: dict[str, Any] = {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "engine_checksum": self.engine_checksum,
            "text": self.text,
            "tokens": self.tokens,
            "counts": {name: list(counts) for name, counts in self.counts.items()},
        }
        content["checksum"] = _checksum(content)
        (directory / USAGE_FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path, engine_checksum: str, program: Program) -> WeightUsage | None:
        """Reads the file of an engine with this checksum and program; None if the build made none.

        Raises EngineError with the path, and the problem of each field.
        """
        path = directory / USAGE_FILE
        if not path.is_file():
            return None
        content = load_json_object(path, EngineError)
        source = JsonFields(content)
        source.string("format", choices=(_FORMAT,))
        source.integer("format_version", minimum=_FORMAT_VERSION, maximum=_FORMAT_VERSION)
        found = source.string("engine_checksum")
        if found != engine_checksum:
            source.problem("engine_checksum", f"is {found}; expected the engine's {engine_checksum}")
        text, tokens = source.string("text"), source.integer("tokens")
        names = usage_names(program)
        counts: dict[str, tuple[int, ...]] = {}
        of_layers = source.object("counts")
        if of_layers is not None:
            for name, size in names.values():
                counts[name] = of_layers.integers(name)
                if len(counts[name]) != size:
                    of_layers.problem(name, f"has {len(counts[name])} numbers; expected {size} for the engine's layer")
                elif any(count > tokens for count in counts[name]):
                    of_layers.problem(name, f"has {max(counts[name])}, more than the {tokens} tokens")
        checksum = source.string("checksum")
        source.finish(str(path), EngineError)
        del content["checksum"]
        if checksum != _checksum(content):
            raise EngineError(f"{path}: checksum does not match its content; it was changed after the build")
        return cls(engine_checksum=found, text=text, tokens=tokens, counts=counts)


class UsageMeasure(Protocol):
    """Runs engines on a text. builder/ runs no engines, so runtime/ provides the implementation."""

    def problems(self, config: BuildConfig) -> list[str]:
        """Lists reasons why engines of this config, after with_defaults(), cannot be run on the text."""

    def measure(self, engine: Path, target: Path | None = None) -> WeightUsage:
        """Runs an engine directory. Raises the errors of running it.

        target: the engine of the same model to which the counts apply; None: the one that is run.
        """


def usage_names(program: Program) -> dict[int, tuple[str, int]]:
    """Names the choices of the body's ops: by op, a tensor of what it chooses from, and the number of choices."""
    if program.matrix_layout is MatrixLayout.ROWS:
        return {at: name for at, name in gate_names(program).items() if _has_sparse_reader(program, at)}
    names = {}
    for at, op in enumerate(program.body):
        if isinstance(op, LinearOp) and op.neurons is not None and len(op.parts) > 1:
            names[at] = (op.neurons.tensor, op.neurons.count)
        elif isinstance(op, ExpertsOp):
            names[at] = (op.down[0].weight.tensor, len(op.down))
    return names


def gate_names(program: Program) -> dict[int, tuple[str, int]]:
    """Names the neurons of all ReLU-gated layers of the body as usage_names() does, also if all are read."""
    gated = (LinearEpilogue.RELU_MUL, LinearEpilogue.RELU_MUL_RELU)
    names = {}
    for at, op in enumerate(program.body):
        if isinstance(op, LinearOp) and op.epilogue in gated:
            up = op.parts[1].weight
            names[at] = (f"{up.tensor.removesuffix('.weight')}.neurons", up.n)
    return names


def _has_sparse_reader(program: Program, at: int) -> bool:
    following = program.body[at + 1] if at + 1 < len(program.body) else None
    return isinstance(following, LinearOp) and following.has_sparse_input


def _checksum(content: Mapping[str, Any]) -> str:
    """Returns the XXH3-64 of the content with sorted keys."""
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
