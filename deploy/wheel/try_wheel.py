"""Installs a wheel into an empty environment where no compiler is found, and runs the demo with it.

    python deploy/wheel/try_wheel.py build/wheels/adaptrt-*.whl
    python deploy/wheel/try_wheel.py build/wheels/adaptrt-*.whl script.py argument

The demo builds an engine, serves a batch with several adapters and checks the answers. A script runs
after it, in the same environment. Exits with a nonzero status if the wheel cannot be installed, or the demo or the
script fails. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A compiler that a build would call. None of them may be found.
COMPILERS = ("c++", "cc", "clang", "cmake", "g++", "gcc", "ninja", "nvcc")
# Arguments of the environment's Python.
CHECKS = (
    ("the version", ["-c", "import adaptrt; print(adaptrt.__version__, adaptrt.__file__)"]),
    ("the command line", ["-m", "adaptrt.builder.cli", "--help"]),
    ("the demo", ["-m", "adaptrt.tools.demo"]),
)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("script", nargs="*", help="a Python script of the repository, and its arguments")
    arguments = parser.parse_args()
    wheel = arguments.wheel.resolve(strict=True)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        python = install([wheel], home / "environment")
        scripts = [(arguments.script[0], arguments.script)] if arguments.script else []
        for name, command in (*CHECKS, *scripts):
            print(f"== {name}", flush=True)
            if subprocess.run([python, *command], cwd=ROOT, env=bare(python), check=False).returncode != 0:
                print(f"{wheel.name}: {name} failed", file=sys.stderr)
                return 1
    print(f"{wheel.name}: installed without a compiler, and the demo's answers are right")
    return 0


def install(wheels: Iterable[Path], folder: Path) -> Path:
    """Makes an environment with the wheels and their dependencies, which must be wheels too. Returns its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--only-binary", ":all:", *wheels], env=bare(python), check=True)
    return python


def bare(python: Path) -> dict[str, str]:
    """Environment variables with which programs find only the environment's own commands."""
    commands = python.parent
    if found := [name for name in COMPILERS if (commands / name).exists()]:
        raise SystemExit(f"{commands} has {', '.join(found)}; expected an environment without compilers")
    return {"PATH": str(commands), "HOME": str(commands.parent)}


if __name__ == "__main__":
    sys.exit(main())
