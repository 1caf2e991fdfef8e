"""Messages of an installation that lacks an extra, or runs on a platform that AdaptRT is not built for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOR_DEVELOPERS = {"dev", "docs", "test"}
EXTRAS = sorted(PROJECT["project"]["optional-dependencies"].keys() - FOR_DEVELOPERS)

IMPORTED_AS = {"pillow": "PIL"}
"""Packages whose modules have another name."""

WITHOUT_EXTRAS = """
import sys
from importlib.machinery import PathFinder
from pathlib import Path

class WithoutExtras(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in sys.argv[1:] else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras
import adaptrt
from adaptrt.builder import cli
from adaptrt.formats.checkpoint.pickled_file import PickledFile
from adaptrt.formats.engine.tensorrt.package import installed_package
from adaptrt.formats.sources.source import find_model
from adaptrt.runtime.guided_decoding import _load_llguidance
from adaptrt.runtime.images.opened import ImageLimits, open_image
from adaptrt.runtime.ranks import Ranks
from adaptrt.serve import ray
from adaptrt.tools.bench.plots import require_matplotlib

USES = {
    "bench": require_matplotlib,
    "guided": _load_llguidance,
    "hub": lambda: find_model("org/name"),
    "mpi": lambda: Ranks(2),
    "ray": lambda: ray.build_app({}),
    "s3": lambda: find_model("s3://bucket/model"),
    "tensorrt": installed_package,
    "tensorrt-rtx": installed_package,
    "torch": lambda: PickledFile(Path("model.bin"), b""),
    "vision": lambda: open_image(b"", "image", ImageLimits()),
}
for extra, use in USES.items():
    try:
        use()
    except (adaptrt.ConfigError, adaptrt.CheckpointError, adaptrt.RequestError) as error:
        print(f"{extra}: {error}")
assert cli.main(["serve", "model"]) == 2
"""


@pytest.fixture(scope="module")
def messages() -> dict[str, str]:
    """Messages by extra, from a process that finds no package of any extra."""
    needed = [requirement for extra in EXTRAS for requirement in PROJECT["project"]["optional-dependencies"][extra]]
    packages = {re.split(r"[\[<>=]", requirement)[0].replace("-", "_") for requirement in needed}
    command = [sys.executable, "-c", WITHOUT_EXTRAS, *(IMPORTED_AS.get(name, name) for name in packages)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    return {**found, "serve": done.stderr}


# test_without_onnx.py builds an engine for one of the others, and test_tensorrt_engine.py lacks adaptrt._cuda.
@pytest.mark.parametrize("extra", [extra for extra in EXTRAS if extra not in ("cuda", "onnx")])
def test_a_missing_extra_is_named_with_its_command(extra: str, messages: dict[str, str]) -> None:
    assert f"pip install 'adaptrt[{extra}]'" in messages[extra]


def cmake() -> str:
    found = shutil.which("cmake", path=sysconfig.get_path("scripts")) or shutil.which("cmake")
    return found or pytest.skip("there is no cmake")


def configure(call: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "script.cmake"
    script.write_text(f"include({ROOT}/cmake/platform.cmake)\n{call}\n")
    return subprocess.run([cmake(), "-P", script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("adaptrt_check_system(Windows)", "AdaptRT cannot be built on Windows; expected Linux"),
        ("adaptrt_check_system(Darwin)", "AdaptRT cannot be built on Darwin; expected Linux"),
        ('adaptrt_check_c_library("")', "another C library than glibc, such as musl"),
    ],
)
def test_platforms_that_cannot_be_built_for(call: str, message: str, tmp_path: Path) -> None:
    done = configure(call, tmp_path)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "call",
    [
        "adaptrt_check_system(Linux)\nadaptrt_check_c_library(1)",
        'set(ADAPTRT_ALLOW_MACOS ON)\nadaptrt_check_system(Darwin)\nadaptrt_check_c_library("")',
        'set(ADAPTRT_ALLOW_MUSL ON)\nadaptrt_check_c_library("")',
    ],
)
def test_platforms_that_can(call: str, tmp_path: Path) -> None:
    assert configure(call, tmp_path).returncode == 0


def test_the_platform_is_checked_before_a_compiler_is_looked_for() -> None:
    lines = (ROOT / "CMakeLists.txt").read_text().splitlines()
    system, project, library = (
        next(number for number, line in enumerate(lines) if line.startswith(start))
        for start in ("adaptrt_check_system(", "project(", "adaptrt_check_c_library(")
    )
    assert system < project < library


def test_the_container_has_all_sources_and_an_ordinary_user() -> None:
    text = (ROOT / "deploy" / "Containerfile").read_text()
    copied = set(re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE))
    folders = {folder.split("/")[0] for folder in PROJECT["tool"]["scikit-build"]["wheel"]["packages"].values()}
    assert copied == folders | {"cmake", "cpp"}
    last_stage = text.rpartition("\nFROM ")[2]
    assert "\nUSER 10001\n" in last_stage
    assert "/health'" in last_stage.partition("\nHEALTHCHECK ")[2]
    assert not {"g++", "pip install"} & set(last_stage.split())
