"""An adapter as the matrices of its modules, whatever kind of file it came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..._core import DType
from .names import ModuleKey, Role

# In an adapter file's metadata: its DoRA magnitudes are m / ||W + s B A||.
# docs/decisions/dora.md has the reasons.
MAGNITUDES_KEY = "adaptrt.dora_magnitudes"
MAGNITUDES_NORMALIZED = "normalized"

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]

DTYPES = {
    np.dtype(np.float32): DType.FLOAT32,
    np.dtype(np.float16): DType.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): DType.BFLOAT16,
}
"""Types that tensors are kept in; float64 becomes float32."""
NUMPY_DTYPES = {dtype: stored for stored, dtype in DTYPES.items()}


@dataclass
class ModuleTensors:
    """The matrices of one adapted module, contiguous, each in one of DTYPES."""

    a: Array  # [rank, in]
    b: Array  # [out, rank], without the scale
    magnitude: Array | None  # [out], of DoRA and IA3
    scale: float  # what B @ A is multiplied by
    names: dict[Role, str]  # the tensors of the file that they are, or are made of
    shift: Array | None = None  # [out], what is added behind the magnitude and before the base's bias
    # What the shift becomes with the base's bias (biases.py).
    bias: Array | None = None  # [out], a trained one that takes the place of the base's
    scales_bias: bool = False  # the magnitude multiplies the base's bias as well

    @property
    def rank(self) -> int:
        """A's first dimension."""
        return int(self.a.shape[0])

    def parts(self) -> Iterator[tuple[Role, Array]]:
        """In the order in which a row has them."""
        yield Role.A, self.a
        yield Role.B, self.b
        if self.magnitude is not None:
            yield Role.MAGNITUDE, self.magnitude
        if self.shift is not None:
            yield Role.SHIFT, self.shift

    @property
    def has_shift(self) -> bool:
        """Whether its row has one, which may only be known with the base's bias."""
        return self.shift is not None or self.bias is not None or self.scales_bias


@dataclass(frozen=True)
class TokenRows:
    """Rows of the embedding or of lm_head that were trained."""

    name: str
    """Of the tensor."""
    tokens: tuple[int, ...]
    values: Array  # [tokens, hidden size], what takes the place of the base's


@dataclass(frozen=True)
class NewEmbeddings:
    """Rows of the embedding or of lm_head for the tokens behind the base's vocabulary."""

    name: str
    """Of the file and the tensor."""
    values: Array  # [new tokens, hidden size]


@dataclass(frozen=True)
class WholeWeight:
    """The whole weight of lm_head or of the embedding."""

    key: ModuleKey
    name: str
    """Of the tensor."""
    values: Array  # [tokens, hidden size]
    is_own: bool
    """It was trained in the adapter (modules_to_save); else it is put into the base, or is a copy of the base's."""


@dataclass
class Adapter:
    """An adapter whose every tensor and field is accounted for."""

    directory: Path
    file: Path
    kind: str
    """What people call it, such as "LoRA, rsLoRA scaling"."""
    modules: dict[ModuleKey, ModuleTensors]
    """In the order of rows: by layer, then by module id."""
    tensors: dict[str, Array] = field(repr=False)
    """All tensors as stored, by name."""
    fan_in_fan_out: bool = False
    is_dora: bool = False
    """Then its modules have magnitudes, all but those of which a bias alone was trained, and they are DoRA's."""
    magnitudes_normalized: bool = False
    whole_weights: list[WholeWeight] = field(default_factory=list, repr=False)
    """Those of lm_head and the embedding, which become modules where the base is known (whole_weights.py)."""
    ties_weights: bool = False
    """A tied lm_head has the embedding's whole weight (ensure_weight_tying)."""
    token_rows: dict[ModuleKey, TokenRows] = field(default_factory=dict, repr=False)
    """Trained tokens, which become modules where the base is known (token_rows.py)."""
    base_changing_init: str = ""
    """The initialisation that took A and B out of the base's weights, such as "pissa"; "" where none did."""
    invocation_tokens: tuple[int, ...] = ()
    """What an aLoRA adapter acts from on; () for others."""
    context_length: int = 0
    """Tokens that it was trained for by dividing rotary positions; 0: not said."""
    new_embeddings: dict[str, NewEmbeddings] = field(default_factory=dict, repr=False)
    """Of new tokens, by EMBEDDING and LM_HEAD, where a file of their own has them."""
    absent_tokens: int = 0
    """How many of the base's last tokens its vocabulary does not have, where the base is known (new_tokens.py)."""
