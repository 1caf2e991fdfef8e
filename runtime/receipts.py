"""Receipts: what made an answer, so that it can be made again with the same bits.

A receipt is JSON: digests of everything that the answer's bits depend on, the requests as the executor got them, and
digests of their tokens and log probs.
"""

from __future__ import annotations

import hashlib
import json
import platform
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np

from .. import _core
from .._core import GuidedDecodingParams, PeftCacheConfig, Request, SamplingConfig
from .._version import __version__
from ..common.file_digest import sha256_of
from ..formats.engine.engine_config import VISION_DIRECTORY
from ..formats.sources.sum_of_names import parse_sum
from .adapter_versions import parse_version
from .executor import Executor
from .guided_decoding import LIBRARY as GUIDE_LIBRARY
from .images.prompt import VirtualPrompt
from .images.vision import takes_images
from .loaded_engine import LoadedEngine

FORMAT: Final = 1
"""Version of the format."""
BITS: Final = ("engine", "library", "libc", "cpu_kernels", "kernels", "gpu", "ranks", "lora_storage", "vision")
"""Fields of the environment that bits depend on. Drafts, threads and other requests change none."""


class AnswerDigest:
    """Digests of one answer's tokens and log probs, as they arrive."""

    def __init__(self) -> None:
        """Has no tokens yet."""
        self.num_tokens = 0
        self._tokens = hashlib.sha256()
        self._log_probs = hashlib.sha256()

    def add(self, token_ids: Sequence[int], log_probs: Iterable[float]) -> None:
        """Adds further tokens with the log prob of each."""
        self.num_tokens += len(token_ids)
        self._tokens.update(np.asarray(token_ids, "<i8").tobytes())
        for log_prob in log_probs:
            self._log_probs.update(struct.pack("<d", log_prob))

    def content(self) -> dict[str, Any]:
        """Returns the digests for JSON."""
        return {
            "num_tokens": self.num_tokens,
            "tokens": self._tokens.hexdigest(),
            "log_probs": self._log_probs.hexdigest(),
        }


def digest_of_tokens(token_ids: Sequence[int]) -> str:
    """Returns the SHA-256 of token ids."""
    return hashlib.sha256(np.asarray(token_ids, "<i8").tobytes()).hexdigest()


def digest_of_text(text: str) -> str:
    """Returns the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def environment_of(executor: Executor) -> dict[str, Any]:
    """Returns the digests of everything but the request and its adapter. Reads files at the first call for an
    executor's engine.
    """
    config = executor.executor_config
    draft = executor.draft_engine
    drafts = None
    if draft is not None and config.draft_target_decoding_config is not None:
        max_draft_len = config.draft_target_decoding_config.max_draft_len
        drafts = {"engine": _engine_digest(draft.directory, draft.config.engine_checksums), "max_len": max_draft_len}
    return {
        "release": __version__,
        "engine": _engine_digest(executor.engine.directory, executor.engine.config.engine_checksums),
        "library": _library_digest(),
        "libc": " ".join(platform.libc_ver()),
        "cpu_kernels": _core.cpu_kernels(),
        "kernels": executor.engine_info.kernels,
        "gpu": executor.engine.gpu(),
        "ranks": executor.engine.num_ranks,
        "lora_storage": (config.peft_cache_config or PeftCacheConfig()).lora_storage,
        "speculation": drafts,
        "vision": _vision_of(executor.engine),
    }


def _vision_of(engine: LoadedEngine) -> dict[str, Any] | None:
    """Returns everything that an image's rows depend on besides its pixels; None: the engine has no tower."""
    if not takes_images(engine):
        return None
    directory = engine.directory / VISION_DIRECTORY
    return {"engine": _engine_digest(directory, ()), "pillow": _release_of("pillow"), "numpy": np.__version__}


def _release_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@lru_cache(maxsize=1)
def _library_digest() -> str:
    return sha256_of(Path(_core.__file__))


@lru_cache(maxsize=8)
def _engine_digest(directory: Path, checksums: tuple[str, ...]) -> str:
    """Returns the SHA-256 of an engine's config.json, which has the checksums of its other files."""
    path = directory / "config.json"
    return hashlib.sha256(path.read_bytes() if path.is_file() else " ".join(checksums).encode()).hexdigest()


def adapters_in(version: str | None) -> list[dict[str, Any]]:
    """Returns name, digest and weight of each adapter in NAME@DIGEST or a sum of such names; None: the base model."""
    if version is None:
        return []
    named = parse_sum(version)
    terms: tuple[tuple[str, float | None], ...] = ((version, None),) if named is None else named.terms
    found = []
    for term, weight in terms:
        name, digest = parse_version(term) or (term, None)
        found.append({"name": name, "digest": digest} | ({} if weight is None else {"weight": weight}))
    return found


def request_content(
    request: Request, *, with_prompt: bool, seen_prompt: Sequence[int] | None = None, images: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns an executor's request for JSON.

    with_prompt: True: with the tokens of its prompt, not only a digest. seen_prompt: tokens of a prompt with images,
    before their rows replaced image tokens. images: digests of their pixels.
    """
    encoder = request.encoder_input_token_ids
    prompt: Sequence[int] = request.input_token_ids if encoder is None else encoder
    if seen_prompt is not None:
        prompt = seen_prompt
    guide, bias = request.guided_decoding_params, request.embedding_bias
    shown_prompt: dict[str, Any] = {"num_tokens": len(prompt), "digest": digest_of_tokens(prompt)}
    if with_prompt:
        shown_prompt["token_ids"] = list(prompt)
    return {
        "prompt": shown_prompt,
        "images": list(images),
        "decoder_start": None if encoder is None else list(request.input_token_ids),
        "max_tokens": request.max_tokens,
        "sampling": {name: value for name, value in _state_of(request.sampling_config).items() if value is not None},
        "end_id": request.end_id,
        "stop_words": request.stop_words,
        "bad_words": request.bad_words,
        "num_answers": request.num_return_sequences,
        "guide": None if guide is None else _content_of(guide),
        "logit_bias": None if bias is None else _sparse(np.asarray(bias)),
    }


def request_of(
    content: Mapping[str, Any], prompt: Sequence[int], vocab_size: int, seen: VirtualPrompt | None = None
) -> Request:
    """Makes the request again, with log probs. vocab_size: of its adapter. seen: the prompt with the rows of its
    images. Raises RequestError for invalid values.
    """
    prompt = prompt if seen is None else seen.ids
    guide, bias, start = content["guide"], content["logit_bias"], content["decoder_start"]
    row = None
    if bias is not None:
        row = np.zeros(vocab_size, np.float32)
        row[bias["tokens"]] = np.asarray(bias["values"], np.float32)
    return Request(
        list(prompt if start is None else start),
        content["max_tokens"],
        encoder_input_token_ids=None if start is None else list(prompt),
        sampling_config=SamplingConfig(**content["sampling"]),
        output_config=_core.OutputConfig(return_log_probs=True, exclude_input_from_output=True),
        end_id=content["end_id"],
        stop_words=content["stop_words"],
        bad_words=content["bad_words"],
        num_return_sequences=content["num_answers"],
        guided_decoding_params=None if guide is None else _guide_of(guide),
        embedding_bias=row,
        prompt_tuning_config=None if seen is None else seen.rows,
    )


def differences(receipt: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Lists the fields of two environments that bits depend on and that differ."""
    return [
        f"{name} is {json.dumps(receipt.get(name))} in the receipt, and {json.dumps(here[name])} here"
        for name in BITS
        if receipt.get(name) != here[name]
    ]


def guide_differences(requests: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lists the guides of a receipt's requests that another release of their library compiles here."""
    here = _release_of(GUIDE_LIBRARY)
    found = []
    for index, content in enumerate(requests):
        expected = (content["guide"] or {}).get(GUIDE_LIBRARY, here)
        if expected != here:
            found.append(f"requests[{index}]: {GUIDE_LIBRARY} is {expected} in the receipt, and {here} here")
    return found


def _content_of(guide: GuidedDecodingParams) -> dict[str, Any]:
    return {"type": guide.guide_type.name, "guide": guide.guide, GUIDE_LIBRARY: _release_of(GUIDE_LIBRARY)}


def _guide_of(guide: Mapping[str, Any]) -> GuidedDecodingParams:
    return GuidedDecodingParams(GuidedDecodingParams.GuideType[guide["type"]], guide["guide"])


def _sparse(row: Any) -> dict[str, Any]:
    tokens = np.flatnonzero(row)
    return {"tokens": tokens.tolist(), "values": [float(value) for value in row[tokens]]}


def _state_of(config: SamplingConfig) -> dict[str, Any]:
    # The binding's state for pickles has all fields by name.
    state = config.__reduce_ex__(2)[2]
    assert isinstance(state, dict)
    return state
