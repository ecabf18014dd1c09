"""What one client gets: PromptInfo once, deltas, FinishInfo once, in this order."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping

from orchestrator.figures import RequestStatus, Stage
from orchestrator.meter import Meter
from orchestrator.outgoing import Outgoing, WriteTurns
from orchestrator.output import Output
from orchestrator.pairing import ModelIdentity
from orchestrator.timeline import Timeline
from orchestrator.tokenizer import Tokenizer
from orchestrator.validation import GenerationRequest
from shared.messages import (
    AcceptedPath,
    AnswerTimes,
    FinishInfo,
    FinishReason,
    PromptInfo,
    RoundTree,
    SpeculationStats,
    TokenDelta,
    TokenTree,
    Usage,
    WorkerInfo,
)
from shared.metrics.tally import Tally

_LENGTHS = (FinishReason.LENGTH, FinishReason.CONTEXT_LENGTH)


class Reply:
    """Events of one request, and whether its output is complete.

    Args:
        tokenizer: None if the model has none: then there is no text.
        turns: Of all that write in this process; None: nobody else does.
        inter_token: Takes the time of each token after the first, seconds.
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer | None,
        turns: WriteTurns | None,
        inter_token: Tally | None,
    ) -> None:
        self.events = Outgoing(turns)
        self.meter = Meter(inter_token)
        self.timeline = Timeline()
        self._request = request
        self._num_output = 0
        self._num_cached_tokens: int | None = None
        wants_text = bool(request.stop_strings) or not request.omit_text
        has_text = tokenizer is not None and wants_text
        self._tokenizer = None if request.omit_text else tokenizer
        self._is_whole = not (request.omit_token_ids or (request.omit_text and has_text))
        self._output = Output(
            detokenizer=tokenizer.detokenizer(
                request.prompt_ids, keeps_special=request.keeps_special
            )
            if tokenizer is not None and wants_text
            else None,
            stop_strings=request.stop_strings,
            includes_stop=request.include_stop_in_output,
        )

    @property
    def is_finished(self) -> bool:
        """Return whether no more tokens are wanted."""
        return self._output.is_finished

    # --- what is counted of it, see metrics.py ---------------------------------------------------

    @property
    def num_prompt_tokens(self) -> int:
        """Return the tokens of the prompt, 0 before it is admitted."""
        return 0 if self._num_cached_tokens is None else len(self._request.prompt_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Return the prompt tokens that a target held already."""
        return self._num_cached_tokens or 0

    @property
    def num_output_tokens(self) -> int:
        """Return the tokens sent so far, resumed ones excluded."""
        return self._output.num_output_tokens

    @property
    def speculation(self) -> SpeculationStats:
        """Return how speculation went so far."""
        return self.meter.speculation

    @property
    def root_only_reasons(self) -> Mapping[str, int]:
        """Return the rounds without a tree by why."""
        return self.meter.root_only_reasons

    # --- what happens to it ----------------------------------------------------------------------

    def resume(self, *, stop_token_ids: frozenset[int], max_new_tokens: int) -> None:
        """Take the output that the client already holds; it may be all there is."""
        resume_ids = self._request.resume_ids
        self._output.resume(resume_ids, stop_token_ids)
        self._num_output = len(resume_ids)
        if not self.is_finished and self._num_output >= max_new_tokens:
            self._output.end(self._reason_of_length())  # its last text was sent with its last token

    def admitted(
        self, model: WorkerInfo, num_cached_tokens: int, times: AnswerTimes | None = None
    ) -> None:
        """Say that the request is being served; said once, whatever happens to it later.

        Args:
            times: Of the target's answer, if it says them; they begin where queueing ended.
        """
        self.meter.admitted(times)
        if self._num_cached_tokens is not None:
            return
        self._num_cached_tokens = num_cached_tokens
        self.events.put(
            PromptInfo(
                request_id=self._request.request_id,
                model=model.model,
                num_prompt_tokens=len(self._request.prompt_ids),
                num_cached_tokens=num_cached_tokens,
                seed=self._request.sampling.seed,
                model_fingerprint=ModelIdentity.of(model).fingerprint,
            )
        )

    def emit(
        self,
        path: AcceptedPath,
        *,
        is_resting: bool = False,
        root_only_reason: str = "",
        is_relayed: bool = False,
    ) -> None:
        """Send what may leave of a committed path; a stop string may end the output here.

        Args:
            is_resting: The target wants no trees for now.
            root_only_reason: Why there was no tree, if there was none.
            is_relayed: The tree came through this process.
        """
        self._num_output += len(path.token_ids)
        if path.finish_reason and path.finish_reason in _LENGTHS:
            path = dataclasses.replace(path, finish_reason=self._reason_of_length())
        for delta in self._output.extend(path, self._tree_of(path)):
            self.meter.sent()
            self.events.put(delta if self._is_whole else self._wanted(delta))
        self.meter.count(
            path,
            num_tokens=self._output.num_taken,
            is_resting=is_resting,
            root_only_reason=root_only_reason,
            is_relayed=is_relayed,
        )

    def note_times(self, round_idx: int, tree: TokenTree | None, path: AcceptedPath) -> None:
        """Keep what the workers say of a round's times, if they say it."""
        if path.times is not None:
            self.timeline.add(
                round_idx,
                tree=tree.times if tree is not None else None,
                path=path.times,
                now_ns=int(asyncio.get_running_loop().time() * 1e9),
            )

    def status(self, *, is_placed: bool, retries: int) -> RequestStatus:
        """Say how far the request is.

        Args:
            is_placed: It is on a target.
        """
        stage = Stage.DECODING if self.meter.has_output else Stage.PREFILLING
        return RequestStatus(
            stage=stage if is_placed else Stage.WAITING,
            end_reason=self._output.finish_reason.name.lower() if self.is_finished else "",
            figures=dataclasses.replace(self.meter.figures, num_retries=retries),
        )

    def finish(self, *, retries: int) -> FinishInfo:
        """Say how the request ended."""
        finish = FinishInfo(
            reason=self._output.finish_reason,
            matched_stop=self._output.matched_stop,
            usage=Usage(
                num_prompt_tokens=len(self._request.prompt_ids),
                num_output_tokens=self._output.num_output_tokens,
                num_cached_tokens=self.num_cached_tokens,
            ),
            speculation=self.meter.speculation,
            timings=self.meter.timings,
            retries=retries,
            round_times=self.timeline.rounds if self._request.round_times else (),
        )
        self.events.put(finish)
        return finish

    def close(self) -> None:
        """Mark the end of the events."""
        self.events.put(None)

    def _tree_of(self, path: AcceptedPath) -> RoundTree | None:
        """Return the tree of a round, with texts, if the client wants to see it."""
        tree, tokenizer = path.tree, self._tokenizer
        if tree is None or not self._request.round_trees:
            return None
        if tokenizer is None:
            return tree
        token_ids = (*tree.token_ids, tree.bonus_token_id)
        texts = [tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in token_ids]
        return dataclasses.replace(tree, texts=tuple(texts))

    def _wanted(self, delta: TokenDelta) -> TokenDelta:
        """Return what the client wants of a delta."""
        if self._request.omit_token_ids:
            delta = dataclasses.replace(delta, token_ids=())
        if self._request.omit_text:
            delta = dataclasses.replace(delta, text="", num_accepted_draft_chars=0)
        return delta

    def _reason_of_length(self) -> FinishReason:
        """Tell the client's limit from the context's."""
        wanted = self._request.max_new_tokens
        is_wanted = wanted is not None and self._num_output >= wanted
        return FinishReason.LENGTH if is_wanted else FinishReason.CONTEXT_LENGTH
