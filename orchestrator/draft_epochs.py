"""One request's state on draft workers: what they are sent, one draft_epoch after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.workers import Handler, WorkerSession
from shared.messages import DraftClose, DraftOpen, DraftRound, SamplingParams, TreeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputGrammar:
    """What the output must be, which follows so many tokens of a prompt."""

    compiled: bytes
    num_prompt_tokens: int


class DraftEpochs:
    """Opens the request on a draft worker, orders trees there, and closes it.

    Args:
        request_id: As the workers know it.
        sampling: Temperature and seed matter to the draft.
        grammar: Of the output; None: it is free.
        is_timed: Have the draft say where its time goes.
    """

    def __init__(
        self,
        *,
        request_id: str,
        sampling: SamplingParams,
        grammar: OutputGrammar | None,
        is_timed: bool,
    ) -> None:
        self.draft_epoch = 0
        """Of the newest state, which may be closed."""
        self.worker: WorkerSession | None = None
        """Where the state is; None: nowhere."""
        self.target: WorkerSession | None = None
        """Whose features the draft reads; None before there was one."""
        self._target_epoch = 0
        self._request_id = request_id
        self._sampling = sampling
        self._grammar = grammar
        self._is_timed = is_timed

    def set_target(self, target: WorkerSession, target_epoch: int) -> None:
        """Take note of the target that holds the request from now on."""
        self.target, self._target_epoch = target, target_epoch

    def open(self, worker: WorkerSession, tokens: Sequence[int], handler: Handler) -> None:
        """Begin the next draft_epoch.

        Args:
            tokens: Prompt and output so far.
            handler: Takes what the worker says about the request.
        """
        assert self.target is not None
        self.worker = worker
        self.draft_epoch += 1
        worker.attach(self._request_id, handler)
        worker.send(
            DraftOpen(
                request_id=self._request_id,
                target_epoch=self._target_epoch,
                draft_epoch=self.draft_epoch,
                target_address=self.target.address,
                target_socket=self.target.info.peer_socket,
                target_peer_address=self.target.info.peer_address,
                token_ids=tuple(tokens),
                sampling=self._sampling,
                is_timed=self._is_timed,
                compiled_grammar=self._grammar.compiled if self._grammar else b"",
                num_prompt_tokens=self._grammar.num_prompt_tokens if self._grammar else 0,
            )
        )

    def order(
        self,
        *,
        round_idx: int,
        seq_len: int,
        token_offset: int,
        tokens: Sequence[int],
        shape: TreeShape,
        unless_attached: bool,
    ) -> DraftRound | None:
        """Order the tree of a round.

        Args:
            seq_len: The root is the token at this index, the last one.
            token_offset: Tokens that the draft has for certain.
            tokens: Prompt and output so far.
            shape: The largest that the tree may be.
            unless_attached: A draft that is attached to the target's engine leaves it at that.
        Returns: What was sent; None: no draft is open, or no tree fits into the target's context.
        """
        if self.worker is None or self.target is None:
            return None
        fitting = shape.within(self.target.info.max_context_len - seq_len)
        if fitting is None:
            return None
        order = DraftRound(
            request_id=self._request_id,
            target_epoch=self._target_epoch,
            draft_epoch=self.draft_epoch,
            round_idx=round_idx,
            seq_len=seq_len,
            token_offset=token_offset,
            token_ids=tuple(tokens[token_offset:]),
            shape=fitting,
            unless_attached=unless_attached,
        )
        self.worker.send(order)
        return order

    def close(self, handler: Handler) -> None:
        """Free what the draft holds, wherever that is; the handler is the one of `open`."""
        if self.worker is not None:
            self.worker.send(DraftClose(request_id=self._request_id, draft_epoch=self.draft_epoch))
            self.worker.detach(self._request_id, handler)
            self.worker = None
