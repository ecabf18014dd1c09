"""Steps of a target engine after contexts that nobody computed."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence

from benchmarks.rows import tree_of
from benchmarks.timing import synchronize
from shared.messages import (
    AcceptedPath,
    SamplingParams,
    StoppingParams,
    TargetAdmitted,
    TargetClose,
    TargetOpen,
    TokenTree,
    VerifyRound,
)
from target_service.engine import TargetEngine

_PROMPT = (7, 8, 9, 10)
_names: Iterator[str] = map("bench-{}".format, itertools.count())


class StretchedRequests:
    """Requests after `context` committed tokens, of which only the prompt was ever computed.

    What lies in their KV is whatever the pool was filled with.

    Args:
        context: Tokens; 0: the prompt's own.
    """

    def __init__(
        self,
        engine: TargetEngine,
        count: int,
        context: int,
        *,
        prompt: Sequence[int] = _PROMPT,
    ) -> None:
        self._engine = engine
        self._request_ids = list(itertools.islice(_names, count))
        for request_id in self._request_ids:
            engine.submit(
                TargetOpen(
                    request_id=request_id,
                    target_epoch=1,
                    token_ids=tuple(prompt),
                    num_prompt_tokens=len(prompt),
                    sampling=SamplingParams(),
                    stopping=StoppingParams(max_new_tokens=1 << 30),
                )
            )
        self.step()  # reads the prompts
        for request_id in self._request_ids if context else ():
            request = engine.requests[request_id]
            missing = context - request.committed_len
            assert missing >= 0, "the prompt is longer than the context"
            request.tokens[-1:-1] = [_PROMPT[0]] * missing
            request.committed_len += missing
            request.launched_len += missing

    def submit_round(self, num_nodes: int) -> None:
        """Queue a round of every request: root and made-up drafts."""
        parents = tuple(tree_of(num_nodes).tolist())
        for request_id in self._request_ids:
            request = self._engine.requests[request_id]
            root = request.tokens[-1]
            round_idx, seq_len = request.round_idx + 1, request.committed_len
            tree = TokenTree(
                request_id=request_id,
                target_epoch=1,
                draft_epoch=1,
                round_idx=round_idx,
                seq_len=seq_len,
                token_ids=(root, *range(1, num_nodes)),
                parent_index=parents,
            )
            self._engine.submit(
                VerifyRound(
                    request_id=request_id,
                    target_epoch=1,
                    round_idx=round_idx,
                    seq_len=seq_len,
                    root_token_id=root,
                    tree=tree if num_nodes > 1 else None,
                )
            )

    def step(self) -> None:
        """Run what is queued, until every request has its answer."""
        waiting = set(self._request_ids)
        while waiting:
            for message in self._engine.step():
                if not isinstance(message, TargetAdmitted):
                    assert isinstance(message, AcceptedPath) and not message.finish_reason, message
                    waiting.remove(message.request_id)

    def step_ms(self, num_nodes: int, num_steps: int) -> float:
        """Return the median wall time of a step, milliseconds; the first ones warm up."""
        seconds = []
        for _ in range(num_steps):
            self.submit_round(num_nodes)
            synchronize(self._engine.runner.pool.device)
            started = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[num_steps // 3 :]) * 1e3

    def close(self) -> None:
        """Give everything back."""
        for request_id in self._request_ids:
            self._engine.submit(TargetClose(request_id=request_id, target_epoch=1))
        self._engine.step()
        self._engine.check_integrity()
