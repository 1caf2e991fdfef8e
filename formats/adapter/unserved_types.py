"""PEFT types that rows of tensors cannot express: the reason, and how PEFT converts some of them to LoRA."""

from __future__ import annotations

from typing import Final

_AT_RANK: Final = "exact at rank = {}"
_FULL_RANK: Final = "exact at rank = the smaller side of the largest target layer, and an approximation below it"

_REASONS: Final = {
    "ADAMSS": "it trains subspaces of the base's singular vectors",
    "ADAPTION_PROMPT": "it adds prompts inside the attention",
    "BEFT": "it adds vectors to the outputs of layers, and has no A and B",
    "BOFT": "it multiplies the base's weights",
    "BONE": "its change of a weight depends on the base's weight; PEFT replaced it with MISS",
    "C3A": "its change of a weight is block-circulant",
    "CARTRIDGE": "it brings keys and values",
    "CPT": "it brings embeddings of a prompt",
    "DEFT": "it multiplies the base's weights",
    "DELORA": "it scales A and B by their own norms and by the base's",
    "FOURIERFT": "its change of a weight is dense",
    "FROD": "it replaces the base's weights with a decomposition that layers share",
    "GLORA": "it multiplies the base's weights",
    "GRALORA": "it has an A and a B for each block of a weight",
    "HIRA": "it multiplies the base's weights",
    "HRA": "it multiplies the base's weights",
    "LILY": "it routes between matrices that layers share",
    "LN_TUNING": "it changes the norms",
    "MISS": "it has one matrix of blocks in place of A and B",
    "MULTITASK_PROMPT_TUNING": "it has embeddings of a prompt for each task",
    "OFT": "it multiplies the base's weights",
    "OSF": "it trains the base's own singular vectors and values",
    "PEANUT": "its change of a weight is a neural network's output for the base's weight",
    "POLY": "it routes between several adapters",
    "PREFIX_TUNING": "it brings keys and values that belong to no token, and engines keep only computed ones, in "
    "layouts of their own",
    "PSOFT": "it rotates the base's singular vectors",
    "PVERA": "it draws a factor of each token from a distribution",
    "RANDLORA": "its change of a weight is a sum of products of random matrices",
    "ROAD": "it rotates the outputs of layers",
    "SHADOW": "it runs a second network along with the model",
    "SHIRA": "its change of a weight is single elements",
    "SUPERTUNING": "its change of a weight is single elements",
    "TINYLORA": "its A and B are the base's singular vectors",
    "UNILORA": "it makes A and B of one vector that layers share",
    "VBLORA": "it makes A and B of a bank of vectors that layers share",
    "WAVEFT": "its change of a weight is dense",
    "XLORA": "it routes between several adapters",
}
_CONVERTED: Final = {
    "C3A": _FULL_RANK,
    "DELORA": _AT_RANK.format("r"),
    "FOURIERFT": _FULL_RANK,
    "GRALORA": _AT_RANK.format("r * gralora_k + hybrid_r"),
    "MISS": _AT_RANK.format("r unless init_weights is bat"),
    "PSOFT": _AT_RANK.format("r"),
    "RANDLORA": _FULL_RANK,
    "TINYLORA": _AT_RANK.format("r"),
    "UNILORA": _AT_RANK.format("r"),
    "VBLORA": _AT_RANK.format("r"),
    "WAVEFT": _FULL_RANK,
}
"""Types that peft.save_as_lora converts, with the rank at which the result is exact."""


def why_unserved(peft_type: object) -> str:
    """Continues an error "... not served": the reason if it is known, and how PEFT can convert the adapter to LoRA."""
    if not isinstance(peft_type, str) or peft_type not in _REASONS:
        return ""
    text = f", because {_REASONS[peft_type]}"
    if peft_type in _CONVERTED:
        text += f"; peft.save_as_lora(path, model, rank) makes a LoRA of it, {_CONVERTED[peft_type]}"
    return text
