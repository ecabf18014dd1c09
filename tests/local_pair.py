"""Drive a target and a draft engine in one process: the rounds without the wire.

A stand-in for the orchestrator that tests use to look into both engines between steps. It never
gives a tree up as late: a round waits for its tree as long as the draft holds the request.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draft_service.engine import DraftEngine
from shared.messages import (
    AcceptedPath,
    Credit,
    CreditUpdate,
    DraftClose,
    DraftOpen,
    DraftRound,
    FeatureChunk,
    FeatureCommand,
    FeatureFailure,
    FeatureSubscribe,
    FinishReason,
    PeerTrees,
    RequestFailure,
    RequestRetracted,
    RootOnly,
    SamplingParams,
    StoppingParams,
    TargetAdmitted,
    TargetOpen,
    TokenLogprob,
    TokenTree,
    TreeShape,
    VerifyRound,
)
from shared.peer.ring import read_nonce
from shared.rpc.engine import will_have_work
from target_service.engine import TargetEngine


@dataclass(kw_only=True)
class LocalRequest:
    """A request, and what became of it.

    Args:
        shape: None: root-only rounds.
        compiled_grammar: Of the output; empty: it is free.
        grows_forced: Tokens that it forces are verified without a tree, too.
        joins_at: Output tokens after which the draft is opened; rounds before it are root-only.
        has_draft: The draft holds the request now.
        ordered_round: Round whose tree the draft was asked for and has not sent; -1 = none.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    shape: TreeShape | None = None
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    priority: int = 0
    is_timed: bool = False
    wants_trees: bool = False
    wants_routed_experts: bool = False
    compiled_grammar: bytes = b""
    grows_forced: bool = False
    joins_at: int = 0
    output: list[int] = field(default_factory=list)
    paths: list[AcceptedPath] = field(default_factory=list)
    trees: list[TokenTree] = field(default_factory=list)
    logprob_rows: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE
    request_id: str = ""
    target_epoch: int = 1
    draft_epoch: int = 0
    has_draft: bool = False
    ordered_round: int = -1

    @property
    def accept_length(self) -> float:
        """Return the mean tokens per verify round, bonus included."""
        rounds = self.paths[1:]
        return sum(path.num_accepted_drafts + 1 for path in rounds) / max(len(rounds), 1)

    @property
    def tokens(self) -> list[int]:
        """Return prompt + output."""
        return [*self.prompt, *self.output]


class LocalPair:
    """One target engine, perhaps one draft engine, and the rounds between them.

    Args:
        edit_tree: Sees every tree before it is verified; what it returns is verified instead
            (None: a root-only round).
        edit_chunk: Sees every feature chunk before the draft does; None: the chunk is lost.
        credit_rounds: Rounds of a credit to requests without a tree shape; 0: all are ordered.
    """

    def __init__(
        self,
        target: TargetEngine,
        draft: DraftEngine | None = None,
        *,
        edit_tree: Callable[[TokenTree], TokenTree | None] = lambda tree: tree,
        edit_chunk: Callable[[FeatureChunk], FeatureChunk | None] = lambda chunk: chunk,
        credit_rounds: int = 0,
    ) -> None:
        self.target = target
        self.target_socket = self.target_peer_address = ""
        self.draft = draft
        self.edit_tree = edit_tree
        self.edit_chunk = edit_chunk
        self.credit_rounds = credit_rounds
        self.failures: list[RequestFailure] = []
        self.admitted: list[str] = []
        self.num_retracted = 0
        self.num_draft_retracted = 0
        self.requests: dict[str, LocalRequest] = {}

    def run(self, requests: Sequence[LocalRequest], *, max_steps: int = 100_000) -> None:
        """Serve the requests together until all have finished; then nothing may be held."""
        for request in requests:
            self.open(request)
        self.finish(max_steps=max_steps)

    def finish(self, *, max_steps: int = 100_000) -> None:
        """Step until every open request has finished; then nothing may be held."""
        for _ in range(max_steps):
            if not self.step():
                break
        assert not self.failures, self.failures
        assert all(r.finish_reason for r in self.requests.values()), "a request is stuck"
        self.check_idle()

    def open(self, request: LocalRequest) -> None:
        """Open a request on the target, and on the draft unless it joins later."""
        request.request_id = request.request_id or f"r{len(self.requests) + 1}"
        self.requests[request.request_id] = request
        self.open_target(request)
        if request.shape is not None and request.joins_at == 0:
            self.open_draft(request)

    def open_draft(self, request: LocalRequest) -> None:
        """Open the request's draft state with the next epoch, also in mid-stream."""
        assert self.draft is not None
        request.draft_epoch += 1
        request.has_draft = True
        self.draft.submit(
            DraftOpen(
                request_id=request.request_id,
                target_epoch=request.target_epoch,
                draft_epoch=request.draft_epoch,
                target_address="local",
                target_socket=self.target_socket,
                target_peer_address=self.target_peer_address,
                token_ids=tuple(request.tokens),
                sampling=request.sampling,
                is_timed=request.is_timed,
                compiled_grammar=request.compiled_grammar,
                num_prompt_tokens=len(request.prompt),
            )
        )

    def replace_draft(self, draft: DraftEngine | None) -> None:
        """Lose the draft engine with all it holds; go on with another one, or with none.

        Trees that were ordered never come: their rounds go root-only.
        """
        self.draft = draft
        for request in self.requests.values():
            if request.has_draft:
                self.lose_draft(request)

    def step(self) -> bool:
        """Step both engines once; return whether anything is left to do."""
        self.step_target()
        self.step_draft()
        return self.has_work

    @property
    def has_work(self) -> bool:
        """Return whether anything is left to do, now or soon."""
        draft_has_work = self.draft is not None and will_have_work(self.draft)
        return draft_has_work or will_have_work(self.target)

    def wait_for_target(self) -> None:
        """Wait until the target has work, if that is all that is left to do."""
        if self.target.has_work or (self.draft is not None and self.draft.has_work):
            return
        time.sleep(self.target.has_work_in_s or 0.0)

    def step_target(self) -> None:
        """Step the target once, if it has work; if it will have some soon, then."""
        self.wait_for_target()
        if self.target.has_work:
            for message in self.target.step():
                self.on_target(message)
            self.target.check_integrity()

    def step_draft(self) -> None:
        """Step the draft once, if there is one that has work."""
        if self.draft is not None and self.draft.has_work:
            for message in self.draft.step():
                self.on_draft(message)
            self.draft.check_integrity()

    def check_idle(self) -> None:
        """Raise unless both workers have every page back and run nothing."""
        for engine in (self.target, self.draft):
            if engine is not None:
                engine.check_integrity()
                load = engine.load
                assert load.num_free_pages == load.num_pages, f"pages leaked: {load}"
                assert load.num_running == load.num_waiting == 0, f"requests leaked: {load}"

    def open_target(self, request: LocalRequest) -> None:
        self.target.submit(
            TargetOpen(
                request_id=request.request_id,
                target_epoch=request.target_epoch,
                token_ids=tuple(request.tokens),
                num_prompt_tokens=len(request.prompt),
                sampling=request.sampling,
                stopping=StoppingParams(
                    max_new_tokens=request.max_new_tokens,
                    min_new_tokens=request.min_new_tokens,
                    stop_token_ids=request.stop_token_ids,
                ),
                logprobs=request.logprobs,
                top_logprobs=request.top_logprobs,
                wants_features=request.shape is not None,
                priority=request.priority,
                is_timed=request.is_timed,
                wants_trees=request.wants_trees,
                wants_routed_experts=request.wants_routed_experts,
                compiled_grammar=request.compiled_grammar,
                grows_forced=request.grows_forced,
            )
        )

    def on_target(self, message: Any) -> None:
        match message:
            case AcceptedPath():
                self.on_path(message)
            case FeatureChunk():
                chunk = self.edit_chunk(message)
                if self.draft is not None and chunk is not None:
                    self.draft.submit(chunk)
            case FeatureFailure():
                if self.draft is not None:
                    self.draft.submit(message.failure)
            case RequestRetracted():
                self.num_retracted += 1
                request = self.requests[message.request_id]
                request.target_epoch += 1
                self.open_target(request)
                if request.has_draft:
                    request.ordered_round = -1
                    self.open_draft(request)
            case RequestFailure():
                self.failures.append(message)
            case TargetAdmitted():
                self.admitted.append(message.request_id)
            case _:
                raise AssertionError(f"unexpected {message}")

    def on_path(self, path: AcceptedPath) -> None:
        request = self.requests[path.request_id]
        request.paths.append(path)
        request.output.extend(path.token_ids)
        request.logprob_rows.extend(path.logprobs)
        request.finish_reason = path.finish_reason
        if path.finish_reason:
            self.close_draft(request)
            return
        wants_draft = request.shape is not None and len(request.output) >= request.joins_at
        if wants_draft and self.draft is not None and not request.has_draft:
            self.open_draft(request)
        if request.has_draft:
            self.order_tree(request)
        elif request.shape is None and self.credit_rounds:
            if path.round_idx % self.credit_rounds == 0:
                self.give_credit(request, self.credit_rounds, RootOnly())
        else:
            self.verify(request, None)

    def give_credit(
        self, request: LocalRequest, num_rounds: int, trees: RootOnly | PeerTrees
    ) -> int:
        """Let the target go on by itself; return the last round of the credit.

        Args:
            num_rounds: After the newest path.
            trees: Where the trees of those rounds come from.
        """
        until = request.paths[-1].round_idx + num_rounds
        credit = Credit(until_round_idx=until, trees=trees)
        self.target.submit(
            CreditUpdate(
                request_id=request.request_id, target_epoch=request.target_epoch, credit=credit
            )
        )
        return until

    def close_draft(self, request: LocalRequest) -> None:
        """Give up the request's draft state."""
        if self.draft is not None and request.has_draft:
            self.draft.submit(
                DraftClose(request_id=request.request_id, draft_epoch=request.draft_epoch)
            )
        request.has_draft = False

    def order_tree(self, request: LocalRequest) -> None:
        """Send the newest path's tokens to the draft and ask for the next tree."""
        self.send_order(request, len(request.tokens) - len(request.paths[-1].token_ids))

    def send_order(self, request: LocalRequest, token_offset: int) -> None:
        """Ask the draft for the next tree; send it the tokens from `token_offset` on."""
        assert self.draft is not None and request.shape is not None
        path = request.paths[-1]
        request.ordered_round = path.round_idx + 1
        self.draft.submit(
            DraftRound(
                request_id=request.request_id,
                target_epoch=request.target_epoch,
                draft_epoch=request.draft_epoch,
                round_idx=path.round_idx + 1,
                seq_len=path.seq_len,
                token_offset=token_offset,
                token_ids=tuple(request.tokens[token_offset:]),
                shape=request.shape,
            )
        )

    def on_draft(self, message: Any) -> None:
        match message:
            case TokenTree():
                self.on_tree(message)
            case FeatureCommand():
                self.target.submit(self._with_nonce(message))
            case RequestRetracted() | RequestFailure():
                request = self.requests[message.request_id]
                if message.draft_epoch != request.draft_epoch or not request.has_draft:
                    return
                if isinstance(message, RequestFailure):
                    self.failures.append(message)
                self.num_draft_retracted += 1
                self.lose_draft(request)
            case _:
                raise AssertionError(f"unexpected {message}")

    def _with_nonce(self, message: FeatureCommand) -> Any:
        """Return the command as a draft's front would send it."""
        ring, command = self.target.info.feature_ring, message.command
        if not ring or message.avoids_ring or not isinstance(command, FeatureSubscribe):
            return command
        with contextlib.suppress(OSError):
            return replace(command, ring_nonce=read_nonce(ring))
        return command

    def on_tree(self, tree: TokenTree) -> None:
        request = self.requests[tree.request_id]
        is_current = tree.draft_epoch == request.draft_epoch and request.has_draft
        if not is_current or tree.round_idx != request.ordered_round:
            return
        request.ordered_round = -1
        request.trees.append(tree)
        self.verify(request, self.edit_tree(tree))

    def lose_draft(self, request: LocalRequest) -> None:
        """Go on without the draft's state; it is opened again after the next path."""
        request.has_draft = False
        if request.ordered_round >= 0:
            request.ordered_round = -1
            self.verify(request, None)

    def verify(self, request: LocalRequest, tree: TokenTree | None) -> None:
        """Queue the next round on the target."""
        self.target.submit(
            VerifyRound(
                request_id=request.request_id,
                target_epoch=request.target_epoch,
                round_idx=request.paths[-1].round_idx + 1,
                seq_len=request.paths[-1].seq_len,
                root_token_id=request.output[-1],
                tree=tree,
            )
        )
