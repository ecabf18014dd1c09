"""CoppiceError <-> gRPC status with google.rpc details, and <-> RequestFailure.

On the wire: ErrorInfo (reason, domain "coppice") always, BadRequest when a field is to blame,
RetryInfo when it makes sense to try again later.
"""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import (  # type: ignore[import-untyped]
    error_details_pb2,
    status_pb2,
)
from grpc_status import rpc_status

from shared.errors import (
    AbortedError,
    CoppiceError,
    InternalError,
    InvalidArgumentError,
    InvalidTreeError,
    NotFoundError,
    ResourceExhaustedError,
    StaleStateError,
    StatusCode,
    UnauthenticatedError,
    UnavailableError,
)
from shared.messages import RequestFailure

DOMAIN = "coppice"
MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
CLIENT_PORT = "orchestrator's client port (--port, default: 50051)"
ADMIN_PORT = "orchestrator's operators' port (--admin-port, default: 51051)"

# Room for the other trailers below gRPC's default limit of 8 KiB.
_MAX_MESSAGE_CHARS = 2000
_IDS = ("request_id", "target_epoch", "draft_epoch", "round_idx")

_CLASSES: dict[int, type[CoppiceError]] = {
    error.code: error
    for error in (
        InvalidArgumentError,
        NotFoundError,
        StaleStateError,
        UnavailableError,
        UnauthenticatedError,
        AbortedError,
        InternalError,
    )
}


def to_status(error: CoppiceError) -> grpc.Status:
    """Convert an error to what `context.abort_with_status` takes."""
    message = error.message[:_MAX_MESSAGE_CHARS]
    details = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=message, reason=error.reason
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, ResourceExhaustedError) and error.retry_after_s:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        entry = any_pb2.Any()
        entry.Pack(detail)
        packed.append(entry)
    return rpc_status.to_status(
        status_pb2.Status(code=int(error.code), message=message, details=packed)
    )


async def abort(context: grpc.aio.ServicerContext, error: CoppiceError) -> NoReturn:
    """End the call with an error; never returns."""
    await context.abort_with_status(to_status(error))
    raise AssertionError("abort_with_status returned")


def from_rpc_error(error: grpc.Call | grpc.aio.AioRpcError, *, port: str = "") -> CoppiceError:
    """Convert a failed call back; codes that Coppice does not send keep their name as reason.

    Args:
        port: What was dialled, such as CLIENT_PORT; said where a server has no such method.
    """
    code = int(error.code().value[0])
    message = error.details() or error.code().name
    if port and error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return InternalError(
            f"what answers there has no such method ({message}): it is no {port}, or one of an "
            "older release",
            reason="UNIMPLEMENTED",
        )
    reason, field, retry_after_s = "", "", 0.0
    for detail in _details_of(error):
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            reason = info.reason
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad_request = error_details_pb2.BadRequest()
            detail.Unpack(bad_request)
            field = next((v.field for v in bad_request.field_violations), "")
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    if not reason and code == StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        reason = MESSAGE_TOO_LARGE
    return make_error(
        code,
        message,
        reason=reason or error.code().name,
        field=field,
        retry_after_s=retry_after_s,
    )


def make_error(
    code: int, message: str, *, reason: str, field: str = "", retry_after_s: float = 0.0
) -> CoppiceError:
    """Build the error of a google.rpc.Code; codes that Coppice does not use are InternalError."""
    if code == StatusCode.RESOURCE_EXHAUSTED:
        return ResourceExhaustedError(
            message, reason=reason, field=field, retry_after_s=retry_after_s
        )
    if code == StatusCode.INVALID_ARGUMENT and reason == InvalidTreeError.default_reason:
        return InvalidTreeError(message, field=field)
    return _CLASSES.get(code, InternalError)(message, reason=reason, field=field)


def failure_of(error: CoppiceError, message: Any = None, **ids: Any) -> RequestFailure:
    """Say an error about one request of a stream that goes on.

    Args:
        message: Is refused; its request, epochs and round are named, as far as it has them.
        ids: Of RequestFailure, instead of the message's.
    """
    named = {name: getattr(message, name) for name in _IDS if hasattr(message, name)}
    return RequestFailure(
        code=int(error.code),
        reason=error.reason,
        message=error.message[:_MAX_MESSAGE_CHARS],
        field=error.field,
        **{"request_id": "", **named, **ids},
    )


def error_of(failure: RequestFailure) -> CoppiceError:
    """Build the error that a RequestFailure says."""
    return make_error(failure.code, failure.message, reason=failure.reason, field=failure.field)


def _details_of(error: grpc.Call | grpc.aio.AioRpcError) -> list[any_pb2.Any]:
    for key, value in error.trailing_metadata() or ():
        if key == rpc_status.GRPC_DETAILS_METADATA_KEY:
            return list(status_pb2.Status.FromString(value).details)
    return []
