"""Random adapters of the bench share no matrix, because the LoRA cache would keep it once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adaptrt import LoraConfig, _core
from adaptrt.tools.bench.scenario_types import AdapterMix
from scenarios.kinds import VariedMix
from scenarios.random_adapters import RandomAdapters
from support.lora_tensors import MODULES

WIDTH = 1024  # matrices of rank 2 have 8 KiB, which is enough to be shared


def make_layout() -> _core.LoraLayout:
    modules = [MODULES["attn_dense"].id, MODULES["mlp_4h_to_h"].id]
    return _core.LoraLayout(
        dtype=_core.DType.FLOAT32,
        num_layers=2,
        max_rank=8,
        dora_enabled=True,
        target_modules=modules,
        sites=[
            _core.LoraSite(layer=layer, in_size=WIDTH, parts=[_core.LoraPart(module=module, out_size=WIDTH)])
            for layer in range(2)
            for module in modules
        ],
    )


def admit(mix: AdapterMix) -> Any:
    """Returns the statistics of a LoRA cache that has all adapters of `mix`."""
    layout = make_layout()
    engine: Any = SimpleNamespace(program=SimpleNamespace(lora=layout, vocab_size=32))
    library = RandomAdapters(engine)
    cache = _core.LoraCache(layout, _core.LoraCacheSizes(host_bytes=1 << 24, page_bytes=1 << 18, device_pages=8))
    for index in range(mix.count):
        config: LoraConfig = library.tensors(mix, index)
        cache.admit(config)
    return cache.stats()


@pytest.mark.parametrize("dora_share", [0.0, 1.0])
def test_adapters_differ_in_every_matrix(dora_share: float) -> None:
    stats = admit(AdapterMix(count=3, ranks=(2,), dora_share=dora_share))
    assert stats.host_adapters == 3
    assert stats.saved_bytes == 0


def test_adapters_with_a_frozen_a_share_it() -> None:
    stats = admit(VariedMix(count=3, ranks=(2,), variant="frozen_a"))
    assert stats.saved_bytes == 2 * 4 * 2 * WIDTH * np.float32().nbytes
