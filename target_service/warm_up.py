"""Have a GPU compile every kernel of a step before the first request comes.

A kernel is compiled at its first launch, for seconds. So the engine serves a few requests that
between them use everything a request can ask for; nothing of them remains.
"""

from __future__ import annotations

from typing import Any

from shared.messages import (
    AcceptedPath,
    Credit,
    CreditUpdate,
    FinishReason,
    SamplingParams,
    StoppingParams,
    TargetClose,
    TargetOpen,
    TokenTree,
    VerifyRound,
)
from shared.rpc.engine import will_have_work
from target_service.engine import TargetEngine

_SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.0, top_k=8, top_p=0.9, min_p=0.01, seed=2),
    SamplingParams(
        repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, logit_bias=((0, 1.0),)
    ),
)
_PROMPT = (0, 1, 2)
_MAX_NEW_TOKENS = 12
# Longest that a request of these gets, and the nodes of its tree.
NUM_TOKENS = len(_PROMPT) + _MAX_NEW_TOKENS + 3


def warm_up(engine: TargetEngine) -> None:
    """Serve requests of every kind: prefill, a bushy tree, rounds by credit. Graphs of all row
    counts are there: this compiles what is in none of them.

    Mutates: nothing that outlives it but the counters of the engine's load.
    """
    for i, sampling in enumerate(_SAMPLINGS):
        engine.submit(
            TargetOpen(
                request_id=f"warm-up {i}",
                target_epoch=0,
                token_ids=_PROMPT,
                num_prompt_tokens=len(_PROMPT),
                sampling=sampling,
                stopping=StoppingParams(
                    max_new_tokens=_MAX_NEW_TOKENS,
                    min_new_tokens=_MAX_NEW_TOKENS,
                    stop_token_ids=(0,),
                ),
                logprobs=i % 2 == 0,
                top_logprobs=i,
                wants_features=True,
                wants_routed_experts=i == 0 and engine.info.num_experts > 0,
            )
        )
    while will_have_work(engine):
        paths = [output for output in engine.step() if isinstance(output, AcceptedPath)]
        for path in paths:
            if path.finish_reason is FinishReason.NONE:
                engine.submit(_next(path))
    assert engine.load.num_running == engine.load.num_waiting == 0
    engine.check_integrity()


def _next(path: AcceptedPath) -> Any:
    """Return what to do after a round: a tree, then rounds without orders, then the end."""
    if path.round_idx == 0:
        tree = TokenTree(
            request_id=path.request_id,
            target_epoch=0,
            draft_epoch=0,
            round_idx=1,
            seq_len=path.seq_len,
            token_ids=(path.token_ids[-1], 0, 1),
            parent_index=(-1, 0, 0),
        )
        return VerifyRound(
            request_id=path.request_id,
            target_epoch=0,
            round_idx=1,
            seq_len=path.seq_len,
            root_token_id=path.token_ids[-1],
            tree=tree,
        )
    if path.round_idx < 3:
        return CreditUpdate(
            request_id=path.request_id, target_epoch=0, credit=Credit(until_round_idx=3)
        )
    return TargetClose(request_id=path.request_id, target_epoch=0)
