"""One request: its rounds, and its recovery when a worker lets it down.

The request's tokens live here; what workers hold is a cache of them. A lost draft costs speculation
until another one has caught up. A lost target costs a prefill of prompt + output elsewhere. Neither
changes the output: a token is a function of the tokens before it, the parameters and the seed.
"""

from __future__ import annotations

import asyncio
import logging

from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential_jitter

from orchestrator.draft_handle import DraftHandle
from orchestrator.pairing import ModelIdentity
from orchestrator.pool import Need, WorkerPool
from orchestrator.reply import Reply
from orchestrator.request_log import RequestLog
from orchestrator.suspicion import Suspicion
from orchestrator.target_handle import Loss, TargetGone, TargetHandle
from orchestrator.tokenizer import Tokenizer
from orchestrator.validation import GenerationRequest
from orchestrator.workers import Worker
from shared.config import OrchestratorConfig
from shared.errors import (
    InternalError,
    InvalidArgumentError,
    InvalidTreeError,
    ResourceExhaustedError,
    UnavailableError,
)
from shared.messages import (
    AcceptedPath,
    FinishReason,
    RootOnly,
    StoppingParams,
    TargetAdmitted,
    TargetOpen,
    TokenTree,
    VerifyRound,
    WorkerInfo,
)
from shared.messages.generation import GenerateEvent

logger = logging.getLogger(__name__)

MAX_FRUITLESS_REBUILDS = 8
_REBUILD_WAIT = wait_exponential_jitter(multiplier=0.05, max=1.0, jitter=0.05)


class Generation:
    """A request being served; one task runs it, `events` is what the client gets.

    Args:
        request: With its prompt tokenized.
        worker_request_id: Its id on the workers, unique in the world.
        model: What is served, as far as validation needed to know.
        tokenizer: None if the model has none: then there is no text.
        log: Where the request's records go; None = to this module's logger.
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
    ) -> None:
        self._request = request
        self._worker_request_id = worker_request_id
        self._model = model
        self._pool = pool
        self._config = config
        self._log = log or RequestLog(logger, request.request_id)
        self._reply = Reply(request, tokenizer)
        self._tokens = [*request.prompt_ids, *request.resume_ids]
        self._round_idx = 0
        self._target_epoch = 0
        self._target: TargetHandle | None = None
        self._draft = DraftHandle(
            request_id=worker_request_id,
            shape=request.shape if config.drafts else None,
            sampling=request.sampling,
            is_timed=request.round_times,
            pool=pool,
            config=config,
            log=self._log,
            on_miss=self._miss,
        )
        # Tokens that were resumed bind the request to what computed them, as its own do later.
        self._identity = ModelIdentity.of(model) if request.resume_fingerprint else None
        self._num_rebuilds = self._num_fruitless = 0
        self._suspicion = Suspicion(worker_request_id)
        self._last_loss: Loss | None = None
        self._avoid: frozenset[str] = frozenset()

    @property
    def events(self) -> asyncio.Queue[GenerateEvent | None]:
        """Return what the client gets; None is the end."""
        return self._reply.events

    async def run(self) -> None:
        """Serve the request to its end; `events` ends with None, whatever happens.

        Raises: CoppiceError if it cannot be served.
        """
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
            self._close()
            self._reply.close()

    async def _round(self) -> None:
        """Run one round: tree -> verify -> commit -> order the next tree -> emit."""
        self._start_round()
        if self._draft.is_off or self._draft.is_peer:
            tree, path = None, await self._granted_round()
        else:
            with self._reply.meter.draft_wait:
                tree = await self._draft.tree(self._round_idx)  # None: the root alone
            with self._reply.meter.verify:
                path = await self._verify(tree)
        self._commit(path)
        await self._order_next_tree(path)
        self._reply.emit(path)
        if path.times is not None:
            self._reply.timeline.add(
                self._round_idx,
                tree=tree.times if tree is not None else None,
                path=path.times,
                now_ns=int(asyncio.get_running_loop().time() * 1e9),
            )

    def _resume(self) -> None:
        """Take the output that the client already holds; it may be all there is."""
        if self._request.resume_ids:
            self._reply.resume(
                stop_token_ids=self._stop_token_ids, max_new_tokens=self._max_new_tokens
            )
            if self._reply.is_finished:
                self._reply.admitted(self._model, 0)

    def _start_round(self) -> None:
        self._round_idx += 1
        self._log.round_idx = self._round_idx

    async def _verify(self, tree: TokenTree | None) -> AcceptedPath:
        """Have the target verify the tree, or only the root if it finds the tree wrong."""
        assert self._target is not None
        # A tree of a attached draft: the target orders the next one as soon as it has a path.
        trees = self._draft.grantable() if tree is not None else None
        try:
            return await self._target.verify(self._verify_order(tree), trees)
        except InvalidArgumentError as error:
            # Without a tree: that of a direct round, which was given up meanwhile, was wrong.
            if tree is None and not isinstance(error, InvalidTreeError):
                raise
            self._draft.refuse(error.message)
            return await self._target.verify(self._verify_order(None))

    async def _granted_round(self) -> AcceptedPath:
        """Wait for a round that the target runs by itself, with its draft if one is attached."""
        assert self._target is not None
        if self._draft.is_off:
            self._target.extend_credit(self._round_idx, RootOnly())
        with self._reply.meter.verify:
            try:
                path = await self._target.credited_path(self._round_idx)
            except InvalidArgumentError as error:
                if self._draft.is_off:
                    raise
                self._draft.refuse(error.message)
                path = await self._target.verify(self._verify_order(None))
        self._draft.note_peer_round(had_tree=path.num_draft_tokens > 1)
        return path

    def _miss(self) -> None:
        """Have the target run the awaited round without the draft that was to bring its tree."""
        if self._target is not None:
            self._target.revoke(self._verify_order(None))

    def _verify_order(self, tree: TokenTree | None) -> VerifyRound:
        return VerifyRound(
            request_id=self._worker_request_id,
            target_epoch=self._target_epoch,
            round_idx=self._round_idx,
            seq_len=len(self._tokens) - 1,
            root_token_id=self._tokens[-1],
            tree=tree,
        )

    def _commit(self, path: AcceptedPath) -> None:
        """Take the accepted path; from now on its tokens are part of the request."""
        num_tokens = len(self._tokens) + len(path.token_ids)
        is_over = path.finish_reason is not FinishReason.NONE
        if not path.token_ids or (not is_over and path.seq_len != num_tokens - 1):
            raise TargetGone(
                Loss.FAILED,
                is_kill=True,
                detail=f"{len(path.token_ids)} tokens committed, seq_len {path.seq_len}",
            )
        self._tokens.extend(path.token_ids)
        self._num_fruitless = 0
        if path.round_idx > 0 and self._target is not None:
            self._suspicion.acquit(self._target.worker)

    async def _order_next_tree(self, path: AcceptedPath) -> None:
        """Order a tree before the tokens are sent on: if a stop string ends them, it is in vain.

        A target that is attached to the draft orders it itself.
        """
        if path.finish_reason is not FinishReason.NONE or self._draft.is_off:
            return
        trees = self._draft.granted()
        if trees is not None:
            assert self._target is not None
            self._target.extend_credit(self._round_idx + 1, trees)
        else:
            self._draft.order(
                round_idx=self._round_idx + 1, seq_len=len(self._tokens) - 1, tokens=self._tokens
            )
        await asyncio.sleep(0)  # the orders of all requests leave now

    async def _build(self) -> None:
        """Have a target prefill the request's tokens (round 0), again and again until one does."""
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(TargetGone), wait=_REBUILD_WAIT
        ):
            with attempt:
                try:
                    path = await self._prefill()
                    self._commit(path)
                except TargetGone as gone:
                    self._lose_target(gone)  # raises when enough is enough
                    raise
        await self._order_next_tree(path)
        self._reply.emit(path)

    async def _prefill(self) -> AcceptedPath:
        """Pick a target, open the next epoch there and wait for round 0."""
        worker = await self._pool.acquire_target(
            self._need(), patience_s=self._config.step_timeout_s if self._identity else 0.0
        )
        self._identity = ModelIdentity.of(worker.info)
        if self._target_epoch == 0:
            self._model = worker.info
        self._target_epoch += 1
        self._round_idx = self._log.round_idx = 0
        self._target = TargetHandle(
            worker,
            self._worker_request_id,
            self._target_epoch,
            step_timeout_s=self._config.step_timeout_s,
            on_admitted=lambda admitted: self._admitted(worker, admitted),
            on_detached=self._draft.lose_channel,
            on_gone=self._draft.close,  # its features came from there: no round waits for it
        )
        try:
            return await self._target.open(self._target_open())
        except ResourceExhaustedError as error:
            if not self._is_running:
                raise
            raise TargetGone(Loss.NO_ROOM, detail=error.message) from error

    def _admitted(self, worker: Worker, admitted: TargetAdmitted) -> None:
        """Tell the client once, and let a draft read along while the target prefills."""
        self._reply.admitted(self._model, admitted.num_cached_tokens, admitted.times)
        self._draft.open(worker, self._target_epoch, self._tokens)

    def _lose_target(self, gone: TargetGone) -> None:
        """Account for lost state.

        Raises: InternalError if the request has brought down too many workers, UnavailableError if
            rebuilding it leads nowhere.
        """
        self._log.warning("rebuilding the request: %s", gone)
        self._num_rebuilds += 1
        self._num_fruitless += gone.loss not in (Loss.RETRACTED, Loss.NO_ROOM)
        self._last_loss = gone.loss
        if self._target is not None:
            if gone.is_kill and gone.loss is Loss.FAILED:
                self._suspicion.note_failure(self._target.worker)
            elif gone.is_kill:
                self._suspicion.note_death(self._target.worker)
            if gone.loss is not Loss.RETRACTED:
                self._avoid = frozenset({self._target.worker.address})
            self._close()
        if self._suspicion.is_guilty:
            raise InternalError(
                f"{self._suspicion.num_kills} times a worker failed while it ran this request, and "
                "no other request explains it; it is not tried again. The workers' logs say why",
                reason="REQUEST_KILLED_WORKERS",
            ) from gone
        if self._num_fruitless > MAX_FRUITLESS_REBUILDS:
            raise UnavailableError(
                f"the request was rebuilt {self._num_fruitless} times without a token: {gone}",
                reason="NO_PROGRESS",
            ) from gone

    def _finish(self) -> None:
        finish = self._reply.finish(retries=self._num_rebuilds + self._draft.num_reopened)
        self._log.info(
            "finished by %s: %d tokens in %d rounds, accept_length %.2f",
            finish.reason.name,
            finish.usage.num_output_tokens,
            finish.speculation.num_rounds,
            finish.speculation.accept_length,
        )

    def _close(self) -> None:
        """Free whatever both workers hold."""
        self._draft.close()
        if self._target is not None:
            self._target.close()
            self._target = None

    @property
    def _is_running(self) -> bool:
        return self._target_epoch > 1 or len(self._tokens) > len(self._request.prompt_ids)

    @property
    def _max_new_tokens(self) -> int:
        """Return the most output tokens: the client's limit or what the context holds."""
        room = self._model.max_context_len - len(self._request.prompt_ids)
        wanted = self._request.max_new_tokens
        return room if wanted is None else min(room, wanted)

    @property
    def _stop_token_ids(self) -> frozenset[int]:
        eos_ids = () if self._request.ignore_eos else self._model.eos_token_ids
        return frozenset({*eos_ids, *self._request.stop_token_ids})

    def _need(self) -> Need:
        request = self._request
        num_prompt = len(request.prompt_ids)
        return Need(
            request_id=self._worker_request_id,
            num_tokens=len(self._tokens),
            context_len=num_prompt + self._max_new_tokens
            if self._identity
            else len(self._tokens) + 1,
            priority=request.priority,
            session_id=request.session_id,
            wants_draft=request.shape is not None,
            is_running=self._is_running,
            wants_room=self._last_loss in (Loss.RETRACTED, Loss.NO_ROOM),
            identity=self._identity,
            avoid=self._avoid,
            needs_trial=self._suspicion.needs_trial,
        )

    def _target_open(self) -> TargetOpen:
        request = self._request
        return TargetOpen(
            request_id=self._worker_request_id,
            target_epoch=self._target_epoch,
            token_ids=tuple(self._tokens),
            num_prompt_tokens=len(request.prompt_ids),
            sampling=request.sampling,
            stopping=StoppingParams(
                max_new_tokens=self._max_new_tokens,
                min_new_tokens=min(request.min_new_tokens, self._max_new_tokens),
                stop_token_ids=tuple(sorted(self._stop_token_ids)),
            ),
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            wants_features=request.shape is not None and bool(self._config.drafts),
            priority=request.priority,
            is_timed=request.round_times,
        )
