"""Measures the perplexity of engines on a text, and how far the others deviate from the first engine.

With an adapter, it also shows what storing the adapter in fewer bytes changes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .._core import ConfigError, PeftCacheConfig
from ..common.number_flags import MAX_INT32, integer
from ..formats.adapter.adapter_copy import TOKENIZER_FILE
from ..runtime.adapter_tokenizers import read_tokenizer
from ..runtime.text_quality import DEFAULT_WINDOW, MIN_TOKENS, Quality, measure, read_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument(
        "--engine_dir", type=Path, nargs="+", required=True, metavar="DIR",
        help="engines to measure; each is compared with the first",
    )  # fmt: skip
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text to read")
    parser.add_argument(
        "--window",
        type=integer(1, MAX_INT32),
        default=DEFAULT_WINDOW,
        metavar="N",
        help="tokens per window (default: %(default)s)",
    )
    parser.add_argument(
        "--lora_dir", metavar="ADAPTER", help="measure the engines with this adapter; they need --lora_plugin"
    )
    parser.add_argument(
        "--lora_storage", metavar="STORAGE",
        help="also measure each engine with the adapter in this storage, such as int8 (--lora-storage of serve)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measures the engines and prints one line for each."""
    if args.window < MIN_TOKENS:
        raise ConfigError(f"window is {args.window}; it must be at least {MIN_TOKENS}")
    if args.lora_storage is not None and args.lora_dir is None:
        raise ConfigError("lora_storage needs lora_dir")
    token_ids = _tokens_of(args.text, args.engine_dir)
    exact = PeftCacheConfig().lora_storage
    storages = list(dict.fromkeys([exact, args.lora_storage or exact]))
    measured = [(engine, storage) for engine in args.engine_dir for storage in storages]
    names = [f"{engine}" if storage == exact else f"{engine}, {storage}" for engine, storage in measured]
    width = max(len(name) for name in names)
    qualities = measure(
        [engine for engine, _ in measured],
        token_ids,
        args.window,
        lora_dir=args.lora_dir,
        lora_storages=[storage for _, storage in measured],
    )
    for number, (name, quality) in enumerate(zip(names, qualities, strict=True)):
        line = f"{name:<{width}}  perplexity {quality.perplexity:.4f} over {quality.tokens} tokens"
        print(line if number == 0 else line + _changes(quality))
    return 0


def _changes(quality: Quality) -> str:
    """Difference of an engine from the first one."""
    return (
        f", divergence {quality.divergence / quality.tokens:.5f} nats a token, the same choice for "
        f"{quality.same_choices / quality.tokens:.2%}, log probs change by "
        f"{quality.log_prob_change / quality.tokens:.5f} on average and {quality.worst_log_prob_change:.4f} at most"
    )


def _tokens_of(text: Path, engines: Sequence[Path]) -> list[int]:
    """The tokens of the text. Raises an error if the engines' tokenizers disagree."""
    tokenizers = {engine: engine / TOKENIZER_FILE for engine in engines}
    missing = [str(engine) for engine in engines if not engine.is_dir()]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: is not a directory")
    missing = [str(path) for path in tokenizers.values() if not path.exists()]
    if missing:
        raise ConfigError(f"there is no tokenizer: {', '.join(missing)}")
    first = tokenizers[engines[0]]
    content = read_tokenizer(first, ()).content
    differing = [str(path) for path in tokenizers.values() if read_tokenizer(path, ()).content != content]
    if differing:
        raise ConfigError(f"{', '.join(differing)}: differs from {first}; engines are compared on the same tokens")
    return read_tokens(text, first)
