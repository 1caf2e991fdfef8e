"""SmolLM3's layers without rotary positions, if config.json does not list them."""

from __future__ import annotations

import pytest
from transformers import SmolLM3Config

from adaptrt.common.json_fields import JsonFields
from adaptrt.formats.models.smollm3 import SMOLLM3


@pytest.mark.parametrize(("layers", "interval"), [(9, None), (7, 3), (4, 1), (3, 4)])
def test_default_of_no_rope_layers_is_that_of_transformers(layers: int, interval: int | None) -> None:
    fields = {} if interval is None else {"no_rope_layer_interval": interval}
    expected = SmolLM3Config(num_hidden_layers=layers, pad_token_id=0, **fields).no_rope_layers
    features = SMOLLM3.read_features(JsonFields(fields), layers)
    assert features["unrotated_layers"] == tuple(layer for layer, is_rotated in enumerate(expected) if not is_rotated)
