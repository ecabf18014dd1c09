"""One request: its rounds, and its recovery when it loses a worker.

    round by credit  the target runs the round by itself: with a tree that it orders from a draft
                     that is attached to it and has caught up, else with the root alone
    relayed round    the draft sends the tree to the orchestrator, which sends it to the target with
                     the order of the round

The accepted path of every round comes to the orchestrator, is committed here and emitted to the
client. The state of the draft decides which kind the next round is, see draft_states.py.

The request's tokens live here; workers hold a cache of them. A lost draft costs speculation until
another draft has caught up. A lost target costs a prefill of prompt + output on another target.
Neither changes the output: a token is a function of the tokens before it, the parameters and the
seed.
"""

from __future__ import annotations

import asyncio
import logging

from tenacity import wait_exponential_jitter

from orchestrator.draft_epochs import OutputGrammar
from orchestrator.draft_handle import DraftHandle
from orchestrator.draft_retry import wait_s
from orchestrator.figures import RequestStatus
from orchestrator.losses import Loss, TargetGone
from orchestrator.metrics import RequestMetrics
from orchestrator.outgoing import Outgoing, WriteTurns
from orchestrator.placement import Placement
from orchestrator.pool import WorkerPool
from orchestrator.reply import Reply
from orchestrator.request_log import RequestLog
from orchestrator.target_handle import TargetHandle
from orchestrator.terms import Terms
from orchestrator.tokenizer import Tokenizer
from orchestrator.validation import GenerationRequest
from orchestrator.workers import WorkerSession
from shared.config import OrchestratorConfig
from shared.errors import InvalidArgumentError, InvalidTreeError
from shared.messages import (
    AcceptedPath,
    FinishReason,
    PeerTrees,
    TargetAdmitted,
    TokenTree,
    VerifyRound,
    WorkerInfo,
)

logger = logging.getLogger(__name__)

_REBUILD_WAIT = wait_exponential_jitter(multiplier=0.05, max=1.0, jitter=0.05)


class Generation:
    """A request being served; one task runs it, `events` is what the client gets.

    Args:
        request: With its prompt tokenized.
        worker_request_id: The request's id on the workers, unique among all orchestrators.
        model: The served model, as validation saw it.
        pool: Workers with open sessions.
        config: Of the orchestrator.
        tokenizer: None if the model has none: then there is no text.
        log: Where the request's records go; None: to this module's logger.
        turns: Write turns of this process; None: no other request writes.
        metrics: Metrics of this process; None: nothing is counted.
        is_awaited: There is no target at present: wait for one that serves this model.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        worker_request_id: str,
        model: WorkerInfo,
        pool: WorkerPool,
        config: OrchestratorConfig,
        tokenizer: Tokenizer | None,
        log: RequestLog | None = None,
        turns: WriteTurns | None = None,
        metrics: RequestMetrics | None = None,
        is_awaited: bool = False,
    ) -> None:
        self._request = request
        self._log = log or RequestLog(logger, request.request_id)
        self._metrics = metrics or RequestMetrics()
        self._reply = Reply(request, tokenizer, turns, self._metrics.inter_token)
        self._tokens = [*request.prompt_ids, *request.resume_ids]
        self._round_idx = 0
        self._may_speculate = request.shape is not None and bool(config.drafts)
        self._draft = DraftHandle(
            request_id=worker_request_id,
            shape=request.shape if self._may_speculate else None,
            adapts=not request.requires_draft,
            sampling=request.sampling,
            grammar=_grammar_of(request),
            is_timed=request.is_timed,
            pool=pool,
            config=config,
            log=self._log,
            on_revoke=self._revoke,
        )
        self._placement = Placement(
            Terms.of(
                *(request, worker_request_id, model),
                wants_features=self._may_speculate,
                is_awaited=is_awaited,
            ),
            pool,
            step_timeout_s=config.step_timeout_s,
            on_admitted=self._admitted,
            on_detached=self._draft.lose_channel,
            on_rest=self._draft.note_rest,
            on_gone=self._draft.close,  # its features came from that target
        )

    @property
    def _target(self) -> TargetHandle:
        return self._placement.target

    @property
    def reply(self) -> Reply:
        """Return the events for the client, with their counts."""
        return self._reply

    @property
    def events(self) -> Outgoing:
        """Return the events for the client; the last one is None."""
        return self._reply.events

    @property
    def status(self) -> RequestStatus:
        """Return the progress of the request."""
        return self._reply.status(is_placed=self._placement.is_open, retries=self._num_retries)

    @property
    def _num_retries(self) -> int:
        return self._placement.losses.num_rebuilds + self._draft.num_reopened

    async def run(self) -> None:
        """Serve the request to its end; `events` ends with None, whatever happens.

        Raises: CoppiceError if it cannot be served.
        """
        self._metrics.begin(self._reply)
        try:
            self._resume()
            while not self._reply.is_finished:
                try:
                    await self._build()
                    while not self._reply.is_finished:
                        await self._round()
                except TargetGone as gone:
                    self._lose_target(gone)
            self._finish()
        finally:
            self._draft.end()
            self._placement.end()
            self._reply.close()
            self._metrics.end(self._reply)
            self._metrics.note_rebuild("draft", "reopened", self._draft.num_reopened)
            self._metrics.note_stall("draft", self._draft.num_overdue)

    async def _round(self) -> None:
        """Run rounds by credit until something changes, or one relayed round."""
        if not self._reply.events.has_room:
            await self._wait_reader()
        self._begin_round(self._round_idx + 1)
        if self._runs_by_credit(self._round_idx):
            await self._credited_rounds()
            return
        root_only_reason = self._draft.root_only_reason
        tree, path = await self._relayed_round()
        self._commit(path)
        if self._prepare_next_round(path):
            await asyncio.sleep(0)  # the orders of all requests leave now
        self._send(path, tree, root_only_reason)

    async def _wait_reader(self) -> None:
        """Wait until the client has read. The target keeps the request's pages, unless it drains;
        no other request waits.
        """
        self._metrics.note_stall("reader")
        self._draft.pause()
        self._placement.pause()
        await self._reply.events.wait_room()
        self._placement.resume()
        self._draft.note_credit()

    def _runs_by_credit(self, round_idx: int) -> bool:
        """Return whether a round needs no order: its path has come already, or the draft's trees
        are not relayed.
        """
        return not self._draft.is_relayed or self._target.has_path(round_idx)

    async def _credited_rounds(self) -> None:
        """Take the rounds that the target runs by its credit."""
        self._extend_credit(self._round_idx)  # the state may have changed since it was prepared
        with self._reply.meter.verify:
            while True:
                try:
                    await self._target.credited_rounds(self._round_idx, self._take_credited)
                    return
                except InvalidArgumentError as error:
                    self._draft.refuse(error.message)
                    if not self._take_credited(await self._target.verify(self._order(None))):
                        return

    def _take_credited(self, path: AcceptedPath) -> bool:
        """Take a round that the target ran by its credit; return whether the next round will come
        by credit, too.

        Called in the callback that receives the path, without a switch of tasks.
        """
        self._reply.meter.verify.lap()
        root_only_reason = self._draft.root_only_reason
        self._draft.note_path(had_tree=path.num_draft_tokens > 1 and not path.is_forced)
        self._commit(path)
        self._prepare_next_round(path)
        self._send(path, None, root_only_reason)
        if self._reply.is_finished:
            return False
        target, next_idx = self._target, self._round_idx + 1
        is_coming = target.has_credit(next_idx) and not self._draft.is_relayed
        if not (is_coming or target.has_path(next_idx)):
            return False
        self._begin_round(next_idx)
        return True

    def _extend_credit(self, round_idx: int) -> bool:
        """Renew the target's credit, if rounds go by credit and the client reads.

        Returns: Whether a message was sent.
        """
        if self._draft.is_relayed or not self._reply.events.has_room:
            return False
        trees = self._draft.trees
        is_sent = self._target.extend_credit(round_idx, trees)
        if isinstance(trees, PeerTrees):
            self._draft.note_credit()
        return is_sent

    def _send(self, path: AcceptedPath, tree: TokenTree | None, root_only_reason: str) -> None:
        """Send a committed round on to the client.

        Args:
            root_only_reason: Why there was no tree, if there was none.
        """
        self._reply.emit(
            path,
            is_resting=self._draft.is_resting,
            root_only_reason=root_only_reason,
            is_relayed=tree is not None,
        )
        self._reply.note_times(self._round_idx, tree, path)

    async def _relayed_round(self) -> tuple[TokenTree | None, AcceptedPath]:
        """Wait for the draft's tree, and have the target verify it, or the root alone if the tree
        is late.
        """
        with self._reply.meter.draft_wait:
            tree = await self._draft.tree(self._round_idx)  # None: the root alone
        with self._reply.meter.verify:
            return tree, await self._verify(tree)

    async def _verify(self, tree: TokenTree | None) -> AcceptedPath:
        """Have the target verify the tree, or only the root if it finds the tree wrong."""
        try:
            return await self._target.verify(self._order(tree))
        except InvalidArgumentError as error:
            # If this order has no tree, the wrong tree was that of a round by credit, which was
            # revoked meanwhile.
            if tree is None and not isinstance(error, InvalidTreeError):
                raise
            self._draft.refuse(error.message)
            return await self._target.verify(self._order(None))

    def _commit(self, path: AcceptedPath) -> None:
        """Commit the accepted path: from now on its tokens are part of the request."""
        self._placement.note_path(path, len(self._tokens) + len(path.token_ids))
        self._tokens.extend(path.token_ids)

    def _prepare_next_round(self, path: AcceptedPath) -> bool:
        """Order the next tree, or extend the target's credit to go on by itself, or both.

        This comes before the tokens are emitted: if a stop string ends the output, the tree is
        grown in vain.

        Returns: Whether a message was sent.
        """
        if path.finish_reason is not FinishReason.NONE:
            return False
        is_sent = False
        if self._may_speculate and not self._draft.is_peer:
            is_sent = self._draft.order(
                round_idx=self._round_idx + 1, seq_len=len(self._tokens) - 1, tokens=self._tokens
            )
        return self._extend_credit(self._round_idx + 1) or is_sent

    def _revoke(self) -> None:
        """End the credit: have the target run the present round without its draft."""
        if self._placement.is_open:
            self._target.revoke_credit(self._order(None))

    def _order(self, tree: TokenTree | None) -> VerifyRound:
        return self._placement.order(self._round_idx, self._tokens, tree)

    async def _build(self) -> None:
        """Have a target prefill the request's tokens (round 0), again and again until one does."""
        num_lost = 0
        while True:
            try:
                self._begin_round(0)
                path = await self._placement.prefill(self._tokens)
                self._commit(path)
                break
            except TargetGone as gone:
                self._lose_target(gone)  # raises after too many losses
            num_lost += 1
            await asyncio.sleep(wait_s(_REBUILD_WAIT, num_lost))
        if self._prepare_next_round(path):
            await asyncio.sleep(0)  # the orders of all requests leave now
        self._reply.emit(path)

    def _admitted(self, worker: WorkerSession, admitted: TargetAdmitted) -> None:
        """Send PromptInfo to the client, once, and open a draft, which reads along while the target
        prefills.
        """
        self._reply.admitted(
            self._placement.terms.model, admitted.num_cached_tokens, admitted.times
        )
        self._draft.open(worker, self._placement.target_epoch, self._tokens)

    def _lose_target(self, gone: TargetGone) -> None:
        """Count the loss of a target, and free what is left of the request's state on workers.

        Raises: InternalError or UnavailableError after too many losses, see Losses.
        """
        level = logging.INFO if gone.loss is Loss.MOVED else logging.WARNING
        self._log.log(level, "rebuilding the request: %s", gone)
        self._metrics.note_rebuild("target", gone.loss.name.lower())
        self._placement.lose(gone)
        self._close()
        gone.with_traceback(None)  # its frames refer to the request: a reference cycle

    def _begin_round(self, round_idx: int) -> None:
        self._round_idx = self._log.round_idx = round_idx

    def _resume(self) -> None:
        """Take the output that the client already holds; the request may be finished by it."""
        if self._request.resume_ids:
            self._reply.resume(
                stop_token_ids=self._placement.terms.stop_token_ids,
                max_new_tokens=self._placement.terms.max_new_tokens,
            )
            if self._reply.is_finished:
                self._reply.admitted(self._placement.terms.model, 0)

    def _finish(self) -> None:
        finish = self._reply.finish(retries=self._num_retries)
        self._log.finish = finish  # logged once the client has got it

    def _close(self) -> None:
        """Free the request's state on both workers."""
        self._draft.close()
        self._placement.close()


def _grammar_of(request: GenerationRequest) -> OutputGrammar | None:
    if not request.compiled_grammar:
        return None
    return OutputGrammar(
        compiled=request.compiled_grammar, num_prompt_tokens=len(request.prompt_ids)
    )
