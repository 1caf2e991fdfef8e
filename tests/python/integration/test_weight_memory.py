"""Engines whose weights exceed memory: the same bits, clear refusals, and errors that name the file."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers

import adaptrt
from adaptrt._core import ConfigError, EngineError, lora_modules
from adaptrt.builder import cli
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.common.byte_size import ALL_WEIGHTS, parse_bytes, parse_weight_memory
from adaptrt.formats.adapter import ModuleKey
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.formats.engine.engine_config import EngineConfig
from adaptrt.runtime.engine import load_engine, load_engine_bytes
from adaptrt.runtime.llm_config import with_weight_memory
from adaptrt.serve.command import executor_config_of
from adaptrt.serve.command_flags import add_arguments as add_serve_arguments
from adaptrt.tools.bench import limits
from support.families import SIZES, Family, save_family
from support.made_up_limits import made_up_limits
from support.models import ModelSpec, save_adapter, save_model
from support.serving import Answer, build_engine, collect, make_request, run_command

SPEC = ModelSpec(
    hidden_size=128, head_dim=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256, vocab_size=250,
    num_hidden_layers=4,
)  # fmt: skip
FLAGS = {"max_batch_size": 4, "max_num_tokens": 128, "max_input_len": 120, "max_seq_len": 160, "tokens_per_block": 16}
KINDS = {
    "bfloat16": ("bfloat16", ()),
    "float32": ("float32", ()),
    "compressed": ("bfloat16", ("--compress_weights",)),
    "w8a8": ("bfloat16", ("--quantization", "w8a8")),
    "w4a16": ("bfloat16", ("--quantization", "w4a16", "--group_size", "32")),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(SPEC, tmp_path_factory.mktemp("weight-memory") / "model")


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, model: Path) -> Path:
    dtype, flags = KINDS[request.param]
    checkpoint, directory = model.parent / f"{dtype}-checkpoint", model.parent / request.param
    if not checkpoint.exists():
        run_command("convert-checkpoint", "--model_dir", model, "--output_dir", checkpoint, "--dtype", dtype)
    sizes = [argument for name, value in FLAGS.items() for argument in (f"--{name}", value)]
    run_command(
        "build", "--checkpoint_dir", checkpoint, "--output_dir", directory, *sizes, "--lora_plugin", "auto",
        "--dora_plugin", "enable", "--max_lora_rank", 32, *flags,
    )  # fmt: skip
    return directory


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an engine that tests copy and then damage."""
    return build_engine(model, tmp_path_factory.mktemp("plain"), **FLAGS)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("adapters")
    kinds = ({"r": 8}, {"r": 20, "use_dora": True})
    return [save_adapter(model, directory / str(seed), seed, **lora) for seed, lora in enumerate(kinds)]


def least_memory(engine: Path, **fields: object) -> int:
    """Returns the minimum that the refusal of one byte reports."""
    with pytest.raises(ConfigError, match="weight_memory is 1; accepted: ") as error:
        executor_of(engine, 1, **fields)
    return int(str(error.value).split("accepted: ")[1].split()[0])


def executor_of(engine: Path, weight_memory: int | None, **fields: object) -> adaptrt.Executor:
    config = adaptrt.ExecutorConfig(weight_memory=weight_memory, num_threads=2, **fields)
    return adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config)


def answers_of(executor: adaptrt.Executor, adapters: list[Path]) -> list[Answer]:
    """Answers a batch of prompts, in turn without and with each adapter."""
    configs = [None, *(adaptrt.LoraConfig.from_peft(i, path, executor.engine) for i, path in enumerate(adapters))]
    prompts = [np.random.default_rng(length).integers(2, 61, length).tolist() for length in (1, 7, 30, 100)]
    requests = [make_request(prompt, 12, configs[i % len(configs)]) for i, prompt in enumerate(prompts)]
    return [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]


def test_every_budget_gives_the_same_bits(engine: Path, adapters: list[Path]) -> None:
    with executor_of(engine, None) as executor:
        expected = answers_of(executor, adapters)
    least, size = least_memory(engine), (engine / "rank0.engine").stat().st_size
    assert least < size
    read = []
    for memory in (least, (least + size) // 2, 2 * size):
        with executor_of(engine, memory) as executor:
            for theirs, ours in zip(expected, answers_of(executor, adapters), strict=True):
                assert ours.same_bits(theirs)
            # Adapters are loaded at the same time, so the number of steps varies between runs.
            steps = executor.get_latest_iteration_stats()
            read.append(sum(step.weight_bytes_read for step in steps) / len(steps))
    assert read[0] > read[1] > read[2] == 0


def test_weights_in_rows_are_where_their_panels_are(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    fields = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(fields | {"hidden_act": "relu"}))
    engine = build_engine(copy, tmp_path, **FLAGS)
    parts = [part for op in load_engine(engine).program.body for part in getattr(op, "parts", ())]
    assert any(part.weight.has_rows for part in parts)
    with executor_of(engine, None) as executor:
        expected = answers_of(executor, [])
    with executor_of(engine, least_memory(engine)) as executor:
        for theirs, ours in zip(expected, answers_of(executor, []), strict=True):
            assert ours.same_bits(theirs)
        assert any(step.weight_bytes_read for step in executor.get_latest_iteration_stats())


def test_experts_give_the_same_bits_and_those_that_are_not_taken_are_not_read(tmp_path: Path) -> None:
    family = Family(
        transformers.Qwen3MoeConfig, [],
        {**SIZES, "hidden_size": 64, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
         "moe_intermediate_size": 96, "norm_topk_prob": True},
    )  # fmt: skip
    model = save_family(family, tmp_path / "model")
    convert_checkpoint(model, tmp_path / "checkpoint")
    config = BuildConfig(
        max_batch_size=4, max_num_tokens=128, max_seq_len=160, tokens_per_block=16,
        lora_config=LoraBuildConfig(max_lora_rank=8), plugin_config=PluginConfig(lora_plugin="auto"),
    )  # fmt: skip
    engine = tmp_path / "engine"
    build(tmp_path / "checkpoint", config, engine)
    adapter = save_adapter(model, tmp_path / "adapter", 3, r=4, target_modules=["q_proj", "v_proj"])
    with executor_of(engine, None) as executor:
        expected = answers_of(executor, [adapter])
    least = least_memory(engine)
    for memory in (least, least + 200_000):
        with executor_of(engine, memory) as executor:
            for theirs, ours in zip(expected, answers_of(executor, [adapter]), strict=True):
                assert ours.same_bits(theirs)


def test_a_build_stores_a_default_that_an_executor_can_change(
    model: Path, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    least = least_memory(plain)
    engine = build_engine(model, tmp_path, weight_memory=f"{least} ", **FLAGS)
    assert EngineConfig.load(engine).build_config.weight_memory == least
    assert (engine / "rank0.engine").read_bytes() == (plain / "rank0.engine").read_bytes()
    assert "weight_memory" not in json.loads((plain / "config.json").read_text())["build_config"]
    capsys.readouterr()
    run_command("inspect", engine)
    assert f"of which {least / 1024:.1f} KiB in memory" in " ".join(capsys.readouterr().out.split())
    loaded = load_engine(engine)
    assert loaded.start(adaptrt.ExecutorConfig(num_threads=1)).weight_placement.file_bytes > 0
    assert loaded.with_weight_memory(0).start(adaptrt.ExecutorConfig(num_threads=1)).weight_placement is None
    assert load_engine(engine, weight_memory=0).start(adaptrt.ExecutorConfig(num_threads=1)).weight_placement is None
    with executor_of(engine, None) as executor:
        answers_of(executor, [])
        assert sum(step.weight_bytes_read for step in executor.get_latest_iteration_stats()) > 0


def test_a_default_may_be_of_many_gigabytes(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = build_engine(model, tmp_path, weight_memory="40GiB", **FLAGS)
    assert EngineConfig.load(engine).build_config.weight_memory == 40 << 30
    arguments = ["build", "--checkpoint_dir", tmp_path / "checkpoint", "--output_dir", tmp_path / "other"]
    with pytest.raises(SystemExit):
        cli.main([*map(str, arguments), "--weight_memory", "5000000TiB"])
    assert "weight_memory: it is '5000000TiB'; accepted: " in " ".join(capsys.readouterr().err.split())


def test_a_budget_that_is_too_small_is_refused_with_the_bytes(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least, engine = least_memory(plain), load_engine(plain)
    with pytest.raises(ConfigError, match=f"weight_memory is {least - 1}; accepted: {least} and more bytes: "):
        executor_of(plain, least - 1)
    monkeypatch.setattr(type(engine), "available_memory", lambda self: least)
    block = engine.program.kv_block_bytes()
    arena = engine.storage.program.arena_bytes
    expected = (
        f"weight_memory is {least}: .* bytes are needed \\(activations {arena}, KV cache {10 * block}, adapters on the "
        f"host level 5000, weights {least}\\); {least} are available"
    )
    with pytest.raises(ConfigError, match=expected):
        executor_of(
            plain, least, kv_cache_config=adaptrt.KvCacheConfig(max_tokens=160),
            peft_cache_config=adaptrt.PeftCacheConfig(host_cache_size=5000),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("4GiB", 4 << 30), ("1.5 MB", 1_500_000), ("70000", 70000), ("2KiB", 2048)]
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_bytes(text, "weight_memory") == num_bytes


@pytest.mark.parametrize("size", ["4 gigs", "-1", "", "GiB", "1e9", -5, True, 1.5])
def test_other_sizes_are_refused(size: object) -> None:
    with pytest.raises(ConfigError, match=r"weight_memory is .*; accepted: a number of bytes"):
        parse_bytes(size, "weight_memory")  # type: ignore[arg-type]


def test_all_weights_may_be_kept_in_memory(plain: Path) -> None:
    config = with_weight_memory(adaptrt.ExecutorConfig(num_threads=2), "all")
    loaded = load_engine(plain, weight_memory=parse_weight_memory("all", "weight_memory"))
    placement = loaded.start(config).weight_placement
    assert placement is not None
    assert placement.file_bytes == 0
    assert placement.resident_bytes <= loaded.storage.num_bytes
    with pytest.raises(ConfigError, match=r"weight_memory is 'most'; accepted: a number of bytes, .*, or all"):
        parse_weight_memory("most", "weight_memory")


def test_engines_that_cannot_have_one_refuse_it(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, config = (plain / "rank0.engine").read_bytes(), (plain / "config.json").read_text()
    with pytest.raises(ConfigError, match="4096; accepted: None and 0, because the engine is in memory"):
        load_engine_bytes(content, config).with_weight_memory(4096)
    loaded = load_engine(plain)
    ranked = replace(loaded.config.pretrained_config.mapping, tp_size=2)
    config_of_two = replace(loaded.config, pretrained_config=replace(loaded.config.pretrained_config, mapping=ranked))
    with pytest.raises(ConfigError, match=r"accepted: None and 0, .* is an engine of several ranks"):
        replace(loaded, config=config_of_two).with_weight_memory(4096)
    capsys.readouterr()
    arguments = ["build", "--checkpoint_dir", plain.parent / "checkpoint", "--output_dir", plain.parent / "other"]
    assert cli.main([*map(str, arguments), "--weight_memory", "0"]) == 2
    assert "weight_memory is 0; it must be at least 1" in " ".join(capsys.readouterr().err.split())


@pytest.fixture
def copied(plain: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "copy"
    shutil.copytree(plain, directory)
    return directory


def test_a_file_that_is_cut_short_ends_requests_and_nothing_else(copied: Path, adapters: list[Path]) -> None:
    file = copied / "rank0.engine"
    content = file.read_bytes()
    with executor_of(copied, least_memory(copied)) as executor:
        expected = collect(executor, executor.enqueue_request(make_request([5, 6, 7], 6)))
        with file.open("r+b") as opened:
            opened.truncate(len(content) // 3)
        for _ in range(2):
            (response,) = executor.await_responses(executor.enqueue_request(make_request([5, 6, 7], 6)))
            assert response.has_error()
            assert response.error_msg.startswith(f"{file}: ends at byte ")
        with pytest.raises(EngineError, match=r"rank0.engine: ends at byte .*; it was cut short while it is in use"):
            adaptrt.LoraConfig.from_peft(9, adapters[1], executor.engine)  # DoRA reads the base's weights
        with file.open("r+b") as opened:
            opened.write(content)
        answer = collect(executor, executor.enqueue_request(make_request([5, 6, 7], 6)))
        assert answer.same_bits(expected)


def test_damage_is_found_without_keeping_the_file_in_memory(copied: Path) -> None:
    file = copied / "rank0.engine"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(EngineError, match="does not have its checksum; the file is damaged"):
        load_engine(copied, weight_memory=1 << 30)


def test_dora_is_normalised_by_the_same_weights(plain: Path) -> None:
    mapped, read = load_engine(plain).base_weights(), load_engine(plain, weight_memory=1 << 30).base_weights()
    assert mapped is not None
    assert read is not None
    keys = [ModuleKey(layer, info.id, "") for layer in range(SPEC.num_hidden_layers) for info in lora_modules()]
    known = [key for key in keys if mapped.shape(key) is not None]
    assert len(known) >= 7 * SPEC.num_hidden_layers
    for key in known:
        left, right = (np.concatenate(list(base.row_blocks(key))) for base in (mapped, read))
        np.testing.assert_array_equal(left, right)


def test_contexts_are_told_before_anything_starts(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = load_engine(plain).program
    own, int8 = program.kv_block_bytes(), program.kv_block_bytes(int8_kv_cache=True)
    info = load_engine(plain).start(adaptrt.ExecutorConfig(num_threads=1)).info
    assert (own, program.tokens_per_block) == (info.kv_block_bytes, info.tokens_per_block)
    assert int8 < own
    capsys.readouterr()
    run_command("inspect", plain, "--context", 16, 17)
    shown = " ".join(capsys.readouterr().out.split())
    for tokens, blocks in ((16, 1), (17, 2)):
        mine, other = (f"{blocks * size / 1024:.1f} KiB" for size in (own, int8))
        assert f"{tokens} tokens {mine} (as int8 {other})" in shown
    run_command("inspect", plain)
    assert f"with {FLAGS['max_seq_len']} tokens {10 * own / 1024:.1f} KiB" in " ".join(capsys.readouterr().out.split())
    for path, context, reason in (
        (plain, 161, "--context is 161; accepted: 1 to 160, the engine's max_seq_len"),
        (plain.parent / "checkpoint", 16, "--context: only for native engines"),
    ):
        assert cli.main(["inspect", str(path), "--context", str(context)]) == 2
        assert reason in " ".join(capsys.readouterr().err.split())


def test_the_bench_shows_what_is_read_of_a_token(
    plain: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(limits, "measure_machine_limits", made_up_limits)
    capsys.readouterr()
    run_command(
        "bench", plain, "--weight_memory", least_memory(plain), "--only", "decode", "--repeats", 1, "--concurrency", 1,
        "--input_len", 8, "--output_len", 8,
    )  # fmt: skip
    assert re.search(r"\d+ MB of weights read per token", capsys.readouterr().out)


def test_flags_and_arguments_reach_the_executor(plain: Path) -> None:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    arguments = parser.parse_args([str(plain), "--weight_memory", "2MiB"])
    assert executor_config_of(arguments).weight_memory == 2 << 20
    assert executor_config_of(parser.parse_args([str(plain), "--weight_memory", "all"])).weight_memory == ALL_WEIGHTS
    assert executor_config_of(parser.parse_args([str(plain)])).weight_memory is None
    given = adaptrt.ExecutorConfig(num_threads=1)
    changed = with_weight_memory(given, "2MiB")
    assert changed is not None
    assert (changed.weight_memory, changed.num_threads, given.weight_memory) == (2 << 20, 1, None)
    assert with_weight_memory(given, None) is given
    with pytest.raises(ConfigError, match="weight_memory is 5, and executor_config has 2097152"):
        with_weight_memory(changed, 5)
