"""Describes a plan to the session, from config.json."""

from __future__ import annotations

from typing import Final

from ..._core import EngineError, GpuModelDescription, GpuStepLimits, TensorRtProgram, TensorRtWeight
from ...formats.checkpoint.rotary import reusable_length
from ...formats.engine.tensorrt.plan_config import DECODE, PREFILL, TensorRow, kv_pool_name
from .layout import attention_shapes
from .loaded_plans import LoadedPlans

PROFILES: Final = (PREFILL, DECODE)
"""Profiles of every engine, in the plans' order."""


def make_program(engine: LoadedPlans) -> TensorRtProgram:
    """Makes the program. Raises EngineError if config.json lacks a profile or tensor, or has an unknown profile."""
    checkpoint, build, plans = engine.config.pretrained_config, engine.config.build_config, engine.plans
    if plans.profiles != PROFILES:
        raise EngineError(
            f"{engine.directory}: config.json has the profiles {', '.join(plans.profiles)}; expected "
            f"{', '.join(PROFILES)}"
        )
    assert build.max_input_len is not None
    assert build.max_seq_len is not None
    tensors = {tensor.name: tensor for tensor in plans.tensors}
    reusable = reusable_length(checkpoint.rotary_scaling, checkpoint.max_position_embeddings)
    prefill, decode = (
        GpuStepLimits(
            max_tokens=_largest(tensors, "input_ids", number),
            max_sequences=_largest(tensors, "block_tables", number),
            max_logit_rows=_largest(tensors, "logit_rows", number),
        )
        for number in range(len(PROFILES))
    )
    model = GpuModelDescription(
        dtype=checkpoint.dtype,
        vocab_size=checkpoint.vocab_size,
        num_layers=checkpoint.num_hidden_layers,
        attention=attention_shapes(engine.config),
        # Every sequence of a step has at least one token.
        max_batch_size=min(build.max_batch_size, build.max_num_tokens),
        max_num_tokens=build.max_num_tokens,
        max_input_len=build.max_input_len,
        max_seq_len=build.max_seq_len,
        max_beam_width=build.max_beam_width,
        tokens_per_block=build.tokens_per_block,
        # Longer prompts rotate all their positions by angles that depend on their length.
        max_reusable_prompt_len=min(build.max_seq_len, reusable or build.max_seq_len),
        has_prompt_lengths="prompt_lengths" in tensors,
        max_kv_blocks=min(_largest(tensors, kv_pool_name(0), number) for number in range(len(PROFILES))),
        num_adapter_slots=min(_largest(tensors, "lora_ranks", number) for number in range(len(PROFILES)))
        if build.lora_enabled
        else 0,
        prefill=prefill,
        decode=decode,
        lora=engine.lora,
    )
    return TensorRtProgram(model=model, weights=_weights(engine))


def _weights(engine: LoadedPlans) -> list[TensorRtWeight]:
    """Returns views of the file next to the plans, which must stay open until the weights are copied."""
    if engine.weights is None:
        return []
    return [
        TensorRtWeight(name=name, data=engine.weights.array(name), shape=list(spec.shape))
        for name, spec in engine.weights.specs.items()
    ]


def _largest(tensors: dict[str, TensorRow], name: str, profile: int) -> int:
    """Returns the maximum of an input's first dimension."""
    if name not in tensors or not tensors[name].profiles:
        raise EngineError(f"config.json has no input {name} of a shape that is known at run time")
    return tensors[name].profiles[profile][2][0]
