"""The output of one request: committed tokens in, deltas out, cut before anything leaves.

Without stop strings a token leaves in the round that committed it; text of a half-finished
character follows later. With stop strings a token leaves only when none of its text can be part of
one, so what was sent never has to be taken back. What is held back depends on the tokens alone, not
on how rounds grouped them: a resumed request goes on exactly where the client's tokens end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.stop import StopMatch, StopMatcher
from orchestrator.tokenizer import Detokenizer
from shared.messages import (
    AcceptedPath,
    FinishReason,
    RoundTree,
    RoutedExperts,
    TokenDelta,
    TokenLogprob,
)
from shared.messages.routed_experts import join_routed


@dataclass(slots=True, kw_only=True)
class _HeldToken:
    """A committed token that has not left yet; its text is `[start, end)` of the output text."""

    token_id: int
    round_number: int
    is_draft: bool
    logprob: TokenLogprob | None
    routed: RoutedExperts | None
    start: int
    end: int | None = None


class Output:
    """Collects the tokens of one request and says what may leave.

    Args:
        detokenizer: None when the client wants no text and has no stop strings.
        stop_strings: Where to cut.
        includes_stop: Keep the matched stop string or stop token.
    """

    def __init__(
        self,
        *,
        detokenizer: Detokenizer | None,
        stop_strings: Sequence[str] = (),
        includes_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop_strings) if stop_strings else None
        self._includes_stop = includes_stop
        self._held: list[_HeldToken] = []
        self._held_trees: deque[tuple[int, RoundTree]] = deque()  # round_number, tree
        self._held_text = ""
        self._text_len = 0
        self._num_sent_chars = 0
        self._num_sent_tokens = 0
        self._num_resumed = 0
        self._round_number = 0
        self.num_taken = 0
        """Tokens of the last round up to the one that ended the output; all, if none did."""
        self.finish_reason = FinishReason.NONE
        self.matched_stop: int | str | None = None

    @property
    def is_finished(self) -> bool:
        """Return whether nothing more will come."""
        return self.finish_reason is not FinishReason.NONE

    @property
    def num_output_tokens(self) -> int:
        """Return the tokens sent so far, resumed ones excluded."""
        return self._num_sent_tokens - self._num_resumed

    def resume(self, token_ids: Sequence[int], stop_token_ids: frozenset[int]) -> None:
        """Take tokens that the client already holds; nothing of them is sent again.

        They may hold the stop that ended the output, if only the last message was lost.
        """
        for token_id in token_ids:
            self._append(token_id, is_draft=False, logprob=None)
        if token_ids and token_ids[-1] in stop_token_ids and not self.is_finished:
            self._finish(FinishReason.STOP, token_ids[-1])
        self._held.clear()
        self._num_sent_tokens = self._num_resumed = len(token_ids)
        self._mark_sent(self._text_len)

    def extend(self, path: AcceptedPath, tree: RoundTree | None = None) -> list[TokenDelta]:
        """Take what a round committed; return what may leave now.

        Args:
            tree: Of the round, if the client wants to see it: it leaves with the round's first
                delta, or by itself if no token of the round leaves at all.
        """
        self.num_taken = len(path.token_ids)
        drops_last = path.matched_stop_token_id is not None and not self._includes_stop
        token_ids = path.token_ids[:-1] if drops_last else path.token_ids
        if self._matcher is None:
            return self._pass_on(token_ids, path, tree)
        self._round_number += 1
        if tree is not None:
            self._held_trees.append((self._round_number, tree))
        routed = path.routed_experts
        for index, token_id in enumerate(token_ids):
            self._append(
                token_id,
                is_draft=index < path.num_accepted_drafts,
                logprob=path.logprobs[index] if path.logprobs else None,
                routed=None if routed is None else routed.part(index, index + 1),
            )
            if self.is_finished:
                self.num_taken = index + 1
                return self._release_all()
        if path.finish_reason is FinishReason.NONE:
            return self._release_safe()
        self._flush()
        if not self.is_finished:
            self._finish(path.finish_reason, path.matched_stop_token_id)
        return self._release_all()

    def end(self, reason: FinishReason) -> list[TokenDelta]:
        """End the output for a reason other than a token; return what was held back."""
        self._flush()
        if not self.is_finished:
            self._finish(reason, None)
        return self._release_all()

    def _pass_on(
        self, token_ids: Sequence[int], path: AcceptedPath, tree: RoundTree | None
    ) -> list[TokenDelta]:
        """Send a round's tokens with the text that they complete: nothing can be cut later."""
        num_drafts = min(path.num_accepted_drafts, len(token_ids))
        is_over = path.finish_reason is not FinishReason.NONE
        draft_text = text = ""
        if self._detokenizer is not None:
            draft_text, text = _read(self._detokenizer, token_ids, num_drafts, is_over=is_over)
        if is_over:
            self._finish(path.finish_reason, path.matched_stop_token_id)
        if not token_ids and not text and tree is None:
            return []
        routed = path.routed_experts
        if routed is not None and len(token_ids) < len(path.token_ids):
            routed = routed.part(0, len(token_ids)) if token_ids else None
        delta = TokenDelta(
            token_offset=self._num_sent_tokens,
            token_ids=tuple(token_ids),
            text=text,
            logprobs=path.logprobs[: len(token_ids)],
            num_accepted_drafts=num_drafts,
            num_accepted_draft_chars=len(draft_text),
            tree=tree,
            routed_experts=routed,
        )
        self._num_sent_tokens += len(token_ids)
        self._text_len = self._num_sent_chars = self._text_len + len(text)
        return [delta]

    def _append(
        self,
        token_id: int,
        *,
        is_draft: bool,
        logprob: TokenLogprob | None,
        routed: RoutedExperts | None = None,
    ) -> None:
        self._held.append(
            _HeldToken(
                token_id=token_id,
                round_number=self._round_number,
                is_draft=is_draft,
                logprob=logprob,
                routed=routed,
                start=self._text_len,
            )
        )
        if self._detokenizer is None:
            self._settle("")
            return
        text = self._detokenizer.push(token_id)
        if self._detokenizer.is_settled:
            self._settle(text)
        else:
            self._add_text(text)

    def _flush(self) -> None:
        self._settle(self._detokenizer.flush() if self._detokenizer is not None else "")

    def _settle(self, text: str) -> None:
        """Add text after which the text of every held token is known."""
        self._add_text(text)
        for token in reversed(self._held):
            if token.end is not None:
                break
            token.end = self._text_len

    def _add_text(self, text: str) -> None:
        self._held_text += text
        self._text_len += len(text)
        if self._matcher is None or not text or self.is_finished:
            return
        match = self._matcher.feed(text)
        if match is not None:
            self._cut(match)

    def _cut(self, match: StopMatch) -> None:
        """Drop the text of the stop string, or what follows it, and the tokens of that text."""
        keep = match.end if self._includes_stop else match.start
        self._held_text = self._held_text[: max(0, keep - self._num_sent_chars)]
        self._text_len = max(keep, self._num_sent_chars)
        # A token without text right before the cut stays: it may have left already.
        self._held = [
            token
            for token in self._held
            if token.start < keep or (token.end is not None and token.end <= keep)
        ]
        for token in self._held:
            token.end = keep if token.end is None else min(token.end, keep)
        self._finish(FinishReason.STOP, match.stop_string)

    def _finish(self, reason: FinishReason, matched_stop: int | str | None) -> None:
        self.finish_reason = reason
        self.matched_stop = matched_stop

    def _release_safe(self) -> list[TokenDelta]:
        assert self._matcher is not None
        count = 0
        for token in self._held:
            if token.end is None or token.end > self._matcher.safe_len:
                break
            count += 1
        return self._release(count) if count else []

    def _release_all(self) -> list[TokenDelta]:
        deltas = self._release(len(self._held))
        if self._text_len > self._num_sent_chars:
            deltas.append(self._delta([]))
        while self._held_trees:  # of rounds that were cut off whole
            deltas.append(self._delta([], self._held_trees.popleft()[1]))
        return deltas

    def _release(self, count: int) -> list[TokenDelta]:
        """Send the first `count` held tokens with the text known after them, a delta per round."""
        deltas = []
        while count:
            round_number = self._held[0].round_number
            size = sum(token.round_number == round_number for token in self._held[:count])
            tokens, self._held = self._held[:size], self._held[size:]
            deltas.append(self._delta(tokens, self._tree_of(round_number)))
            count -= size
        return deltas

    def _tree_of(self, round_number: int) -> RoundTree | None:
        """Return the tree of a round whose first delta this is."""
        if self._held_trees and self._held_trees[0][0] == round_number:
            return self._held_trees.popleft()[1]
        return None

    def _delta(self, tokens: list[_HeldToken], tree: RoundTree | None = None) -> TokenDelta:
        text_end = self._held[0].start if self._held else self._text_len
        num_chars = max(0, text_end - self._num_sent_chars)
        num_drafts = sum(token.is_draft for token in tokens)  # they come first
        draft_end = tokens[num_drafts].start if num_drafts < len(tokens) else text_end
        num_draft_chars = max(0, draft_end - self._num_sent_chars) if num_drafts else 0
        delta = TokenDelta(
            token_offset=self._num_sent_tokens,
            token_ids=tuple(token.token_id for token in tokens),
            text=self._held_text[:num_chars],
            logprobs=tuple(token.logprob for token in tokens if token.logprob is not None),
            num_accepted_drafts=num_drafts,
            num_accepted_draft_chars=num_draft_chars,
            tree=tree,
            routed_experts=join_routed([token.routed for token in tokens]),
        )
        self._num_sent_tokens += len(tokens)
        self._mark_sent(self._num_sent_chars + num_chars)
        return delta

    def _mark_sent(self, num_chars: int) -> None:
        self._held_text = self._held_text[num_chars - self._num_sent_chars :]
        self._num_sent_chars = num_chars


def _read(
    detokenizer: Detokenizer, token_ids: Sequence[int], num_drafts: int, *, is_over: bool
) -> tuple[str, str]:
    """Return the text that drafts complete, which come first, and that of the whole round."""
    draft_text = text = detokenizer.push(*token_ids[:num_drafts]) if num_drafts else ""
    if num_drafts < len(token_ids):
        text += detokenizer.push(*token_ids[num_drafts:])
    if is_over:
        text += detokenizer.flush()
    return text if num_drafts == len(token_ids) > 0 else draft_text, text
