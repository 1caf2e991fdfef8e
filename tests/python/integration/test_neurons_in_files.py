"""ReLU-gated MLPs of engines that do not fit into memory: neurons are read one by one and give the same bits."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.activations import ACT2FN

import adaptrt
from adaptrt._core import ConfigError, DType, EngineError
from adaptrt.builder import cli
from adaptrt.formats.engine.weight_usage import USAGE_FILE, WeightUsage
from adaptrt.runtime import text_usage
from adaptrt.runtime.engine import load_engine
from support.families import LLAMA, SIZES, Family, save_family
from support.relu_gates import (
    GATES,
    THRESHOLD,
    FatRelu,
    Gate,
    adapters_of,
    answers_of,
    engine_of,
    layers_of,
    make_model,
)
from support.serving import run_command

FIELDS = {**SIZES, "intermediate_size": 192, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
GATE = Gate(
    Family(transformers.LlamaConfig, LLAMA, {**FIELDS, "hidden_act": "fatrelu", "hidden_act_param": THRESHOLD}),
    GATES["fatrelu"].epilogue,
)
SOME_MEMORY = 1 << 30
TEXT = "A small text, of which some neurons make more than others do. " * 8
DEMO = Path(__file__).resolve().parents[3] / "examples" / "demo" / "model"


@pytest.fixture(scope="module", autouse=True)
def oracle_code() -> Iterator[None]:
    """Gives transformers the activation that the published models' own code uses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ACT2FN, "fatrelu", FatRelu)
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with a model as make_model() leaves it."""
    place = tmp_path_factory.mktemp("neurons")
    make_model(GATE, place)
    return place


def neuron_engine(directory: Path, place: Path, dtype: DType = DType.FLOAT32, **fields: Any) -> Path:
    return engine_of(directory / "published", place, dtype, **{"weight_memory": SOME_MEMORY, **fields})


def least_memory(engine: Path) -> int:
    with pytest.raises(ConfigError, match="weight_memory is 1; accepted: ") as error:
        adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(weight_memory=1))
    assert "for the neurons that a token opens in a layer" in str(error.value)
    return int(str(error.value).split("accepted: ")[1].split()[0])


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_every_budget_gives_the_bits_of_an_engine_without_neurons(
    directory: Path, tmp_path: Path, dtype: DType
) -> None:
    plain = engine_of(directory / "published", tmp_path / "plain", dtype)
    adapters = adapters_of(GATE, directory)
    expected = answers_of(plain, adapters, 4)
    engine = neuron_engine(directory, tmp_path / "neurons", dtype)
    least, size = least_memory(engine), (engine / "rank0.engine").stat().st_size
    for memory in (0, least, (least + size) // 2, 2 * size):
        for crowd in (1, 4):
            answers = answers_of(engine, adapters, crowd, weight_memory=memory, num_threads=2)
            assert all(ours.same_bits(theirs) for ours, theirs in zip(answers, expected, strict=True))


def test_an_engine_for_files_has_neurons_and_no_rows(directory: Path, tmp_path: Path) -> None:
    engine = neuron_engine(directory, tmp_path)
    with_neurons = [op for op in layers_of(engine) if op.neurons is not None]
    assert len(with_neurons) == 2 * FIELDS["num_hidden_layers"]
    parts = [part for op in layers_of(engine) for part in op.parts]
    assert not any(part.weight.has_rows or part.weight.has_columns for part in parts)
    for op in with_neurons:
        assert (op.neurons.count, op.neurons.size) == (FIELDS["intermediate_size"], FIELDS["hidden_size"])
    for fields in ({"weight_memory": None}, {"sparse_mlp": "disable"}):
        other = neuron_engine(directory, tmp_path / str(fields), **fields)
        assert not any(op.neurons for op in layers_of(other))
        in_columns = sum(part.weight.has_columns for op in layers_of(other) for part in op.parts)
        assert in_columns == (FIELDS["num_hidden_layers"] if "weight_memory" in fields else 0)


def test_layers_without_neurons_are_read_whole(tmp_path: Path) -> None:
    gate = GATES["fatrelu"]  # its hidden size is not a multiple of a panel's outputs
    make_model(gate, tmp_path)
    engine = engine_of(tmp_path / "published", tmp_path, weight_memory=SOME_MEMORY)
    assert not any(op.neurons for op in layers_of(engine))


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with an engine of the demo's model, with ReLU gates and neuron usage measured on a text."""
    place = tmp_path_factory.mktemp("used")
    shutil.copytree(DEMO, place / "model")
    config = json.loads((place / "model" / "config.json").read_text())
    (place / "model" / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    (place / "text.txt").write_text(TEXT)
    build_used(place, "engine", "--usage_text", place / "text.txt", "--usage_tokens", 64)
    return place


def build_used(place: Path, name: str, *flags: object) -> None:
    run_command(
        "build", "--model_dir", place / "model", "--dtype", "bfloat16", "--output_dir", place / name, "--max_seq_len",
        128, "--max_num_tokens", 64, "--max_batch_size", 4, "--weight_memory", SOME_MEMORY, *flags,
    )  # fmt: skip


def test_a_text_says_what_is_kept_and_changes_no_bit(used: Path) -> None:
    engine = used / "engine"
    program, checksum = load_engine(engine).storage.program, load_engine(engine).config.engine_checksums[0]
    usage = WeightUsage.load(engine, checksum, program)
    assert usage is not None
    assert (usage.text, usage.tokens) == ("text.txt", 64)
    assert len(usage.counts) == len([op for op in layers_of(engine) if op.neurons]) // 2
    assert all(0 < max(counts) <= 64 for counts in usage.counts.values())
    build_used(used, "unknown")
    assert (used / "unknown" / "rank0.engine").read_bytes() == (engine / "rank0.engine").read_bytes()
    least, size = least_memory(engine), (engine / "rank0.engine").stat().st_size
    expected = answers_of(engine, {"a": None, "b": None, "c": None, "d": None}, 4, weight_memory=0)
    for memory in (least, (least + size) // 2):
        for each in (engine, used / "unknown"):
            answers = answers_of(each, {"a": None, "b": None, "c": None, "d": None}, 2, weight_memory=memory)
            assert all(ours.same_bits(theirs) for ours, theirs in zip(answers, expected, strict=True))


def test_weights_that_no_token_used_count_zero(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_usage, "run_windows", lambda *_: [])
    usage = text_usage.TextUsage(used / "text.txt", used / "model", 64).measure(used / "engine")
    assert usage.tokens == 0
    assert {count for counts in usage.counts.values() for count in counts} == {0}


def first_counts(content: dict[str, Any]) -> tuple[str, list[int]]:
    return next(iter(content["counts"].items()))


def shorten(content: dict[str, Any]) -> str:
    name, counts = first_counts(content)
    counts.pop()
    return rf"{name} has {len(counts)} numbers; expected {len(counts) + 1} for the engine's layer"


def count_too_often(content: dict[str, Any]) -> str:
    name, counts = first_counts(content)
    counts[0] = 65
    return rf"{name} has 65, more than the 64 tokens"


def drop_layer(content: dict[str, Any]) -> str:
    name, _ = first_counts(content)
    del content["counts"][name]
    return f"{name} has 0 numbers"


def add_layer(content: dict[str, Any]) -> str:
    content["counts"]["layers.99.neurons"] = [1]
    return "layers.99.neurons"


def change_quietly(content: dict[str, Any]) -> str:
    _, counts = first_counts(content)
    counts[0] = 1 - min(counts[0], 1)
    return "checksum does not match its content; it was changed after the build"


def rename_engine(content: dict[str, Any]) -> str:
    content["engine_checksum"] = "0" * 16
    return f"engine_checksum is {'0' * 16}; expected the engine's "


@pytest.mark.parametrize("damage", [shorten, count_too_often, drop_layer, add_layer, change_quietly, rename_engine])
def test_usage_of_another_engine_or_with_damage_is_refused(
    used: Path, tmp_path: Path, damage: Callable[[dict[str, Any]], str]
) -> None:
    engine = shutil.copytree(used / "engine", tmp_path / "engine")
    path = engine / USAGE_FILE
    content = json.loads(path.read_text())
    reason = damage(content)
    path.write_text(json.dumps(content))
    loaded = load_engine(engine, weight_memory=SOME_MEMORY)
    with pytest.raises(EngineError, match=rf"{USAGE_FILE}: .*{reason}"):
        loaded.start(adaptrt.ExecutorConfig(num_threads=1))
    load_engine(engine, weight_memory=0).start(adaptrt.ExecutorConfig(num_threads=1))  # keeps all weights in memory


@pytest.mark.parametrize("content", ["", "[]", "{", '{"format": "other"}'])
def test_a_file_that_is_no_usage_is_refused(used: Path, tmp_path: Path, content: str) -> None:
    engine = shutil.copytree(used / "engine", tmp_path / "engine")
    (engine / USAGE_FILE).write_text(content)
    with pytest.raises(EngineError, match=USAGE_FILE):
        load_engine(engine, weight_memory=SOME_MEMORY).start(adaptrt.ExecutorConfig(num_threads=1))


def test_builds_that_cannot_have_a_usage_say_so(used: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = [
        "build",
        "--model_dir",
        str(used / "model"),
        "--output_dir",
        str(tmp_path / "engine"),
        "--dtype",
        "bfloat16",
    ]
    text = ["--usage_text", str(used / "text.txt")]
    for flags, reason in (
        (text, "usage_text: the engine has neither experts nor neurons that are read one by one"),
        ([*text, "--usage_tokens", "1"], "usage_tokens is 1; it must be at least 2"),
        (["--usage_tokens", "8"], "usage_tokens needs usage_text"),
        (["--usage_text", str(used / "none.txt")], "none.txt: cannot be read"),
        ([*text, "--backend", "tensorrt"], "usage_text needs backend native"),
    ):
        capsys.readouterr()
        assert cli.main([*base, "--max_seq_len", "128", *flags]) == 2
        assert reason in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "engine").exists()


def test_experts_that_a_text_took_are_there_from_the_start(tmp_path: Path) -> None:
    family = Family(
        transformers.Qwen3MoeConfig, [],
        {**SIZES, "hidden_size": 64, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
         "moe_intermediate_size": 96, "norm_topk_prob": True},
    )  # fmt: skip
    engine = engine_of(save_family(family, tmp_path / "model"), tmp_path)
    loaded = load_engine(engine)
    names = [op.down[0].weight.tensor for op in loaded.storage.program.body if hasattr(op, "gate_up")]
    counts = dict.fromkeys(names, (0, 0, 3, 9, 0, 0, 1, 0))
    (checksum,) = loaded.config.engine_checksums
    message = "weight_memory is 1; accepted: "
    with pytest.raises(ConfigError, match=message) as error:
        loaded.with_weight_memory(1).start(adaptrt.ExecutorConfig(num_threads=1))
    least = int(str(error.value).split("accepted: ")[1].split()[0])

    def bytes_at_start() -> int:
        started = loaded.with_weight_memory(least).start(adaptrt.ExecutorConfig(num_threads=1))
        placement = started.weight_placement
        assert placement is not None
        return placement.bytes_read - placement.resident_bytes

    without = bytes_at_start()
    WeightUsage(engine_checksum=checksum, text="text", tokens=9, counts=counts).save(engine)
    assert bytes_at_start() > without
    answers = answers_of(engine, {"a": None, "b": None, "c": None, "d": None}, 4, weight_memory=least)
    expected = answers_of(engine, {"a": None, "b": None, "c": None, "d": None}, 4)
    assert all(ours.same_bits(theirs) for ours, theirs in zip(answers, expected, strict=True))


def test_stored_neurons_can_be_read_back(tmp_path: Path, used: Path) -> None:
    loaded = load_engine(used / "engine")
    (checksum,) = loaded.config.engine_checksums
    found = WeightUsage.load(used / "engine", checksum, loaded.storage.program)
    assert found is not None
    changed = dataclasses.replace(found, text="other")
    changed.save(tmp_path)
    assert WeightUsage.load(tmp_path, checksum, loaded.storage.program) == changed
