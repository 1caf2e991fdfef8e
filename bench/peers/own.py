"""The model and the adapters of AdaptRT's own scenarios, which all peers run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from scenarios.model import BenchModel, write_model
from scenarios.peft_adapter import write_peft_adapter

__all__ = ["BenchModel", "write_model", "write_peft_adapter"]
