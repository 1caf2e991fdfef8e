"""Calls of one method at all running replicas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle


@dataclass
class Answers:
    """Results of the calls."""

    values: list[Any] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    """Exceptions of replicas that still run. Replicas that have died are ignored."""


async def call_all(replicas: DeploymentHandle, method: str, *args: Any, seconds: float) -> Answers:
    """Returns one answer per replica; none if no replica runs. Raises TimeoutError."""
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
