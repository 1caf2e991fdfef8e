"""Imports the package that compiled a TensorRT engine."""

from __future__ import annotations

import importlib.util
from typing import Any

from ..._core import ConfigError
from ...formats.engine.tensorrt.package import PACKAGES, Package
from ...formats.engine.tensorrt.plan_config import TensorRtPlans
from ..cuda_module import import_installed


def import_tensorrt(plans: TensorRtPlans, subject: str) -> Any:
    """Returns the module of TensorRT's package. Raises ConfigError unless the version that compiled the plans is
    installed.
    """
    name, version = plans.package, plans.package_version
    if name not in PACKAGES:
        raise ConfigError(f"{subject}: was compiled by package '{name}'; accepted: {', '.join(PACKAGES)}")
    title = Package(name, version, compute_capabilities=()).title
    command = f"pip install {name.replace('_', '-')}=={version}"
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"{subject}: was compiled by {title}, which is not installed: {command}")
    trt = import_installed(name, subject)
    if trt.__version__ != version:
        raise ConfigError(
            f"{subject}: was compiled by {title}, and {trt.__version__} is installed; plans run with the "
            f"version that made them: {command}, or build the engine again"
        )
    return trt
