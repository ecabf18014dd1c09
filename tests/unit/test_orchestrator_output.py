"""Stop strings, held-back text and resumption, however rounds group the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.meter import Meter
from orchestrator.output import Output
from orchestrator.stop import StopMatch, StopMatcher
from orchestrator.tokenizer import _ByteLevelDetokenizer
from shared.messages import (
    AcceptedPath,
    FinishReason,
    RoundTree,
    RoutedExperts,
    TokenDelta,
    TokenLogprob,
)

# Tokens with text that overlaps in every way: no text at all, and half characters (é, 😀), too.
SPELLING = [b"", b"a", b"b", b"ab", b"aba", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80", b"b\xc3"]
TOKENS = st.lists(st.integers(0, len(SPELLING) - 1), max_size=24)
STOPS = st.lists(st.text(alphabet="abé😀�", min_size=1, max_size=4), max_size=3, unique=True)


def first_match(text: str, stops: Sequence[str]) -> StopMatch | None:
    """Find the stop completed first, the longer of two, by trying every end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return StopMatch(stop_string=stop, start=end - len(stop), end=end)
    return None


def make_output(stops: Sequence[str], *, includes_stop: bool = False) -> Output:
    return Output(
        detokenizer=_ByteLevelDetokenizer(SPELLING.__getitem__, []),
        stop_strings=stops,
        includes_stop=includes_stop,
    )


def routed_of(token_ids: Sequence[int]) -> RoutedExperts:
    """Return experts that tell by which token each row is."""
    ids = bytes(number for token in token_ids for number in (token, token + 100))
    return RoutedExperts(ids=ids, num_layers=2, top_k=1, num_experts=128)


def path_of(
    token_ids: Sequence[int],
    *,
    reason: FinishReason = FinishReason.NONE,
    stop_id: int | None = None,
) -> AcceptedPath:
    return AcceptedPath(
        request_id="r",
        target_epoch=1,
        round_idx=1,
        seq_len=1,
        accept_index=tuple(range(len(token_ids))),
        token_ids=tuple(token_ids),
        num_accepted_drafts=len(token_ids) - 1,
        num_draft_tokens=8,
        logprobs=tuple(TokenLogprob(token_id=token, logprob=-1.0) for token in token_ids),
        routed_experts=routed_of(token_ids),
        finish_reason=reason,
        matched_stop_token_id=stop_id,
    )


def in_rounds(token_ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """Cut tokens into rounds of at least one token."""
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(token_ids)}), len(token_ids)]
    return [list(token_ids[a:b]) for a, b in zip(bounds, bounds[1:], strict=False) if a < b]


def run(output: Output, rounds: Sequence[Sequence[int]]) -> list[TokenDelta]:
    """Feed rounds; the last one ends by length. Nothing is fed once the output has ended."""
    deltas: list[TokenDelta] = []
    for index, tokens in enumerate(rounds):
        if output.is_finished:
            break
        is_last = index == len(rounds) - 1
        reason = FinishReason.LENGTH if is_last else FinishReason.NONE
        deltas += output.extend(path_of(tokens, reason=reason))
    return deltas


def text_of(deltas: Sequence[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def routed_ids(deltas: Sequence[TokenDelta]) -> bytes:
    """Return the experts of an output, each delta's those of its own tokens."""
    found = b""
    for delta in deltas:
        expected = routed_of(delta.token_ids) if delta.token_ids else None
        assert delta.routed_experts == expected
        found += expected.ids if expected is not None else b""
    return found


def ids_of(deltas: Sequence[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def expected(
    token_ids: Sequence[int], stops: Sequence[str], *, includes_stop: bool
) -> tuple[str, list[int], str | None]:
    """Return text, tokens and the stop string that any correct output has."""
    whole = b"".join(SPELLING[token] for token in token_ids).decode(errors="replace")
    match = first_match(whole, stops)
    if match is None:
        return whole, list(token_ids), None
    keep = match.end if includes_stop else match.start
    detokenizer = _ByteLevelDetokenizer(SPELLING.__getitem__, [])
    starts, ends, num_chars = [], [], 0
    for token in token_ids:
        starts.append(num_chars)
        num_chars += len(detokenizer.push(token))
        if detokenizer.is_settled:
            ends += [num_chars] * (len(starts) - len(ends))
        if num_chars >= match.end:
            break  # the output ends with the token that completes the stop
    ends += [num_chars + 1] * (len(starts) - len(ends))
    kept = [
        token
        for token, start, end in zip(token_ids, starts, ends, strict=False)
        if start < keep or end <= keep
    ]
    return whole[:keep], kept, match.stop_string


@given(text=st.text(alphabet="ab", max_size=30), stops=STOPS, data=st.data())
def test_matcher_finds_the_first_stop_whatever_the_pieces(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """Also says how much of the text no stop can touch any more, and not less than that."""
    matcher = StopMatcher(stops)
    position = 0
    while position < len(text):
        size = data.draw(st.integers(1, len(text) - position))
        match = matcher.feed(text[position : position + size])
        position += size
        seen = text[:position]
        assert match == first_match(seen, stops)
        if match is not None:
            return
        unsafe = max(
            (n for s in stops for n in range(1, len(s)) if seen.endswith(s[:n])), default=0
        )
        assert matcher.safe_len == len(seen) - unsafe


@given(tokens=TOKENS, stops=STOPS, cuts=st.lists(st.integers(1, 24)), includes=st.booleans())
@settings(max_examples=200)
def test_output_is_cut_at_the_first_stop_and_nothing_is_taken_back(
    *, tokens: list[int], stops: list[str], cuts: list[int], includes: bool
) -> None:
    """Text, token ids, logprobs, experts and usage follow one and the same cut."""
    output = make_output(stops, includes_stop=includes)
    deltas = run(output, in_rounds(tokens, cuts))
    whole = b"".join(SPELLING[token] for token in tokens)
    if any(stop in "�" for stop in stops) and whole.decode(errors="ignore") != whole.decode(
        errors="replace"
    ):
        return  # the end of a broken character is known only to the flush
    text, ids, stop = expected(tokens, stops, includes_stop=includes)
    assert text_of(deltas) == text
    assert ids_of(deltas) == ids
    assert [entry.token_id for delta in deltas for entry in delta.logprobs] == ids
    assert routed_ids(deltas) == routed_of(ids).ids
    assert output.num_output_tokens == len(ids)
    if tokens:
        assert output.matched_stop == stop
        assert output.finish_reason is (FinishReason.STOP if stop else FinishReason.LENGTH)
    offset = 0
    for delta in deltas:
        assert delta.token_offset == offset
        offset += len(delta.token_ids)


@given(tokens=TOKENS, stops=STOPS, cuts=st.lists(st.integers(1, 24)), data=st.data())
@settings(max_examples=200)
def test_a_resumed_output_goes_on_exactly_after_what_was_received(
    tokens: list[int], stops: list[str], cuts: list[int], data: st.DataObject
) -> None:
    """The stream may break after any delta; the rest may come in other rounds."""
    deltas = run(make_output(stops), in_rounds(tokens, cuts))
    received = deltas[: data.draw(st.integers(0, len(deltas)))]
    if received and len(received) == len(deltas):
        return  # all is there but the reason: see the tests below
    held = ids_of(received)

    output = make_output(stops)
    output.resume(held, frozenset())
    assert not output.is_finished
    rest = run(output, in_rounds(tokens[len(held) :], data.draw(st.lists(st.integers(1, 24)))))
    assert ids_of(received) + ids_of(rest) == ids_of(deltas)
    assert text_of(received) + text_of(rest) == text_of(deltas)
    assert output.num_output_tokens == len(ids_of(rest))
    if rest:
        assert rest[0].token_offset == len(held)


@given(tokens=TOKENS, stops=STOPS, cuts=st.lists(st.integers(1, 24)), has_stop_id=st.booleans())
@settings(max_examples=200)
def test_every_round_shows_its_tree_once(
    *, tokens: list[int], stops: list[str], cuts: list[int], has_stop_id: bool
) -> None:
    """With its first tokens; alone, when none of them may leave."""
    rounds = in_rounds(tokens, cuts)
    output = make_output(stops)
    deltas: list[TokenDelta] = []
    trees = []
    for index, ids in enumerate(rounds):
        if output.is_finished:
            break
        is_last = index == len(rounds) - 1
        tree = RoundTree(
            token_ids=(index,), parent_index=(-1,), accept_index=(0,), bonus_token_id=ids[-1]
        )
        trees.append(tree)
        reason, stop_id = FinishReason.NONE, None
        if is_last:
            reason, stop_id = FinishReason.LENGTH, None
        if is_last and has_stop_id:
            reason, stop_id = FinishReason.STOP, ids[-1]
        deltas += output.extend(path_of(ids, reason=reason, stop_id=stop_id), tree)
    assert [delta.tree for delta in deltas if delta.tree is not None] == trees
    begins = [sum(map(len, rounds[:index])) for index in range(len(rounds))]
    for delta in deltas:
        if delta.token_ids and delta.tree is not None:
            assert begins[trees.index(delta.tree)] == delta.token_offset
        elif delta.token_ids:
            assert delta.token_offset not in begins


def test_without_stop_strings_tokens_leave_at_once_and_half_characters_later() -> None:
    """Token ids never wait for text."""
    output = make_output([])
    (first,) = output.extend(path_of([1, 5]))
    assert (first.token_ids, first.text) == ((1, 5), "a")
    (second,) = output.extend(path_of([6]))
    assert (second.token_ids, second.text, second.token_offset) == ((6,), "é", 2)


def test_tokens_of_a_round_leave_in_one_delta() -> None:
    """Accepted drafts first, then the bonus token; so do their characters."""
    output = make_output([])
    (delta,) = output.extend(path_of([1, 3, 4]))
    assert delta.token_ids == (1, 3, 4)
    assert delta.num_accepted_drafts == 2
    assert (delta.text, delta.num_accepted_draft_chars) == ("aababa", 3)


def test_held_tokens_leave_round_by_round() -> None:
    """Drafts come first in every delta, also when two rounds leave together."""
    output = make_output(["abc"])
    assert output.extend(path_of([1])) == []
    deltas = output.extend(path_of([2, 1, 1]))
    assert [delta.token_ids for delta in deltas] == [(1,), (2, 1)]
    assert [delta.num_accepted_drafts for delta in deltas] == [0, 2]
    assert [delta.num_accepted_draft_chars for delta in deltas] == [0, 2]
    assert [delta.text for delta in deltas] == ["a", "ba"]


@pytest.mark.parametrize("includes", [False, True])
def test_a_stop_token_is_cut_unless_asked_for(*, includes: bool) -> None:
    """The path ends with it; usage, logprobs and experts follow."""
    output = make_output([], includes_stop=includes)
    deltas = output.extend(path_of([1, 2], reason=FinishReason.STOP, stop_id=2))
    assert ids_of(deltas) == ([1, 2] if includes else [1])
    assert text_of(deltas) == ("ab" if includes else "a")
    assert sum(len(delta.logprobs) for delta in deltas) == 1 + includes
    assert routed_ids(deltas) == routed_of(ids_of(deltas)).ids
    assert (output.finish_reason, output.matched_stop) == (FinishReason.STOP, 2)


def test_a_stop_string_wins_over_a_later_stop_token_of_the_same_round() -> None:
    """What comes first in the text ends the output."""
    output = make_output(["b"])
    assert text_of(output.extend(path_of([1, 2, 4], reason=FinishReason.STOP, stop_id=4))) == "a"
    assert output.matched_stop == "b"


def test_text_held_for_a_stop_string_leaves_at_the_end() -> None:
    """The end of the output decides that it was no stop after all."""
    output = make_output(["abab"])
    assert output.extend(path_of([4])) == []
    assert text_of(output.extend(path_of([0], reason=FinishReason.LENGTH))) == "aba"


def test_resuming_a_finished_output_ends_it_at_once() -> None:
    """Only FinishInfo was lost: the stop is in what the client holds."""
    output = make_output(["ab"], includes_stop=True)
    output.resume([1, 2], frozenset())
    assert (output.finish_reason, output.matched_stop) == (FinishReason.STOP, "ab")

    output = make_output([], includes_stop=True)
    output.resume([1, 2], frozenset({2}))
    assert (output.finish_reason, output.matched_stop) == (FinishReason.STOP, 2)
    assert output.num_output_tokens == 0


def test_without_a_detokenizer_there_are_tokens_only() -> None:
    """A model without tokenizer.json, or a client that wants no text."""
    output = Output(detokenizer=None)
    (delta,) = output.extend(path_of([1, 2, 3]))
    assert (delta.token_ids, delta.text) == ((1, 2, 3), "")


@pytest.mark.asyncio
@pytest.mark.parametrize(("stop_strings", "num_taken"), [((), 5), (("b",), 2), (("cd",), 4)])
async def test_drafts_that_a_stop_cuts_off_do_not_count(
    stop_strings: tuple[str, ...], num_taken: int
) -> None:
    """The mean is of tokens that became output; the one that stops it counts as one."""
    output = Output(detokenizer=Letters(), stop_strings=stop_strings)
    path = path_of(range(5))
    output.extend(path)
    assert output.num_taken == num_taken
    meter = Meter()
    meter.count(path, num_tokens=output.num_taken)
    stats = meter.speculation
    assert (stats.num_accepted_drafts, stats.accept_length) == (num_taken - 1, num_taken)
    assert stats.accept_length_histogram[-1] == 1


class Letters:
    """Token 0 is "a", 1 is "b" and so on."""

    is_settled = True

    def push(self, *token_ids: int) -> str:
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)

    def flush(self) -> str:
        return ""
