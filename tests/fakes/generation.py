"""A generation server without models, over real gRPC: outputs are counted on from the prompt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any

import grpc

from coppice.v1 import generation_pb2 as pb
from coppice.v1 import generation_pb2_grpc as pb_grpc
from shared.errors import ResourceExhaustedError
from shared.rpc.status import to_status


class FakeGeneration(pb_grpc.GenerationServiceServicer):
    """Answers with deltas of two tokens, after one of the first token.

    Args:
        first_s: Until the first token.
        gap_s: Between deltas.
        fails_on: First token of prompts that are refused.
        num_cancelled: Calls, the first ones, that are cancelled, as by a server that stops.
        most_tokens: Of an output: the context ends there.
    """

    def __init__(
        self,
        *,
        first_s: float = 0.0,
        gap_s: float = 0.0,
        fails_on: int = -1,
        num_cancelled: int = 0,
        most_tokens: int = 1_000_000,
    ) -> None:
        self.requests: list[tuple[float, pb.GenerateRequest]] = []
        self._first_s = first_s
        self._gap_s = gap_s
        self._fails_on = fails_on
        self._num_cancelled = num_cancelled
        self._most_tokens = most_tokens
        self._lock = Lock()

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        with self._lock:
            self.requests.append((time.monotonic(), request))
            is_cancelled = len(self.requests) <= self._num_cancelled
        if is_cancelled:
            context.abort(grpc.StatusCode.CANCELLED, "")
        start = sum(request.text.encode()) + sum(request.token_ids.ids)
        if list(request.token_ids.ids)[:1] == [self._fails_on]:
            context.abort_with_status(to_status(ResourceExhaustedError("no room for more")))
        info = pb.PromptInfo(request_id="r", model="fake", model_fingerprint="f00d")
        yield pb.GenerateResponse(prompt_info=info)
        time.sleep(self._first_s)
        is_whole = request.stopping.max_new_tokens <= self._most_tokens
        length = request.stopping.max_new_tokens if is_whole else self._most_tokens
        sent, num_rounds = 0, 0
        while sent < length:
            step = 1 if not sent else min(2, length - sent)
            ids = [start + sent + i for i in range(step)]
            yield pb.GenerateResponse(delta=pb.TokenDelta(token_ids=ids, token_offset=sent))
            sent += step
            num_rounds += step > 1
            time.sleep(self._gap_s if sent < length else 0)
        reason = pb.FINISH_REASON_LENGTH if is_whole else pb.FINISH_REASON_CONTEXT_LENGTH
        finish = pb.FinishInfo(reason=reason)
        finish.speculation.num_rounds = finish.speculation.num_accepted_drafts = num_rounds
        yield pb.GenerateResponse(finish=finish)


@contextmanager
def serving(servicer: Any) -> Iterator[str]:
    """Serve for the length of a block; yields the address."""
    server = grpc.server(ThreadPoolExecutor(64))
    pb_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield address
    finally:
        server.stop(None).wait()
