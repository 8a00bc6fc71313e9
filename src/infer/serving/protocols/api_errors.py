"""Errors of the server in OpenAI's format, on every route, for every status, and in streams."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import msgspec
from msgspec import UNSET, Struct, UnsetType

from infer.errors import (
    ClosedError,
    ContextLengthError,
    EngineFailedError,
    InferError,
    InvalidRequestError,
    OutOfPagesError,
)
from infer.serving.protocols.fields import BodyError

_TYPE_BY_STATUS = {429: "rate_limit_error"}
ENGINE_FAILED = "engine_failed"  # the code of an error of the engine: another process can answer instead
NO_RETRY = {"x-should-retry": "false"}


class ErrorFields(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorOutput(Struct, kw_only=True):
    """The error format of every route. `type` is set only in the errors of Anthropic's routes.

    On Ollama's routes `error` is only the message, and `code` is next to it.
    """

    type: Literal["error"] | UnsetType = UNSET
    error: ErrorFields | str
    code: str | UnsetType = UNSET


@dataclass(eq=False, repr=False)
class ApiError(Exception):
    """An error that the client receives. A handler raises it to answer with it. No `type` means the status's type."""

    status: int
    message: str
    type: str = ""
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.message)
        if not self.type:
            standard = "invalid_request_error" if self.status < 500 else "server_error"
            self.type = _TYPE_BY_STATUS.get(self.status, standard)

    @classmethod
    def of(cls, error: "ApiError", **changes: Any) -> Self:
        """Return the error with these arguments changed, and with the format of this class."""
        return cls(**vars(error) | changes)

    def to_json(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(self.to_json())


def api_error(error: Exception) -> ApiError:
    """Return the error that the client receives for an exception. It has no details of an internal failure."""
    match error:
        case ApiError():
            return error
        case ClosedError():
            return ApiError(503, "the model is closed", headers={"Retry-After": "1"})
        case ContextLengthError():
            return ApiError(400, str(error), param=None, code="context_length_exceeded")
        case BodyError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case InvalidRequestError():
            return ApiError(400, str(error))
        case OutOfPagesError():
            return ApiError(503, str(error), code="out_of_memory", headers={"Retry-After": "1"})
        case EngineFailedError():
            return ApiError(500, str(error), code=ENGINE_FAILED, headers=NO_RETRY)
        case InferError():
            return ApiError(500, str(error), headers=NO_RETRY)
    return ApiError(500, "the server failed to answer: see its log", code="internal_error", headers=NO_RETRY)
