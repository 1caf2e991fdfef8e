"""A client's own adapter that is evicted after it was stored and before its request is queued."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import adaptrt
from adaptrt.serve.adapters import TRIES, ServedAdapters
from adaptrt.serve.work import WorkKind


class MadeUp:
    """An executor whose cache loses the adapter a few times."""

    def __init__(self, num_losses: int) -> None:
        self.num_losses = num_losses
        self.stored: list[int] = []
        self.submitted: list[Any] = []
        core = SimpleNamespace(
            adapters=SimpleNamespace(names=()), put_adapter=lambda lora: self.stored.append(lora.task_id)
        )
        work = SimpleNamespace(run=self.run)
        self.adapters = ServedAdapters(
            SimpleNamespace(executor=core, work=work, submit=self.submit, gate=None), [], frozenset()
        )  # type: ignore[arg-type]

    async def run(self, kind: WorkKind, function: Callable[[Any], None], argument: Any) -> None:
        function(argument)

    def submit(self, request: adaptrt.Request, adapter: str) -> str:
        if self.num_losses > 0:
            self.num_losses -= 1
            raise adaptrt.PeftTaskNotCachedError("LoRA task 7 not found in cache")
        assert request.lora_config is not None
        self.submitted.append((adapter, request.lora_config.task_id, request.lora_config.weights))
        return "queued"


def submit(made: MadeUp, *tensors: np.ndarray) -> object:
    request = adaptrt.Request([1], 1)
    return asyncio.run(made.adapters.submit_task(request, adaptrt.LoraConfig(7, *tensors)))


WEIGHTS = (np.zeros((1, 2), np.float32), np.zeros((1, 4), np.int32))


def test_it_is_stored_again() -> None:
    made = MadeUp(num_losses=2)
    assert submit(made, *WEIGHTS) == "queued"
    assert made.stored == [7, 7, 7]
    assert made.submitted == [("7", 7, None)]


def test_it_is_not_stored_for_ever() -> None:
    made = MadeUp(num_losses=10**6)
    with pytest.raises(adaptrt.PeftTaskNotCachedError, match=f"task 7 was evicted {TRIES} times"):
        submit(made, *WEIGHTS)
    assert len(made.stored) == TRIES


def test_without_weights_nothing_is_stored() -> None:
    made = MadeUp(num_losses=1)
    with pytest.raises(adaptrt.PeftTaskNotCachedError, match="not found in cache"):
        submit(made)
    assert made.stored == []
