"""Recognises the kind of adapter in a directory; refuses kinds that cannot be served, with one sentence each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final

from ..._core import AdapterError
from ...common.json_fields import describe, load_json_object
from ...common.regular_file import open_regular
from ..network.adapter_sites import AdaptedModules
from .classifier_head import is_classifier
from .peft_fields import FIELDS
from .unserved_types import why_unserved

CONFIG_FILE: Final = "adapter_config.json"
MAX_CONFIG_BYTES: Final = 1 << 20
"""Size limit in bytes of an adapter's config, which is read and parsed before anything is known about it."""
SAFETENSORS_FILE: Final = "adapter_model.safetensors"
PICKLE_FILE: Final = "adapter_model.bin"
MLX_FILE: Final = "adapters.safetensors"
INITIAL_DIRECTORY: Final = "initial_adapter"
"""Subdirectory of an adapter: the initial adapter, in the state in which training began (initial.py)."""
DRAFT_DIRECTORY: Final = "draft"
"""Subdirectory of an adapter: the adapter of the draft model."""

_LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/"

_TASKS: Final = {
    "SEQ_2_SEQ_LM": "an adapter of an encoder and a decoder, but the model is a decoder or not known",
    "SEQ_CLS": "a classifier, whose head does not fit into a request's tensors; use its directory (LLM.classify)",
    "TOKEN_CLS": "a classifier of tokens, whose head does not fit into a request's tensors; use its directory",
    "QUESTION_ANS": "it marks answers in a text, but engines generate text",
}
_CAUSAL_TASK: Final = "CAUSAL_LM"
_ENCODER_DECODER_TASK: Final = "SEQ_2_SEQ_LM"
_EMBEDDING_TASK: Final = "FEATURE_EXTRACTION"
_OTHER_HEADS: Final = re.compile(r"For\w*(Classification|QuestionAnswering|MultipleChoice)|RewardModel")


class PromptKind(Enum):
    """Kinds of adapters that are virtual tokens before a prompt, by peft_type."""

    PROMPT_TUNING = "prompt tuning"
    P_TUNING = "P-tuning"


class AdapterFormat(Enum):
    """Formats of adapters that can be read."""

    PEFT = "PEFT"
    MLX = "MLX-LM"


def recognise(
    directory: Path, modules: AdaptedModules | None = None, *, classifiers: bool = False
) -> tuple[AdapterFormat, dict[str, Any]]:
    """Returns the format of an adapter directory, and the fields of its adapter_config.json.

    modules: modules of the model that the adapter is for, which decide the accepted tasks; None: a decoder's.
    classifiers: True also accepts adapters of classifiers; the caller must then serve their heads.

    Raises AdapterError with one sentence if the directory has no adapter, or one whose kind or task cannot be served.
    """
    if not directory.is_dir():
        raise AdapterError(f"{directory}: is not a directory; expected one with {CONFIG_FILE}")
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise AdapterError(f"{directory}: has no {CONFIG_FILE}{_what_it_is(directory)}")
    refuse_lfs_pointer(path)
    fields = load_json_object(path, AdapterError, max_bytes=MAX_CONFIG_BYTES)
    if "peft_type" not in fields and ("fine_tune_type" in fields or "lora_parameters" in fields):
        return AdapterFormat.MLX, fields
    accepted = _accepted_tasks(modules)
    reason = _why_not(fields, accepted, classifiers=classifiers and _EMBEDDING_TASK in accepted)
    if reason is not None:
        raise AdapterError(f"{path}: {reason}")
    return AdapterFormat.PEFT, fields


def prompt_kind(fields: Mapping[str, Any]) -> PromptKind | None:
    """Kind of virtual tokens of an adapter_config.json; None for other adapters."""
    peft_type = fields.get("peft_type")
    return PromptKind[peft_type] if isinstance(peft_type, str) and peft_type in PromptKind.__members__ else None


def _accepted_tasks(modules: AdaptedModules | None) -> tuple[str, ...]:
    """Accepted tasks, in addition to classifiers of the model's hidden states."""
    if modules is not None and modules.has_encoder:
        return (_ENCODER_DECODER_TASK,)
    if modules is not None and modules.is_encoder_only and not modules.is_tower:
        return (_EMBEDDING_TASK,)
    return (_CAUSAL_TASK, _EMBEDDING_TASK)


def refuse_lfs_pointer(path: Path) -> None:
    """Raises AdapterError if Git left a pointer in place of a large file that was not fetched."""
    try:
        with open_regular(path) as file:
            begin = file.read(len(_LFS_POINTER))
    except OSError as reason:
        raise AdapterError(f"{path}: cannot be read: {reason.strerror}") from None
    if begin == _LFS_POINTER:
        raise AdapterError(f"{path}: is a Git LFS pointer, not the file itself; run git lfs pull")


def _what_it_is(directory: Path) -> str:
    if (directory / MLX_FILE).is_file():
        return f": an MLX-LM adapter needs the one that was written with {MLX_FILE}"
    if (directory / "adapters.npz").is_file():
        return ": adapters.npz is from an old MLX-LM and cannot be read; train it again or convert it"
    if (directory / "config.json").is_file():
        return ": it holds a whole model, not an adapter"
    return "; expected the directory of a PEFT or MLX-LM adapter"


def _why_not(fields: Mapping[str, Any], accepted_tasks: Sequence[str], *, classifiers: bool) -> str | None:
    peft_type, task = fields.get("peft_type"), fields.get("task_type")
    if peft_type is None:
        if "config" in fields and ("model_class" in fields or "hidden_size" in fields):
            return "is from AdapterHub (the library adapters), which is not supported; accepted: PEFT and MLX-LM"
        return "peft_type is missing, so this is not an adapter of PEFT, nor one of MLX-LM"
    kind = prompt_kind(fields)
    if kind is not None:
        return (
            f"peft_type = {describe(peft_type)}: {kind.value}, whose virtual tokens do not fit into a LoraConfig; "
            "accepted: by its name (LLM, Executor.add_adapter, servers), and as PromptTuningConfig.from_peft"
        )
    if not isinstance(peft_type, str) or peft_type not in FIELDS:
        accepted = ", ".join((*FIELDS, *PromptKind.__members__))
        return f"peft_type = {describe(peft_type)}: not served{why_unserved(peft_type)}; accepted: {accepted}"
    if is_classifier(fields) and classifiers:
        return None
    if task not in (*accepted_tasks, None):
        because = _TASKS.get(str(task), "not a task of PEFT")
        if task == _CAUSAL_TASK:
            because = "an adapter of a decoder, but the model has an encoder"
        return f"task_type = {describe(task)}: {because}; accepted: {', '.join(accepted_tasks)}"
    trained = fields.get("auto_mapping")
    name = trained.get("base_model_class") if isinstance(trained, dict) else None
    if isinstance(name, str) and _OTHER_HEADS.search(name):
        return f'auto_mapping says "{name}": a classifier or the like, but engines generate text'
    return None
