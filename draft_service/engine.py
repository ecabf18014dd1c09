"""The draft engine: keep every request's draft KV caught up with the target, grow trees on order.

The engine never decides anything about a request's output: a late, missing or wrong tree costs a
round its speculation, nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.answers import token_tree, tree_batch
from draft_service.overlap import AheadTrees
from draft_service.phases import DraftOutput
from draft_service.request import DraftRequest, FeatureRows
from draft_service.runner import DraftRunner, ExtendWork
from shared.device import DTYPES
from shared.errors import CoppiceError, InvalidArgumentError, ResourceExhaustedError
from shared.kernels.dispatch import launch_counts
from shared.kv.allocator import OutOfPagesError
from shared.messages import (
    DraftClose,
    DraftOpen,
    DraftRound,
    FeatureAck,
    FeatureChunk,
    FeatureCommand,
    FeatureSubscribe,
    FeatureUnsubscribe,
    PathBatch,
    PathEntry,
    PeerAttach,
    PeerDetach,
    RequestFailure,
    RequestRetracted,
    RingRows,
    RingSpan,
    TreeShape,
    WorkerInfo,
    WorkerLoad,
    check_shape,
)
from shared.peer.channel import PeerChannel, PeerChannels, PeerLost, connect
from shared.peer.mailbox import is_tag
from shared.peer.ring import RingReader
from shared.step.step_timer import StepTimer

logger = logging.getLogger(__name__)

CHUNK_ROWS = 256
ACK_ROWS = 64
"""Feature rows between acknowledgements: each wakes both workers, in the middle of a round."""


class DraftEngine:
    """Requests, their draft state, and the step that advances them. Single-threaded.

    Args:
        max_batch_rows: Rows per extend.
        max_context_len: Longest conversation, tokens.
    """

    def __init__(
        self,
        runner: DraftRunner,
        info: WorkerInfo,
        *,
        max_batch_rows: int,
        max_context_len: int,
    ) -> None:
        self.info = info
        self._runner = runner
        self._pool = runner.pool
        self._max_batch_rows = max_batch_rows
        self._max_context_len = max_context_len
        self._requests: dict[str, DraftRequest] = {}
        self._rings = RingReader()
        self.channels = PeerChannels()
        self._channels_by_name: dict[str, PeerChannel] = {}
        self._ahead = AheadTrees(runner, width=info.features.width)
        self._order = 0
        self._outbox: list[Any] = []
        self._has_rows: bool | None = None  # None: not known
        self._busy_until_ns = 0  # when the last step ended
        self._num_steps = self._num_rows = self._num_request_steps = 0

    @property
    def has_work(self) -> bool:
        """Return whether a step would do anything."""
        return self._has_compute or bool(self._outbox)

    @property
    def _has_compute(self) -> bool:
        if self._has_rows is None:
            self._has_rows = any(
                request.num_ready_rows or request.can_grow for request in self._requests.values()
            )
        return self._has_rows

    @property
    def has_work_in_s(self) -> float | None:
        """Return None: there is work now, or when a message comes."""
        return None

    @property
    def load(self) -> WorkerLoad:
        """Return progress and room."""
        return WorkerLoad(
            num_running=len(self._requests),
            num_free_pages=self._pool.num_free_pages,
            num_pages=self._pool.num_pages,
            num_steps=self._num_steps,
            num_rows=self._num_rows,
            num_request_steps=self._num_request_steps,
            kernel_launches=tuple(sorted(launch_counts().items())),
        )

    def submit(self, message: Any) -> None:
        """Take a message; a bad one fails its request only."""
        self._has_rows = None
        try:
            match message:
                case DraftOpen():
                    self._open(message)
                case DraftRound():
                    self._order_round(message, None)
                case DraftClose():
                    request = self._requests.get(message.request_id)
                    if request is not None and request.open.draft_epoch <= message.draft_epoch:
                        self._drop(request)
                case FeatureChunk():
                    self._take_features(message)
                case RequestFailure():
                    self._lose_features(message)
                case _:
                    raise TypeError(f"a draft engine takes no {type(message).__name__}")
        except CoppiceError as error:
            self._fail(message, error)

    def submit_peer(self, channel: PeerChannel, message: Any) -> None:
        """Take what a target's engine says."""
        self._has_rows = None
        try:
            match message:
                case DraftRound():
                    self._order_round(message, channel)
                case PathBatch():
                    self._take_paths(channel, message)
                case FeatureChunk():
                    self._take_features(message)
                case RequestFailure():
                    self._lose_features(message)
                case PeerLost():
                    self._lose_channel(channel)
                case _:
                    raise TypeError(f"a draft engine is told no {type(message).__name__}")
        except CoppiceError as error:
            if not isinstance(message, PathBatch):
                self._fail(message, error)
                return
            for part in message.parts:
                if self._ordered(part) is not None:
                    self._fail(part, error)

    def step(self) -> list[Any]:
        """Extend what can be extended, then grow every tree whose root is extended.

        Returns: TokenTree, RequestFailure, RequestRetracted and FeatureCommand messages.
        """
        self._commit_ahead()
        timer = StepTimer(
            self._pool.device, is_on=any(r.pending_times for r in self._requests.values())
        )
        works = self._plan_extend()
        self._runner.extend(works, timer)
        for work in works:
            work.request.kv_len += work.num_rows
        growing = self._plan_growth()  # while the device extends
        if growing:
            self._runner.grow(growing, timer)
        self._settle(works, growing)  # while it grows trees
        if growing:
            rows = range(len(growing))
            self._answer(growing, rows, self._runner.read(timer), timer)
        self._run_ahead()
        self._has_rows = None
        outbox, self._outbox = self._outbox, []
        self._busy_until_ns = time.monotonic_ns()
        return outbox

    def launch_deferred(self) -> None:
        """Do nothing: a step of a draft ends with it."""

    def compile_mailbox(self, dtype: torch.dtype) -> None:
        """Compile what talks to targets' devices.

        Args:
            dtype: Of the features that will come.
        """
        self._runner.compile_mailbox(dtype)

    def check_integrity(self) -> None:
        """Raise unless every page is accounted for."""
        self._pool.check_integrity()

    # --- messages --------------------------------------------------------------------------------

    def _open(self, message: DraftOpen) -> None:
        known = self._requests.get(message.request_id)
        if known is not None:
            if known.open.draft_epoch >= message.draft_epoch:
                return  # a late duplicate
            self._drop(known)
        if not message.token_ids:
            raise InvalidArgumentError("token_ids is empty", field="token_ids")
        if len(message.token_ids) > self._max_context_len:
            raise InvalidArgumentError(
                f"{len(message.token_ids)} tokens exceed max_context_len {self._max_context_len}",
                field="token_ids",
            )
        self._check_tokens(message.token_ids)
        if not self._pool.has_free_row:
            raise ResourceExhaustedError("the draft worker holds max_num_requests requests")
        shift = self._runner.model.input_shift
        window = self._runner.window
        num_rows = max(len(message.token_ids) - shift, 0)
        base = max(num_rows - window, 0) if window else 0
        request = DraftRequest(
            open=message,
            order=self._order,
            req_idx=self._pool.acquire(),
            base=base,
            input_shift=shift,
            tokens=list(message.token_ids),
            features_end=base,
            acknowledged=base,
        )
        self._order += 1
        self._requests[message.request_id] = request
        request.channel = self._channel_to(message.target_socket)
        if request.channel is not None:
            request.mailbox = self._ahead.mailbox_of(request.channel)
            request.channel.put(
                PeerAttach(
                    request_id=message.request_id,
                    target_epoch=message.target_epoch,
                    draft_epoch=message.draft_epoch,
                    has_mailbox=request.mailbox is not None,
                )
            )
        if shift:
            self._subscribe(request)

    def _order_round(self, message: DraftRound, channel: PeerChannel | None) -> None:
        request = self._requests.get(message.request_id)
        if request is None or request.open.draft_epoch != message.draft_epoch:
            return  # closed, retracted or re-opened meanwhile; the orchestrator was told
        check_shape(message.shape, prefix="shape.")
        self._check_tokens(message.token_ids)
        self._accept_order(request, message, channel)

    def _accept_order(
        self,
        request: DraftRequest,
        order: DraftRound,
        channel: PeerChannel | None,
        mail: tuple[int, int] = (0, 0),
    ) -> None:
        if order.seq_len + 1 > self._max_context_len:
            raise InvalidArgumentError(
                f"seq_len {order.seq_len} exceeds max_context_len", field="seq_len"
            )
        if not self._can_mail(request, mail):
            mail = (0, 0)
        request.accept_round(
            order, answer_channel=channel, mail=mail, busy_until_ns=self._busy_until_ns
        )

    def _can_mail(self, request: DraftRequest, mail: tuple[int, int]) -> bool:
        slot, seq = mail
        has_slot = request.mailbox is not None and slot < request.mailbox.num_slots
        return has_slot and is_tag(seq)

    def _channel_to(self, name: str) -> PeerChannel | None:
        """Return the channel to a target's engine; None if that is on another host."""
        channel = self._channels_by_name.get(name)
        if channel is None and name:
            try:
                channel = connect(name)
            except OSError as error:
                logger.info(
                    "rounds go through the orchestrator: no channel to the target: %s", error
                )
                return None
            logger.info("attached to %s: rounds and features go from engine to engine", name)
            self._channels_by_name[name] = channel
            self.channels.add(channel)
            self._ahead.open_mailbox(name, channel)
        return channel

    def _lose_channel(self, channel: PeerChannel) -> None:
        """Go on without a channel: the orchestrator orders, features come through the front."""
        for name in [name for name, known in self._channels_by_name.items() if known is channel]:
            del self._channels_by_name[name]
        self._ahead.lose_channel(channel)
        for request in self._requests.values():
            if request.channel is channel:
                request.channel = request.answer_channel = request.mailbox = None
                if request.has_peer_features:
                    self._subscribe(request)

    def _answer(
        self,
        growing: Sequence[DraftRequest],
        rows: Sequence[int],
        output: DraftOutput,
        timer: StepTimer,
        *,
        is_ahead: bool = False,
    ) -> None:
        """Answer with the grown trees; targets that are attached hear of theirs at once.

        Args:
            rows: Of the requests in `output`.
            is_ahead: They were grown before the orders came.
        """
        attached: dict[PeerChannel, list[int]] = {}
        for i, request in enumerate(growing):
            if request.answer_channel is not None:
                attached.setdefault(request.answer_channel, []).append(i)
            else:
                self._outbox.append(token_tree(request, rows[i], output, timer))
        for channel, places in attached.items():
            requests = [growing[i] for i in places]
            own_rows = [rows[i] for i in places]
            channel.put(tree_batch(requests, own_rows, output, timer, is_ahead=is_ahead))
            channel.flush()
        for request in growing:
            request.pending = request.pending_times = request.answer_channel = None

    def _take_features(self, chunk: FeatureChunk) -> None:
        request = self._expecting(chunk.request_id, chunk.target_epoch)
        if request is None:
            return
        self._check_features(chunk)
        if self._misses_rows(request, chunk.start):
            return
        data: bytes | NDArray[np.uint8] | None
        if isinstance(chunk.data, RingSpan):
            data = self._rings.read(chunk.data)
            if data is None:
                self._avoid_ring(request)
                return
        else:
            data = chunk.data
        self._add_features(request, chunk.start, FeatureRows.read(data, chunk.dtype, chunk.shape))

    def _take_paths(self, channel: PeerChannel, batch: PathBatch) -> None:
        """Take what a step of the target accepted of several requests, and its orders."""
        rows = None
        if batch.rows is not None:
            self._check_features(batch.rows)
            data = self._rings.read(batch.rows.data)
            if data is not None:
                rows = FeatureRows.read(data, batch.rows.dtype, batch.rows.shape)
        first = 0
        for part in batch.parts:
            stop = first + len(part.token_ids)
            request = self._ordered(part)
            if request is not None:
                try:
                    self._check_tokens(part.token_ids)
                    mail = (part.mailbox_slot, part.round_tag)
                    self._accept_order(request, _order_of(part, batch.shape), channel, mail)
                except CoppiceError as error:
                    self._fail(part, error)
                else:
                    if batch.rows is not None and not self._misses_rows(request, part.seq_len):
                        if rows is None:
                            self._avoid_ring(request)
                        else:
                            self._add_features(request, part.seq_len, rows.part(first, stop))
            first = stop

    def _ordered(self, part: PathEntry) -> DraftRequest | None:
        """Return the request that a part of a batch is about, unless it was opened anew."""
        request = self._expecting(part.request_id, part.target_epoch)
        if request is None or request.open.draft_epoch != part.draft_epoch:
            return None
        return request

    def _expecting(self, request_id: str, target_epoch: int) -> DraftRequest | None:
        request = self._requests.get(request_id)
        if request is None or request.open.target_epoch != target_epoch:
            return None
        return request

    def _misses_rows(self, request: DraftRequest, start: int) -> bool:
        """Return whether rows before `start` are missing; they are asked for, once."""
        if start <= request.features_end:
            return False
        if not request.is_awaiting:
            extra = {"request_id": request.request_id}
            logger.warning("feature gap, asking again", extra=extra)
            self._subscribe(request)
        return True

    def _check_features(self, rows: FeatureChunk | RingRows) -> None:
        width = self.info.features.width
        if rows.shape[1] != width or rows.dtype not in DTYPES:
            raise InvalidArgumentError(
                f"features are {rows.shape[1]} x {rows.dtype}, expected {width} values of "
                "a float type",
                reason="FEATURE_MISMATCH",
                field="handle.shape",
            )

    def _avoid_ring(self, request: DraftRequest) -> None:
        logger.warning(
            "feature rows from %d on were overwritten in the ring, asking for bytes",
            request.features_end,
            extra={"request_id": request.request_id},
        )
        self._subscribe(request, avoids_ring=True)

    def _add_features(self, request: DraftRequest, start: int, rows: FeatureRows) -> None:
        """Take rows from a position on."""
        if request.open.is_timed:
            request.features_ns = time.monotonic_ns()
        request.add_features(start, rows)
        if request.features_end - request.acknowledged >= ACK_ROWS:
            request.acknowledged = request.features_end
            self._tell_target(
                request,
                FeatureAck(
                    request_id=request.request_id,
                    target_epoch=request.open.target_epoch,
                    position=request.features_end,
                ),
            )

    def _lose_features(self, failure: RequestFailure) -> None:
        """The target gives no features for a request: there is nothing to draft from."""
        request = self._expecting(failure.request_id, failure.target_epoch)
        if request is None or failure.draft_epoch not in (0, request.open.draft_epoch):
            return
        self._drop(request)
        self._outbox.append(replace(failure, draft_epoch=request.open.draft_epoch))

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.info.vocab_size:
            raise InvalidArgumentError(
                f"token ids must lie in 0..{self.info.vocab_size - 1}", field="token_ids"
            )

    # --- a step ----------------------------------------------------------------------------------

    def _commit_ahead(self) -> None:
        """Commit and answer what the device did ahead, if there is anything to do at all."""
        done = self._ahead.finish() if self._has_compute else None
        if done is None:
            return
        for request, num_tokens in zip(done.requests, done.num_tokens, strict=True):
            request.kv_len += num_tokens
            if request.input_shift:
                request.take_features(num_tokens)
        self._answer(done.requests, done.rows, done.output, done.timer, is_ahead=True)
        self._num_steps += 1
        self._num_rows += sum(done.num_tokens)
        self._num_request_steps += len(done.requests)
        for request in done.requests:
            self._drop_unseen(request)

    def _run_ahead(self) -> None:
        requests = list(self._requests.values())
        shape = self._ahead.next_shape(requests)
        if shape is not None and all([self._reserve_ahead(r, shape) for r in requests]):
            self._ahead.launch(requests, shape)

    def _plan_extend(self) -> list[ExtendWork]:
        """Choose rows: requests whose tree is awaited first, oldest first."""
        ready = [
            (request, count)
            for request in self._requests.values()  # oldest first
            if (count := request.num_ready_rows)
        ]
        ready.sort(key=lambda entry: entry[0].pending is None)
        budget = self._max_batch_rows
        works = []
        for request, num_ready in ready:
            count = min(num_ready, budget, CHUNK_ROWS)
            if count and request.is_held and self._reserve(request, count):
                works.append(ExtendWork(request, request.kv_len, count))
                budget -= count
        return [work for work in works if work.request.is_held]

    def _plan_growth(self) -> list[DraftRequest]:
        """Reserve slots for every tree that can grow; whoever was retracted meanwhile is out."""
        growing = []
        for request in [request for request in self._requests.values() if request.can_grow]:
            num_slots = self._runner.num_scratch_slots(request.pending_order.shape)
            if request.is_held and self._reserve(request, num_slots):
                growing.append(request)
        return [request for request in growing if request.is_held]

    def _settle(self, works: Sequence[ExtendWork], growing: Sequence[DraftRequest]) -> None:
        """Do what can wait until a step is launched: count it, free and reserve pages."""
        if not works and not growing:
            return
        self._num_steps += 1
        self._num_rows += sum([work.num_rows for work in works])
        self._num_request_steps += len({*growing, *[work.request for work in works]})
        for request, _, _ in works:
            if request.is_held:
                self._drop_unseen(request)
        for request in growing:
            self._reserve_ahead(request, request.pending_order.shape)
        self._runner.bring_page_table()

    def _drop_unseen(self, request: DraftRequest) -> None:
        """Free the pages that no row to come will see."""
        if self._runner.window:
            self._pool.drop_before(request.req_idx, request.kv_len - self._runner.window)

    def _reserve_ahead(self, request: DraftRequest, shape: TreeShape) -> bool:
        """Reserve for what may be accepted of a tree, and for the next one.

        Returns: False if it does not fit into the context, or if no pages are free.
        """
        end = request.kv_len + shape.num_steps + 1
        if end > self._max_context_len:
            return False
        try:
            self._pool.reserve(request.req_idx, end + self._runner.num_scratch_slots(shape))
        except OutOfPagesError:
            return False
        return True

    def _reserve(self, request: DraftRequest, num_slots: int) -> bool:
        """Reserve slots past kv_len, retracting the newest requests while there are too few pages.

        Returns: False if the request itself had to go.
        """
        while True:
            try:
                self._pool.reserve(request.req_idx, request.kv_len + num_slots)
            except OutOfPagesError:
                newest = max(self._requests.values(), key=lambda held: held.order)
                self._drop(newest)
                self._outbox.append(
                    RequestRetracted(
                        request_id=newest.request_id,
                        target_epoch=newest.open.target_epoch,
                        draft_epoch=newest.open.draft_epoch,
                    )
                )
                if newest is request:
                    return False
            else:
                return True

    def _drop(self, request: DraftRequest) -> None:
        del self._requests[request.request_id]
        request.is_held = False
        self._pool.release(request.req_idx)
        if request.channel is not None:
            request.channel.put(
                PeerDetach(
                    request_id=request.request_id,
                    target_epoch=request.open.target_epoch,
                    draft_epoch=request.open.draft_epoch,
                )
            )
        if request.input_shift and not request.has_peer_features:
            self._tell_target(
                request,
                FeatureUnsubscribe(
                    request_id=request.request_id, target_epoch=request.open.target_epoch
                ),
            )

    def _subscribe(self, request: DraftRequest, *, avoids_ring: bool = False) -> None:
        """Ask for the rows from features_end on; as bytes they come through the front."""
        request.is_awaiting = True
        request.has_peer_features = request.channel is not None and not avoids_ring
        command = FeatureSubscribe(
            request_id=request.request_id,
            target_epoch=request.open.target_epoch,
            from_position=request.features_end,
            draft_epoch=request.open.draft_epoch,
        )
        self._tell_target(request, command, avoids_ring=avoids_ring)

    def _tell_target(
        self,
        request: DraftRequest,
        command: FeatureSubscribe | FeatureAck | FeatureUnsubscribe,
        *,
        avoids_ring: bool = False,
    ) -> None:
        if request.has_peer_features:
            assert request.channel is not None
            request.channel.put(command)
            return
        self._outbox.append(
            FeatureCommand(
                target_address=request.open.target_address, command=command, avoids_ring=avoids_ring
            )
        )

    def _fail(self, message: Any, error: CoppiceError) -> None:
        """Report an error against the request that the message is about, and drop its state."""
        request = self._requests.get(message.request_id)
        if request is not None:
            self._drop(request)
        draft_epoch = request.open.draft_epoch if request else getattr(message, "draft_epoch", 0)
        self._outbox.append(
            RequestFailure(
                request_id=message.request_id,
                code=int(error.code),
                reason=error.reason,
                message=error.message,
                field=error.field,
                target_epoch=message.target_epoch,
                draft_epoch=draft_epoch,
                round_idx=getattr(message, "round_idx", 0),
            )
        )


def _order_of(part: PathEntry, shape: TreeShape) -> DraftRound:
    return DraftRound(
        request_id=part.request_id,
        target_epoch=part.target_epoch,
        draft_epoch=part.draft_epoch,
        round_idx=part.round_idx,
        seq_len=part.seq_len + len(part.token_ids),
        token_offset=part.seq_len + 1,
        token_ids=tuple(part.token_ids),
        shape=shape,
    )
