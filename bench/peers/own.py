"""The models and adapters of AdaptRT's own scenarios, which all peers run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from scenarios.families import config_of, write_family
from scenarios.model import BenchModel, write_model
from scenarios.peft_adapter import write_peft_adapter
from scenarios.tokenizer import write_tokenizer


@dataclass(frozen=True)
class FamilyModel:
    """A model from scenarios/families.py, run without adapters."""

    family: str

    @property
    def vocab_size(self) -> int:
        """Size of its vocabulary."""
        return int(config_of(self.family)["vocab_size"])


def write_base(model: BenchModel | FamilyModel, directory: Path) -> None:
    """Writes a Hugging Face directory with random bfloat16 weights."""
    if isinstance(model, FamilyModel):
        write_family(model.family, directory)
    else:
        write_model(model, directory)


__all__ = ["BenchModel", "FamilyModel", "write_base", "write_peft_adapter", "write_tokenizer"]
