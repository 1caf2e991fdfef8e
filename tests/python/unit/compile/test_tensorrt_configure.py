"""The configuration that plans are built with, as TensorRT for RTX reports it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaptrt.builder.compile.tensorrt.build_plan import configure

trt = pytest.importorskip("tensorrt_rtx", reason="pip install adaptrt[tensorrt-rtx]")


@pytest.fixture
def builder() -> Any:
    return trt.Builder(trt.Logger(trt.Logger.ERROR))


def test_plans_write_in_place_and_can_be_captured(builder: Any) -> None:
    config = builder.create_builder_config()
    assert configure(trt, config, "8.9", streams_weights=False)
    assert not config.get_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    assert config.get_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03)
    assert config.get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    assert config.num_compute_capabilities == 1
    assert config.get_compute_capability(0) == trt.ComputeCapability.SM89


def test_plans_that_stream_weights_allocate_while_they_run(builder: Any) -> None:
    config = builder.create_builder_config()
    assert configure(trt, config, "8.9", streams_weights=True)
    assert config.get_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    assert not config.get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # TensorRT for RTX refuses both flags together


def test_tensorrt_itself_knows_no_such_flag_and_builds_for_the_gpu_at_hand(builder: Any) -> None:
    config = builder.create_builder_config()
    flags, capabilities = config.flags, config.num_compute_capabilities
    other = SimpleNamespace(PreviewFeature=trt.PreviewFeature, BuilderFlag=SimpleNamespace())
    assert configure(other, config, None, streams_weights=False)
    assert config.get_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03)
    assert (config.flags, config.num_compute_capabilities) == (flags, capabilities)
