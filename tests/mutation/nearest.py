"""Finds the tests of a source file, nearest first."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Test programs of a room and of those that depend on it, nearest first, and Python tests that use it through the
# bindings.
CPP_PROGRAMS = {
    "core": ("core", "lora", "kernels", "cpu", "exec"),
    "kernels": ("kernels", "cpu"),
    "lora": ("lora", "sched", "cpu", "exec"),
    "kv": ("kv", "sched", "exec"),
    "kv_file": ("kv_file", "exec"),
    "weight_file": ("weight_file", "cpu"),
    "draft": ("draft", "sched", "exec"),
    "draft_engine": ("exec",),
    "guide": ("guide", "exec"),
    "sample": ("sample", "exec"),
    "sched": ("sched", "exec"),
    "program": ("program", "cpu"),
    "measure": ("measure",),
    "engine": ("engine", "cpu", "sharded"),
    "cpu": ("cpu", "sharded"),
    "sharded": ("sharded",),
    "socket": ("socket", "sharded"),
    "mpi": ("mpi", "sharded"),
    "exec": ("exec",),
    "device": ("gpu", "tensorrt"),
    "gpu": ("gpu", "cuda_program", "tensorrt"),
    "cuda_program": ("cuda_program",),
    "tensorrt": ("tensorrt",),
}
SEEN_THROUGH_BINDINGS = (
    "unit/test_executor.py",
    "unit/test_lora_cache.py",
    "unit/test_executor_types.py",
    "integration/test_generation.py",
    "integration/test_ranks.py",
    "property/test_batch_invariance.py",
    "property/test_beams.py",
    "property/test_speculation.py",
    "property/test_second_level.py",
)
PYTHON_WIDER = {
    "formats/adapter": ("property/test_adapter_mutations.py", "integration/test_parity.py"),
    "formats/checkpoint": ("integration/test_parity.py", "integration/test_quantized_engines.py"),
    "builder/compile": ("integration/test_parity.py", "integration/test_quantized_engines.py",
                        "integration/test_compressed_weights.py", "integration/test_int8_kv_cache.py"),
    "builder/network": ("unit/compile", "integration/test_parity.py"),
    "formats/engine": ("unit/compile", "unit/runtime", "integration/test_parity.py",
                       "integration/test_quantized_engines.py", "integration/test_compressed_weights.py",
                       "integration/test_int8_kv_cache.py"),
    "formats/network": ("unit/compile", "integration/test_parity.py"),
    "formats": ("unit", "integration/test_parity.py"),
    "common": ("unit", "integration/test_parity.py"),
    "builder": ("unit", "integration/test_parity.py"),
    "plugins": ("unit/network", "unit/compile", "integration/test_tensorrt_emulated.py"),
    "runtime/orchestrator": ("integration/test_orchestrator.py",),
    "runtime": ("unit/test_executor.py", "unit/test_executor_types.py", "unit/test_lora_cache.py",
                "unit/test_executor_lifetime.py", "unit/test_llm.py", "integration/test_text.py",
                "integration/test_generation.py", "integration/test_perplexity.py",
                "integration/test_bad_input.py", "integration/test_weight_memory.py", "integration/test_ranks.py",
                "integration/test_neurons_in_files.py", "integration/test_embeddings.py",
                "integration/test_classifiers.py", "integration/test_prompt_tuning.py",
                "integration/test_prompt_adapters.py", "integration/test_adapter_tokenizers.py",
                "property/test_adapter_names.py"),
    "serve": ("unit/serve", "integration/test_serve_openai.py", "integration/test_serve_tools.py",
              "integration/test_serve_triton.py", "integration/test_serve_metrics.py",
              "integration/test_serve_abuse.py", "integration/test_serve_embeddings.py",
              "integration/test_serve_guides.py", "integration/test_serve_prompt_tuning.py",
              "property/test_server_crowd.py"),
    "tools": ("unit/bench", "unit/test_inspect.py", "unit/adapter/test_dora_normalisation.py",
              "unit/adapter/test_adapter_kinds.py", "unit/adapter/test_prompt_embeddings.py",
              "integration/test_bench.py", "integration/test_lora_guide.py", "integration/test_demo.py",
              "integration/test_perplexity.py", "integration/test_text.py"),
}  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """Tests that run together: a program of tests/cpp, or files of tests/python."""

    program: str | None = None
    files: tuple[str, ...] = ()
    needs_core: bool = False
    """True: the Python tests need a rebuilt extension module."""

    def __str__(self) -> str:
        return self.program or " ".join(self.files)


def stages_of(path: str, python_tests: Path) -> list[Stage]:
    """Stages for a file of the repository; `python_tests` is the folder tests/python."""
    parts = PurePosixPath(path).parts
    if parts[0] != "cpp":
        return _python_stages(PurePosixPath(path), python_tests)
    room = parts[3] if parts[1] == "include" else parts[2]
    if parts[2:4] == ("cpu", "kernels"):
        room = "kernels"
    if parts[1] == "bindings":
        return [Stage(files=SEEN_THROUGH_BINDINGS, needs_core=True)]
    programs = [Stage(program=f"test_{name}") for name in CPP_PROGRAMS[room]]
    return [*programs, Stage(files=SEEN_THROUGH_BINDINGS, needs_core=True)]


def _python_stages(path: PurePosixPath, tests: Path) -> list[Stage]:
    """Unit tests named like the module or importing it, then the room's folder, then integration tests."""
    room = next(folder for folder in PYTHON_WIDER if PurePosixPath(folder) in path.parents)
    own = [file for file in sorted(tests.glob("unit/**/test_*.py")) if path.stem in file.stem or _imports(file, path)]
    own.sort(key=lambda file: path.stem not in file.stem)
    stages = [Stage(files=tuple(str(file.relative_to(tests)) for file in own))] if own else []
    folder = f"unit/{PurePosixPath(room).name}"
    if (tests / folder).is_dir():
        stages.append(Stage(files=(folder,)))
    return [*stages, Stage(files=PYTHON_WIDER[room])]


def _imports(test: Path, path: PurePosixPath) -> bool:
    package, module = re.escape(".".join(("adaptrt", *path.parent.parts))), re.escape(path.stem)
    imported = rf"^\W*from {package}(?:\.{module} | import .*\b{module}\b)"
    return re.search(imported, test.read_text(), re.MULTILINE) is not None
