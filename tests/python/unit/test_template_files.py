"""Named chat templates are copied with checkpoints, engines and adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from adaptrt import AdapterError, CheckpointError
from adaptrt.builder.conversion.convert import _is_checkpoint, copied_files, copy_files
from adaptrt.builder.engine.directory import is_engine_directory
from adaptrt.builder.model_cache.model_digest import ModelFiles, file_state
from adaptrt.common.progress import SilentProgress
from adaptrt.formats.adapter.adapter_copy import adapter_checksum, adapter_files, copy_adapter
from adaptrt.formats.template_files import holds_templates

TOOL_USE = "additional_chat_templates/tool_use.jinja"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    (model / "additional_chat_templates").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", TOOL_USE, "additional_chat_templates/a.txt"):
        (model / name).write_text("x")
    return model


def test_named_templates_are_copied(model: Path, tmp_path: Path) -> None:
    assert copied_files(model) == ["tokenizer.json", "chat_template.jinja", TOOL_USE]
    engine = tmp_path / "engine"
    engine.mkdir()
    copy_files(model, engine)
    assert (engine / TOOL_USE).read_text() == "x"
    assert sorted(entry.name for entry in (engine / "additional_chat_templates").iterdir()) == ["tool_use.jinja"]


def test_a_named_template_makes_another_digest(model: Path, tmp_path: Path) -> None:
    def digest() -> str:
        return ModelFiles(model, file_state(model / "config.json")).digest(tmp_path / "known", SilentProgress())

    first = digest()
    (model / TOOL_USE).write_text("y")
    second = digest()
    (model / TOOL_USE).rename(model / "additional_chat_templates" / "rag.jinja")
    assert len({first, second, digest()}) == 3


def test_named_templates_belong_to_an_adapter(model: Path, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (model / name).write_text("x")
    assert TOOL_USE in adapter_files(model)
    checksum = copy_adapter(model, tmp_path / "copy")
    assert (tmp_path / "copy" / TOOL_USE).read_text() == "x"
    assert checksum == adapter_checksum(model)
    (model / TOOL_USE).write_text("y")
    assert checksum != adapter_checksum(model)


def test_a_directory_with_too_many_entries_is_named(model: Path) -> None:
    for i in range(1024):
        (model / "additional_chat_templates" / f"{i}.txt").touch()
    with pytest.raises(AdapterError, match="additional_chat_templates: has too many entries; expected at most 1024"):
        adapter_files(model)
    with pytest.raises(CheckpointError, match="additional_chat_templates: has too many entries"):
        copied_files(model)


@pytest.mark.parametrize(
    ("is_ours", "content"), [(_is_checkpoint, "rank0.safetensors"), (is_engine_directory, "rank0.engine")]
)
def test_checkpoints_and_engines_with_named_templates_may_be_replaced(
    is_ours: Callable[[Path], bool], content: str, model: Path
) -> None:
    (model / "config.json").write_text('{"producer": {"name": "adaptrt"}}')
    (model / content).touch()
    assert not is_ours(model)  # AdaptRT did not write that file
    (model / "additional_chat_templates" / "a.txt").unlink()
    assert is_ours(model)
    (model / "other").mkdir()
    assert not is_ours(model)


def test_only_templates_may_be_replaced_with_an_engine(model: Path, tmp_path: Path) -> None:
    templates = model / "additional_chat_templates"
    assert not holds_templates(templates)
    (templates / "a.txt").unlink()
    assert holds_templates(templates)
    (tmp_path / "additional_chat_templates").symlink_to(templates)
    assert not holds_templates(tmp_path / "additional_chat_templates")
    (templates / "b.jinja").symlink_to(model / "config.json")
    assert not holds_templates(templates)
