"""Installs the wheels of adaptrt and adaptrt-cuda into an empty environment where no compiler is found, and tries them.

    python deploy/wheel/try_cuda_wheel.py build/wheels/adaptrt-*.whl build/wheels-cuda/adaptrt_cuda-*.whl

Builds an engine for NVIDIA GPUs, which needs no GPU. With a GPU, the engine answers a prompt. Without one, the error
must say whether the driver or the GPU is missing. Exits with a nonzero status if this is not so. Needs the standard
library only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from try_wheel import ROOT, bare, install

MODEL = ROOT / "examples" / "demo" / "model"
PROMPT = "Q: What is the weather in Paris?\nA:"
ANSWER = "It is sunny in Paris today, and the air is warm."
ERRORS = ("there is no NVIDIA driver on this machine", "the NVIDIA driver finds no GPU")
ASK = f"""
import sys
from adaptrt import LLM
print(LLM(sys.argv[1]).generate([{PROMPT!r}])[0].text)
"""


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs=2)
    wheels = [wheel.resolve(strict=True) for wheel in parser.parse_args().wheels]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        python = install(wheels, home / "environment")
        engine = home / "engine"
        build = ["-m", "adaptrt.builder.cli", "build", "--backend", "cuda", "--model_dir", str(MODEL)]
        build += ["--dtype", "bfloat16", "--output_dir", str(engine), "--lora_plugin", "auto"]
        subprocess.run([python, *build], cwd=home, env=bare(python), check=True)
        asked = subprocess.run(
            [python, "-c", ASK, engine], cwd=home, env=bare(python), check=False, capture_output=True, text=True
        )
    if asked.returncode == 0 and ANSWER in asked.stdout:
        print(f"{wheels[1].name}: the GPU answered: {asked.stdout.strip()}")
        return 0
    if missing := [error for error in ERRORS if error in asked.stderr]:
        print(f"{wheels[1].name}: installed without a compiler; no GPU was tried: {missing[0]}")
        return 0
    print(f"{wheels[1].name}: failed:\n{asked.stdout}{asked.stderr}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
