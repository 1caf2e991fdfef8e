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


def engine_with(given_columns: tuple[int, int]) -> Any:
    config = SimpleNamespace(build_config=BuildConfig(), network=SimpleNamespace(given_columns=given_columns))
    return SimpleNamespace(directory=Path("engine"), config=config, num_ranks=1, adapted_modules=None)


ENGINE = engine_with((0, 0))


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


def test_engines_that_take_images_get_rows_without_coordinates(tmp_path: Path) -> None:
    config = prompt_of_directory(adapter_of(tmp_path / "tuned", "PROMPT_TUNING"), engine_with((2, 4)))
    assert config is not None
    np.testing.assert_array_equal(config.embedding_table, [[*[1] * 8, 0, 0, *[-1] * 4]] * 3)


def test_virtual_tokens_are_those_of_the_directory(tmp_path: Path, read: list[Path]) -> None:
    tuned = adapter_of(tmp_path / "tuned", "PROMPT_TUNING")
    np.testing.assert_array_equal(table_from_peft(str(tuned), "engine"), TABLE)
    assert prompt_of_directory(tuned, ENGINE) is not None
    assert read == [tuned, tuned]
