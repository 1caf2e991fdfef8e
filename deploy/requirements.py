"""Prints what the package needs, one requirement per line.

    python deploy/requirements.py [EXTRA ...]

pip can install a package together with its requirements, but not the requirements alone. Needs Python 3.11 or tomli.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """The requirements of the package and of these extras. Raises KeyError for an unknown extra."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    return [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
