"""Triton's API, KServe v2 over HTTP, with the inputs and outputs of its TensorRT-LLM backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .._core import AdaptrtError
from .._version import __version__
from ..runtime.adapter_tokenizers import TextTokenizer
from ..runtime.adapter_versions import without_versions
from ..runtime.text_bound import max_prompt_tokens
from .async_executor import Generation
from .errors import ApiError
from .http import LONG_BODY, EventStream, health_response, parse_json, read_body, read_json, unless_disconnected
from .json_answer import JsonAnswer, frame
from .origin_guard import BINARY
from .service import Service
from .triton_requests import ACCEPTED, INPUTS, OUTPUTS, TritonAnswer, TritonRequest, make_request
from .triton_tensors import (
    BYTES,
    HEADER_LENGTH,
    InferBody,
    OutputTensor,
    TensorSpec,
    json_values,
    read_infer,
    read_tensors,
    tensor_of_value,
    write_infer,
)
from .work import WorkKind

PREFIX: Final = "/v2"
VERSION: Final = "1"
"""The only version of every model."""
_PLATFORM: Final = "adaptrt"
_SCALARS: Final = frozenset({"sequence_length", "cum_log_probs", "text_output"})
"""Outputs that are single values in the generate extension's JSON; the others are lists."""


class _IndexBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    ready: bool = False


class _GenerateBody(BaseModel):
    """All other members are inputs."""

    model_config = ConfigDict(extra="allow", strict=True)

    id: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)


def error_response(error: ApiError) -> JSONResponse:
    """Makes an error response in KServe's format."""
    return JSONResponse({"error": str(error)}, status_code=int(error.status), headers=error.headers)


def other_type(path: str) -> str | None:
    """Returns the type of bodies that a path accepts in addition to JSON; None: no other."""
    return BINARY if is_below_prefix(path) else None


def is_below_prefix(path: str) -> bool:
    """True if a path belongs to this API, known or not."""
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def routes(service: Service) -> APIRouter:
    """Makes all routes. A model's name is that of the base model or of an adapter."""
    router = APIRouter()

    @router.get(PREFIX)
    async def server() -> JSONResponse:
        extensions = ["binary_tensor_data", "generate", "model_configuration", "model_repository"]
        return JSONResponse({"name": _PLATFORM, "version": __version__, "extensions": extensions})

    @router.get(f"{PREFIX}/health/live")
    @router.get(f"{PREFIX}/health/ready")
    async def health() -> Response:
        return health_response(service.executor.executor.is_alive)

    @router.post(f"{PREFIX}/repository/index")
    async def index(request: Request) -> JSONResponse:
        await read_json(request, _IndexBody, service.options.limits, service.executor.work, if_empty=b"{}")
        names = [*service.model_names, *(adapter.name for adapter in service.adapters.list())]
        return JSONResponse([{"name": name, "version": VERSION, "state": "READY", "reason": ""} for name in names])

    surface = _Surface(service)
    actions: tuple[tuple[str, str, Callable[[Request], Any]], ...] = (
        ("POST", "/infer", surface.infer),
        ("POST", "/generate", surface.generate),
        ("POST", "/generate_stream", surface.generate_stream),
        ("GET", "/ready", surface.ready),
        ("GET", "/config", surface.config),
        ("GET", "", surface.metadata),
    )
    # Adapters' names may have slashes, so longer paths come first.
    for method, action, endpoint in actions:
        for model in ("{name:path}/versions/{version}", "{name:path}"):
            router.add_api_route(f"{PREFIX}/models/{model}{action}", endpoint, methods=[method])
    return router


class _Surface:
    """The routes of a model."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._limits = service.options.limits

    async def ready(self, request: Request) -> Response:
        """Answers GET ready."""
        await self._adapter(request)
        return health_response(self._service.executor.executor.is_alive)

    async def metadata(self, request: Request) -> JSONResponse:
        """Answers GET for a model."""
        await self._adapter(request)
        return JSONResponse(
            {
                "name": request.path_params["name"],
                "versions": [VERSION],
                "platform": _PLATFORM,
                "inputs": [_described(spec) for spec in INPUTS],
                "outputs": [_described(spec) for spec in OUTPUTS.values()],
            }
        )

    async def config(self, request: Request) -> JSONResponse:
        """Answers GET config with the fields of Triton's ModelConfig that apply here."""
        await self._adapter(request)
        needed = {"request_output_len"}
        return JSONResponse(
            {
                "name": request.path_params["name"],
                "platform": _PLATFORM,
                "backend": _PLATFORM,
                "max_batch_size": 1,
                "input": [{**_configured(spec), "optional": spec.name not in needed} for spec in INPUTS],
                "output": [_configured(spec) for spec in OUTPUTS.values()],
                "model_transaction_policy": {"decoupled": False},
            }
        )

    async def infer(self, request: Request) -> Response:
        """Answers POST infer: tensors in, tensors out."""
        body = await self._body(request)
        return await unless_disconnected(request, self._inferred(request, body))

    async def _inferred(self, request: Request, body: bytes) -> Response:
        adapter = await self._adapter(request)
        header_length = request.headers.get(HEADER_LENGTH)
        own = await self._service.tokenizers.of(adapter)
        if len(body) > LONG_BODY:
            work = self._service.executor.work
            sent, asked = await work.run(WorkKind.TEXTS, self._read_infer, body, header_length, own)
        else:
            sent, asked = self._read_infer(body, header_length, own)
        if asked.streaming:
            raise ApiError("input 'streaming' is true; infer cannot stream: use generate_stream", param="streaming")
        outputs = await self._whole(asked, adapter)
        written, length = await write_infer(_head(request, sent.id), _with_forms(sent, outputs))
        if length is None:
            return Response(written, media_type="application/json")
        return Response(written, headers={HEADER_LENGTH: str(length)}, media_type="application/octet-stream")

    async def generate(self, request: Request) -> Response:
        """Answers POST generate: JSON in, JSON out."""
        body = await self._body(request)
        return await unless_disconnected(request, self._generated(request, body))

    async def _generated(self, request: Request, body: bytes) -> Response:
        adapter = await self._adapter(request)
        sent, asked = await self._generate_request(body, adapter)
        if asked.streaming:
            raise ApiError("streaming is true; generate cannot stream: use generate_stream", param="streaming")
        outputs = await self._whole(asked, adapter)
        return JsonAnswer(_event(request, sent.id, outputs))

    async def generate_stream(self, request: Request) -> Response:
        """Answers POST generate_stream: JSON in, one event per piece of the answer unless streaming is false."""
        body = await self._body(request)
        return await unless_disconnected(request, self._streamed(request, body))

    async def _streamed(self, request: Request, body: bytes) -> Response:
        adapter = await self._adapter(request)
        sent, asked = await self._generate_request(body, adapter)
        generation = await self._submit(asked, adapter)
        return EventStream(self._frames(request, sent.id, asked, generation), generation)

    async def _adapter(self, request: Request) -> str | None:
        version = request.path_params.get("version", VERSION)
        adapter = await self._service.adapter_of(request.path_params["name"])
        if version != VERSION:
            raise ApiError.not_found(f"model version '{version}' does not exist; there is: {VERSION}")
        return adapter

    async def _body(self, request: Request) -> bytes:
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise ApiError(
                f"Content-Encoding is '{encoding}'; bodies are read uncompressed",
                status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            )
        return await read_body(request, self._limits)

    async def _generate_request(self, body: bytes, adapter: str | None) -> tuple[_GenerateBody, TritonRequest]:
        own = await self._service.tokenizers.of(adapter)
        if len(body) > LONG_BODY:
            return await self._service.executor.work.run(WorkKind.TEXTS, self._read_generate, body, own)
        return self._read_generate(body, own)

    def _read_infer(
        self, body: bytes, header_length: str | None, own: TextTokenizer
    ) -> tuple[InferBody, TritonRequest]:
        sent, binary = read_infer(body, header_length, self._limits)
        _check_parameters(sent)
        arrays = read_tensors(sent.inputs, binary, ACCEPTED)
        names = None if not sent.outputs else [output.name for output in sent.outputs]
        return sent, self._request(arrays, names, sent.parameters.get("timeout"), own)

    def _read_generate(self, body: bytes, own: TextTokenizer) -> tuple[_GenerateBody, TritonRequest]:
        sent = parse_json(body, _GenerateBody, self._limits)
        values = dict(sent.model_extra or {})
        for name, value in sent.parameters.items():
            if name in values:
                raise ApiError(f"'{name}' is given twice, as an input and in parameters", param=name)
            values[name] = value
        arrays = {name: tensor_of_value(name, value, ACCEPTED) for name, value in values.items()}
        return sent, self._request(arrays, None, None, own)

    def _request(
        self, arrays: Mapping[str, Any], outputs: Sequence[str] | None, timeout_us: int | None, own: TextTokenizer
    ) -> TritonRequest:
        limits_ms = [self._limits.max_request_seconds * 1000] if self._limits.max_request_seconds > 0 else []
        if timeout_us is not None:
            limits_ms.append(max(1.0, timeout_us / 1000))
        return make_request(
            arrays,
            outputs,
            own=own,
            max_prompt_tokens=max_prompt_tokens(self._service.engine_info),
            limit_ms=min(limits_ms, default=None),
            decoder_start=self._service.decoder_start,
        )

    async def _submit(self, asked: TritonRequest, adapter: str | None) -> Generation:
        if asked.lora is None:
            return await self._service.adapters.submit(asked.request, adapter)
        if adapter is not None:
            raise ApiError(
                f"input 'lora_task_id' names an adapter, and so does the model's name, '{without_versions(adapter)}'",
                param="lora_task_id",
            )
        return await self._service.adapters.submit_task(asked.request, asked.lora)

    def _answer(self, asked: TritonRequest, generation: Generation) -> TritonAnswer:
        return TritonAnswer(asked, self._service.engine_info.vocab_size, generation.num_virtual_tokens)

    async def _whole(self, asked: TritonRequest, adapter: str | None) -> list[OutputTensor]:
        async with await self._submit(asked, adapter) as generation:
            answer = self._answer(asked, generation)
            while not answer.is_over:
                answer.add(await generation.next_results())
            return answer.flush(with_prompt=not asked.exclude_input)

    async def _frames(
        self, request: Request, request_id: str, asked: TritonRequest, generation: Generation
    ) -> AsyncIterator[bytes]:
        answer = self._answer(asked, generation)
        is_streamed = asked.streaming is not False
        try:
            while not answer.is_over:
                answer.add(await generation.next_results())
                if is_streamed or answer.is_over:
                    outputs = answer.flush(with_prompt=not is_streamed and not asked.exclude_input)
                    yield await frame(_event(request, request_id, outputs))
        except (AdaptrtError, ApiError) as error:
            # The status has been sent already; the extension has an event for late errors.
            yield await frame({"error": str(error)})


def _described(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatypes[0], "shape": [1, *spec.dims]}


def _configured(spec: TensorSpec) -> dict[str, Any]:
    datatype = "STRING" if spec.datatypes[0] == BYTES else spec.datatypes[0]
    return {"name": spec.name, "data_type": f"TYPE_{datatype}", "dims": list(spec.dims)}


def _check_parameters(sent: InferBody) -> None:
    """Rejects unknown parameters by name."""
    for name, value in sent.parameters.items():
        if name == "binary_data_output":
            if type(value) is not bool:
                raise ApiError(f"parameter 'binary_data_output' is {value!r}; accepted: true, false", param=name)
        elif name == "timeout":
            if type(value) is not int or not 0 < value < 1 << 63:
                raise ApiError(f"parameter 'timeout' is {value!r}; accepted: microseconds, 1 or more", param=name)
        else:
            raise ApiError(f"parameter '{name}' is not known; accepted: binary_data_output, timeout", param=name)
    for output in sent.outputs or ():
        for name, value in output.parameters.items():
            if name != "binary_data" or type(value) is not bool:
                raise ApiError(
                    f"output '{output.name}': parameter '{name}' is {value!r}; accepted: binary_data as true or false",
                    param=output.name,
                )


def _with_forms(sent: InferBody, outputs: Sequence[OutputTensor]) -> list[tuple[OutputTensor, bool]]:
    """Returns each output, and True if it is wanted as binary data."""
    default = sent.parameters.get("binary_data_output", False)
    forms = {output.name: output.parameters.get("binary_data", default) for output in sent.outputs or ()}
    return [(output, forms.get(output.name, default)) for output in outputs]


def _head(request: Request, request_id: str) -> dict[str, Any]:
    """Returns the fields that every answer begins with."""
    head: dict[str, Any] = {"id": request_id} if request_id else {}
    return head | {"model_name": request.path_params["name"], "model_version": VERSION}


def _event(request: Request, request_id: str, outputs: Sequence[OutputTensor]) -> dict[str, Any]:
    """Returns the generate extension's JSON."""
    event = _head(request, request_id)
    for output in outputs:
        values = json_values(output)
        event[output.name] = values[0] if output.name in _SCALARS and isinstance(values, list) else values
    return event
