"""Names of the tensors that a checkpoint has once."""

from __future__ import annotations

from typing import Final

EMBEDDING: Final = "transformer.vocab_embedding.weight"
LM_HEAD: Final = "lm_head.weight"
