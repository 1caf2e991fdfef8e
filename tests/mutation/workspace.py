"""A copy of the working tree in which faults are tried, so that the tree itself does not change."""

from __future__ import annotations

import contextlib
import enum
import filecmp
import importlib.util
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from faults import Fault
from nearest import Stage

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"builder", "common", "formats", "runtime", "plugins", "serve", "tools"}
# A fault may cause an endless loop, or allocate all memory.
MEMORY_LIMIT = 16 << 30
# Limits of CPU time, which does not depend on other load on the machine.
TIMES_AS_LONG = 5
SECONDS_MORE = 20
# Limits of elapsed time: a process that waits indefinitely uses no CPU time, and a busy machine is several times
# slower.
TIMES_AS_LONG_IN_ALL = 10
SECONDS_MORE_IN_ALL = 60
# The first build compiles everything.
MOST_SECONDS = 3600


@dataclass(frozen=True)
class Limits:
    """Resource limits of a command."""

    cpu_seconds: float
    seconds: float


UNLIMITED = Limits(MOST_SECONDS, MOST_SECONDS)


# Statuses of timeout(1) after a timeout, and of a process that exceeded its CPU time limit.
TIME_WAS_UP = {124, 128 + signal.SIGKILL, -signal.SIGKILL, 128 + signal.SIGXCPU, -signal.SIGXCPU}


class BuildError(Exception):
    """The fault does not compile."""


class Ending(enum.Enum):
    """How a command ended."""

    PASSED = enum.auto()
    FAILED = enum.auto()
    NEVER_ENDED = enum.auto()


class Workspace:
    """A copy of the sources and tests, their C++ build, and a copy of the installed package."""

    def __init__(self, folder: Path, prefix: Sequence[str]) -> None:
        """`prefix` is put before every command that builds or tests."""
        self.tree = folder / "tree"
        self._build = self.tree / "build" / "faults"
        self._site = folder / "site"
        self._output = folder / "output.txt"
        self._prefix = list(prefix)
        self._limits: dict[Stage, Limits] = {}
        self._copy_tree()
        self._copy_package()

    def text(self, path: str) -> str:
        """Text of a file without a fault."""
        return (ROOT / path).read_text()

    @contextlib.contextmanager
    def fault(self, fault: Fault) -> Iterator[None]:
        """Applies the fault during the with statement."""
        original = self.text(fault.path)
        try:
            self._write(fault.path, fault.applied_to(original))
            yield
        finally:
            self._write(fault.path, original)

    def ending_of(self, stage: Stage) -> Ending:
        """Runs a stage's tests; returns how they end. Raises BuildError."""
        if stage not in self._limits:
            raise ValueError(f"{stage} was not tried without a fault")
        return self._run(stage, self._limits[stage])

    def try_without_fault(self, stage: Stage) -> None:
        """Checks that the tests pass without a fault, and measures their time for the limits."""
        if stage in self._limits:
            return
        self._build_for(stage)
        begin, cpu_begin = time.monotonic(), _seconds_of_children()
        if self._run(stage, UNLIMITED) is not Ending.PASSED:
            raise SystemExit(f"{stage} fails without any fault; see {self._output}")
        cpu_seconds, seconds = _seconds_of_children() - cpu_begin, time.monotonic() - begin
        self._limits[stage] = Limits(
            TIMES_AS_LONG * cpu_seconds + SECONDS_MORE, TIMES_AS_LONG_IN_ALL * seconds + SECONDS_MORE_IN_ALL
        )

    def _build_for(self, stage: Stage) -> None:
        target = stage.program or ("_core" if stage.needs_core else None)
        if target is not None:
            self._compile(target)

    def _run(self, stage: Stage, limits: Limits) -> Ending:
        self._build_for(stage)
        if stage.program is not None:
            return self._call([self._build / "tests" / "cpp" / stage.program], self.tree, limits)
        module = self._installed_core()
        if stage.needs_core:
            module = next((self._build / "cpp" / "bindings").glob("_core*.so"))
        # Deletes the old file first, because it may be mapped.
        (self._site / "adaptrt" / module.name).unlink(missing_ok=True)
        shutil.copy2(module, self._site / "adaptrt")
        command = [sys.executable, "-m", "pytest", "-c", "../pyproject.toml", "--rootdir", "..", "-q", "-x"]
        files = [f"python/{file}" for file in stage.files]
        return self._call([*command, "-p", "no:cacheprovider", *files], self.tree / "tests", limits)

    def _compile(self, target: str) -> None:
        if not (self._build / "build.ninja").exists():
            self._configure()
        command = ["cmake", "--build", self._build, "--target", target]
        if self._call(command, self.tree, UNLIMITED) is not Ending.PASSED:
            raise BuildError(target)

    def _configure(self) -> None:
        # A link makes paths relative to the build the same as in the checkout, so that the compiler cache is shared.
        environment = self.tree / ".venv"
        if not environment.exists():
            environment.symlink_to(sys.prefix)
        python = environment / "bin" / "python"
        options = {"Python_EXECUTABLE": python, "ADAPTRT_BUILD_TESTS": "ON", "ADAPTRT_BUILD_PYTHON": "ON"}
        options["ADAPTRT_UNITY_BUILD"] = "OFF"  # A fault is in one source file.
        command = ["cmake", "-S", self.tree, "-B", self._build, "-G", "Ninja"]
        command += [f"-D{name}={value}" for name, value in options.items()]
        if self._call(command, self.tree, UNLIMITED) is not Ending.PASSED:
            raise SystemExit("cmake could not configure the build")

    def _call(self, command: Sequence[str | Path], folder: Path, limits: Limits) -> Ending:
        environment = dict(os.environ)
        emulated = ROOT / "build" / "wheel" / "tests" / "python_modules"
        environment["PYTHONPATH"] = os.pathsep.join([str(self._site), str(emulated)])
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
        # The prefix may wait for its turn, which does not count as the command's time.
        limited = [*self._prefix, "timeout", "--kill-after=10", str(round(limits.seconds)), *map(str, command)]

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
            resource.setrlimit(resource.RLIMIT_CPU, (round(limits.cpu_seconds),) * 2)

        with self._output.open("wb") as output:
            done = subprocess.run(
                limited, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False,
                preexec_fn=limit,
            )  # fmt: skip
        if done.returncode == 0:
            return Ending.PASSED
        return Ending.NEVER_ENDED if done.returncode in TIME_WAS_UP else Ending.FAILED

    def _write(self, path: str, text: str) -> None:
        (self.tree / path).write_text(text)
        if Path(path).parts[0] in PACKAGES:
            (self._site / "adaptrt" / path).write_text(text)

    def _copy_tree(self) -> None:
        """Unchanged files keep their times, so that they are not compiled again."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, stdout=subprocess.PIPE,
        )  # fmt: skip
        names = {name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()}
        for name in names:
            target = self.tree / name
            if not target.exists() or not filecmp.cmp(ROOT / name, target, shallow=False):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, target)
        for folder in ("cpp", "tests", *PACKAGES):
            for file in (self.tree / folder).rglob("*"):
                if file.suffix in {".py", ".cpp", ".h"} and str(file.relative_to(self.tree)) not in names:
                    file.unlink()

    def _copy_package(self) -> None:
        """Copies the installed package, with the tree's Python sources."""
        package = self._site / "adaptrt"
        shutil.rmtree(package, ignore_errors=True)
        shutil.copytree(self._installed_core().parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        for name in PACKAGES:
            shutil.copytree(self.tree / name, package / name, dirs_exist_ok=True)

    @staticmethod
    def _installed_core() -> Path:
        spec = importlib.util.find_spec("adaptrt._core")
        if spec is None or spec.origin is None:
            raise SystemExit("adaptrt is not installed for this Python; `make test` installs it")
        return Path(spec.origin)


def _seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
