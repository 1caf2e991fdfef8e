"""Checks without a build that pyproject.toml describes a wheel that can be built: part of `make lint`.

    .ci/check_package.py

Has scikit-build-core make the wheel's metadata, and looks for every folder of [tool.scikit-build.wheel.packages],
because scikit-build-core leaves out a folder that does not exist. Prints what is wrong and exits with status 1.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
_METADATA = "import sys; from scikit_build_core import build; build.prepare_metadata_for_build_wheel(sys.argv[1])"


def problems(root: Path) -> Iterator[str]:
    """Yields what is wrong with the project in `root`."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-c", _METADATA, place]
        made = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if made.returncode != 0:
        yield f"the wheel's metadata cannot be built:\n{made.stdout}{made.stderr}"
    packages = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]["packages"]
    for package, folder in packages.items():
        if not (root / folder).is_dir():
            yield f"wheel.packages: the folder of {package} is '{folder}'; expected a folder that exists"


def main() -> int:
    """Prints the problems. Returns 1 if there are any."""
    found = [f"pyproject.toml: {problem}" for problem in problems(ROOT)]
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
