"""Imports adaptrt._cuda, the module with the CUDA device, kernels and engine."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

from .._core import ConfigError
from .._version import __version__
from ..common.file_digest import sha256_of

_CUDA = "adaptrt._cuda"
_REMEDY = (
    "Install them with: pip install 'adaptrt[cuda]'; or in a checkout of AdaptRT, with CUDA's compiler (nvcc): "
    "pip install ./package/cuda"
)


def import_cuda(subject: str) -> Any:
    """Returns the module _cuda. Raises ConfigError with the remedy if it is missing or of another version; `subject`
    begins the message.
    """
    if importlib.util.find_spec(_CUDA) is None:
        raise ConfigError(
            f"{subject}: is for NVIDIA GPUs, and the CUDA kernels are not installed: {_CUDA} is missing. {_REMEDY}"
        )
    module = import_installed(_CUDA, subject)
    if module.__version__ != __version__:
        raise ConfigError(
            f"{subject}: adaptrt-cuda is version {module.__version__}, and adaptrt is {__version__}; "
            f"they must be the same. {_REMEDY}"
        )
    return module


def import_installed(name: str, subject: str) -> Any:
    """Returns a module that is installed. Raises ConfigError with the reason if it cannot be loaded."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as reason:
        raise ConfigError(f"{subject}: {name} is installed, but cannot be loaded: {reason}") from reason


@lru_cache(maxsize=8)
def gpu_of(cuda: Any, index: int) -> dict[str, str]:
    """Returns the build of the kernels and the generation of the GPU with this number. cuda: from import_cuda()."""
    major, minor = cuda.CudaDevice(index).info.compute_capability
    return {"library": sha256_of(Path(cuda.__file__)), "compute_capability": f"{major}.{minor}"}
