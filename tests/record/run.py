"""Records results of engines, bit for bit, to compare two commits on one machine.

    .venv/bin/python tests/record/run.py build/before.json                              # at the commit before a change
    .venv/bin/python tests/record/run.py build/after.json --against build/before.json   # at the commit after it

For each family and storage type, a record has the digest of the engine file. For each kernel table it has the tokens
and the logits' digest of a crowd of requests with and without adapters. Records of two machines may differ, because
their kernel tables differ, and random models depend on the installed release of transformers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import numpy as np

import adaptrt
from adaptrt import _core
from support.families import FAMILIES, RELATIVES, Family, save_family
from support.models import save_adapter
from support.serving import collect, make_request, run_command

ADAPTERS: dict[str, dict[str, Any]] = {"lora": {"r": 5}, "dora": {"r": 4, "use_dora": True}}
LENGTHS = (3, 17, 90)
NUM_TOKENS = 10
# Families for which all storage types are recorded: one with gated MLPs, one with biases and layer norms.
STORED = ("granite", "gpt2")
STORAGES: dict[str, list[str]] = {
    "float32": ["--dtype", "float32"],
    "bfloat16": ["--dtype", "bfloat16"],
    "float16": ["--dtype", "float16"],
    "w8a16": ["--dtype", "bfloat16", "--quantization", "w8a16"],
    "w8a8": ["--dtype", "bfloat16", "--quantization", "w8a8"],
    "w4a16": ["--dtype", "bfloat16", "--quantization", "w4a16", "--group_size", "32", "--has_zero_point"],
    "w4a8": ["--dtype", "bfloat16", "--quantization", "w4a8", "--group_size", "32"],
    "int8_kv_cache": ["--dtype", "bfloat16", "--int8_kv_cache"],
    "compressed": ["--dtype", "bfloat16", "--compress_weights"],
}
BUILD = {
    "max_batch_size": 8, "max_num_tokens": 128, "max_seq_len": 256, "tokens_per_block": 8, "max_lora_rank": 16,
    "lora_plugin": "auto", "dora_plugin": "enable",
}  # fmt: skip


def main() -> int:
    """Returns 0 if the record equals the other one, or there is no other one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="file to write, JSON")
    parser.add_argument("--against", type=Path, metavar="RECORD", help="an earlier record of this machine")
    parser.add_argument("--families", nargs="+", default=sorted({**FAMILIES, **RELATIVES}), metavar="NAME")
    arguments = parser.parse_args()
    families = {name: {**FAMILIES, **RELATIVES}[name] for name in arguments.families}
    record = {"kernels": _core.cpu_kernels(), **dict(recorded(families))}
    arguments.record.parent.mkdir(parents=True, exist_ok=True)
    arguments.record.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    if arguments.against is None:
        return 0
    found = list(differences(json.loads(arguments.against.read_text()), record))
    print("\n".join(found) or f"{len(record)} entries are the same")
    return int(bool(found))


def recorded(families: Mapping[str, Family]) -> Iterator[tuple[str, Any]]:
    """The entries of a record."""
    with tempfile.TemporaryDirectory() as place:
        for name, family in families.items():
            directory = Path(place) / name
            model = save_family(family, directory / "model")
            adapters = adapters_of(family, model, directory)
            for storage, flags in STORAGES.items():
                if storage == "float32" or name in STORED:
                    print(f"{name} {storage}", file=sys.stderr)
                    yield f"{name} {storage}", entry_of(model, adapters, directory / storage, flags)


def adapters_of(family: Family, model: Path, directory: Path) -> list[Path]:
    """Random adapters on every linear layer of the family."""
    made = []
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        fields = {"target_modules": family.targets, **settings}
        if family.parameters and not settings.get("use_dora"):
            fields["target_parameters"] = list(family.parameters)
        made.append(save_adapter(model, directory / name, seed, **fields))
    return made


def entry_of(model: Path, adapters: list[Path], engine: Path, flags: list[str]) -> dict[str, Any]:
    """The engine's digest, and the results of a crowd of requests on each kernel table."""
    settings = [word for name, value in BUILD.items() for word in (f"--{name}", str(value))]
    run_command("build", "--model_dir", model, "--output_dir", engine, *settings, *flags)
    files = sorted(engine.glob("*.engine"))
    return {
        "engine": [digest(file.read_bytes()) for file in files],
        **{kernels: crowd(engine, adapters, kernels) for kernels in _core.cpu_kernels()},
    }


def crowd(engine: Path, adapters: list[Path], kernels: str) -> list[dict[str, Any]]:
    """Runs all requests at once. Returns the tokens and the logits' digest of each."""
    config = adaptrt.ExecutorConfig(kernels=kernels, num_threads=2, enable_chunked_context=True)
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
        loras = [None, *(adaptrt.LoraConfig.from_peft(number, one, engine) for number, one in enumerate(adapters))]
        requests = [
            make_request(np.random.default_rng((number, length)).integers(2, 61, length).tolist(), NUM_TOKENS, lora)
            for number, lora in enumerate(loras)
            for length in LENGTHS
        ]
        answers = [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]
    return [
        {
            "tokens": answer.tokens,
            "logits": digest(answer.context_logits.tobytes() + answer.generation_logits.tobytes()),
        }
        for answer in answers
    ]


def digest(content: bytes) -> str:
    """Digest of bytes in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def differences(before: Mapping[str, Any], after: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """A description of each difference between two records."""
    for name in sorted({*before, *after}):
        here = f"{place}{name}"
        if name not in before or name not in after:
            yield f"{here}: only {'after' if name in after else 'before'}"
        elif isinstance(before[name], dict) and isinstance(after[name], dict):
            yield from differences(before[name], after[name], f"{here} / ")
        elif before[name] != after[name]:
            yield f"{here}: differs"


if __name__ == "__main__":
    raise SystemExit(main())
