"""Virtual tokens are read from adapter directories that have some."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adaptrt._core import AdapterError
from adaptrt.formats.engine.build_config import BuildConfig
from adaptrt.runtime import prompt_tuning
from adaptrt.runtime.prompt_tuning import prompt_of_directory, table_from_peft

TABLE = np.ones((3, 8), np.float32)


ENGINE: Any = SimpleNamespace(directory=Path("engine"), config=SimpleNamespace(build_config=BuildConfig()), num_ranks=1,
                              adapted_modules=None)  # fmt: skip


def adapter_of(directory: Path, peft_type: str) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": peft_type}))
    return directory


@pytest.fixture(autouse=True)
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    directories: list[Path] = []

    def read_prompt_embeddings(directory: Path, _: Any) -> tuple[int, np.ndarray]:
        directories.append(directory)
        return 3, TABLE

    monkeypatch.setattr(prompt_tuning, "read_prompt_embeddings", read_prompt_embeddings)
    monkeypatch.setattr(prompt_tuning, "load_engine", lambda _: ENGINE)
    return directories


def test_a_lora_has_no_virtual_tokens(tmp_path: Path, read: list[Path]) -> None:
    lora = adapter_of(tmp_path / "lora", "LORA")
    with pytest.raises(AdapterError, match=r"adapter_config\.json: has no virtual tokens; accepted: PROMPT_TUNING"):
        table_from_peft(lora, "engine")
    assert prompt_of_directory(lora, ENGINE) is None
    assert read == []


def test_virtual_tokens_are_those_of_the_directory(tmp_path: Path, read: list[Path]) -> None:
    tuned = adapter_of(tmp_path / "tuned", "PROMPT_TUNING")
    np.testing.assert_array_equal(table_from_peft(str(tuned), "engine"), TABLE)
    assert prompt_of_directory(tuned, ENGINE) is not None
    assert read == [tuned, tuned]
