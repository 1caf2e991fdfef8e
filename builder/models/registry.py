"""The table of supported model families."""

from __future__ import annotations

from typing import Final

from .family import ModelFamily
from .llama import LLAMA
from .mistral import MISTRAL
from .qwen2 import QWEN2
from .qwen3 import QWEN3

FAMILIES: Final[dict[str, ModelFamily]] = {
    family.architecture: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
    )
}
