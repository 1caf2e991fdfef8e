"""The manifests in deploy/kubernetes, where they refer to this package."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from adaptrt.builder.cli import CommandParser
from adaptrt.serve import command
from adaptrt.serve.options import ServerLimits
from adaptrt.serve.ray.options import application_options

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

DIRECTORY = Path(__file__).parents[3] / "deploy" / "kubernetes"


def objects(name: str) -> dict[str, Any]:
    """Returns a manifest's objects by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((DIRECTORY / name).read_text())}


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = CommandParser(prog="adaptrt serve", description="")
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def test_servers_are_started_with_flags_that_there_are() -> None:
    found = objects("server.yaml")
    pod = found["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    args = parsed(container["args"])
    assert str(args.num_threads) == container["resources"]["requests"]["cpu"]
    (port,) = container["ports"]
    assert port["containerPort"] == args.port
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(args.port)
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > args.shutdown_seconds + wait
    for kind in ("Service", "PodDisruptionBudget"):
        selector = found[kind]["spec"]["selector"]
        assert selector.get("matchLabels", selector).items() <= pod["metadata"]["labels"].items()
    pool = objects("inference-pool.yaml")
    assert pool["InferencePool"]["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert pool["InferencePool"]["spec"]["targetPorts"] == [{"number": args.port}]
    (rule,) = pool["HTTPRoute"]["spec"]["rules"]
    assert int(rule["timeouts"]["request"].removesuffix("s")) > ServerLimits().max_request_seconds


def test_ray_builds_the_application_of_its_manifest() -> None:
    cluster = objects("ray-service.yaml")["RayService"]["spec"]
    (application,) = yaml.safe_load(cluster["serveConfigV2"])["applications"]
    assert application["import_path"] == "adaptrt.serve.ray:build_app"
    options = application_options(application["args"])
    (workers,) = cluster["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"] == workers["rayStartParams"]["num-cpus"]
    assert int(container["resources"]["requests"]["cpu"]) == options.parsed.num_threads
    assert workers["maxReplicas"] == options.scaling.max_replicas
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > options.parsed.shutdown_seconds
