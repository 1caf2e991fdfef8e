"""Models of families that can be split over ranks, their adapters, and engines of several ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adaptrt._core import DType
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig

from .families import FAMILIES, GEMMA4, LATENT, RECURRENT, RELATIVES, Family, save_family
from .models import Reference, save_adapter
from .ranks import EngineRun, RankAnswer, answers_of_runs

FLOAT32_TOLERANCE = 1e-4
CONFIG = BuildConfig(
    max_batch_size=8,
    max_num_tokens=128,
    max_seq_len=256,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=16),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"r": 5},
    "dora": {"r": 4, "use_dora": True},
    "biased": {"r": 3, "lora_bias": True},
}
# Four ranks can divide the sizes, which do not fill panels. They share two key-value heads.
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 40, "intermediate_size": 76}
GPT2_SIZES = {"n_embd": 40, "n_head": 4, "n_inner": 76}
EXPERT_SIZES = {**SIZES, "moe_intermediate_size": 20}
NEOX_SIZES = {"num_attention_heads": 4, "hidden_size": 48, "intermediate_size": 76}
CUT = {
    "granite": SIZES,
    "phi3": SIZES,
    "gemma2": SIZES,
    "gpt2": GPT2_SIZES,
    "gpt-neox": NEOX_SIZES,
    "cohere": SIZES,
    "starcoder2": SIZES,
    "olmo2": SIZES,
    "olmo3": SIZES,
    "llama-relu": {**SIZES, "intermediate_size": 256},
    "mixtral": SIZES,
    "qwen2-moe": {**EXPERT_SIZES, "shared_expert_intermediate_size": 28},
    "qwen3-moe": EXPERT_SIZES,
    "deepseek-v2": {**EXPERT_SIZES, "num_key_value_heads": 4},
    "deepseek-v3": {**EXPERT_SIZES, "num_key_value_heads": 4},
}


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng((seed, length)).integers(2, 61, length).tolist()


def even_sizes(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns a config's fields with sizes that two ranks can divide."""
    if "text_config" in fields:
        return {"text_config": {**fields["text_config"], **even_sizes(fields["text_config"])}}
    if "n_embd" in fields:
        return {**GPT2_SIZES, "n_inner": fields["n_inner"] and GPT2_SIZES["n_inner"]}
    # Heads have twelve floats. Families rotate half of them, or rotate them in sections.
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 76, "ffn_dim": 76}
    sizes = {name: size for name, size in sizes.items() if name in fields}
    return {**sizes, "hidden_size": max(48, fields["hidden_size"])}


class CutModel:
    """A model in a directory, and engines of it by number of ranks."""

    def __init__(self, directory: Path, model: Path, config: BuildConfig = CONFIG) -> None:
        self.directory = directory
        self.model = model
        self._config = config
        self._references: dict[Path | None, Any] = {}
        self.adapters: dict[str, Path | None] = {"base": None}

    def load_reference(self, adapter: Path | None) -> Any:
        """Returns transformers + PEFT with the model and this adapter."""
        return Reference(self.model, adapter)

    def reference(self, adapter: Path | None) -> Any:
        """Returns the result of load_reference(), loaded once: loading takes far longer than a forward pass."""
        if adapter not in self._references:
            self._references[adapter] = self.load_reference(adapter)
        return self._references[adapter]

    def engine(
        self,
        tp_size: int,
        dtype: DType = DType.FLOAT32,
        *,
        pp_size: int = 1,
        moe_ep_size: int | None = None,
        fully_sharded: bool = False,
    ) -> Path:
        name = f"{tp_size}x{pp_size}-{moe_ep_size}-{dtype.name}{'-sharded' if fully_sharded else ''}"
        made = self.directory / f"engine{name}"
        if not made.is_dir():
            checkpoint = self.directory / f"checkpoint{name}"
            sizes = {"tp_size": tp_size, "pp_size": pp_size, "moe_ep_size": moe_ep_size}
            convert_checkpoint(self.model, checkpoint, dtype=dtype, **sizes)
            lora = dataclasses.replace(self._config.lora_config, fully_sharded_loras=fully_sharded)
            build(checkpoint, dataclasses.replace(self._config, lora_config=lora), made, workers=2)
        return made


class Cut(CutModel):
    """A family's model with adapters on every linear layer."""

    def __init__(self, name: str, directory: Path, kinds: Collection[str] = ADAPTERS, **fields: Any) -> None:
        """kinds: of ADAPTERS. fields: of the config, in addition to those of CUT or even_sizes()."""
        family: Family = {**FAMILIES, **RELATIVES, **RECURRENT, **LATENT, **GEMMA4}[name]
        sizes = CUT[name] if name in CUT else even_sizes(family.fields)
        sized = dataclasses.replace(family, fields={**family.fields, **sizes, **fields})
        super().__init__(directory, save_family(sized, directory / "model"))
        for seed, (kind, settings) in enumerate(ADAPTERS.items()):
            if kind not in kinds:
                continue
            settings = {"target_modules": family.targets, **settings}
            if family.parameters and kind == "lora":
                settings["target_parameters"] = list(family.parameters)
            self.adapters[kind] = save_adapter(self.model, directory / kind, seed, **settings)

    def cases(self) -> list[dict[str, Any]]:
        """Returns a request for each adapter."""
        return [
            {
                "adapter": None if adapter is None else str(adapter),
                "task": number,
                "prompt": prompt_of(length, number),
                "tokens": 8,
            }
            for number, (adapter, length) in enumerate(zip(self.adapters.values(), (3, 40, 90, 17), strict=False))
        ]

    def check(self, answers: list[RankAnswer]) -> None:
        """Compares answers with transformers + PEFT."""
        for (name, adapter), case, answer in zip(self.adapters.items(), self.cases(), answers, strict=True):
            prompt = case["prompt"]
            expected = self.reference(adapter).logits(prompt, answer.tokens).numpy()
            actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
            scale = expected.max() - expected.min()
            assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * scale, (self.model, name)
            assert answer.tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist(), (self.model, name)


def check_crowds(cuts: Mapping[str, Cut], place: Path, **engine: Any) -> None:
    """Checks engines of two ranks: all kinds of adapters in one batch, and each alone, with other chunks and threads.

    The same processes run all engines, one after the other. engine: further arguments of CutModel.engine().
    """
    chunks = {"enable_chunked_context": True, "max_num_tokens": 16, "num_threads": 2}
    runs: list[EngineRun] = []
    for cut in cuts.values():
        made = cut.engine(2, **engine)
        runs.append((made, [cut.cases()], {"num_threads": 1}))
        runs.append((made, [[case] for case in reversed(cut.cases())], chunks))
    found = answers_of_runs(2, runs, place)
    for (name, cut), (crowd,), by_themselves in zip(cuts.items(), found[::2], found[1::2], strict=True):
        cut.check(crowd)
        for answer, (by_itself,) in zip(crowd, reversed(by_themselves), strict=True):
            assert answer.same_bits(by_itself), name
