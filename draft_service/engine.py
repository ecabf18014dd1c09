"""The draft engine: keep every request's draft KV caught up with the target, grow trees on order.

The engine never decides anything about a request's output: a late, missing or wrong tree costs a
round its speculation, nothing else.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from draft_service.features import FeatureReader
from draft_service.path_source import PathSource
from draft_service.peer_rounds import PeerRounds
from draft_service.pipeline import DraftPipeline
from draft_service.request_table import RequestTable
from draft_service.runner import DraftRunner
from shared.config import PEERS, Secret
from shared.errors import CoppiceError
from shared.grammar.grammars import Grammars
from shared.kernels.dispatch import launch_counts
from shared.messages import (
    DraftClose,
    DraftOpen,
    DraftRound,
    FeatureChunk,
    PathBatch,
    RequestFailure,
    RowsAnswer,
    WorkerInfo,
    WorkerLoad,
    check_shape,
)
from shared.metrics.samples import Samples, counted
from shared.peer.channel import PeerChannel, PeerChannels, PeerLost
from shared.peer.tcp import PeerAddress, TcpDialer
from shared.step.recorder import Recorder
from shared.step.serving_counts import ServingCounts


class DraftEngine:
    """Hands messages to what they concern, and steps. Single-threaded.

    Args:
        max_batch_rows: Rows per extend.
        max_context_len: Longest conversation, tokens.
        source: Of paths that the device has before its host.
        grammars: Of outputs.
        secret: Of the deployment, for peer channels over TCP.
    """

    def __init__(
        self,
        runner: DraftRunner,
        info: WorkerInfo,
        *,
        max_batch_rows: int,
        max_context_len: int,
        source: PathSource,
        grammars: Grammars,
        secret: Secret,
    ) -> None:
        self.info = info
        dialer = TcpDialer(secret.keys(PEERS), self._note_dialled)
        self.channels = PeerChannels(dialer)
        self.source = source
        self.runner = runner
        self.serving = ServingCounts(runner.graphs)
        self._recorder = Recorder(runner.pool.device)
        self._outbox: list[Any] = []
        self._reader = FeatureReader(info.features.width)
        self._grammars = grammars
        self.requests = RequestTable(
            runner, self._outbox, self._recorder, grammars, max_context_len=max_context_len
        )
        self._peers = PeerRounds(self.requests, self._reader, self.channels, dialer, self.source)
        self.pipeline = DraftPipeline(
            runner,
            self.requests,
            self._outbox,
            self.source,
            self._recorder,
            hear_peers=self._hear_peers,
            max_batch_rows=max_batch_rows,
        )

    @property
    def has_work(self) -> bool:
        """Return whether a step would do anything."""
        return self.pipeline.has_work or bool(self._outbox)

    @property
    def has_work_in_s(self) -> float | None:
        """Return how long there is work that waits for a device round at most; None: none waits."""
        return self.pipeline.has_work_in_s

    @property
    def load(self) -> WorkerLoad:
        """Return progress and room."""
        pool, pipeline = self.runner.pool, self.pipeline
        return WorkerLoad(
            num_running=len(self.requests),
            num_free_pages=pool.num_free_pages,
            num_pages=pool.num_pages,
            num_steps=pipeline.num_steps,
            num_rows=pipeline.num_rows,
            num_request_steps=pipeline.num_request_steps,
            num_compiles=self.serving.num_compiles,
            num_captures=self.serving.num_captures,
            num_eager_launches=self.serving.num_eager_launches,
            kernel_launches=tuple(sorted(launch_counts().items())),
        )

    @property
    def counts(self) -> Samples:
        """Return what was counted since the start, by name."""
        return {
            **self.pipeline.tallies.samples,
            **dict(counted("coppice_draft_trees_total", "order", self.pipeline.num_trees)),
            "coppice_retractions_total": self.requests.num_retracted,
        }

    def prepare(self, message: Any) -> Future[Any] | None:
        """Begin to read the grammar of a request that is to be opened."""
        if not isinstance(message, DraftOpen):
            return None
        return self._grammars.begin(message.compiled_grammar)

    def submit(self, message: Any) -> None:
        """Take a message of the front; a bad one fails its request only."""
        self._take(message, None)

    def submit_peer(self, channel: PeerChannel, message: Any) -> None:
        """Take a message of a target's engine; a bad one fails its requests only."""
        self._take(message, channel)

    def step(self) -> list[Any]:
        """Run one step of the pipeline.

        Returns: TokenTree, RequestFailure, RequestRetracted and FeatureCommand messages.
        """
        self.pipeline.step()
        self._recorder.end_step()
        outputs = self._outbox.copy()
        self._outbox.clear()
        return outputs

    def check_integrity(self) -> None:
        """Raise unless every page is accounted for."""
        self.runner.pool.check_integrity()

    def _hear_peers(self) -> None:
        for channel, message in self.channels.receive():
            self.submit_peer(channel, message)

    def _take(self, message: Any, channel: PeerChannel | None) -> None:
        self.pipeline.note_message()
        try:
            match message:
                case DraftOpen():
                    self._open(message)
                case DraftRound():
                    self._take_order(message, channel)
                case DraftClose():
                    self.requests.close(message)
                case FeatureChunk():
                    self._take_features(message)
                case RequestFailure():
                    self._lose_features(message)
                case RowsAnswer() if channel is not None:
                    self.source.take_answer(channel, is_taken=message.is_taken)
                case PathBatch() if channel is not None:
                    self._peers.take_paths(channel, message)
                case PeerLost() if channel is not None:
                    self._peers.lose(channel)
                case _:
                    raise TypeError(f"a draft engine takes no {type(message).__name__}")
        except CoppiceError as error:
            self.requests.fail(message, error)

    def _open(self, message: DraftOpen) -> None:
        request = self.requests.open(message)
        if request is not None:
            self._peers.connect(request)

    def _note_dialled(self, address: PeerAddress, channel: PeerChannel | None) -> None:
        self.pipeline.note_message()
        self._peers.note_dialled(address, channel)

    def _take_order(self, message: DraftRound, channel: PeerChannel | None) -> None:
        request = self.requests.get(message.request_id)
        if request is None or request.open.draft_epoch != message.draft_epoch:
            return  # closed, retracted or opened anew meanwhile, of which the orchestrator knows
        check_shape(message.shape, prefix="shape.")
        if not (message.unless_attached and self._peers.keep_order(request, message)):
            self.requests.take_order(request, message, channel)

    def _take_features(self, chunk: FeatureChunk) -> None:
        request = self.requests.expecting(chunk.request_id, chunk.target_epoch)
        if request is None:
            return
        self._reader.check(chunk)
        if request.features is not None:
            request.features.receive(chunk.start, self._reader.read(chunk))

    def _lose_features(self, failure: RequestFailure) -> None:
        """Drop a request whose features the target does not give: the draft has no input."""
        request = self.requests.expecting(failure.request_id, failure.target_epoch)
        if request is None or failure.draft_epoch not in (0, request.open.draft_epoch):
            return
        self.requests.drop(request)
        self._outbox.append(replace(failure, draft_epoch=request.open.draft_epoch))
