"""Failing starts of `adaptrt serve`: one line, exit status 2, and no engine is built."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adaptrt import ConfigError, ModelType
from adaptrt._core import DType, LoraLayout, LoraPart, LoraSite, Program
from adaptrt.builder.build import build
from adaptrt.builder.cli import CommandParser
from adaptrt.builder.cli import main as command_line
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.model_cache import first_use
from adaptrt.builder.model_cache.first_use import EnginePlan
from adaptrt.builder.model_cache.store import EngineCache
from adaptrt.formats.engine.build_config import LIMITS, LORA_LIMITS, BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.runtime import first_use as runtime_first_use
from adaptrt.serve import command
from adaptrt.serve.command_flags import API_KEY_VARIABLE
from support.models import ModelSpec, save_adapter, save_model
from support.tokenizers import byte_level, save_tokenizer

SPEC = ModelSpec(vocab_size=300, num_hidden_layers=1)
HUGE = "99999999999999999999"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("starts")
    model = save_model(SPEC, root / "model")
    save_tokenizer(byte_level(), model)
    save_adapter(model, root / "adapter", 0, r=4)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    monkeypatch.setattr(first_use, "_make", lambda *_: pytest.fail("an engine is made"))
    shutil.copytree(saved, tmp_path / "files")
    monkeypatch.chdir(tmp_path / "files")
    return tmp_path / "files"


def refusal(capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    """Returns the line that a start ends with."""
    try:
        status = command_line(["serve", "model", "--port", "0", "--num_threads", "1", *flags])
    except SystemExit as end:  # raised by argparse
        status = int(str(end.code))
    written = capfd.readouterr().err
    lines = [line for line in written.splitlines() if not line.startswith("Reading the model: ")]
    assert status == 2, written
    assert len(lines) == 1, written
    assert "error: " in lines[0]
    return lines[0]


BAD_FLAGS: dict[str, list[str]] = {
    f"--num_threads {HUGE}": ["num_threads", HUGE, "1 to 2147483647"],
    "--num_threads 0": ["num_threads", "is 0", "from 1"],
    "--num_threads 2000": ["num_threads is 2000", "1 to 1024"],
    f"--max_queue_size {HUGE}": ["max_queue_size", HUGE, "1 to 2147483647"],
    "--max_queue_size x": ["max_queue_size", "is x", "an integer"],
    "--host_cache_bytes -1": ["host_cache_bytes", "is -1", "from 0"],
    "--device_cache_percent 0": ["device_cache_percent", "it is 0", "above 0 and up to 1"],
    "--device_cache_percent 1.5": ["device_cache_percent", "it is 1.5", "above 0 and up to 1"],
    "--device_cache_percent nan": ["device_cache_percent", "it is nan", "above 0 and up to 1"],
    f"--host_cache_bytes {HUGE}": ["host_cache_bytes", HUGE, "to 9223372036854775807"],
    f"--kv_cache_tokens {HUGE}": ["kv_cache_tokens", HUGE, "to 9223372036854775807"],
    "--kv_cache_tokens 0": ["kv_cache_tokens", "is 0", "from 1"],
    f"--kv_cache_tokens {'9' * 5000}": ["kv_cache_tokens", "999...", "from 1"],
    f"--kv_cache_dir x --kv_cache_dir_bytes {HUGE}": ["kv_cache_dir_bytes", HUGE, "from 1"],
    "--kv_cache_dir x": ["kv_cache_dir is x without kv_cache_dir_bytes; expected both, or neither"],
    "--kv_cache_dir_bytes 7000": ["kv_cache_dir_bytes is 7000 without kv_cache_dir; expected both, or neither"],
    "--kv_cache_dir nowhere --kv_cache_dir_bytes 9": ["kv_cache_dir is 'nowhere'", "a directory that can be written"],
    "--lora_storage int4": ["peft_cache_config.lora_storage is 'int4'", "accepted: 'exact', 'compressed', 'int8'"],
    "--kernels nope": ["kernels is 'nope'", "this CPU can run"],
    f"--weight_memory {HUGE}": ["weight_memory", HUGE, "up to 2^62 bytes"],
    f"--weight_memory {'9' * 400}TiB": ["weight_memory", "up to 2^62 bytes"],
    "--draft_model nowhere": ["nowhere", "does not exist"],
    f"--draft_model model --max_draft_len {HUGE}": ["max_draft_len", HUGE, "1 to 2147483647"],
    f"--draft_model model --draft_kv_cache_bytes {HUGE}": ["draft_kv_cache_bytes", HUGE],
    "--generation_config nowhere": ["generation_config is 'nowhere'", "expected 'auto', 'vllm', None, or a directory"],
    "--max_draft_len 3": ["max_draft_len is 3", "draft_model"],
    f"--max_lora_rank {HUGE}": ["max_lora_rank", HUGE, "1 to 1048576"],
    "--max_lora_rank 99999999": ["max_lora_rank is 99999999", "1 to 1048576"],
    "--max_lora_rank 1048576 --max_num_tokens 16777216": ["max_lora_rank is 1048576", "16777216", "the machine has"],
    f"--max_batch_size {HUGE}": ["max_batch_size", HUGE, "1 to 1048576"],
    f"--max_num_tokens {HUGE}": ["max_num_tokens", HUGE, "1 to 16777216"],
    f"--max_seq_len {HUGE}": ["max_seq_len", HUGE],
    f"--max_extra_tokens {HUGE}": ["max_extra_tokens", HUGE, "0 to 65536"],
    f"--long_lora_scaling_factors {HUGE}": ["long_lora_scaling_factors", HUGE, "2 to 1024"],
    "--group_size 32": ["group_size: without quantization"],
    f"--max_body_bytes {HUGE}": ["max_body_bytes", HUGE, "from 1"],
    "--max_header_bytes 0": ["max_header_bytes", "is 0", "from 1"],
    "--max_prompts 0": ["max_prompts", "is 0", "from 1"],
    "--max_request_seconds 1e300": ["max_request_seconds", "1e300", "0 to 1000000000"],
    "--max_request_seconds nan": ["max_request_seconds", "nan", "0 to 1000000000"],
    "--shutdown_seconds -1": ["shutdown_seconds", "-1", "0 to 1000000000"],
    "--port 65536": ["port", "65536", "0 to 65535"],
    "--host 300.1.1.1": ["300.1.1.1", "expected a free host and port"],
    "--adapter_root nowhere": ["adapter_root is 'nowhere'", "expected a directory"],
    "--enable_lora_loading": ["enable_lora_loading is given without adapter_root"],
    "--adapter_root s3://bucket//x": ["adapter_root", "expected a directory, s3://BUCKET/PREFIX, or hf://"],
    "--adapter_root hub:org/*": ["adapter_root: it is 'hub:org/*'", "or hf://ORGANISATION/NAME[@REVISION][/FOLDER]"],
    "--adapter_root model/x": ["adapter_root: name is 'model/x'", "write './model/x' or 'hf://model/x'"],
    "--adapter_root ./model/x": ["adapter_root is './model/x'", "expected a directory"],
    "--adapter_root a:1+b:1": ["adapter_root: name is 'a:1+b:1', a weighted sum"],
    "--allowed_adapter_sources hub:org/*": ["allowed_adapter_sources is hub:org/*", "enable_lora_loading"],
    "--enable_lora_loading --allowed_adapter_sources hub:org": ["has 'hub:org'", "expected hub:ORGANISATION/*"],
    "--lora_modules x": ["lora_modules 'x'", "NAME=ADAPTER"],
    "--lora_modules x=nowhere": ["lora_modules 'x=nowhere'", "nowhere is not a directory"],
    '--lora_modules {"name":1}': ["lora_modules '{\"name\":1}'", "expected texts name and path"],
    "--lora_modules {": ["lora_modules '{'", "not JSON"],
    "--lora_modules base=adapter --served_model_name base": ["'base=adapter'", "the base model's name"],
    "--lora_modules model=adapter": ["'model=adapter'", "the base model's name"],
    "--lora_modules a:0.5=adapter": ["'a:0.5=adapter'", "a weighted sum"],
    "--lora_modules a=adapter a=adapter": ["'a' is given twice"],
    "--lora_modules a=model": ["'a=model'", "it holds a whole model, not an adapter"],
    "--lora_modules a=adapter --max_lora_rank 2": ["'a=adapter'", "rank", "2"],
    "--host_cache_bytes 1": ["host_cache_size gives the host level 1 bytes, but one adapter of rank 64", "needs"],
    "--kv_cache_dir . --kv_cache_dir_bytes 9": ["host_cache_size is 9; one KV block takes", "bytes in a file"],
    "--kv_cache_tokens 1": ["max_tokens is 1, less than one block of 32 tokens"],
    "--weight_memory 1": ["weight_memory is 1; accepted: ", "and more bytes", "to read the largest layer into"],
    "--draft_model model --draft_kv_cache_bytes 1": ["kv_cache_size is 1, less than one KV block of the draft engine"],
}  # fmt: skip


def test_a_draft_model_of_another_vocabulary_is_refused(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("model", "draft")
    tokenizer = json.loads(Path("draft/tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = (token for token, number in vocab.items() if number in (70, 71))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    Path("draft/tokenizer.json").write_text(json.dumps(tokenizer))
    message = refusal(capfd, "--draft_model", "draft")
    assert f"draft/tokenizer.json: token 70 is {second!r}; expected {first!r}" in message


@pytest.mark.parametrize(("flags", "expected"), BAD_FLAGS.items(), ids=[name[:60] for name in BAD_FLAGS])
def test_bad_flags_end_a_start(root: Path, flags: str, expected: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    line = refusal(capfd, *flags.split(" ")).replace("-", "_")
    for part in expected:
        assert part.replace("-", "_") in line


@pytest.mark.parametrize("flags", ["--batch_dir .", "--enable_lora_upload"])
def test_a_package_that_uploads_need_is_named(
    root: Path, flags: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "python_multipart", None)
    name = flags.split()[0].removeprefix("--")
    assert f"{name} needs python-multipart: pip install 'adaptrt[serve]'" in refusal(capfd, *flags.split())


@pytest.mark.parametrize(
    ("source", "package", "extra"), [("hub:org/*", "huggingface_hub", "hub"), ("s3://bucket/a/*", "s3fs", "s3")]
)
def test_a_package_that_allowed_sources_need_is_named(
    root: Path,
    source: str,
    package: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    line = refusal(capfd, "--enable_lora_loading", "--adapter_root", ".", "--allowed_adapter_sources", source)
    assert f"pip install 'adaptrt[{extra}]'" in line


@pytest.mark.parametrize("flags", [["--served_model_name", ""], ["--api_key", ""], ["--lora_modules", "a\nb=adapter"]])
def test_texts_that_are_no_names_end_a_start(root: Path, flags: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert flags[0].removeprefix("--") in refusal(capfd, *flags)


def _fields(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **changes}))

    return change


def _bytes(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


BAD_FILES: dict[str, tuple[str, Callable[[Path], object], list[str]]] = {
    "no config": ("model/config.json", Path.unlink, ["has no config.json"]),
    "config that is no JSON": ("model/config.json", _bytes(b"{"), ["model/config.json", "not JSON"]),
    "sizes beyond 64 bits": ("model/config.json", _fields(hidden_size=10**30), ["hidden_size", "1000000", "at most"]),
    "numbers beyond floats": ("model/config.json", _fields(rms_norm_eps=10**400), ["rms_norm_eps"]),
    "half of a character": ("model/config.json", _bytes(rb'{"architectures": "\ud800"}'), [r"has \ud800", "halves"]),
    "no weights": ("model/model.safetensors", Path.unlink, ["holds no weights"]),
    "no tokenizer": ("model/tokenizer.json", Path.unlink, ["there is no tokenizer", "save_pretrained('model')"]),
    "damaged tokenizer": ("model/tokenizer.json", _bytes(b"{}"), ["model/tokenizer.json", "cannot be read"]),
    "tokenizer config": ("model/tokenizer_config.json", _fields(chat_template=3), ["tokenizer_config.json", "is 3"]),
    "chat template": ("model/chat_template.jinja", _bytes(b"{% for"), ["chat_template.jinja", "line 1"]),
    "generation config that is no JSON": ("model/generation_config.json", _bytes(b"\xff"), ["generation_config.json"]),
    "generation config that is a list": ("model/generation_config.json", _bytes(b"[]"), ["generation_config.json"]),
    "hot": ("model/generation_config.json", _fields(temperature="hot"), ["generation_config.json", "temperature"]),
    "NaN": ("model/generation_config.json", _fields(top_p=float("nan")), ["generation_config.json", "top_p"]),
    "many": ("model/generation_config.json", _fields(top_k=10**30), ["generation_config.json", "top_k"]),
    "end": ("model/generation_config.json", _fields(eos_token_id="x"), ["generation_config.json", "eos_token_id"]),
    "no adapter": ("adapter/adapter_config.json", Path.unlink, ["'a=adapter'", "has no adapter_config.json"]),
    "rank": ("adapter/adapter_config.json", _fields(r=10**30), ["'a=adapter'", "_config.json", "1 to 2147483647"]),
    "weights": ("adapter/adapter_model.safetensors", _bytes(b"x" * 100), ["'a=adapter'", "adapter_model.safetensors"]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "change", "expected"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_end_a_start(
    root: Path, name: str, change: Callable[[Path], object], expected: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    change(root / name)
    line = refusal(capfd, "--lora_modules", "a=adapter")
    for part in expected:
        assert part in line


def test_an_adapter_of_the_engine_with_the_bases_name_ends_a_start(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lora = LoraBuildConfig(lora_dir=(root / "adapter",))
    config = BuildConfig(max_seq_len=64, lora_config=lora, plugin_config=PluginConfig(lora_plugin="auto"))
    build(Checkpoint.of_model(root / "model", None), config, root / "engine")
    monkeypatch.setattr(command, "Executor", lambda *_, **__: pytest.fail("the engine is started"))
    shutil.rmtree(root / "model")
    (root / "engine").rename(root / "model")
    line = refusal(capfd, "--served_model_name", "other", "adapter")
    assert "an adapter that the engine carries is 'adapter', which is the base model's name" in line
    assert "served_model_name" in line
    (root / "model" / "tokenizer.json").unlink()
    assert "model/tokenizer.json: there is no tokenizer" in refusal(capfd, "--served_model_name", "other")


@pytest.fixture
def port_in_use() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_in_use_ends_a_start(root: Path, port_in_use: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert f"cannot listen on 127.0.0.1:{port_in_use}" in refusal(capfd, "--port", str(port_in_use))


def test_processes_of_mpi_that_do_not_lead_bind_no_port(
    root: Path, port_in_use: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []
    follower = types.SimpleNamespace(can_enqueue_requests=lambda: False, shutdown=lambda: ended.append(True))
    monkeypatch.setattr(command, "is_started_by_mpi", lambda: True)
    monkeypatch.setattr(command, "make_executor", lambda _: follower)
    assert command_line(["serve", "model", "--port", str(port_in_use)]) == 0
    assert ended == [True]


def test_a_cache_that_cannot_be_written_ends_a_start(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    line = refusal(capfd)
    assert str(EngineCache().directory) in line
    assert "cannot be written" in line
    assert "XDG_CACHE_HOME" in line


def test_good_flags_come_as_far_as_the_engine(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "_make", lambda *_: (_ for _ in ()).throw(ConfigError("made")))
    flags = ["--lora_modules", "a=adapter", "--max_request_seconds", "0", "--max_queue_size", "2147483647"]
    # Weights in memory and the host level share the memory, so both of these cannot fit.
    for large in (["--host_cache_bytes", "9223372036854775807"], ["--weight_memory", "all"]):
        with pytest.raises(ConfigError, match="made"):
            command.make_executor(parsed(*flags, *large))


def parsed(*flags: str) -> argparse.Namespace:
    parser = CommandParser(prog="adaptrt serve", description="")
    command.add_arguments(parser)
    return parser.parse_args(["model", *flags])


def test_the_executor_gets_what_the_flags_say(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    sizes = types.SimpleNamespace(max_num_tokens=8, max_input_len=9, max_seq_len=10, max_beam_width=3)
    loaded = types.SimpleNamespace(
        adapters={}, model_type=ModelType.DECODER_ONLY, num_ranks=1, config=types.SimpleNamespace(build_config=sizes)
    )
    monkeypatch.setattr(runtime_first_use, "check_config", lambda *_: None)
    monkeypatch.setattr(EnginePlan, "engine", lambda plan, *_: root / "engines" / plan.directory)
    monkeypatch.setattr(command, "load_engine", lambda directory, weight_memory: given.append(weight_memory) or loaded)
    monkeypatch.setattr(command, "Executor", lambda *arguments, **named: given.extend((arguments[2], named)))
    monkeypatch.setattr(command, "memory_for_images", lambda engine, limits: (engine, limits.max_images))
    monkeypatch.setattr(runtime_first_use, "check_draft_vocabulary", lambda *files: given.append(files))
    flags = ["--num_threads", "3", "--max_queue_size", "5", "--kv_cache_tokens", "64", "--kv_cache_dir", str(root),
             "--kv_cache_dir_bytes", "7000", "--host_cache_bytes", "9000", "--device_cache_percent", "0.5",
             "--lora_storage", "compressed",
             "--weight_memory", "1KiB", "--draft_model", "model", "--max_draft_len", "2",
             "--draft_kv_cache_bytes", "8000", "--max_images", "3",
             "--kernels", "portable", "--max_state_snapshots", "6"]  # fmt: skip
    command.make_executor(parsed(*flags))
    vocabularies, weight_memory, config, named = given
    assert vocabularies == (Path("model/tokenizer.json"), Path("model/tokenizer.json"))
    assert named["reserved_memory"] == (loaded, 3)
    assert named["compare_vocabularies"] is False, "the vocabularies would be compared twice"
    assert weight_memory == config.weight_memory == 1024
    assert (config.num_threads, config.max_queue_size, config.kernels) == (3, 5, "portable")
    cache, draft = config.kv_cache_config, config.draft_target_decoding_config
    assert (cache.max_tokens, cache.host_cache_dir, cache.host_cache_size) == (64, str(root), 7000)
    assert cache.max_state_snapshots == 6
    assert config.peft_cache_config.host_cache_size == 9000
    assert config.peft_cache_config.device_cache_percent == 0.5
    assert config.peft_cache_config.lora_storage == "compressed"
    assert (draft.speculative_model_dir, draft.max_draft_len) == (str(root / "engines" / "model"), 2)
    assert draft.kv_cache_size == 8000
    assert config.enable_chunked_context
    assert config.max_beam_width == 3
    sizes.max_num_tokens = 9  # a step takes every prompt
    command.make_executor(parsed())
    assert (given[-2].enable_chunked_context, given[-2].max_num_tokens) == (False, None)
    command.make_executor(parsed("--max_step_tokens", "5"))
    assert (given[-2].enable_chunked_context, given[-2].max_num_tokens) == (True, 5)
    loaded.model_type, loaded.directory = ModelType.ENCODER_ONLY, Path("it")
    with pytest.raises(ConfigError, match="max_step_tokens is 5; expected none: it is"):
        command.make_executor(parsed("--max_step_tokens", "5"))


LARGEST_SIZES = {name: limit.maximum for name, limit in {**LIMITS, **LORA_LIMITS}.items() if limit.maximum is not None}
del LARGEST_SIZES["max_extra_tokens"], LARGEST_SIZES["long_lora_scaling_factors"]  # their limits depend on ops


@pytest.mark.parametrize("name", sorted(LARGEST_SIZES))
def test_the_largest_sizes_are_those_of_programs(name: str) -> None:
    checked = "max_rank" if name == "max_lora_rank" else name
    assert not any(f"{checked} is" in problem for problem in problems_of_program(LARGEST_SIZES))
    too_large = LARGEST_SIZES[name] + 1
    problems = problems_of_program({**LARGEST_SIZES, name: too_large})
    assert any(f"{checked} is {too_large}; it must lie in" in problem for problem in problems)


def problems_of_program(sizes: dict[str, int]) -> list[str]:
    """Returns the core's errors for a program of these sizes without ops."""
    site = LoraSite(layer=0, in_size=8, parts=[LoraPart(module=0, out_size=8)])
    layout = LoraLayout(
        dtype=DType.FLOAT32, num_layers=1, max_rank=sizes["max_lora_rank"], dora_enabled=False, target_modules=[0],
        sites=[site],
    )  # fmt: skip
    program = Program(
        dtype=DType.FLOAT32, vocab_size=9, num_layers=1, arena_bytes=0, buffers=[], body=[], head=[], lora=layout,
        **{name: size for name, size in sizes.items() if name != "max_lora_rank"},
    )  # fmt: skip
    found: list[str] = program.validate()
    return found
