"""Writes engines and the answers that they should give on a CPU of another kind; check_references.py compares them.

    export PYTHONPATH=tests/python
    python tests/arm/make_references.py build/arm-references granite phi2
    python tests/arm/make_references.py build/arm-references            # all families

Each family gets a folder with its engines, its PEFT adapters and expected.npz: logits of transformers + PEFT in
float32, and the logits of the portable kernels on this machine. Needs the packages of `adaptrt[test]`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from cases import ADAPTERS, USES_C_LIBRARY, ask, prompts

from adaptrt._core import DType, QuantAlgo
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.families import FAMILIES, GEMMA4, LATENT, RECURRENT, RELATIVES, Family, save_family
from support.models import Reference, save_adapter

ALL = {**FAMILIES, **RELATIVES, **RECURRENT, **LATENT, **GEMMA4}
BUILD = BuildConfig(
    max_batch_size=8,
    max_num_tokens=128,
    max_seq_len=128,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=16),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
# The engine in float32 is compared with transformers, all of them with the portable kernels of this machine.
ENGINES: dict[str, tuple[DType, QuantAlgo | None]] = {
    "float32": (DType.FLOAT32, None),
    "bfloat16": (DType.BFLOAT16, None),
    "int8": (DType.BFLOAT16, QuantAlgo.W8A8),
    "int4": (DType.BFLOAT16, QuantAlgo.W4A16),
    "int4-int8": (DType.BFLOAT16, QuantAlgo.W4A8),
}

# It gets all engines; other families get the one in float32.
OF_ALL_TYPES = "granite"


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("families", nargs="*", default=[], help="default: all")
    arguments = parser.parse_args()
    if unknown := set(arguments.families) - set(ALL):
        parser.error(f"unknown families {', '.join(sorted(unknown))}; expected some of {', '.join(ALL)}")
    for name in arguments.families or ALL:
        (arguments.folder / name).mkdir(parents=True)
        if name in RECURRENT:
            (arguments.folder / name / USES_C_LIBRARY).touch()
        write_references(ALL[name], arguments.folder / name, list(ENGINES) if name == OF_ALL_TYPES else ["float32"])
        print(name, flush=True)
    return 0


def write_references(family: Family, folder: Path, engines: list[str]) -> None:
    """Writes the engines, the adapters and expected.npz of one family."""
    model = save_family(family, folder / "model")
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        if settings is not None:
            save_adapter(model, folder / name, seed, target_modules=family.targets, **settings)
    expected: dict[str, np.ndarray] = {"vocab_size": np.array(family.vocab_size)}
    for engine in engines:
        dtype, algo = ENGINES[engine]
        quantization = None if algo is None else QuantConfig(quant_algo=algo)
        convert_checkpoint(model, folder / "checkpoint", dtype=dtype, quantization=quantization)
        build(folder / "checkpoint", BUILD, folder / engine)
        answers = ask(folder, engine, family.vocab_size, together=True, kernels="portable")
        for name, prompt, answer in zip(ADAPTERS, prompts(family.vocab_size), answers, strict=True):
            expected[f"{engine}/portable/{name}"] = answer.logits
            if engine == "float32":
                reference = Reference(model, None if name == "base" else folder / name)
                expected[f"{engine}/transformers/{name}"] = reference.logits(prompt, answer.tokens).numpy()
    np.savez(folder / "expected.npz", **expected)


if __name__ == "__main__":
    sys.exit(main())
