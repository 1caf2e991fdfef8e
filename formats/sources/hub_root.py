"""A repository of the Hub whose folders are adapters, which requests find by name."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from ..._core import AdapterError
from ..adapter.recognise import CONFIG_FILE
from .grammar import HubName
from .hub import require_hub
from .hub_errors import HubErrors
from .hub_files import HubFiles, repository_info
from .kind import Kind

_LOG: Final = logging.getLogger("adaptrt")
LISTED_SECONDS: Final = 5.0
"""Seconds until the repository is asked again for its files, also after a failure. Until then, names that it does not
have cause no requests.
"""


class HubRoot:
    """A repository, or a folder of one, as an adapter root. Thread-safe."""

    def __init__(self, name: HubName) -> None:
        """Makes no connection yet. Raises AdapterError without huggingface_hub."""
        self.name: Final = name
        self._hub = require_hub(name, Kind.ADAPTER)
        self._errors = HubErrors(self._hub, name)
        self._listed: tuple[float, Any] | None = None
        """Time of the last request, and its answer or its failure."""

    def check(self) -> None:
        """Raises AdapterError if the repository or its folder is missing, or access is refused.

        A Hub that cannot be reached raises nothing: adapters that were downloaded earlier can be served.
        """
        try:
            info = self._info()
        except self._errors.failures as error:
            if not self._errors.is_unreachable(error):
                raise AdapterError(f"{self.name}: {self._errors.explain(error)}") from error
            _LOG.warning("%s: %s", self.name, self._errors.explain(error))
            return
        above = self.name.file("")
        files = [entry.rfilename for entry in info.siblings or () if entry.rfilename.startswith(above)]
        if above and not files:
            raise AdapterError(f"{self.name}: the repository has no folder '{self.name.folder}'")
        configs = [file for file in files if file.rpartition("/")[2] == CONFIG_FILE]
        if configs == [above + CONFIG_FILE]:
            raise AdapterError(
                f"{self.name}: is an adapter itself; expected a repository with adapters in its folders (lora_modules "
                f"takes NAME={self.name.without_prefix})"
            )

    def adapter(self, path: str) -> HubFiles:
        """Returns the files of the adapter in a folder below this one; its listing() is None if there is none."""
        return HubFiles(self.name.child(path), Kind.ADAPTER, info=self._info)

    def _info(self) -> Any:
        listed = self._listed
        if listed is None or time.monotonic() - listed[0] > LISTED_SECONDS:
            # Two threads may both ask; a lock would hold up a thread whose client has left.
            try:
                answer = repository_info(self._hub, self.name)
            except self._errors.failures as error:
                answer = error
            listed = (time.monotonic(), answer)
            self._listed = listed
        if isinstance(listed[1], BaseException):
            raise listed[1].with_traceback(None)
        return listed[1]
