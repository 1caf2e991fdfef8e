"""Explains errors of huggingface_hub."""

from __future__ import annotations

import errno
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from .grammar import HubName
from .shown import first_line

MAIN: Final = "main"
"""Revision of a name without one."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITABLE: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


class HubErrors:
    """Says in words why there are no files of a repository."""

    def __init__(self, hub: ModuleType, name: HubName) -> None:
        self._hub = hub
        self._name = name

    @property
    def failures(self) -> tuple[type[BaseException], ...]:
        """Errors of requests and downloads; httpx's are not OSErrors."""
        return (OSError, self._hub.errors.HTTPError)

    @property
    def cache(self) -> str:
        """Directory of huggingface_hub's cache."""
        return str(self._hub.constants.HF_HUB_CACHE)

    def is_unreachable(self, error: BaseException) -> bool:
        """True if the Hub gave no answer, so that an earlier copy may be used."""
        errors = self._hub.errors
        if isinstance(error, errors.OfflineModeIsEnabled):
            return True
        return isinstance(error, errors.HTTPError) and not isinstance(error, errors.HfHubHTTPError)

    def explain(self, error: BaseException) -> str:
        """Says why a request or download failed, and what the user can do."""
        errors = self._hub.errors
        if isinstance(error, errors.LocalEntryNotFoundError):
            cause = error.__cause__
            if isinstance(cause, errors.OfflineModeIsEnabled) or cause is None:
                return "is not in the local cache, and HF_HUB_OFFLINE forbids downloads"
            return self.explain(cause)
        return self.why(error)

    def why(self, error: BaseException) -> str:
        """Says why a request failed; the error is not about the local cache."""
        errors, repository = self._hub.errors, self._name.repository
        page = f"{self._hub.constants.ENDPOINT}/{repository}"
        reasons: tuple[tuple[type[BaseException], Callable[[], str]], ...] = (
            (errors.OfflineModeIsEnabled, lambda: "HF_HUB_OFFLINE forbids downloads"),
            (
                errors.GatedRepoError,
                lambda: f"the repository is gated: accept its terms at {page}, and set HF_TOKEN or run hf auth login",
            ),
            (errors.DisabledRepoError, lambda: f"the Hub has disabled the repository; see {page}"),
            (errors.RevisionNotFoundError, lambda: f"the repository has no revision '{self._name.revision or MAIN}'"),
            (
                errors.RepositoryNotFoundError,
                lambda: (
                    f"there is no local path '{self._name.without_prefix}', and no repository {page} that is "
                    "public; a private one needs HF_TOKEN or hf auth login"
                ),
            ),
            (errors.HfHubHTTPError, lambda: self._of_status(error)),
            (errors.FileMetadataError, lambda: f"{self._hub.constants.ENDPOINT} does not answer like the Hub: {error}"),
            (OSError, lambda: self._of_file(error)),
        )
        for kind, reason in reasons:
            if isinstance(error, kind):
                return reason()
        return (
            f"the connection to {self._hub.constants.ENDPOINT} failed ({first_line(error)}); check the network and "
            "try again, the download continues where it stopped"
        )

    def _of_status(self, error: Any) -> str:
        status = error.response.status_code
        advice = {
            401: "the Hub does not accept the token; check HF_TOKEN, or run hf auth login",
            403: "the token may not read the repository; check the token's rights",
            429: "the Hub limits the number of requests; wait a few minutes, or set HF_TOKEN",
        }
        return advice.get(status, f"the Hub answers {status}; try again later ({first_line(error)})")

    def _of_file(self, error: Any) -> str:
        if error.errno in _FULL:
            return f"the disk of {self.cache} is full; free some space, or set HF_HOME to another directory"
        if error.errno in _NOT_WRITABLE:
            return f"{self.cache} cannot be written ({error.strerror}); set HF_HOME to another directory"
        return f"the download failed ({first_line(error)}); try again"
