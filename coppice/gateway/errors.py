"""What went wrong, as OpenAI's API says it: a status, and {"error": {...}} with four fields."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import CoppiceError, ResourceExhaustedError, StatusCode

CLIENT_CLOSED = 499
_BAD_REQUEST = 400
_MIN_SERVER_ERROR = 500
_MAX_SHOWN_CHARS = 100

_STATUS_OF_CODE = {
    StatusCode.CANCELLED: CLIENT_CLOSED,
    StatusCode.INVALID_ARGUMENT: _BAD_REQUEST,
    StatusCode.DEADLINE_EXCEEDED: 504,
    StatusCode.NOT_FOUND: 404,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.FAILED_PRECONDITION: _BAD_REQUEST,
    StatusCode.ABORTED: 409,
    StatusCode.INTERNAL: 500,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.UNAUTHENTICATED: 401,
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# Reasons whose status is another one than their gRPC code says. Of a code that Coppice itself does
# not send, such as a proxy's, the reason is the code's name.
_STATUS_OF_REASON = {
    "MESSAGE_TOO_LARGE": 413,
    "DEADLINE_EXCEEDED": 504,
    "CANCELLED": CLIENT_CLOSED,
    "PERMISSION_DENIED": 403,
    "UNIMPLEMENTED": 501,
}
_CODE_OF_REASON = {
    "INVALID_ARGUMENT": "invalid_value",
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "NO_IDENTITY": "invalid_api_key",
    "WRONG_IDENTITY": "invalid_api_key",
    "EXPIRED_IDENTITY": "invalid_api_key",
}
# What the same request would end with again, though its status says otherwise.
_FINAL_REASONS = frozenset(
    {"ABORTED", "NO_DRAFT", "NO_PROGRESS", "NON_FINITE_LOGITS", "REQUEST_KILLED_WORKERS"}
    | {"DEADLINE_EXCEEDED", "UNIMPLEMENTED"}
)
# Fields of GenerateRequest that OpenAI's API calls otherwise; of others the last part is the name,
# but for those of `speculation`, which requests of HTTP have as well.
_PARAMS = {
    "text": "prompt",
    "token_ids": "prompt",
    "stopping.max_new_tokens": "max_tokens",
    "stopping.min_new_tokens": "min_tokens",
    "stopping.stop_strings": "stop",
    "stopping.include_stop_in_output": "include_stop_str_in_output",
    "output.logprobs": "logprobs",
    "output.top_logprobs": "top_logprobs",
    "output.routed_experts": "return_routed_experts",
}


@dataclass(kw_only=True, eq=False)
class ApiError(Exception):
    """What a client is answered in the place of a result.

    Args:
        param: Field of the request to blame; None: none is.
        code: Stable identifier, lower case.
        headers: Of the answer.
    """

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str]

    @property
    def body(self) -> dict[str, Any]:
        """Return the JSON of the answer."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def shortened(text: str) -> str:
    """Return a text of the client's as errors and logs repeat it."""
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def shown(value: Any) -> str:
    """Return a value of the client's as errors repeat it; of an object or a list its type."""
    if isinstance(value, str):
        return repr(shortened(value))
    return f"a {type(value).__name__}" if isinstance(value, dict | list) else shortened(repr(value))


def bad_request(
    message: str, *, param: str | None, code: str = "invalid_value", status: int = _BAD_REQUEST
) -> ApiError:
    """Return the error of a request that cannot be served as it is."""
    return ApiError(
        status=status,
        message=message,
        kind="invalid_request_error",
        param=param,
        code=code,
        headers={},
    )


def unsupported(name: str, why: str) -> ApiError:
    """Return the error of a field that OpenAI's API has and this server does not."""
    return bad_request(
        f"{name} is not supported by this server: {why}", param=name, code="unsupported_parameter"
    )


def model_not_found(name: str) -> ApiError:
    """Return the error of a model that nobody serves."""
    message = f"the model {shown(name)} is not served here; GET /v1/models lists those that are"
    return bad_request(message, param="model", code="model_not_found", status=404)


def api_error(error: CoppiceError, *, params: Mapping[str, str] = _PARAMS) -> ApiError:
    """Return what a client is told of an error of the orchestrator or of the gateway.

    Args:
        params: What fields of its request to the orchestrator are called in the client's.
    """
    status = _STATUS_OF_REASON.get(error.reason) or _STATUS_OF_CODE[error.code]
    kind = "server_error" if status >= _MIN_SERVER_ERROR else "invalid_request_error"
    param = _param(error.field, params) if error.field else None
    return ApiError(
        status=status,
        message=_message(error.message, error.field, param) if param else error.message,
        kind=_TYPES.get(status, kind),
        param=param,
        code=_CODE_OF_REASON.get(error.reason, error.reason.lower()),
        headers=_retry_headers(error, status),
    )


def _retry_headers(error: CoppiceError, status: int) -> dict[str, str]:
    """Say when to come again, or that it is of no use; OpenAI's clients listen to all three."""
    if isinstance(error, ResourceExhaustedError) and error.retry_after_s:
        return {
            "retry-after": str(math.ceil(error.retry_after_s)),
            "retry-after-ms": str(math.ceil(error.retry_after_s * 1e3)),
        }
    is_final = error.reason in _FINAL_REASONS or isinstance(error, ResourceExhaustedError)
    return {"x-should-retry": "false"} if is_final else {}


def _param(field: str, params: Mapping[str, str]) -> str:
    if field.startswith("speculation."):
        return field
    return params.get(field, field.rpartition(".")[2])


def _message(message: str, field: str, param: str) -> str:
    """Return what is wrong with a field, by the names that HTTP has for it and for the limit."""
    path, _, own = field.rpartition(".")
    message = re.sub(rf"^({re.escape(field)}|{re.escape(own)})\b", lambda _: param, message)
    if path:  # a name alone may be a word of the text
        message = message.replace(field, param)
    return message.replace(" max_new_tokens", " max_tokens")
