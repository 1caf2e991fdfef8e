"""The server's routes over replicas of the executor: an application of Ray Serve.

serve run adaptrt.serve.ray:build_app model=MODEL num_threads=4 num_replicas=2
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._core import ConfigError

if TYPE_CHECKING:
    from ray.serve import Application


def build_app(args: dict[str, Any]) -> Application:
    """Makes the application. args: flags of `adaptrt serve` and fields of Scaling, by name.

    Raises ConfigError that names wrong arguments or the missing package.
    """
    try:
        from .application import application
    except ModuleNotFoundError as error:
        raise ConfigError(f"adaptrt.serve.ray needs {error.name}: pip install 'adaptrt[ray]'") from error
    return application(args)
