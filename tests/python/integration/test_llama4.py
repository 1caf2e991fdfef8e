"""The text of Llama 4's vision-language class. test_families.py compares the language model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.families import LLAMA4_VISION, save_family
from support.models import EAGER, load_adapter, load_model, save_adapter
from support.serving import collect, make_request


def test_the_text_of_a_model_that_sees(tmp_path: Path) -> None:
    model = save_family(LLAMA4_VISION, tmp_path / "model")
    parameters = list(LLAMA4_VISION.parameters)
    targets = LLAMA4_VISION.targets
    adapter = save_adapter(model, tmp_path / "adapter", 1, r=4, target_modules=targets, target_parameters=parameters)
    plugins = PluginConfig(lora_plugin="auto")
    config = BuildConfig(
        max_batch_size=2, max_num_tokens=64, max_seq_len=64, lora_config=LoraBuildConfig(), plugin_config=plugins
    )
    convert_checkpoint(model, tmp_path / "checkpoint")
    build(tmp_path / "checkpoint", config, tmp_path / "engine")
    prompt = np.random.default_rng(4).integers(2, 57, 50).tolist()
    with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        lora = adaptrt.LoraConfig.from_peft(1, adapter, tmp_path / "engine")
        logits = collect(executor, executor.enqueue_request(make_request(prompt, 1, lora))).context_logits
    # In transformers 5.24, the whole model fails after its language model if there are no images.
    reference = load_adapter(load_model(model, **EAGER), adapter).get_base_model().language_model.eval()
    with torch.no_grad():
        expected = reference(torch.tensor([prompt]), use_cache=False).logits[0].numpy()
    assert np.abs(logits - expected).max() <= 1e-4 * np.ptp(expected)
