"""PowerInfer's predictors, which skip neurons before they are computed: formula, batch invariance, quality loss."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralMLP, MistralRMSNorm

from adaptrt._core import CheckpointError, ConfigError, DType, LinearEpilogue
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.engine.build_config import DISABLE, BuildConfig
from adaptrt.formats.engine.engine_config import EngineConfig
from support.families import Family, save_family
from support.relu_gates import (
    CONFIG,
    FIELDS,
    GATES,
    THRESHOLD,
    Gate,
    adapters_of,
    answers_of,
    check_answers,
    engine_of,
    layers_of,
    make_model,
    published,
)
from support.serving import run_command

LAYERS, HIDDEN, GATES_OF_LAYER = FIELDS["num_hidden_layers"], FIELDS["hidden_size"], FIELDS["intermediate_size"]
LEAST_SCORE = 0.25
WITHOUT_GATE = {
    name: value for name, value in FIELDS.items() if name not in ("num_key_value_heads", "intermediate_size")
}
UNGATED = {
    "opt": Gate(
        Family(
            transformers.OPTConfig,
            ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
            {**WITHOUT_GATE, "ffn_dim": GATES_OF_LAYER, "word_embed_proj_dim": HIDDEN},
        ),
        LinearEpilogue.RELU,
    ),
    "falcon": Gate(
        Family(
            transformers.FalconConfig,
            ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
            {**WITHOUT_GATE, "ffn_hidden_size": GATES_OF_LAYER, "activation": "relu"},
        ),
        LinearEpilogue.RELU,
    ),
}
MODELS = {**GATES, **UNGATED}
DEMO = Path(__file__).resolve().parents[3] / "examples" / "demo" / "model"
# No score in the float32 test is this close to LEAST_SCORE, so rounding moves no score across it.
MARGIN = 3e-6


def predictor(layer: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Returns random weights whose rank depends on the layer."""
    generator = torch.Generator().manual_seed(100 + layer)
    rank = 20 + layer
    return {
        "fc1.weight": (torch.randn(rank, HIDDEN, generator=generator) / HIDDEN**0.5).to(dtype),
        "fc2.weight": (torch.randn(GATES_OF_LAYER, rank, generator=generator) / rank**0.5).to(dtype),
    }


def save_predictors(
    directory: Path, least_score: float | None = LEAST_SCORE, dtype: torch.dtype = torch.float32
) -> Path:
    """Saves the predictors as pickles, and the last one as safetensors."""
    directory.mkdir()
    for layer in range(LAYERS):
        tensors = predictor(layer, dtype)
        if layer + 1 < LAYERS:
            torch.save(tensors, directory / f"model_{layer}.pt")
        else:
            save_file(tensors, directory / f"model_{layer}.safetensors")
    if least_score is not None:
        (directory / "config.json").write_text(json.dumps({"sparse_threshold": least_score}))
    (directory / "README.md").write_text("Predictors of a random model.")
    (directory / ".gitattributes").write_text("*.pt filter=lfs")
    return directory


class Oracle:
    """transformers MLPs whose gates are closed by scores computed from the input of their norms."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.stream = torch.empty(0)
        self.calls = 0
        self.closed = 0
        self.margin = float("inf")

    def __deepcopy__(self, memo: dict[int, Any]) -> Oracle:
        """Returns the oracle itself: the modules of copied models have the oracle of the test."""
        return self

    def scores(self) -> torch.Tensor:
        """Returns the scores of the next layer's neurons."""
        weights = predictor(self.calls % LAYERS)
        self.calls += 1
        scores = torch.relu(self.stream @ weights["fc1.weight"].T) @ weights["fc2.weight"].T
        self.margin = min(self.margin, float((scores - LEAST_SCORE).abs().min()))
        return scores

    def mlp(self, mlp: Any, x: torch.Tensor) -> torch.Tensor:
        scores = self.scores()
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        gate = torch.where(gate >= THRESHOLD, gate, 0.0) if self.kind == "fatrelu" else torch.relu(gate)
        self.closed += int(((scores < LEAST_SCORE) & (gate != 0.0)).sum())
        gate = torch.where(scores < LEAST_SCORE, 0.0, gate)
        return mlp.down_proj(gate * (torch.relu(up) if self.kind == "drelu" else up))


class ClosedRelu(torch.nn.Module):
    """The activation of MLPs that have no gate."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__()
        self.oracle = oracle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.oracle.scores()
        self.oracle.closed += int(((scores < LEAST_SCORE) & (x > 0.0)).sum())
        return torch.where(scores < LEAST_SCORE, 0.0, torch.relu(x))


@pytest.fixture
def oracle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Oracle:
    made = Oracle(request.node.callspec.params["name"])
    monkeypatch.setitem(ACT2FN, "fatrelu", torch.nn.Identity)

    def recorded(norm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
            made.stream = x
            return norm(module, x)

        return forward

    if request.node.callspec.params["name"] in UNGATED:
        monkeypatch.setitem(ACT2FN, "relu", (ClosedRelu, {"oracle": made}))
    for norm in (LlamaRMSNorm, MistralRMSNorm, torch.nn.LayerNorm):
        monkeypatch.setattr(norm, "forward", recorded(norm.forward))
    for mlp in (LlamaMLP, MistralMLP):
        monkeypatch.setattr(mlp, "forward", lambda module, x: made.mlp(module, x))
    return made


@pytest.mark.parametrize("name", MODELS)
def test_the_formula_with_adapters(name: str, oracle: Oracle, tmp_path: Path) -> None:
    gate = MODELS[name]
    predictors = save_predictors(tmp_path / "predictors")
    engine = engine_of(make_model(gate, tmp_path), tmp_path, sparse_predictors=predictors)
    check_answers(engine, gate, tmp_path)
    assert oracle.margin > MARGIN
    assert oracle.closed > 1000


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("name", ["relu", "drelu", "opt", "falcon"])
def test_a_crowd_changes_no_bit(name: str, dtype: DType, tmp_path: Path) -> None:
    gate = MODELS[name]
    predictors = save_predictors(tmp_path / "predictors", dtype=torch.float16)
    engine = engine_of(make_model(gate, tmp_path), tmp_path, dtype, sparse_predictors=predictors)
    adapters = adapters_of(gate, tmp_path)
    alone = answers_of(engine, adapters, 1, num_threads=1)
    chunks = {"enable_chunked_context": True, "max_num_tokens": 16}
    for others in (
        answers_of(engine, adapters, 2, num_threads=3),
        answers_of(engine, adapters, 4, num_threads=2, **chunks),
        answers_of(engine, adapters, 4, num_threads=1, weight_memory=1 << 19),
    ):
        assert all(one.same_bits(other) for one, other in zip(alone, others, strict=True))


def test_without_closed_gates_nothing_changes(tmp_path: Path) -> None:
    gate = GATES["relu"]
    model = make_model(gate, tmp_path)
    predictors = save_predictors(tmp_path / "predictors", -1e9)
    predicted = engine_of(model, tmp_path / "predicted", sparse_predictors=predictors)
    plain = engine_of(model, tmp_path / "plain")
    adapters = adapters_of(gate, tmp_path)
    for crowd in (1, 4):
        answers = zip(answers_of(predicted, adapters, crowd), answers_of(plain, adapters, crowd), strict=True)
        assert all(one.same_bits(other) for one, other in answers)


def test_the_threshold_is_zero_where_nothing_says_so(tmp_path: Path) -> None:
    model = make_model(GATES["relu"], tmp_path)
    for number, (least, expected) in enumerate(((None, 0.0), (-0.5, -0.5))):
        predictors = save_predictors(tmp_path / f"predictors{number}", least)
        engine = engine_of(model, tmp_path / str(number), sparse_predictors=predictors)
        predicted = [op for op in layers_of(engine) if op.scores is not None]
        assert [op.least_score for op in predicted] == [expected] * LAYERS
        assert all(part.weight.has_rows for op in predicted for part in op.parts)
        assert EngineConfig.load(engine).build_config.sparse_predictors == Path(predictors.name)


def demo_sized(directory: Path) -> Path:
    """Saves a random model with the demo's tokenizer."""
    vocab_size = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    relu = GATES["relu"].family
    family = Family(transformers.LlamaConfig, relu.targets, {**relu.fields, "vocab_size": vocab_size})
    model = save_family(family, directory)
    shutil.copyfile(DEMO / "tokenizer.json", model / "tokenizer.json")
    return model


def test_the_build_reports_the_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = demo_sized(tmp_path / "model")
    (tmp_path / "text.txt").write_text("The sea was calm and the old ship sailed on. " * 4, encoding="utf-8")
    flags = ("--model_dir", model, "--max_seq_len", "64", "--max_num_tokens", "64", "--max_batch_size", "4")
    quality = ("--quality_text", tmp_path / "text.txt")
    predictors = ("--sparse_predictors", save_predictors(tmp_path / "predictors"))
    run_command("build", *flags, *quality, "--output_dir", tmp_path / "plain")
    capsys.readouterr()
    run_command("build", *flags, *quality, *predictors, "--output_dir", tmp_path / "predicted")
    printed = capsys.readouterr().out
    plain, predicted = (EngineConfig.load(tmp_path / name).quality for name in ("plain", "predicted"))
    assert plain is not None
    assert plain.reference is None
    assert predicted is not None
    assert predicted.reference is not None
    assert predicted.reference.perplexity == plain.perplexity
    assert predicted.reference.engine == "float32"
    assert predicted.perplexity != plain.perplexity
    assert predicted.reference.divergence > 0.0
    assert "skip neurons of 3 layers whose scores are below 0.25" in printed
    assert "predicted" in printed.split()  # the row of this engine in the table, next to float32
    run_command("inspect", tmp_path / "predicted")
    assert "predictors, which close gates before they are computed" in " ".join(capsys.readouterr().out.split())


def change_tensors(layer: int, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def apply(directory: Path) -> None:
        tensors = predictor(layer)
        change(tensors)
        torch.save(tensors, directory / f"model_{layer}.pt")

    return apply


def write_config(**fields: object) -> Callable[[Path], object]:
    return lambda directory: (directory / "config.json").write_text(json.dumps(fields))


class Code:
    """An object that a pickle must not contain."""


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "model_1.pt").unlink(), "there is no model_1.pt or model_1.safetensors"),
        (lambda d: shutil.copyfile(d / "model_0.pt", d / "model_3.pt"), "'model_3.pt' is not a file of predictors for"),
        (lambda d: (d / "predictor.bin").touch(), "'predictor.bin' is not a file of predictors"),
        (lambda d: shutil.copyfile(d / "model_2.safetensors", d / "model_1.safetensors"), "holds both model_1.pt and"),
        (lambda d: (d / "model_1.pt").write_bytes(b"no zip"), r"model_1.pt: cannot be read with weights_only=True"),
        (lambda d: torch.save({"fc1.weight": Code()}, d / "model_1.pt"), "cannot be read with weights_only=True"),
        (change_tensors(1, lambda t: t.pop("fc2.weight")), r"model_1.pt: tensor 'fc2.weight' is missing"),
        (change_tensors(1, lambda t: t.update({"fc1.bias": torch.ones(2)})), "unexpected tensor 'fc1.bias'"),
        (change_tensors(1, lambda t: t.update({"fc1.weight": torch.ones(21, 71)})),
         r"tensor 'fc1.weight' is \[21, 71\]; expected \[rank, 72\]"),
        (change_tensors(1, lambda t: t.update({"fc2.weight": torch.ones(192, 22)})),
         r"tensor 'fc2.weight' is \[192, 22\]; expected \[192, 21\]"),
        (change_tensors(1, lambda t: t.update({"fc2.weight": torch.ones(192, 21).double()})),
         "tensor 'fc2.weight' is float64; accepted: float32, float16, bfloat16"),
        (change_tensors(1, lambda t: t["fc1.weight"].fill_(float("nan"))), "'fc1.weight': holds nan"),
        (write_config(sparse_threshold="0"), 'sparse_threshold is "0"; expected a finite number'),
        (write_config(sparse_threshold=-2e9), "sparse_threshold is -2000000000.0; it must be at least -1000000000.0"),
        (write_config(sparse_threshold=2e9), "sparse_threshold is 2000000000.0; it must be at most 1000000000.0"),
        (write_config(sparse_threshold=0.0, rank=20), "rank is unknown"),
        (lambda d: shutil.rmtree(d), "is not a directory of sparse predictors"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_by_name(spoil: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    model = make_model(GATES["relu"], tmp_path)
    predictors = save_predictors(tmp_path / "predictors")
    spoil(predictors)
    with pytest.raises(CheckpointError, match=message):
        engine_of(model, tmp_path, sparse_predictors=predictors)
    assert not (tmp_path / "engine").exists()


def change(**fields: Any) -> Callable[[BuildConfig], BuildConfig]:
    return lambda config: dataclasses.replace(config, **fields)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (change(compress_weights=True), "sparse_predictors and compress_weights"),
        (change(backend="tensorrt"), "sparse_predictors needs backend native"),
        (change(sparse_mlp=DISABLE), "sparse_predictors needs sparse_mlp auto or enable"),
    ],
)
def test_options_that_read_every_gate_are_refused(
    how: Callable[[BuildConfig], BuildConfig], message: str, tmp_path: Path
) -> None:
    convert_checkpoint(make_model(GATES["relu"], tmp_path), tmp_path / "checkpoint", dtype=DType.BFLOAT16)
    config = dataclasses.replace(CONFIG, sparse_predictors=save_predictors(tmp_path / "predictors"))
    with pytest.raises(ConfigError, match=message):
        build(tmp_path / "checkpoint", how(config), tmp_path / "engine")
    with pytest.raises(ConfigError, match="dump_onnx and sparse_predictors: the graph has no predictors"):
        build(tmp_path / "checkpoint", config, tmp_path / "engine", dump_onnx_to=tmp_path / "graph.onnx")
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("gate", "fields", "dtype", "message"),
    [
        ({}, {"hidden_act": "silu"}, DType.FLOAT32, "sparse_predictors needs a model whose MLP has a ReLU"),
        ({}, {}, DType.FLOAT16, "can be read neuron by neuron: .*the model is float16 with 192 and 72"),
        ({"intermediate_size": 190}, {}, DType.FLOAT32, "the model is float32 with 190 and 72"),
    ],
)
def test_models_whose_gates_cannot_be_left_out_are_refused(
    gate: dict[str, Any], fields: dict[str, Any], dtype: DType, message: str, tmp_path: Path
) -> None:
    relu: Gate = GATES["relu"]
    family = dataclasses.replace(relu.family, fields={**relu.family.fields, **gate})
    model = published(save_family(family, tmp_path / "model"), tmp_path / "published", **fields)
    predictors = save_predictors(tmp_path / "predictors")
    with pytest.raises((CheckpointError, ConfigError), match=message):
        engine_of(model, tmp_path, dtype, sparse_predictors=predictors)


def test_a_relu_behind_no_norm_is_refused(tmp_path: Path) -> None:
    opt = UNGATED["opt"].family
    family = dataclasses.replace(opt, fields={**opt.fields, "do_layer_norm_before": False})
    model = save_family(family, tmp_path / "model")
    with pytest.raises(CheckpointError, match="need a ReLU MLP after a norm in every layer, which OPTForCausalLM"):
        engine_of(model, tmp_path, sparse_predictors=save_predictors(tmp_path / "predictors"))
