"""The Ray Serve application: its deployments, connected to each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from ...runtime.orchestrator.mode import num_ranks_at
from ..command_options import limits_of
from .coordinator import AdapterCoordinator
from .endpoint import Endpoint
from .options import application_options
from .replica import Replica
from .router import AdapterRouter

REPLICA: Final = "Replica"
COORDINATOR: Final = "AdapterCoordinator"
ENDPOINT: Final = "Endpoint"
UNBOUNDED: Final = 1 << 20
"""Maximum number of concurrent requests of deployments that only wait for others."""
_QUIET: Final = {"enable_access_log": False}
"""Turns off access logs: Serve's log has each request once, from the endpoint."""


def application(args: Mapping[str, Any]) -> Application:
    """Makes the application for build_app()."""
    options = application_options(args)
    parsed = options.parsed
    light = {"num_cpus": 0}
    coordinator = serve.deployment(
        AdapterCoordinator,
        name=COORDINATOR,
        max_ongoing_requests=UNBOUNDED,
        graceful_shutdown_timeout_s=0.0,
        ray_actor_options=light,
        logging_config=_QUIET,
    ).bind(REPLICA, limits_of(parsed).versions)
    replicas = serve.deployment(
        Replica,
        name=REPLICA,
        max_queued_requests=parsed.max_queue_size,
        graceful_shutdown_timeout_s=parsed.shutdown_seconds,
        ray_actor_options={"num_cpus": parsed.num_threads * num_ranks_at(Path(parsed.model))},
        logging_config=_QUIET,
        request_router_config=RequestRouterConfig(
            request_router_class=AdapterRouter,
            request_router_kwargs={"queue_slack": options.scaling.adapter_queue_slack},
        ),
        **options.scaling.serve_options(),
    ).bind(options.flags, coordinator, options.scaling.max_adapters_per_replica)
    return serve.deployment(
        serve.ingress()(Endpoint),
        name=ENDPOINT,
        max_ongoing_requests=UNBOUNDED,
        graceful_shutdown_timeout_s=parsed.shutdown_seconds,
        ray_actor_options=light,
    ).bind(replicas, options.flags, options.scaling.adapter_affinity)
