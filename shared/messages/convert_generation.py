"""GenerateResponse <-> the dataclasses of shared/generation.py."""

from __future__ import annotations

from coppice.v1 import generation_pb2 as pb
from shared.errors import InvalidArgumentError
from shared.messages import FinishReason, generation
from shared.messages.convert_tree import (
    logprob_from_proto,
    logprob_to_proto,
    stage_from_proto,
    stage_to_proto,
)


def event_to_proto(event: generation.GenerateEvent) -> pb.GenerateResponse:
    """Convert one event of a Generate stream."""
    match event:
        case generation.PromptInfo():
            return pb.GenerateResponse(prompt_info=_prompt_info_to_proto(event))
        case generation.TokenDelta():
            return pb.GenerateResponse(delta=_delta_to_proto(event))
        case generation.FinishInfo():
            return pb.GenerateResponse(finish=_finish_to_proto(event))


def event_from_proto(response: pb.GenerateResponse) -> generation.GenerateEvent:
    """Convert one event of a Generate stream.

    Raises: InvalidArgumentError if the event is of a kind that this version does not know.
    """
    match response.WhichOneof("event"):
        case "prompt_info":
            return _prompt_info_from_proto(response.prompt_info)
        case "delta":
            return _delta_from_proto(response.delta)
        case "finish":
            return _finish_from_proto(response.finish)
        case _:
            raise InvalidArgumentError("the event is absent or unknown", field="event")


def _prompt_info_to_proto(info: generation.PromptInfo) -> pb.PromptInfo:
    return pb.PromptInfo(
        request_id=info.request_id,
        model=info.model,
        num_prompt_tokens=info.num_prompt_tokens,
        num_cached_tokens=info.num_cached_tokens,
        seed=info.seed,
        model_fingerprint=info.model_fingerprint,
    )


def _prompt_info_from_proto(message: pb.PromptInfo) -> generation.PromptInfo:
    return generation.PromptInfo(
        request_id=message.request_id,
        model=message.model,
        num_prompt_tokens=message.num_prompt_tokens,
        num_cached_tokens=message.num_cached_tokens,
        seed=message.seed,
        model_fingerprint=message.model_fingerprint,
    )


def _delta_to_proto(delta: generation.TokenDelta) -> pb.TokenDelta:
    return pb.TokenDelta(
        token_offset=delta.token_offset,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=[logprob_to_proto(value) for value in delta.logprobs],
        num_accepted_drafts=delta.num_accepted_drafts,
        num_accepted_draft_chars=delta.num_accepted_draft_chars,
    )


def _delta_from_proto(message: pb.TokenDelta) -> generation.TokenDelta:
    return generation.TokenDelta(
        token_offset=message.token_offset,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=tuple(logprob_from_proto(value) for value in message.logprobs),
        num_accepted_drafts=message.num_accepted_drafts,
        num_accepted_draft_chars=message.num_accepted_draft_chars,
    )


def _finish_to_proto(finish: generation.FinishInfo) -> pb.FinishInfo:
    stop = finish.matched_stop
    stats = finish.speculation
    return pb.FinishInfo(
        reason=pb.FinishReason.Name(finish.reason),
        stop_token_id=stop if isinstance(stop, int) else None,
        stop_string=stop if isinstance(stop, str) else None,
        usage=pb.Usage(
            num_prompt_tokens=finish.usage.num_prompt_tokens,
            num_output_tokens=finish.usage.num_output_tokens,
            num_cached_tokens=finish.usage.num_cached_tokens,
        ),
        speculation=pb.SpeculationStats(
            num_rounds=stats.num_rounds,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_drafts=stats.num_accepted_drafts,
            accept_length=stats.accept_length,
            accept_length_histogram=stats.accept_length_histogram,
            num_root_only_rounds=stats.num_root_only_rounds,
            num_moved_rounds=stats.num_moved_rounds,
        ),
        timings=pb.Timings(
            queue_ms=finish.timings.queue_ms,
            time_to_first_token_ms=finish.timings.time_to_first_token_ms,
            total_ms=finish.timings.total_ms,
            mean_draft_wait_ms=finish.timings.mean_draft_wait_ms,
            mean_verify_ms=finish.timings.mean_verify_ms,
        ),
        retries=finish.retries,
        round_times=[
            pb.RoundTimes(
                round_idx=times.round_idx,
                begin_ns=times.begin_ns,
                stages=map(stage_to_proto, times.stages),
            )
            for times in finish.round_times
        ],
    )


def _finish_from_proto(message: pb.FinishInfo) -> generation.FinishInfo:
    matched = message.WhichOneof("matched_stop")
    stats = message.speculation
    timings = message.timings
    try:
        reason = FinishReason(message.reason)
    except ValueError:
        raise InvalidArgumentError(
            f"reason has the unknown value {message.reason}; the server is newer than this client",
            field="finish.reason",
        ) from None
    return generation.FinishInfo(
        reason=reason,
        matched_stop=None if matched is None else getattr(message, matched),
        usage=generation.Usage(
            num_prompt_tokens=message.usage.num_prompt_tokens,
            num_output_tokens=message.usage.num_output_tokens,
            num_cached_tokens=message.usage.num_cached_tokens,
        ),
        speculation=generation.SpeculationStats(
            num_rounds=stats.num_rounds,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_drafts=stats.num_accepted_drafts,
            accept_length_histogram=tuple(stats.accept_length_histogram),
            num_root_only_rounds=stats.num_root_only_rounds,
            num_moved_rounds=stats.num_moved_rounds,
        ),
        timings=generation.Timings(
            queue_ms=timings.queue_ms,
            time_to_first_token_ms=timings.time_to_first_token_ms,
            total_ms=timings.total_ms,
            mean_draft_wait_ms=timings.mean_draft_wait_ms,
            mean_verify_ms=timings.mean_verify_ms,
        ),
        retries=message.retries,
        round_times=tuple(
            generation.RoundTimes(
                round_idx=times.round_idx,
                begin_ns=times.begin_ns,
                stages=tuple(map(stage_from_proto, times.stages)),
            )
            for times in message.round_times
        ),
    )
