"""Hypothesis strategies for every value that crosses the wire."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

import shared.messages as types
from shared.messages import MIN_TEMPERATURE

request_ids = st.text(min_size=1, max_size=40)
epochs = st.integers(0, 2**31 - 1)
token_ids = st.integers(0, 2**31 - 1)
counts = st.integers(0, 2**31 - 1)


def floats(low: float, high: float, **more: Any) -> st.SearchStrategy[float]:
    """Floats that survive the wire's float32."""
    return st.floats(low, high, width=32, **more)


def ids(*, min_size: int = 0, max_size: int = 40) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(token_ids, min_size=min_size, max_size=max_size).map(tuple)


sampling = st.builds(
    types.SamplingParams,
    temperature=st.just(0.0) | floats(MIN_TEMPERATURE, 100),
    top_p=floats(0, 1, exclude_min=True),
    min_p=floats(0, 1),
    top_k=counts,
    repetition_penalty=floats(0, 10, exclude_min=True),
    presence_penalty=floats(-2, 2),
    frequency_penalty=floats(-2, 2),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(token_ids, floats(-100, 100), max_size=5).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
)
stopping = st.builds(
    types.StoppingParams,
    max_new_tokens=st.integers(1, 2**31 - 1),
    min_new_tokens=counts,
    stop_token_ids=ids(),
)
logprob = st.builds(
    types.TokenLogprob,
    token_id=token_ids,
    logprob=floats(-1000, 0),
    top=st.lists(st.tuples(token_ids, floats(-1000, 0)), max_size=4).map(tuple),
)

times_ns = st.integers(0, 2**64 - 1)
stages = st.builds(types.StageTime, name=st.text(max_size=20), end_ns=times_ns)
answer_times = st.builds(
    types.AnswerTimes,
    clock_id=times_ns,
    begin_ns=times_ns,
    stages=st.lists(stages, max_size=4).map(tuple),
)


@st.composite
def trees(draw: st.DrawFn) -> types.TokenTree:
    num_nodes = draw(st.integers(1, types.MAX_TREE_NODES))
    return types.TokenTree(
        request_id=draw(request_ids),
        target_epoch=draw(epochs),
        draft_epoch=draw(epochs),
        round_idx=draw(counts),
        seq_len=draw(counts),
        token_ids=draw(ids(min_size=num_nodes, max_size=num_nodes)),
        parent_index=(-1, *(draw(st.integers(0, node)) for node in range(num_nodes - 1))),
        cumulative_logprobs=draw(
            st.just(())
            | st.lists(floats(-1000, 0), min_size=num_nodes, max_size=num_nodes).map(tuple)
        ),
        times=draw(st.none() | answer_times),
    )


@st.composite
def tree_batches(draw: st.DrawFn) -> types.TreeBatch:
    num_nodes = draw(st.lists(st.integers(1, types.MAX_TREE_NODES), min_size=1, max_size=4))
    count, total = len(num_nodes), sum(num_nodes)
    column = st.lists(counts, min_size=count, max_size=count)
    return types.TreeBatch(
        request_ids=draw(st.lists(request_ids, min_size=count, max_size=count)),
        target_epochs=draw(column),
        draft_epochs=draw(column),
        round_idx=draw(column),
        seq_lens=draw(column),
        num_nodes=num_nodes,
        token_ids=draw(st.lists(token_ids, min_size=total, max_size=total)),
        parent_index=draw(st.lists(st.integers(-1, 63), min_size=total, max_size=total)),
        times=draw(st.dictionaries(st.integers(0, count - 1), answer_times)),
        is_overlapped=draw(st.booleans()),
        num_targets=draw(counts),
    )


@st.composite
def round_trees(draw: st.DrawFn) -> types.RoundTree:
    num_nodes = draw(st.integers(1, 12))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, num_nodes))]
    accepted = [draw(st.integers(0, num_nodes - 1))]
    while accepted[0]:
        accepted.insert(0, parents[accepted[0]])
    texts = st.lists(st.text(max_size=4), min_size=num_nodes + 1, max_size=num_nodes + 1)
    return types.RoundTree(
        token_ids=draw(ids(min_size=num_nodes, max_size=num_nodes)),
        parent_index=tuple(parents),
        accept_index=tuple(accepted),
        bonus_token_id=draw(token_ids),
        texts=draw(st.just(()) | texts.map(tuple)),
    )


@st.composite
def routed_experts(draw: st.DrawFn, num_tokens: int | None = None) -> types.RoutedExperts:
    num_layers, top_k = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_experts = draw(st.sampled_from([1, 8, 256, 257, 65536]))
    count = draw(st.integers(1, 4)) if num_tokens is None else num_tokens
    size = count * num_layers * top_k * (1 if num_experts <= 256 else 2)
    return types.RoutedExperts(
        ids=draw(st.binary(min_size=size, max_size=size)),
        num_layers=num_layers,
        top_k=top_k,
        num_experts=num_experts,
    )


@st.composite
def accepted_paths(draw: st.DrawFn) -> types.AcceptedPath:
    length = draw(st.integers(0, 17))
    return types.AcceptedPath(
        request_id=draw(request_ids),
        target_epoch=draw(epochs),
        round_idx=draw(counts),
        seq_len=draw(counts),
        accept_index=draw(ids(min_size=length, max_size=length)),
        token_ids=draw(ids(min_size=length, max_size=length)),
        num_accepted_drafts=draw(counts),
        num_draft_tokens=draw(st.integers(1, 64)),
        logprobs=draw(st.just(()) | st.lists(logprob, min_size=length, max_size=length).map(tuple)),
        finish_reason=draw(st.sampled_from(types.FinishReason)),
        matched_stop_token_id=draw(st.none() | token_ids),
        times=draw(st.none() | answer_times),
        tree=draw(st.none() | round_trees()),
        routed_experts=draw(st.none() | routed_experts(length)),
        is_forced=draw(st.booleans()),
    )


@st.composite
def chunks(draw: st.DrawFn) -> types.FeatureChunk:
    num_rows, width = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    dtype, item_bytes = draw(st.sampled_from([("float32", 4), ("float16", 2), ("bfloat16", 2)]))
    size = num_rows * width * item_bytes
    spans = st.builds(
        types.RingSpan,
        ring=st.from_regex(r"coppice-features-[0-9a-f]{32}", fullmatch=True),
        begin=st.integers(0, 2**63 - 1),
        num_bytes=st.just(size),
    )
    return types.FeatureChunk(
        request_id=draw(request_ids),
        target_epoch=draw(epochs),
        start=draw(counts),
        shape=(num_rows, width),
        dtype=dtype,
        data=draw(st.binary(min_size=size, max_size=size) | spans),
    )


@st.composite
def shapes(draw: st.DrawFn) -> types.TreeShape:
    num_steps, topk = draw(st.integers(1, 16)), draw(st.integers(1, 16))
    most = min(types.MAX_TREE_NODES, 1 + topk + (num_steps - 1) * topk**2)
    return types.TreeShape(
        num_steps=num_steps, topk=topk, num_draft_tokens=draw(st.integers(2, most))
    )


@st.composite
def path_rows(draw: st.DrawFn, num_rows: int | None = None) -> types.PathRows:
    shape = (num_rows or draw(st.integers(1, 8)), draw(st.integers(1, 8)))
    num_bytes = 4 * shape[0] * shape[1]
    span = st.builds(
        types.RingSpan,
        ring=st.from_regex(r"coppice-features-[0-9a-f]{32}", fullmatch=True),
        begin=st.integers(0, 2**63 - 1),
        num_bytes=st.just(num_bytes),
    )
    data = draw(span | st.binary(min_size=num_bytes, max_size=num_bytes))
    return types.PathRows(shape=shape, dtype="float32", data=data)


@st.composite
def path_batches(draw: st.DrawFn) -> types.PathBatch:
    part = st.builds(
        types.PathEntry,
        request_id=request_ids,
        target_epoch=epochs,
        draft_epoch=epochs,
        round_idx=counts,
        seq_len=counts,
        token_ids=ids(min_size=1, max_size=8),
        mailbox_slot=counts,
        round_tag=counts,
    )
    parts = draw(st.lists(part, min_size=1, max_size=4).map(tuple))
    rows = path_rows(sum(len(part.token_ids) for part in parts))
    return types.PathBatch(
        parts=parts,
        shape=draw(shapes()),
        following=draw(st.none() | shapes()),
        rows=draw(st.none() | rows),
    )


peer_trees = st.builds(types.PeerTrees, draft_epoch=epochs, shape=shapes(), adapts=st.booleans())
credits_ = st.builds(
    types.Credit,
    until_round_idx=st.integers(1, 2**31 - 1),
    trees=st.just(types.RootOnly()) | peer_trees,
)


@st.composite
def target_opens(draw: st.DrawFn) -> types.TargetOpen:
    tokens = draw(ids(min_size=1))
    return types.TargetOpen(
        request_id=draw(request_ids),
        target_epoch=draw(epochs),
        token_ids=tokens,
        num_prompt_tokens=draw(st.integers(1, len(tokens))),
        sampling=draw(sampling),
        stopping=draw(stopping),
        logprobs=draw(st.booleans()),
        top_logprobs=draw(st.integers(0, 20)),
        wants_features=draw(st.booleans()),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        is_timed=draw(st.booleans()),
        credit=draw(st.none() | credits_),
        wants_trees=draw(st.booleans()),
        wants_routed_experts=draw(st.booleans()),
    )


loads = st.builds(
    types.WorkerLoad,
    num_running=counts,
    num_waiting=counts,
    num_free_pages=counts,
    num_pages=counts,
    num_steps=st.integers(0, 2**63 - 1),
    num_rows=st.integers(0, 2**63 - 1),
    num_request_steps=st.integers(0, 2**63 - 1),
    num_moved_rounds=st.integers(0, 2**63 - 1),
    num_compiles=st.integers(0, 2**63 - 1),
    num_captures=st.integers(0, 2**63 - 1),
    num_eager_launches=st.integers(0, 2**63 - 1),
    kernel_launches=st.dictionaries(
        st.text(max_size=12), st.integers(0, 2**63 - 1), max_size=3
    ).map(lambda launches: tuple(sorted(launches.items()))),
    counts=st.dictionaries(
        st.text(max_size=12), st.floats(0, 2**53, allow_nan=False), max_size=3
    ).map(lambda counts: tuple(sorted(counts.items()))),
)
feature_specs = st.builds(
    types.FeatureSpec,
    layer_ids=ids(max_size=5),
    width=counts,
    dtype=st.sampled_from(["", "float32", "float16", "bfloat16"]),
    projection=st.text(max_size=64),
)
infos = st.builds(
    types.WorkerInfo,
    incarnation=request_ids,
    model=st.text(max_size=20),
    model_hash=st.text(max_size=64),
    tokenizer_hash=st.text(max_size=64),
    vocab_size=st.integers(1, 2**31 - 1),
    max_context_len=st.integers(1, 2**31 - 1),
    page_size=st.integers(1, 1024),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    device=st.sampled_from(["cpu", "cuda"]),
    features=feature_specs,
    kind=st.sampled_from(["target", "eagle3", "standalone"]),
    load=loads,
    eos_token_ids=ids(max_size=3),
    draft_window=counts,
    feature_ring=st.text(max_size=20),
    peer_socket=st.text(max_size=20),
    peer_address=st.text(max_size=20),
    device_model=st.text(max_size=20),
    versions=st.text(max_size=20),
    cpu_threads=counts,
    logits_hash=st.text(max_size=64),
)
failures = st.builds(
    types.RequestFailure,
    request_id=st.text(max_size=20),
    code=st.integers(1, 16),
    reason=st.text(max_size=20),
    message=st.text(max_size=50),
    field=st.text(max_size=20),
    target_epoch=epochs,
    draft_epoch=epochs,
    round_idx=counts,
)
retractions = st.builds(
    types.RequestRetracted, request_id=request_ids, target_epoch=epochs, draft_epoch=epochs
)
verify_rounds = st.builds(
    types.VerifyRound,
    request_id=request_ids,
    target_epoch=epochs,
    round_idx=st.integers(1, 2**31 - 1),
    seq_len=counts,
    root_token_id=token_ids,
    tree=st.none() | trees(),
)
credit_updates = st.builds(
    types.CreditUpdate, request_id=request_ids, target_epoch=epochs, credit=credits_
)
peer_attaches = st.builds(
    types.PeerAttach,
    request_id=request_ids,
    target_epoch=epochs,
    draft_epoch=epochs,
    has_mailbox=st.booleans(),
    num_tokens=counts,
)
peer_detaches, detached = (
    st.builds(kind, request_id=request_ids, target_epoch=epochs, draft_epoch=epochs)
    for kind in (types.PeerDetach, types.DraftDetached)
)
rows_offers = st.builds(
    types.RowsOffer,
    handle=st.binary(min_size=64, max_size=64),
    gpu=st.text(min_size=1, max_size=64),
    num_bytes=st.integers(1, 2**63 - 1),
)
rows_answers = st.builds(types.RowsAnswer, is_taken=st.booleans())
rests = st.builds(
    types.DraftRest,
    request_id=request_ids,
    target_epoch=epochs,
    draft_epoch=epochs,
    is_resting=st.booleans(),
)
target_closes = st.builds(types.TargetClose, request_id=request_ids, target_epoch=epochs)
admissions = st.builds(
    types.TargetAdmitted,
    request_id=request_ids,
    target_epoch=epochs,
    num_cached_tokens=counts,
    times=st.none() | answer_times,
)
subscribes = st.builds(
    types.FeatureSubscribe,
    request_id=request_ids,
    target_epoch=epochs,
    from_position=counts,
    draft_epoch=epochs,
    ring_nonce=st.binary(max_size=16),
)
acks = st.builds(types.FeatureAck, request_id=request_ids, target_epoch=epochs, position=counts)
unsubscribes = st.builds(types.FeatureUnsubscribe, request_id=request_ids, target_epoch=epochs)
draft_opens = st.builds(
    types.DraftOpen,
    request_id=request_ids,
    target_epoch=epochs,
    draft_epoch=epochs,
    target_address=st.text(min_size=1, max_size=30),
    token_ids=ids(min_size=1),
    sampling=sampling,
    is_timed=st.booleans(),
    target_socket=st.text(max_size=20),
    target_peer_address=st.text(max_size=20),
)
draft_rounds = st.builds(
    types.DraftRound,
    request_id=request_ids,
    target_epoch=epochs,
    draft_epoch=epochs,
    round_idx=counts,
    seq_len=counts,
    token_offset=counts,
    token_ids=ids(),
    shape=shapes(),
    unless_attached=st.booleans(),
)
stats = st.builds(
    types.SpeculationStats,
    num_rounds=counts,
    num_draft_tokens=counts,
    num_accepted_drafts=counts,
    accept_length_histogram=ids(max_size=6),
    num_root_only_rounds=counts,
    num_moved_rounds=counts,
)
milliseconds = st.floats(0, 1e9)
timings = st.builds(
    types.Timings,
    queue_ms=milliseconds,
    time_to_first_token_ms=milliseconds,
    total_ms=milliseconds,
    mean_draft_wait_ms=milliseconds,
    mean_verify_ms=milliseconds,
)
usages = st.builds(
    types.Usage, num_prompt_tokens=counts, num_output_tokens=counts, num_cached_tokens=counts
)
round_times = st.builds(
    types.RoundTimes,
    round_idx=counts,
    begin_ns=times_ns,
    stages=st.lists(stages, max_size=4).map(tuple),
)
prompt_infos = st.builds(
    types.PromptInfo,
    model_fingerprint=st.text(max_size=64),
    request_id=request_ids,
    model=st.text(max_size=20),
    num_prompt_tokens=counts,
    num_cached_tokens=counts,
    seed=st.integers(0, 2**64 - 1),
)
deltas = st.builds(
    types.TokenDelta,
    token_offset=counts,
    token_ids=ids(max_size=6),
    text=st.text(max_size=20),
    logprobs=st.lists(logprob, max_size=3).map(tuple),
    num_accepted_drafts=counts,
    num_accepted_draft_chars=counts,
    tree=st.none() | round_trees(),
    routed_experts=st.none() | routed_experts(),
)
finishes = st.builds(
    types.FinishInfo,
    reason=st.sampled_from(types.FinishReason),
    matched_stop=st.none() | token_ids | st.text(max_size=8),
    usage=usages,
    speculation=stats,
    timings=timings,
    retries=counts,
    round_times=st.lists(round_times, max_size=3).map(tuple),
)
draft_closes = st.builds(types.DraftClose, request_id=request_ids, draft_epoch=epochs)

BY_TYPE: dict[type[Any], st.SearchStrategy[Any]] = {
    types.SamplingParams: sampling,
    types.StoppingParams: stopping,
    types.TokenLogprob: logprob,
    types.AnswerTimes: answer_times,
    types.TokenTree: trees(),
    types.TreeBatch: tree_batches(),
    types.AcceptedPath: accepted_paths(),
    types.RequestFailure: failures,
    types.RequestRetracted: retractions,
    types.WorkerLoad: loads,
    types.WorkerInfo: infos,
    types.TargetOpen: target_opens(),
    types.TargetAdmitted: admissions,
    types.VerifyRound: verify_rounds,
    types.Credit: credits_,
    types.CreditUpdate: credit_updates,
    types.TargetClose: target_closes,
    types.FeatureSpec: feature_specs,
    types.FeatureChunk: chunks(),
    types.FeatureSubscribe: subscribes,
    types.FeatureAck: acks,
    types.FeatureUnsubscribe: unsubscribes,
    types.PathBatch: path_batches(),
    types.DraftDetached: detached,
    types.DraftRest: rests,
    types.PeerAttach: peer_attaches,
    types.PeerDetach: peer_detaches,
    types.RowsOffer: rows_offers,
    types.RowsAnswer: rows_answers,
    types.DraftOpen: draft_opens,
    types.DraftRound: draft_rounds,
    types.DraftClose: draft_closes,
    types.RootOnly: st.just(types.RootOnly()),
    types.PeerTrees: peer_trees,
    types.PathRows: path_rows(),
    types.PromptInfo: prompt_infos,
    types.TokenDelta: deltas,
    types.FinishInfo: finishes,
    types.Usage: usages,
    types.SpeculationStats: stats,
    types.Timings: timings,
    types.RoundTimes: round_times,
    types.RoundTree: round_trees(),
    types.RoutedExperts: routed_experts(),
}
