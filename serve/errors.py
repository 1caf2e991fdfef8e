"""HTTP errors: one table from exceptions to status codes, and OpenAI's error format."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from .._core import (
    AdapterError,
    AdaptrtError,
    ConfigError,
    EngineError,
    ExecutorClosedError,
    LoraCacheFullError,
    PeftTaskNotCachedError,
    QueueFullError,
    RequestError,
    StepError,
)
from ..runtime.adapter_versions import without_versions
from ..runtime.named_adapter import UnknownAdapterError
from ..runtime.text_bound import TextTooLongError

RETRY_AFTER_SECONDS: Final = 1

BAD_REQUEST: Final = "BadRequestError"
INVALID_USER_INPUT: Final = "InvalidUserInput"
NOT_FOUND: Final = "NotFoundError"
UNAUTHORIZED: Final = "AuthenticationError"
FORBIDDEN: Final = "PermissionDeniedError"
TOO_LARGE: Final = "RequestTooLargeError"
OVERLOADED: Final = "RateLimitError"
UNAVAILABLE: Final = "ServiceUnavailableError"
INTERNAL: Final = "InternalServerError"

# The first matching row counts, so derived classes precede their bases.
_ANSWERS: Final[tuple[tuple[type[AdaptrtError], HTTPStatus, str], ...]] = (
    (QueueFullError, HTTPStatus.TOO_MANY_REQUESTS, OVERLOADED),
    (LoraCacheFullError, HTTPStatus.TOO_MANY_REQUESTS, OVERLOADED),
    (PeftTaskNotCachedError, HTTPStatus.NOT_FOUND, NOT_FOUND),
    (RequestError, HTTPStatus.BAD_REQUEST, BAD_REQUEST),
    (AdapterError, HTTPStatus.BAD_REQUEST, BAD_REQUEST),
    (EngineError, HTTPStatus.BAD_REQUEST, BAD_REQUEST),  # raised for an adapter's files after the server has started
    (ConfigError, HTTPStatus.BAD_REQUEST, BAD_REQUEST),
    (StepError, HTTPStatus.INTERNAL_SERVER_ERROR, INTERNAL),
    (ExecutorClosedError, HTTPStatus.SERVICE_UNAVAILABLE, UNAVAILABLE),
)


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        message: str,
        *,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        kind: str = BAD_REQUEST,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """kind: `type` of the error in the answer. param: name of the request's field that is wrong."""
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.headers = dict(headers or {})

    @classmethod
    def of(cls, error: AdaptrtError) -> ApiError:
        """Converts an error of the executor, the builder or an adapter's reader."""
        if isinstance(error, UnknownAdapterError):
            # The message does not tell clients where the engine lies, nor which adapters others use.
            return cls.not_found(f"The adapter '{without_versions(error.name)}' does not exist.", param="model")
        for error_type, status, kind in _ANSWERS:
            if isinstance(error, error_type):
                param = error.field if isinstance(error, TextTooLongError) else None
                return cls(str(error), status=status, kind=kind, param=param, headers=retry_headers(status))
        return cls(str(error), status=HTTPStatus.INTERNAL_SERVER_ERROR, kind=INTERNAL)

    @classmethod
    def not_found(cls, message: str, param: str | None = None) -> ApiError:
        """Makes an error with status 404."""
        return cls(message, status=HTTPStatus.NOT_FOUND, kind=NOT_FOUND, param=param)

    @classmethod
    def overloaded(cls, message: str, retry_after: int = RETRY_AFTER_SECONDS) -> ApiError:
        """Makes an error with status 429. retry_after: seconds to wait before the next try."""
        headers = {"Retry-After": str(retry_after)}
        return cls(message, status=HTTPStatus.TOO_MANY_REQUESTS, kind=OVERLOADED, headers=headers)

    def body(self) -> dict[str, Any]:
        """Returns the body in OpenAI's format, with the status as `code` as in vLLM."""
        return {
            "error": {"message": str(self), "type": self.kind, "param": self.param, "code": int(self.status)},
        }


def retry_headers(status: HTTPStatus) -> dict[str, str]:
    """Returns the additional headers of an answer with this status."""
    return {"Retry-After": str(RETRY_AFTER_SECONDS)} if status is HTTPStatus.TOO_MANY_REQUESTS else {}
