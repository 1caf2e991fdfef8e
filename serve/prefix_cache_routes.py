"""POST /reset_prefix_cache: vLLM's route that forgets the reusable KV blocks."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from .errors import ApiError
from .http import read_query
from .service import Service

RESET_PATH: Final = "/reset_prefix_cache"


class ResetQuery(BaseModel):
    """vLLM's options, which are refused if they are true."""

    model_config = ConfigDict(extra="forbid")

    reset_running_requests: bool = False
    reset_external: bool = False


def routes(service: Service) -> APIRouter:
    """Makes the route."""
    router = APIRouter()

    @router.post(RESET_PATH)
    async def reset(request: Request) -> Response:
        query = read_query(request, ResetQuery)
        if query.reset_running_requests:
            raise ApiError("running requests keep their blocks; expected false", param="reset_running_requests")
        if query.reset_external:
            raise ApiError("the second level keeps its blocks; expected false", param="reset_external")
        service.executor.executor.reset_prefix_cache()
        return Response()

    return router
