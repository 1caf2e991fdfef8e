"""Imports the packages that a TensorRT engine needs: adaptrt._cuda and the package that compiled it."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ..._core import ConfigError
from ..._version import __version__
from ...formats.engine.tensorrt.package import PACKAGES, Package
from ...formats.engine.tensorrt.plan_config import TensorRtPlans

_CUDA = "adaptrt._cuda"
_REMEDY = "In a checkout of AdaptRT, with CUDA's compiler (nvcc) installed: pip install ./package/cuda"


def import_cuda(subject: str) -> Any:
    """Returns the module _cuda. Raises ConfigError with the remedy if it is missing or of another version; `subject`
    begins the message.
    """
    if importlib.util.find_spec(_CUDA) is None:
        raise ConfigError(
            f"{subject}: is for NVIDIA GPUs, and the CUDA kernels are not installed: {_CUDA} is missing. {_REMEDY}"
        )
    module = _imported(_CUDA, subject)
    if module.__version__ != __version__:
        raise ConfigError(
            f"{subject}: adaptrt-cuda is version {module.__version__}, and adaptrt is {__version__}; "
            f"they must be the same. {_REMEDY}"
        )
    return module


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
    trt = _imported(name, subject)
    if trt.__version__ != version:
        raise ConfigError(
            f"{subject}: was compiled by {title}, and {trt.__version__} is installed; plans run with the "
            f"version that made them: {command}, or build the engine again"
        )
    return trt


def _imported(name: str, subject: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as reason:
        raise ConfigError(f"{subject}: {name} is installed, but cannot be loaded: {reason}") from reason
