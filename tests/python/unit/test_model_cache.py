"""Engines that are built on first use: cases of reuse, cases of a new build, and files that must never be deleted."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import os
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from adaptrt import LLM, ConfigError
from adaptrt._core import AdaptrtError, DType, EngineError, QuantAlgo
from adaptrt.builder.cli import main as command_line
from adaptrt.builder.commands import engine_flags
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.model_cache import code_digest, first_use
from adaptrt.builder.model_cache.first_use import engine_for
from adaptrt.builder.model_cache.options import EngineOptions
from adaptrt.builder.model_cache.store import EngineCache, default_cache_directory
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.engine.engine_config import EngineConfig
from adaptrt.runtime.engine import load_engine
from support.models import ModelSpec, save_adapter, save_model
from support.tokenizers import byte_level, save_tokenizer

SPEC = ModelSpec(vocab_size=300, num_hidden_layers=1)
SMALL = EngineOptions(max_batch_size=4, max_num_tokens=64, max_seq_len=96, max_lora_rank=8)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineCache:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return EngineCache()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(SPEC, tmp_path_factory.mktemp("model") / "model")
    save_tokenizer(byte_level(), directory)
    return directory


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def forbid_building(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        pytest.fail("an engine is made, where one could be found or nothing could come of it")

    monkeypatch.setattr(first_use, "_make", fail)


def test_an_engine_is_made_once(cache: EngineCache, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model, SMALL)
    config = EngineConfig.load(engine)
    assert config.build_config.max_seq_len == 96
    assert config.build_config.dora_enabled
    assert len(config.build_config.lora_config.lora_target_modules) == 9
    assert (engine / "tokenizer.json").is_file()
    (entry,) = cache.entries()
    assert (entry.directory, entry.model) == (engine, str(model))
    assert entry.num_bytes > (engine / "rank0.engine").stat().st_size
    assert "max_lora_rank 8" in entry.options
    # The build leaves no checkpoint, no unfinished file, and only the key's lock file.
    left = {path.name for path in cache.directory.iterdir()}
    assert left == {entry.key, f"{entry.key}.lock", "digests"}
    assert {path.name for path in cache.place(entry.key).iterdir()} == {"engine", "entry.json"}
    forbid_building(monkeypatch)
    assert engine_for(str(model), SMALL) == engine
    assert engine_for(model, EngineOptions(max_batch_size=4, max_num_tokens=64, max_seq_len=96, max_input_len=96,
                                           max_lora_rank=8)) == engine  # fmt: skip


def test_the_last_use_is_noted(cache: EngineCache, model: Path) -> None:
    engine = engine_for(model, SMALL)
    os.utime(engine.parent / "entry.json", (0, 0))
    assert cache.entries()[0].last_used.year == 1970
    engine_for(model, SMALL)
    assert cache.entries()[0].last_used.year > 2000


def test_defaults_suit_a_server_and_the_model(cache: EngineCache, model: Path) -> None:
    build = EngineConfig.load(engine_for(model)).build_config
    assert (build.max_batch_size, build.max_num_tokens) == (256, 8192)
    assert build.max_seq_len == build.max_input_len == SPEC.max_position_embeddings
    assert build.lora_config.max_lora_rank == 64
    assert build.max_beam_width == 1


def test_an_engine_for_beams_is_another(cache: EngineCache, model: Path) -> None:
    engine = engine_for(model, dataclasses.replace(SMALL, max_beam_width=3))
    assert engine != engine_for(model, SMALL)
    assert EngineConfig.load(engine).build_config.max_beam_width == 3


@pytest.mark.parametrize("change", ["weights", "tokenizer", "options", "version", "code"])
def test_every_option_that_the_engine_depends_on_makes_another_engine(
    change: str, cache: EngineCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine_for(model, SMALL)
    options = SMALL
    if change == "weights":
        path = model / "model.safetensors"
        stat, content = path.stat(), bytearray(path.read_bytes())
        content[-2] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # files from archives and images have such times
    elif change == "tokenizer":
        (model / "chat_template.jinja").write_text("x")
    elif change == "options":
        options = EngineOptions(max_batch_size=5, max_num_tokens=64, max_seq_len=96, max_lora_rank=8)
    elif change == "version":
        monkeypatch.setattr(first_use, "__version__", "999")
    else:
        monkeypatch.setattr(first_use, "code_digest", lambda: "of another release")
    second = engine_for(model, options)
    assert second != first
    assert {entry.directory for entry in cache.entries()} == {first, second}


def test_the_digest_of_the_code_changes_with_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "adaptrt"
    names = (
        "builder/model_cache/code_digest.py",
        "builder/build.py",
        "common/x.py",
        "formats/x/y.py",
        "plugins/x/y.py",
    )
    files = [package / name for name in names]
    core = package / "_core.so"
    for file in (*files, core):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("one")
    monkeypatch.setattr(code_digest, "__file__", str(files[0]))
    monkeypatch.setattr(code_digest, "_core", types.SimpleNamespace(__file__=str(core)))
    digests = [code_digest.code_digest()]
    (package / "serve.py").write_text("makes no engines")
    assert code_digest.code_digest() == digests[0]
    for file in (*files, core):
        file.write_text("two")
        digests.append(code_digest.code_digest())
    files[1].rename(package / "builder" / "renamed.py")
    digests.append(code_digest.code_digest())
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("reason", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC])
def test_a_made_engine_is_used_where_the_cache_cannot_be_written(
    reason: int, cache: EngineCache, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(model, SMALL)
    again = Path(shutil.copytree(model, tmp_path / "again"))  # its digest is not cached

    def refuse(*_: object, **__: object) -> None:
        raise OSError(reason, os.strerror(reason))

    forbid_building(monkeypatch)
    for place, name in ((os, "utime"), (Path, "mkdir"), (Path, "write_text")):
        monkeypatch.setattr(place, name, refuse)
    assert engine_for(model, SMALL) == engine
    assert engine_for(again, SMALL) == engine


def test_other_errors_of_the_cache_are_reported(
    cache: EngineCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_for(model, SMALL)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(os, "utime", fail)
    with pytest.raises(OSError, match="the disk is broken"):
        engine_for(model, SMALL)


def _damage_text(path: Path) -> None:
    path.write_text(path.read_text()[:-20])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("entry.json", Path.unlink),
        ("entry.json", _damage_text),
        ("engine/config.json", Path.unlink),
        ("engine/config.json", _damage_text),
        ("engine", shutil.rmtree),
    ],
)
def test_a_damaged_entry_is_made_anew(
    name: str, damage: Callable[[Path], None], cache: EngineCache, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engine_for(model, SMALL)
    damage(engine.parent / name)
    assert [entry.options for entry in cache.entries()] == ["damaged"]
    assert command_line(["cache"]) == 0
    assert "damaged" in capsys.readouterr().out
    assert engine_for(model, SMALL) == engine
    assert load_engine(engine).directory == engine
    assert "max_lora_rank 8" in cache.entries()[0].options


@pytest.mark.parametrize("content", [b"", b"\xff" * 32, b"0" * 31])
def test_a_damaged_digest_is_made_anew(
    content: bytes, cache: EngineCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(model, SMALL)
    (kept,) = (cache.directory / "digests").iterdir()
    digest = kept.read_bytes()
    kept.write_bytes(content)
    forbid_building(monkeypatch)
    assert engine_for(model, SMALL) == engine
    assert kept.read_bytes() == digest


def test_an_entry_with_two_values_of_a_field_is_listed(
    cache: EngineCache, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = engine_for(model, SMALL).parent / "entry.json"
    entry.write_text(entry.read_text().replace("{", '{"model": "x",', 1))
    assert command_line(["cache"]) == 0
    assert "damaged" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["entry.json", "engine/config.json"])
def test_a_damaged_entry_can_be_removed(name: str, cache: EngineCache, model: Path) -> None:
    engine = engine_for(model, SMALL)
    _damage_text(engine.parent / name)
    cache.remove(engine.parent.name)
    assert not engine.parent.exists()


def test_a_damaged_engine_names_the_command_that_makes_it_anew(cache: EngineCache, model: Path, tmp_path: Path) -> None:
    engine = engine_for(model, SMALL)
    elsewhere = Path(shutil.copytree(engine.parent, tmp_path / engine.parent.name)) / "engine"
    for directory in (engine, elsewhere):
        content = bytearray((directory / "rank0.engine").read_bytes())
        content[-1] ^= 1
        (directory / "rank0.engine").write_bytes(content)
    key = engine.parent.name
    with pytest.raises(EngineError, match=f"; the engine is in the cache: adaptrt cache --remove {key} deletes it"):
        load_engine(engine)
    with pytest.raises(EngineError) as raised:
        load_engine(elsewhere)
    assert "adaptrt cache" not in str(raised.value)
    assert command_line(["cache", "--remove", key]) == 0
    assert load_engine(engine_for(model, SMALL)).directory == engine


def test_only_shards_that_the_index_names_count(cache: EngineCache, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    parts = {"first.safetensors": sorted(tensors)[::2], "second.safetensors": sorted(tensors)[1::2]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, model / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    engine = engine_for(model, SMALL)
    (model / "consolidated.safetensors").write_bytes(b"the same weights once more")
    assert engine_for(model, SMALL) == engine
    save_file({name: tensors[name] + 1 for name in parts["second.safetensors"]}, model / "second.safetensors")
    assert engine_for(model, SMALL) != engine


def test_a_copy_of_a_model_has_its_engine(
    cache: EngineCache, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(model, SMALL)
    forbid_building(monkeypatch)
    assert engine_for(Path(shutil.copytree(model, tmp_path / "copy")), SMALL) == engine


def test_a_model_is_read_once(cache: EngineCache, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model, SMALL)
    monkeypatch.setattr("adaptrt.builder.model_cache.model_digest.add_file", lambda *_: pytest.fail("read again"))
    assert engine_for(model, SMALL) == engine


def test_a_model_that_changes_meanwhile_is_not_kept(
    cache: EngineCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from adaptrt.builder import build as build_module

    build = build_module.build

    def build_and_change(*arguments: Any, **options: Any) -> Any:
        report = build(*arguments, **options)
        (model / "tokenizer.json").write_text("{}")
        return report

    monkeypatch.setattr(build_module, "build", build_and_change)
    with pytest.raises(ConfigError, match="its files were changed while they were read"):
        engine_for(model, SMALL)
    assert cache.entries() == []


def test_an_engine_is_returned_as_it_is(cache: EngineCache, model: Path) -> None:
    engine = engine_for(model, SMALL)
    assert engine_for(engine) == engine
    with pytest.raises(ConfigError, match=r"is an engine.* max_batch_size, compress_weights would have no effect"):
        engine_for(engine, EngineOptions(max_batch_size=4, compress_weights=True))


def test_a_checkpoint_is_built(cache: EngineCache, model: Path, tmp_path: Path) -> None:
    convert_checkpoint(model, tmp_path / "checkpoint")
    options = EngineOptions(max_seq_len=64, quantization=QuantConfig(quant_algo=QuantAlgo.W8A16), int8_kv_cache=True)
    config = EngineConfig.load(engine_for(tmp_path / "checkpoint", options)).pretrained_config
    assert config.quantization is not None
    assert config.quantization.quant_algo is QuantAlgo.W8A16
    assert config.int8_kv_cache
    assert (tmp_path / "checkpoint" / "rank0.safetensors").is_file()


def test_a_model_may_have_another_type(cache: EngineCache, model: Path, tmp_path: Path) -> None:
    options = EngineOptions(max_seq_len=64, dtype=DType.BFLOAT16)
    engine = engine_for(model, options)
    assert EngineConfig.load(engine).pretrained_config.dtype is DType.BFLOAT16
    assert engine != engine_for(model, EngineOptions(max_seq_len=64))
    convert_checkpoint(model, tmp_path / "checkpoint")
    with pytest.raises(
        ConfigError, match="checkpoint, whose dtype was chosen when it was converted; dtype bfloat16 is only"
    ):
        engine_for(tmp_path / "checkpoint", options)


def test_a_model_is_quantised(cache: EngineCache, model: Path) -> None:
    options = EngineOptions(max_seq_len=64, quantization=QuantConfig(quant_algo=QuantAlgo.W8A16), int8_kv_cache=True)
    config = EngineConfig.load(engine_for(model, options)).pretrained_config
    assert config.describe_types() == "float32, linear layers W8A16, int8 KV cache"
    assert cache.entries()[0].options.startswith("float32, linear layers W8A16, int8 KV cache, max_batch_size 256")


def test_int8_activations_make_another_engine(cache: EngineCache, model: Path) -> None:
    plain = EngineOptions(max_seq_len=64, quantization=QuantConfig(quant_algo=QuantAlgo.W8A16))
    rounding = dataclasses.replace(plain, int8_activations=True)
    assert rounding.given == ("max_seq_len", "quantization", "int8_activations")
    assert engine_for(model, rounding) != engine_for(model, plain)
    config = EngineConfig.load(engine_for(model, rounding)).pretrained_config
    assert config.describe_types() == "float32, linear layers W8A8"
    with pytest.raises(ConfigError, match="int8_activations: the weights are not quantised"):
        engine_for(model, EngineOptions(max_seq_len=64, int8_activations=True))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_lora_rank": 0}, r"max_lora_rank is 0; expected 1 to 1048576"),
        ({"max_batch_size": 0}, r"max_batch_size is 0 \(max_num_seqs in vLLM\); expected 1 to"),
        ({"max_seq_len": -1}, r"max_seq_len is -1 \(max_model_len in vLLM\); expected 1 to"),
        ({"max_num_tokens": "8k"}, r"max_num_tokens is '8k' \(max_num_batched_tokens in vLLM\); expected 1 to"),
        ({"max_num_tokens": True}, r"max_num_tokens is True"),
        ({"max_extra_tokens": -1}, r"max_extra_tokens is -1; expected 0 to 65536"),
        ({"max_beam_width": 1.5}, r"max_beam_width is 1.5; expected 1 to"),
        (
            {"long_lora_scaling_factors": (1,)},
            r"long_lora_scaling_factors is \(1,\); expected a list of integers",
        ),
        ({"long_lora_scaling_factors": 4}, r"long_lora_scaling_factors is 4; expected a list of integers, each 2"),
        ({"max_lora_rank": (8,)}, r"max_lora_rank is \(8,\); expected 1 to"),
        (
            {"max_lora_rank": 0, "max_beam_width": 0},
            r"max_beam_width is 0; .*max_lora_rank is 0",
        ),
    ],
)
def test_sizes_out_of_range_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        EngineOptions(**options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (EngineOptions(max_seq_len=4096), "max_seq_len 4096 is above the model's max_position_embeddings 1024"),
        (EngineOptions(compress_weights=True), "compress_weights needs bfloat16 weights"),
        (EngineOptions(quantization=QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=7)), "group_size is 7"),
    ],
)
def test_invalid_options_are_refused_before_any_work(
    options: EngineOptions, expected: str, cache: EngineCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_building(monkeypatch)
    with pytest.raises(ConfigError, match=expected):
        engine_for(model, options)
    assert not cache.directory.exists()


def test_directories_that_are_no_model_are_refused(cache: EngineCache, model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(model, tmp_path / "adapter", 0, r=2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    for directory, expected in {
        "./Qwen3-0.6B": r"does not exist; expected an engine .* or its name in the Hub \(ORGANISATION/NAME\)",
        model / "config.json": "is not a directory",
        tmp_path / "empty": "has no config.json; expected an engine .*, a checkpoint .*, or a Hugging Face model",
        tmp_path / "other": "has no architectures",
        adapter: "is a PEFT adapter; name the directory of its base model",
    }.items():
        with pytest.raises(ConfigError, match=expected):
            engine_for(directory)
    (model / "model.safetensors").unlink()
    with pytest.raises(AdaptrtError, match="holds no weights"):
        engine_for(model)


def test_a_model_without_a_tokenizer_is_refused_by_llm_before_any_work(
    cache: EngineCache, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_building(monkeypatch)
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer.json: there is no tokenizer; .*save_pretrained\('.*model'\)"):
        LLM(model)
    with pytest.raises(
        ConfigError, match=r"nowhere: there is no tokenizer; expected a tokenizer.json or a directory with one"
    ):
        LLM(model, tokenizer=tmp_path / "nowhere")
    assert not cache.directory.exists()


def test_too_little_space_is_said_before_the_work(
    cache: EngineCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(model)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ConfigError, match=r"needs about .* KiB, and 1000 bytes are free"):
        engine_for(model, SMALL)
    assert cache.entries() == []


def test_files_of_a_killed_process_are_deleted(cache: EngineCache, model: Path) -> None:
    engine = engine_for(model, SMALL)
    (entry,) = cache.entries()
    cache.remove(entry.key)
    unfinished = cache.directory / f".{entry.key}.99999.tmp"
    (unfinished / "checkpoint").mkdir(parents=True)
    other = cache.directory / ".0123456789abcdef.99999.tmp"
    other.mkdir()
    assert engine_for(model, SMALL) == engine
    assert not unfinished.exists()
    assert other.is_dir()  # another process may be building it
    cache.clean_up()
    assert not other.exists()
    assert len(cache.entries()) == 1


def test_an_engine_in_use_is_kept(cache: EngineCache, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_engine(engine_for(model, SMALL))
    (entry,) = cache.entries()
    with pytest.raises(ConfigError, match=f"{entry.key}: is in use"):
        cache.remove(entry.key)
    assert command_line(["cache", "--clear"]) == 0
    assert f"{entry.key}: kept, because a process uses it\n0 engines removed" in capsys.readouterr().out
    assert loaded.directory.is_dir()
    del loaded
    assert command_line(["cache", "--remove", entry.key]) == 0
    assert cache.entries() == []
    assert command_line(["cache", "--remove", entry.key]) == 2
    assert "has no engine with the key" in capsys.readouterr().err


def test_only_what_is_ours_is_deleted(cache: EngineCache, model: Path, tmp_path: Path) -> None:
    engine_for(model, SMALL)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("x")
    keep = [cache.directory / name for name in ("notes.txt", "0123456789abcdef/mine", "digests/x")]
    for path in keep:
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    (cache.directory / "fedcba9876543210").symlink_to(outside)
    (cache.directory / ".fedcba9876543210.1.tmp").symlink_to(outside)
    assert command_line(["cache", "--clear"]) == 0
    assert cache.entries() == []
    assert all(path.is_file() for path in [*keep, outside / "file"])
    for key in ("0123456789abcdef", "fedcba9876543210", "../outside", ""):
        with pytest.raises(ConfigError, match="has no engine with the key"):
            cache.remove(key)


def test_the_cache_is_listed_and_pruned(
    cache: EngineCache, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert command_line(["cache"]) == 0
    nouns = {"engines": "engines", "downloads": "downloads", "gguf": "GGUF files", "hub": "downloads from the Hub"}
    expected = [f"{cache.directory.parent / name}: has no {noun}" for name, noun in nouns.items()]
    assert capsys.readouterr().out.splitlines() == expected
    older, newer = engine_for(model, SMALL), engine_for(model, EngineOptions(max_seq_len=64))
    os.utime(older.parent / "entry.json", (0, 0))
    assert command_line(["cache"]) == 0
    output = capsys.readouterr().out
    assert output.index(newer.parent.name) < output.index(older.parent.name)
    assert "1970-01-01" in output
    assert "2 engines" in output
    size = cache.entries()[0].num_bytes
    assert command_line(["cache", "--max_bytes", str(size)]) == 0
    assert "1 engine removed" in capsys.readouterr().out
    assert [entry.directory for entry in cache.entries()] == [newer]
    assert command_line(["cache", "--max_bytes", str(size)]) == 0
    assert "0 engines removed" in capsys.readouterr().out
    assert command_line(["cache", "--max_bytes", "-1"]) == 2


@pytest.mark.parametrize("stated", [None, "", "relative/cache"])
def test_the_place_of_the_cache(stated: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if stated is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", stated)
    assert default_cache_directory() == tmp_path / ".cache" / "adaptrt" / "engines"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert default_cache_directory() == Path("/elsewhere/adaptrt/engines")


def test_the_cache_is_its_owners_alone(cache: EngineCache, model: Path) -> None:
    engine_for(model, SMALL)
    assert cache.directory.stat().st_mode & 0o077 == 0


def options_of(*flags: str) -> EngineOptions:
    parser = argparse.ArgumentParser()
    engine_flags.add_arguments(parser)
    return engine_flags.engine_options_of(parser.parse_args(flags))


def test_flags_say_what_is_made() -> None:
    assert options_of() == EngineOptions()
    assert options_of("--max_batch_size", "3", "--max_lora_rank", "16", "--int8_kv_cache") == EngineOptions(
        max_batch_size=3, max_lora_rank=16, int8_kv_cache=True
    )
    assert options_of("--quantization", "w4a16", "--has_zero_point").quantization == QuantConfig(
        quant_algo=QuantAlgo.W4A16, group_size=128, has_zero_point=True
    )
    assert options_of("--dtype", "float16") == EngineOptions(dtype=DType.FLOAT16)
    assert options_of("--quantization", "w4a16", "--int8_activations").int8_activations
    assert options_of("--max_seq_len=9", "--compress_weights").given == ("max_seq_len", "compress_weights")
    with pytest.raises(ConfigError, match="group_size: without quantization"):
        options_of("--group_size", "32")
