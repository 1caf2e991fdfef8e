"""Vision towers with int8 weights and adapters, against transformers + PEFT with the same rounded weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adaptrt import LLM, SamplingParams
from adaptrt._core import QuantAlgo
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.runtime.images.opened import ImageLimits, open_image
from support import seeing, seeing_qwen

# The rounded weights are equal; sums are in float32, in another order than torch's.
TOLERANCE = 1e-4
# The rows of the unrounded model differ by the rounding to 8 bits of each of a few layers.
TOLERANCE_OF_FLOAT32 = 0.03
LAYERS = ("visual.", "vision_tower.", "multi_modal_projector.")
IMAGE, SMALL = seeing.random_image(61, 47, 1), seeing.random_image(5, 9, 2)


@dataclass(frozen=True)
class Model:
    """A vision-language model, and how its files and transformers' rows are made."""

    algorithm: QuantAlgo
    save: Callable[[Path], Path]
    save_adapters: Callable[[Path, Path], dict[str, Path]]
    reference: Callable[[Path, Path | None], Any]


MODELS = {
    # Windows and stacked weights.
    "qwen2.5-vl": Model(
        QuantAlgo.W8A16,
        lambda directory: seeing_qwen.save_model("qwen2.5-vl", directory),
        lambda model, directory: seeing_qwen.save_adapters(model, directory, ["everything", "dora"]),
        seeing_qwen.QwenReference,
    ),
    # A merger with permuted inputs. Towers become int8 whatever the language model's weights become.
    "mistral3": Model(
        QuantAlgo.W8A8,
        lambda directory: seeing.save_model(directory, seeing.PIXTRAL),
        lambda model, directory: seeing.save_adapters(model, directory, seeing.PIXTRAL),
        lambda model, adapter: seeing.SeeingReference(model, adapter, seeing.PIXTRAL),
    ),
}


def rounded(model: Path, directory: Path) -> Path:
    """Copies a model, with the weights of its tower's and connector's linear layers rounded to int8."""
    shutil.copytree(model, directory)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and any(part in name for part in LAYERS):
            scale = np.abs(tensor).max(axis=1, keepdims=True) / np.float32(127)
            tensors[name] = np.rint(tensor / scale) * scale
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def rows_of(llm: LLM, image: Any, adapter: str | None) -> np.ndarray:
    tower = llm._vision._running()
    tiles = tower.model.tiles(open_image(image, "image", ImageLimits()), "image")
    return tower.rows([tiles], None if adapter is None else llm.executor.adapters.get(adapter))[0]


@dataclass(frozen=True)
class Built:
    """A model with its engine and its adapters."""

    kind: Model
    directory: Path
    engine: Path
    adapters: dict[str, Path]

    def llm(self) -> LLM:
        llm = LLM(self.engine)
        for name, adapter in self.adapters.items():
            llm.load_lora(name, adapter)
        return llm


@pytest.fixture(scope="module", params=MODELS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    kind, directory = MODELS[request.param], tmp_path_factory.mktemp("tower")
    model = kind.save(directory / "model")
    adapters = kind.save_adapters(model, directory / "adapters")
    engine = seeing.engine_of_model(model, directory / "engine", QuantConfig(quant_algo=kind.algorithm))
    return Built(kind, model, engine, adapters)


def test_rows_are_those_of_rounded_weights(built: Built, tmp_path: Path) -> None:
    like, reference = rounded(built.directory, tmp_path / "rounded"), built.kind.reference
    with built.llm() as llm:
        for adapter in (None, "everything", "dora"):
            source = None if adapter is None else built.adapters[adapter]
            rows, expected = rows_of(llm, IMAGE, adapter), reference(like, source).rows(IMAGE)
            assert np.abs(rows - expected).max() <= TOLERANCE * np.ptp(expected)
            unrounded = reference(built.directory, source).rows(IMAGE)
            assert TOLERANCE < np.abs(rows - unrounded).max() / np.ptp(unrounded) <= TOLERANCE_OF_FLOAT32


def test_a_crowd_changes_no_bit(built: Built) -> None:
    names = (None, "everything", "dora", None)
    questions = [seeing.question(image) for image in (IMAGE, IMAGE, SMALL, SMALL)]
    greedy = SamplingParams(max_tokens=2, temperature=0, logprobs=0, ignore_eos=True)
    with built.llm() as llm:
        together = llm.chat(questions, greedy, lora=list(names))
    with built.llm() as llm:
        for question, name, found in zip(questions, names, together, strict=True):
            alone = llm.chat(question, greedy, lora=name)
            assert [one.log_prob for one in alone.log_probs] == [one.log_prob for one in found.log_probs]
