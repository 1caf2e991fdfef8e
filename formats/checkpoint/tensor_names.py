"""Names of tensors outside of the layers of a checkpoint."""

from __future__ import annotations

from typing import Final

EMBEDDING: Final = "transformer.vocab_embedding.weight"
LM_HEAD_MODULE: Final = "lm_head"
LM_HEAD: Final = f"{LM_HEAD_MODULE}.weight"
LM_HEAD_BIAS: Final = f"{LM_HEAD_MODULE}.bias"
