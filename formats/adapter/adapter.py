"""An adapter in memory, as the matrices of its modules; the same for every file format."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..._core import DType
from .names import ModuleKey, Role

# Key in an adapter file's metadata. The value "normalized" says that the file's DoRA magnitudes are m / ||W + s B A||.
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
    magnitude: Array | None  # [out], for DoRA and IA3
    scale: float  # factor of B @ A
    names: dict[Role, str]  # the file's tensors that they are, or are made from
    shift: Array | None = None  # [out], added after the magnitude and before the base's bias
    # The next two fields change the shift once the base's bias is known (biases.py).
    bias: Array | None = None  # [out], a trained bias that replaces the base's
    scales_bias: bool = False  # the magnitude also multiplies the base's bias

    @property
    def rank(self) -> int:
        """A's first dimension."""
        return int(self.a.shape[0])

    def parts(self) -> Iterator[tuple[Role, Array]]:
        """Yields the matrices in the order in which a row has them."""
        yield Role.A, self.a
        yield Role.B, self.b
        if self.magnitude is not None:
            yield Role.MAGNITUDE, self.magnitude
        if self.shift is not None:
            yield Role.SHIFT, self.shift

    @property
    def has_shift(self) -> bool:
        """True if its row has a shift, even if the values are not known without the base's bias."""
        return self.shift is not None or self.bias is not None or self.scales_bias


@dataclass(frozen=True)
class TokenRows:
    """Trained rows of the embedding or of lm_head."""

    name: str
    """Name of the tensor."""
    tokens: tuple[int, ...]
    values: Array  # [tokens, hidden size]; they replace the base's rows


@dataclass(frozen=True)
class NewEmbeddings:
    """Rows of the embedding or of lm_head for new tokens, whose ids follow the base's vocabulary."""

    name: str
    """Names of the file and the tensor."""
    values: Array  # [new tokens, hidden size]


@dataclass(frozen=True)
class WholeWeight:
    """The whole weight of lm_head or of the embedding."""

    key: ModuleKey
    name: str
    """Name of the tensor."""
    values: Array  # [tokens, hidden size]
    is_own: bool
    """True if it was trained (modules_to_save).

    Otherwise it is a copy of the base's weight, or replaces it in the base.
    """


@dataclass
class Adapter:
    """A checked adapter. The reader has accounted for every tensor and every field."""

    directory: Path
    file: Path
    kind: str
    """Description for people, such as "LoRA, rsLoRA scaling"."""
    modules: dict[ModuleKey, ModuleTensors]
    """Modules in the order of rows: by layer, then by module id."""
    tensors: dict[str, Array] = field(repr=False)
    """All tensors as stored, by name."""
    fan_in_fan_out: bool = False
    is_dora: bool = False
    """True for DoRA. Then every module has a magnitude, except those of which only a bias was trained."""
    magnitudes_normalized: bool = False
    whole_weights: list[WholeWeight] = field(default_factory=list, repr=False)
    """Whole weights of lm_head and the embedding. They become modules once the base is known (whole_weights.py)."""
    ties_weights: bool = False
    """True if a tied lm_head shares the embedding's whole weight (ensure_weight_tying)."""
    token_rows: dict[ModuleKey, TokenRows] = field(default_factory=dict, repr=False)
    """Trained tokens. They become modules once the base is known (token_rows.py)."""
    base_changing_init: str = ""
    """Initialisation that moved a share of the base's weights into A and B, such as "pissa"; "" for none."""
    invocation_tokens: tuple[int, ...] = ()
    """aLoRA: the tokens from which on the adapter is active; () for other adapters."""
    context_length: int = 0
    """Context length in tokens that it was trained for with divided rotary positions; 0: not given."""
    new_embeddings: dict[str, NewEmbeddings] = field(default_factory=dict, repr=False)
    """New tokens' rows by EMBEDDING and LM_HEAD, if a file of their own has them."""
    changes_elsewhere: bool = False
    """True if it also has tensors of layers that another network uses: those of a vision tower, or of its text."""
    absent_tokens: int = 0
    """Number of the base's last tokens that its vocabulary lacks; set once the base is known (new_tokens.py)."""

    @property
    def short_kind(self) -> str:
        """The kind without its settings, such as lora, dora, alora, ia3 or trained_tokens."""
        return re.split(", | of ", self.kind)[0].lower().replace(" ", "_")
