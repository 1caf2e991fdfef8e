"""Print pyproject.toml's dependencies, or those of one extra, one a line, for `pip install -r`.

Runs before anything is installed: `python tools/list_dependencies.py [EXTRA]`.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def dependencies(extra: str | None) -> list[str]:
    """The requirements as pyproject.toml states them. Raises KeyError for an unknown extra."""
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
    listed: list[str] = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    return listed


if __name__ == "__main__":
    print("\n".join(dependencies(sys.argv[1] if len(sys.argv) > 1 else None)))
