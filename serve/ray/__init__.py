"""The server's routes over replicas of the executor: an application of Ray Serve.

serve run adaptrt.serve.ray:build_app model=MODEL num_threads=4 num_replicas=2
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._core import ConfigError

if TYPE_CHECKING:
    from ray.serve import Application


def build_app(args: dict[str, Any]) -> Application:
    """An application that `args` describe: the flags of `adaptrt serve` by their names, and the fields of Scaling.

    Raises ConfigError that names what is wrong with them, or what is not installed.
    """
    try:
        from .application import application
    except ModuleNotFoundError as error:
        raise ConfigError(f"adaptrt.serve.ray needs {error.name}: pip install 'adaptrt[ray]'") from error
    return application(args)
