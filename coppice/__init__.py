"""Coppice: tree speculative decoding with the draft and the target as separate services.

    from coppice import Client

    with Client("localhost:50051") as client:
        print(client.generate("def fibonacci(n):", max_new_tokens=64).text)

Names are imported when they are first used: `import coppice` alone loads no gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coppice.client import (
        AsyncClient,
        CancelledError,
        Client,
        Completion,
        DeadlineExceededError,
    )
    from coppice.model import ServedModel, TokenText
    from coppice.request import RequestOptions
    from shared.access.tls import Tls
    from shared.errors import (
        AbortedError,
        CoppiceError,
        InternalError,
        InvalidArgumentError,
        ResourceExhaustedError,
        StaleStateError,
        UnauthenticatedError,
        UnavailableError,
    )
    from shared.messages import (
        FinishInfo,
        FinishReason,
        GenerateEvent,
        PromptInfo,
        RoundTree,
        RoutedExperts,
        SpeculationStats,
        Timings,
        TokenDelta,
        TokenLogprob,
        Usage,
    )

__version__ = "0.1.0"  # a literal: the build reads it without importing this module

_MODULE_OF = {
    "AsyncClient": "coppice.client",
    "CancelledError": "coppice.client",
    "Client": "coppice.client",
    "Completion": "coppice.client",
    "DeadlineExceededError": "coppice.client",
    "RequestOptions": "coppice.request",
    "ServedModel": "coppice.model",
    "TokenText": "coppice.model",
    "AbortedError": "shared.errors",
    "CoppiceError": "shared.errors",
    "InternalError": "shared.errors",
    "InvalidArgumentError": "shared.errors",
    "ResourceExhaustedError": "shared.errors",
    "StaleStateError": "shared.errors",
    "Tls": "shared.access.tls",
    "UnauthenticatedError": "shared.errors",
    "UnavailableError": "shared.errors",
    "FinishInfo": "shared.messages",
    "GenerateEvent": "shared.messages",
    "PromptInfo": "shared.messages",
    "RoundTree": "shared.messages",
    "RoutedExperts": "shared.messages",
    "SpeculationStats": "shared.messages",
    "Timings": "shared.messages",
    "TokenDelta": "shared.messages",
    "Usage": "shared.messages",
    "FinishReason": "shared.messages",
    "TokenLogprob": "shared.messages",
}

__all__ = [
    "AbortedError",
    "AsyncClient",
    "CancelledError",
    "Client",
    "Completion",
    "CoppiceError",
    "DeadlineExceededError",
    "FinishInfo",
    "FinishReason",
    "GenerateEvent",
    "InternalError",
    "InvalidArgumentError",
    "PromptInfo",
    "RequestOptions",
    "ResourceExhaustedError",
    "RoundTree",
    "RoutedExperts",
    "ServedModel",
    "SpeculationStats",
    "StaleStateError",
    "Timings",
    "Tls",
    "TokenDelta",
    "TokenLogprob",
    "TokenText",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
