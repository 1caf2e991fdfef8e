"""A repository of the Hub whose folders are adapters, which requests find by name."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from ..._core import AdapterError
from .grammar import HubName
from .hub import require_hub
from .hub_errors import HubErrors
from .hub_files import HubFiles, repository_info
from .kind import Kind

_LOG: Final = logging.getLogger("adaptrt")
LISTED_SECONDS: Final = 5.0
"""Seconds until the repository is asked again for its files. Names that it does not have cause no further requests."""


class HubRoot:
    """A repository, or a folder of one, as an adapter root. Thread-safe."""

    def __init__(self, name: HubName) -> None:
        """Makes no connection yet. Raises AdapterError without huggingface_hub."""
        self.name: Final = name
        self._hub = require_hub(name, Kind.ADAPTER)
        self._listed: tuple[float, Any] | None = None

    def check(self) -> None:
        """Raises AdapterError if the repository or its folder is missing, or access is refused.

        A Hub that cannot be reached raises nothing: adapters that were downloaded earlier can be served.
        """
        errors = HubErrors(self._hub, self.name)
        try:
            info = self._info()
        except errors.failures as error:
            if not errors.is_unreachable(error):
                raise AdapterError(f"{self.name}: {errors.explain(error)}") from error
            _LOG.warning("%s: %s", self.name, errors.explain(error))
            return
        above = self.name.file("")
        if above and not any(entry.rfilename.startswith(above) for entry in info.siblings or ()):
            raise AdapterError(f"{self.name}: the repository has no folder '{self.name.folder}'")

    def adapter(self, path: str) -> HubFiles:
        """Returns the files of the adapter in a folder below this one; its listing() is None if there is none."""
        return HubFiles(self.name.child(path), Kind.ADAPTER, info=self._info)

    def _info(self) -> Any:
        listed = self._listed
        if listed is None or time.monotonic() - listed[0] > LISTED_SECONDS:
            # Two threads may both ask; a lock would hold up a thread whose client has left.
            listed = (time.monotonic(), repository_info(self._hub, self.name))
            self._listed = listed
        return listed[1]
