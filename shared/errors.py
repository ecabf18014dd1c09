"""Errors that cross a service boundary, and what each one is on the wire.

    CoppiceError
    ├── InvalidArgumentError      INVALID_ARGUMENT     the request is wrong; `field` says where
    │   └── InvalidTreeError      INVALID_ARGUMENT     a token tree is malformed
    ├── NotFoundError             NOT_FOUND            no such request on this worker
    ├── StaleStateError           FAILED_PRECONDITION  old epoch, round or seq_len
    ├── ResourceExhaustedError    RESOURCE_EXHAUSTED   no room now; `retry_after_s`: when to retry
    ├── UnavailableError          UNAVAILABLE          draining, or no worker
    ├── UnauthenticatedError      UNAUTHENTICATED      the caller did not prove who it is
    ├── AbortedError              ABORTED              an operator ended the request
    └── InternalError             INTERNAL             our bug
        └── NonFiniteError        INTERNAL             the model computes NaN or infinity
    ConfigError, CheckpointError                       refuse to start; never on the wire

docs/errors.md lists every `reason`.
"""

from __future__ import annotations

import enum

EXIT_CONFIG = 2
"""Exit code of a process that refuses to start: it was asked for what cannot work."""


class StatusCode(enum.IntEnum):
    """google.rpc.Code values that Coppice uses."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class CoppiceError(Exception):
    """Base of every error that a service reports.

    Args:
        message: What was wrong, what was expected, what to do.
        reason: UPPER_SNAKE identifier, stable across releases (docs/errors.md).
        field: Dotted path of the request field to blame, or "".
    """

    code = StatusCode.INTERNAL
    default_reason = "INTERNAL"

    def __init__(self, message: str, *, reason: str | None = None, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.field = field


class InvalidArgumentError(CoppiceError):
    """The request cannot be served as it is."""

    code = StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_ARGUMENT"


class InvalidTreeError(InvalidArgumentError):
    """A token tree is not topological, too large, or names tokens out of range."""

    default_reason = "INVALID_TREE"


class NotFoundError(CoppiceError):
    """The worker does not know the request."""

    code = StatusCode.NOT_FOUND
    default_reason = "REQUEST_NOT_FOUND"


class StaleStateError(CoppiceError):
    """The message speaks of an epoch, round or length that is not the worker's."""

    code = StatusCode.FAILED_PRECONDITION
    default_reason = "STALE_STATE"


class ResourceExhaustedError(CoppiceError):
    """There is no room for the request at present.

    Args:
        retry_after_s: When it makes sense to try again, seconds; 0: never, or nobody knows.
    """

    code = StatusCode.RESOURCE_EXHAUSTED
    default_reason = "OVERLOADED"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str = "",
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(message, reason=reason, field=field)
        self.retry_after_s = retry_after_s


class UnavailableError(CoppiceError):
    """No worker can take the request, or the server is draining."""

    code = StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class UnauthenticatedError(CoppiceError):
    """The caller did not prove who it is."""

    code = StatusCode.UNAUTHENTICATED
    default_reason = "NO_IDENTITY"


class AbortedError(CoppiceError):
    """An operator has ended the request."""

    code = StatusCode.ABORTED
    default_reason = "ABORTED"


class InternalError(CoppiceError):
    """A bug of ours."""


class NonFiniteError(InternalError):
    """A request's logits are no numbers; it would end so on every worker, so it is not retried."""

    default_reason = "NON_FINITE_LOGITS"


class ConfigError(ValueError):
    """A configuration that cannot work; the message says how to fix it."""


class CheckpointError(ConfigError):
    """A checkpoint directory that does not hold what its config.json promises."""
