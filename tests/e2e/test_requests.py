"""What a request may ask for: its ends, stops, logprobs and resumption, the same with trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer

from coppice import Client, Completion, FinishInfo, TokenDelta
from shared.messages import FinishReason, GenerateEvent
from shared.models.checkpoint_names import resolve_model
from tests.e2e.serving import Server, generate_all, generate_plain
from tests.processes import wait_for

pytestmark = pytest.mark.slow

PROMPT = "def count_words(text):\n"
TREE = {"num_steps": 5, "topk": 4, "num_draft_tokens": 24}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 3}
EOS_ID = 0


def both_ways(server: Server, requests: list[dict[str, Any]]) -> list[Completion]:
    """Run requests plain, then with trees; return the completions, which must be equal."""
    plain = generate_plain(server.address, requests)
    completions = generate_all(server.address, [{**TREE, **request} for request in requests])
    for request, completion, alone in zip(requests, completions, plain, strict=True):
        assert completion.token_ids == alone.token_ids, request
        assert completion.text == alone.text, request
        assert completion.logprobs == alone.logprobs, request
        assert completion.finish_reason == alone.finish_reason, request
        assert completion.matched_stop == alone.matched_stop, request
        assert completion.usage == alone.usage, request
    return completions


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(resolve_model("demo", "target") / "tokenizer.json"))


def test_short_outputs_and_short_prompts(pair: Server, tokenizer: Tokenizer) -> None:
    """A tree always holds more tokens than one, two or three; a prompt may be one token."""
    prompts = (tokenizer.encode(PROMPT).ids, [tokenizer.encode("import").ids[0]], [EOS_ID])
    requests = [
        {"token_ids": prompt, "max_new_tokens": count, "ignore_eos": True, **sampling}
        for prompt in prompts
        for count in (1, 2, 3)
        for sampling in ({}, SAMPLED)
    ]
    completions = both_ways(pair, requests)
    for request, completion in zip(requests, completions, strict=True):
        assert len(completion.token_ids) == request["max_new_tokens"]
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.usage.num_prompt_tokens == len(request["token_ids"])
        assert completion.speculation.num_rounds < len(completion.token_ids)


def test_text_and_token_prompts_are_the_same(pair: Server, tokenizer: Tokenizer) -> None:
    text, ids = both_ways(
        pair,
        [
            {"prompt": PROMPT, "max_new_tokens": 20},
            {"token_ids": tokenizer.encode(PROMPT).ids, "max_new_tokens": 20},
        ],
    )
    assert text.token_ids == ids.token_ids
    assert text.text == ids.text


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.mark.parametrize("asked", [{}, SAMPLED, {"json_schema": SCHEMA}, {"stop_strings": ["("]}])
def test_the_tree_of_every_round_is_shown(
    pair: Server, tokenizer: Tokenizer, asked: dict[str, Any]
) -> None:
    """It says what was committed, and adds up to what the request ends with."""
    request = {"prompt": PROMPT, "max_new_tokens": 40, **asked}
    with Client(pair.address) as client:
        plain = client.generate(**request, speculation=False)

        def are_accepted() -> bool:
            """Return whether drafts were; short outputs may end before the draft has caught up."""
            events = client.stream(**request, **TREE, speculation=True, round_trees=True)
            num_trees, num_committed = check_trees([*events], plain, tokenizer)
            return num_trees < num_committed or num_committed <= 20

        wait_for(are_accepted, describe=lambda: "no draft was accepted")


def check_trees(
    events: Sequence[GenerateEvent], plain: Completion, tokenizer: Tokenizer
) -> tuple[int, int]:
    """Check the trees of an output; return how many there are, and the tokens committed by them."""
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    assert tuple(i for delta in deltas for i in delta.token_ids) == plain.token_ids
    assert "".join(delta.text for delta in deltas) == plain.text
    trees = [delta.tree for delta in deltas if delta.tree is not None]
    root, committed = tokenizer.encode(PROMPT).ids[-1], list[int]()
    for tree in trees:
        assert tree.token_ids[0] == root
        climbed = [tree.parent_index[node] for node in tree.accept_index]
        assert climbed == [-1, *tree.accept_index[:-1]]
        ids = [*tree.token_ids, tree.bonus_token_id]
        if all(text.isascii() for text in tree.texts):
            assert [tokenizer.decode([i], skip_special_tokens=False) for i in ids] == [*tree.texts]
        committed += [tree.token_ids[node] for node in tree.accept_index[1:]]
        committed.append(root := tree.bonus_token_id)
    assert tuple(committed[: len(plain.token_ids)]) == plain.token_ids
    finish = events[-1]
    assert isinstance(finish, FinishInfo)
    num_nodes = sum(len(tree.token_ids) - 1 for tree in trees)
    assert num_nodes == finish.speculation.num_draft_tokens
    assert len(trees) == finish.speculation.num_rounds + 1
    return len(trees), len(committed)


def test_stop_strings_across_token_boundaries(pair: Server, tokenizer: Tokenizer) -> None:
    """The output ends before the string or with it, in the middle of tokens and of rounds."""
    base = {"prompt": PROMPT, "max_new_tokens": 48, "ignore_eos": True, "seed": 4}
    for sampling in ({}, {"temperature": 0.9}):
        with Client(pair.address) as client:
            whole = client.generate(**base, **sampling, speculation=False)
        requests, wanted = [], []
        for index in (3, 11, 24, 39):
            before, after = (
                tokenizer.decode(list(whole.token_ids[:count])) for count in (index, index + 2)
            )
            stop = whole.text[len(before) - 1 : len(after) - 1]  # from a token's end into the next
            assert len(stop) >= 2
            start = whole.text.index(stop)
            for includes in (False, True):
                requests.append(
                    {
                        **base,
                        **sampling,
                        "stop_strings": ["no such string", stop],
                        "include_stop_in_output": includes,
                    }
                )
                wanted.append((stop, whole.text[: start + len(stop) * includes]))
        for (stop, text), completion in zip(wanted, both_ways(pair, requests), strict=True):
            assert completion.text == text
            assert completion.matched_stop == stop
            assert completion.finish_reason is FinishReason.STOP
            assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
            assert completion.usage.num_output_tokens == len(completion.token_ids) < 48


def test_eos_and_stop_tokens(pair: Server) -> None:
    """They end the output inside a round; ignored or too early, they do not."""
    with Client(pair.address) as client:
        whole = client.generate(PROMPT, max_new_tokens=32, ignore_eos=True, speculation=False)
    stop_token = whole.token_ids[17]
    eager = {"prompt": PROMPT, "max_new_tokens": 32, **SAMPLED, "logit_bias": {EOS_ID: 100.0}}
    least = [0, 1, 2, 9, 20]
    requests = [{**eager, "min_new_tokens": count} for count in least]
    greedy = {"prompt": PROMPT, "max_new_tokens": 32, "stop_token_ids": [stop_token]}
    requests += [
        {**eager, "ignore_eos": True},
        greedy,
        {**greedy, "include_stop_in_output": True},
    ]
    *ended, ignored, stopped, included = both_ways(pair, requests)
    for count, completion in zip(least, ended, strict=True):
        assert completion.finish_reason is FinishReason.STOP
        assert completion.matched_stop == EOS_ID
        assert len(completion.token_ids) == count
        assert EOS_ID not in completion.token_ids
    assert ignored.token_ids == (EOS_ID,) * 32
    assert ignored.finish_reason is FinishReason.LENGTH
    first = whole.token_ids.index(stop_token)
    assert stopped.token_ids == whole.token_ids[:first]
    assert included.token_ids == whole.token_ids[: first + 1]
    assert stopped.matched_stop == included.matched_stop == stop_token


def test_logprobs_are_the_same_to_the_last_bit(pair: Server) -> None:
    """Of the chosen token and of the alternatives, for every token of every path."""
    requests = [
        {"prompt": PROMPT, "max_new_tokens": 24, "logprobs": True, "top_logprobs": top, **sampling}
        for top in (0, 5, 20)
        for sampling in ({}, SAMPLED)
    ]
    for request, completion in zip(requests, both_ways(pair, requests), strict=True):
        assert [row.token_id for row in completion.logprobs] == list(completion.token_ids)
        for row in completion.logprobs:
            assert len(row.top) == request["top_logprobs"]
            assert row.logprob <= 0
            values = [logprob for _, logprob in row.top]
            assert values == sorted(values, reverse=True)
            if row.top and "temperature" not in request:
                assert row.top[0] == (row.token_id, row.logprob)


def test_resume_goes_on_exactly(pair: Server) -> None:
    """After any number of tokens: stops, penalties and text count what was there already."""
    whole_request = {
        "prompt": PROMPT,
        "max_new_tokens": 40,
        "ignore_eos": True,
        "frequency_penalty": 0.3,
        "logprobs": True,
        **SAMPLED,
    }
    with Client(pair.address) as client:
        whole = client.generate(**whole_request, speculation=False)
        counts = [0, 1, 2, 13, 29, 38, 39]
        so_far = [client.generate(**{**whole_request, "max_new_tokens": n}) for n in counts[1:]]
    requests = [{**whole_request, "resume_token_ids": whole.token_ids[:n]} for n in counts]
    completions = both_ways(pair, requests)
    texts = ["", *(completion.text for completion in so_far)]
    for count, text, completion in zip(counts, texts, completions, strict=True):
        assert completion.token_ids == whole.token_ids[count:]
        assert completion.logprobs == whole.logprobs[count:]
        assert text + completion.text == whole.text
        assert completion.usage.num_output_tokens == 40 - count
    with Client(pair.address) as client:
        nothing = client.generate(**whole_request, resume_token_ids=whole.token_ids)
    assert nothing.token_ids == ()
    assert nothing.finish_reason is FinishReason.LENGTH
