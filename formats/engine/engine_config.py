"""config.json of an engine directory.

Native and CUDA engines have `engine_checksum`, the checksum of their one file. Native engines of several ranks have
`engine_checksums`, one per rank's file.
TensorRT engines have `tensorrt`, their plans.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import xxhash

from ..._core import CheckpointError, EngineError
from ..._version import __version__
from ...common.json_fields import JsonFields, describe, load_json_object
from ..checkpoint.config import CONFIG_FILE, PRODUCER, CheckpointConfig
from ..models.registry import declare, read_config
from ..network.network import Network
from .build_config import CUDA, NATIVE, TENSORRT, BuildConfig
from .engine_quality import EngineQuality
from .tensorrt.plan_config import TensorRtPlans, plans_from_fields, plans_to_json

FORMAT_VERSIONS: Final = {NATIVE: 1, TENSORRT: 2, CUDA: 3}
"""Versions by backend, so that releases which do not know a backend refuse its engines."""
ADAPTERS_DIRECTORY: Final = "lora"
VISION_DIRECTORY: Final = "vision"
"""Directory of the vision tower, which has the form of an engine's directory."""


def engine_file(rank: int | str) -> str:
    """Name of the file with the program and weights of a rank; "*" matches all ranks."""
    return f"rank{rank}.engine"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Content of an engine directory's config.json."""

    version: str
    """Release that built the engine."""
    pretrained_config: CheckpointConfig
    build_config: BuildConfig
    engine_checksums: tuple[str, ...] = ()
    """Checksums of the engine files, by rank; see formats/engine/engine_file.py."""
    tensorrt: TensorRtPlans | None = None
    """Plans of a TensorRT engine; None for other engines."""
    adapter_checksums: tuple[str, ...] = ()
    """Checksums of the copies in build_config.lora_config.lora_dir; see adapter_copy.py."""
    quality: EngineQuality | None = None
    """Result of the build's measurement on a text, if one was requested."""
    source: str | None = None
    """Name of the model's repository with its commit (hf://ORGANISATION/NAME@COMMIT); None for a model from a path."""

    @cached_property
    def network(self) -> Network:
        """Network that the engine was compiled from; declared once."""
        return declare(self.pretrained_config)

    @classmethod
    def of_this_release(
        cls,
        pretrained_config: CheckpointConfig,
        build_config: BuildConfig,
        engine: tuple[str, ...] | TensorRtPlans,
        adapter_checksums: tuple[str, ...] = (),
        source: str | None = None,
    ) -> EngineConfig:
        """Makes the config of a new engine; `engine` is the engine files' checksums, or the plans."""
        return cls(
            version=__version__,
            pretrained_config=pretrained_config,
            build_config=build_config,
            engine_checksums=engine if isinstance(engine, tuple) else (),
            tensorrt=None if isinstance(engine, tuple) else engine,
            adapter_checksums=adapter_checksums,
            source=source,
        )

    def save(self, directory: Path) -> None:
        """Writes config.json."""
        (directory / CONFIG_FILE).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Content of config.json."""
        content: dict[str, Any] = {
            "producer": {"name": PRODUCER, "version": self.version},
            "version": self.version,
            "format_version": FORMAT_VERSIONS[self.build_config.backend],
            "pretrained_config": self.pretrained_config.to_dict(),
            "build_config": self.build_config.to_dict(),
        }
        if self.tensorrt is not None:
            content["tensorrt"] = plans_to_json(self.tensorrt)
        elif len(self.engine_checksums) == 1:
            (content["engine_checksum"],) = self.engine_checksums
        else:
            content["engine_checksums"] = list(self.engine_checksums)
        content["adapter_checksums"] = list(self.adapter_checksums)
        if self.quality is not None:
            content["quality"] = self.quality.to_dict()
        if self.source is not None:
            content["source"] = self.source
        return {**content, "checksum": _checksum(content)}

    @classmethod
    def load(cls, directory: Path) -> EngineConfig:
        """Reads config.json. Raises EngineError with its path and the reason why it cannot be used."""
        path = directory / CONFIG_FILE
        return cls.from_json(load_json_object(path, EngineError), str(path))

    @classmethod
    def from_json(cls, data: Mapping[str, Any], subject: str) -> EngineConfig:
        """Reads the content of config.json. Raises EngineError with `subject` and the reason why it cannot be used."""
        _check_kind(data, subject)
        content = {name: value for name, value in data.items() if name != "checksum"}
        if data.get("checksum") != _checksum(content):
            raise EngineError(
                f"{subject}: does not have its checksum; it was changed after the build. Build the engine again"
            )
        fields = JsonFields(content)
        fields.discard(("producer", "format_version"))
        build = fields.object("build_config")
        pretrained = fields.raw("pretrained_config")
        if not isinstance(pretrained, dict):
            fields.problem("pretrained_config", f"is {describe(pretrained)}; expected an object")
            pretrained = {}
        version, adapter_checksums = fields.string("version"), fields.strings("adapter_checksums")
        build_config = BuildConfig.from_fields(build) if build else BuildConfig()
        checksums: tuple[str, ...] = ()
        plans = None
        if data["format_version"] == FORMAT_VERSIONS[TENSORRT]:
            section = fields.object("tensorrt")
            plans = plans_from_fields(section) if section else None
        elif "engine_checksums" in content:
            checksums = tuple(fields.strings("engine_checksums"))
        else:
            checksums = (fields.string("engine_checksum"),)
        if FORMAT_VERSIONS.get(build_config.backend) != data["format_version"]:
            fields.problem("build_config.backend", f"is {build_config.backend}, which does not match format_version")
        quality = fields.object("quality", optional=True)
        measured = EngineQuality.from_fields(quality) if quality is not None else None
        source = fields.string("source") if "source" in content else None
        fields.finish(subject, EngineError)
        pretrained_config = _pretrained(pretrained, subject)
        ranks = pretrained_config.mapping.world_size
        if plans is None and len(checksums) != ranks:
            raise EngineError(f"{subject}: has {len(checksums)} engine_checksums for {ranks} ranks")
        return cls(
            version=version,
            pretrained_config=pretrained_config,
            build_config=build_config,
            engine_checksums=checksums,
            tensorrt=plans,
            adapter_checksums=adapter_checksums,
            quality=measured,
            source=source,
        )


def _check_kind(data: Mapping[str, Any], subject: str) -> None:
    if "format_version" not in data or "build_config" not in data:
        raise EngineError(f"{subject}: is not the config of an engine of AdaptRT; `adaptrt build` makes engines")
    if data["format_version"] not in FORMAT_VERSIONS.values() or isinstance(data["format_version"], bool):
        *others, last = map(str, sorted(FORMAT_VERSIONS.values()))
        known = f"{', '.join(others)} and {last}"
        raise EngineError(
            f"{subject}: has format_version {describe(data['format_version'])}, this release reads {known}; "
            "build the engine again"
        )


def _pretrained(data: Mapping[str, Any], subject: str) -> CheckpointConfig:
    try:
        return read_config(data, subject=f"{subject}: pretrained_config")
    except CheckpointError as error:
        raise EngineError(str(error)) from None


def _checksum(content: Mapping[str, Any]) -> str:
    """Returns the XXH3-64 of the content with sorted keys: layout and order do not matter, values do."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())
