"""Writes an adapter's proof: log probs of transformers and PEFT, which servers compare when they load the adapter."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from .._core import AdapterError, CheckpointError, ConfigError
from ..common.number_flags import integer
from ..formats.adapter.adapter_copy import TOKENIZER_FILE
from ..formats.adapter.dora import write_files
from ..formats.adapter.proof import (
    MAX_PROMPT_TOKENS,
    MAX_PROMPTS,
    MAX_TOLERANCE,
    MAX_TOP,
    PROOF_FILE,
    AdapterProof,
    ProvenPrompt,
    TopLogProbs,
)
from ..formats.adapter.recognise import CONFIG_FILE, SAFETENSORS_FILE
from ..formats.sources import find_model
from ..runtime.adapter_tokenizers import load_tokenizer

PROMPTS: Final = ("The", "Q: What is the weather in Paris?\nA:", "Once upon a time", "def main():\n")
"""Prompts of proofs that name none."""
TOLERANCE: Final = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument(
        "adapter", type=Path, metavar="ADAPTER", help=f"directory of a PEFT adapter, which gets an {PROOF_FILE}"
    )
    parser.add_argument("--model", required=True, metavar="BASE", help="Hugging Face model of the adapter")
    parser.add_argument(
        "--prompts", nargs="+", default=list(PROMPTS), metavar="TEXT",
        help="texts, best from what the adapter was trained for (default: four general ones)",
    )  # fmt: skip
    parser.add_argument(
        "--num_top", type=integer(1, MAX_TOP), default=5, metavar="N",
        help="number of log probs for each prompt (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=_tolerance, default=TOLERANCE, metavar="X",
        help="maximum difference of a log prob where the adapter is served; quantised engines need more (default: "
        "%(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Writes the proof into the adapter's directory."""
    proof, difference = make_proof(
        args.adapter, find_model(args.model).directory, args.prompts, args.num_top, args.tolerance
    )
    write_files(args.adapter, {PROOF_FILE: (proof.to_json() + "\n").encode()})
    print(
        f"{args.adapter / PROOF_FILE}: {len(proof.prompts)} prompts; the adapter changes a log prob by {difference:.4f}"
    )
    return 0


def make_proof(
    adapter: Path, base: Path, prompts: Sequence[str], num_top: int, tolerance: float
) -> tuple[AdapterProof, float]:
    """Runs the prompts with transformers and PEFT in float32. Returns the proof, and the largest change of a log prob.

    Raises AdapterError if PEFT cannot load the adapter, or if it changes no log prob enough to be told from the base;
    CheckpointError for the base, ConfigError for prompts that cannot be used or packages that are missing.
    """
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise ConfigError(f"prompts has {len(prompts)} texts; expected 1 to {MAX_PROMPTS}")
    for name in (CONFIG_FILE, SAFETENSORS_FILE):
        if not (adapter / name).is_file():
            raise AdapterError(f"{adapter / name}: is missing; expected an adapter that PEFT has saved")
    own = adapter / TOKENIZER_FILE
    tokenizer = load_tokenizer(own if own.exists() else base / TOKENIZER_FILE)
    tokens = [list(tokenizer.encode(text).ids) for text in prompts]
    for text, token_ids in zip(prompts, tokens, strict=True):
        if not 0 < len(token_ids) <= MAX_PROMPT_TOKENS:
            raise ConfigError(f"prompts: {text!r:.60} has {len(token_ids)} tokens; expected 1 to {MAX_PROMPT_TOKENS}")
    with_adapter, without = _log_probs(adapter, base, tokens)
    proven, difference = [], 0.0
    for text, token_ids, row, row_of_base in zip(prompts, tokens, with_adapter, without, strict=True):
        top, top_of_base = _top(row, num_top), _top(row_of_base, num_top)
        proven.append(ProvenPrompt(tuple(token_ids), text, top, top_of_base))
        for token, log_prob in top:
            if token < len(row_of_base):
                difference = max(difference, abs(log_prob - float(row_of_base[token])))
    if not difference > 2 * tolerance:
        raise AdapterError(
            f"{adapter}: the adapter changes log probs by at most {difference:.4f} on these prompts; expected more "
            f"than twice the tolerance of {tolerance:g}: give prompts that it was trained for, or a smaller tolerance"
        )
    proof = AdapterProof(tolerance, tuple(proven))
    return proof, difference


def _log_probs(adapter: Path, base: Path, prompts: Sequence[Sequence[int]]) -> tuple[list[Any], list[Any]]:
    """Returns the log probs after each prompt, float32 [vocabulary], with the adapter and without."""
    try:
        import peft
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(f"adaptrt prove needs torch, transformers and peft: {error}") from error
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, use_safetensors=True, local_files_only=True
        ).eval()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{base}: transformers cannot load the model: {error}") from error

    def rows() -> list[Any]:
        with torch.no_grad():
            logits = [model(torch.tensor([list(tokens)])).logits[0, -1] for tokens in prompts]
        return [torch.log_softmax(row.float(), -1).numpy() for row in logits]

    without = rows()
    try:
        model = peft.PeftModel.from_pretrained(model, str(adapter), local_files_only=True).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise AdapterError(f"{adapter}: PEFT cannot load the adapter: {error}") from error
    return rows(), without


def _top(log_probs: Any, num_top: int) -> TopLogProbs:
    tokens = sorted(range(len(log_probs)), key=lambda token: -log_probs[token])[:num_top]
    return tuple((token, round(float(log_probs[token]), 6)) for token in tokens)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MAX_TOLERANCE:
        raise argparse.ArgumentTypeError(f"'{text}'; expected a number above 0, at most {MAX_TOLERANCE:g}")
    return value
