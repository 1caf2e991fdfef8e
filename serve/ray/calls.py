"""Calls of one method at all replicas that run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle


@dataclass
class Answers:
    """What came back."""

    values: list[Any] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    """Of replicas that still run: one that dies has no say any more."""


async def call_all(replicas: DeploymentHandle, method: str, *args: Any, seconds: float) -> Answers:
    """One answer a replica; none where none runs. Raises TimeoutError."""
    answers = Answers()
    try:
        results = await replicas.broadcast(method, *args).results_async(timeout_s=seconds, return_exceptions=True)
    except DeploymentUnavailableError:
        return answers
    for result in results:
        if isinstance(result, (RayActorError, DeploymentUnavailableError)):
            continue
        if isinstance(result, Exception):
            answers.failures.append(result)
        else:
            answers.values.append(result)
    return answers
