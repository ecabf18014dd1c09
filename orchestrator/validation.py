"""GenerateRequest -> GenerationRequest: bad input is refused here, by the name of its field."""

from __future__ import annotations

import dataclasses
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.v1 import generation_pb2 as pb
from orchestrator.structured_output import parse_grammar
from shared.errors import InvalidArgumentError
from shared.grammar.source import Grammar
from shared.messages import (
    MAX_TOP_LOGPROBS,
    SamplingParams,
    TreeShape,
    check_shape,
    from_proto,
)
from shared.messages.fields import Within, require_ids, require_range

MAX_REQUEST_ID_LEN = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LEN = 256
# Small enough to be exact in JSON and in a float.
_SEED_BITS = 53


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a request must fit into.

    Args:
        max_context_len: Longest sequence, prompt and output.
        default_shape: Tree shape of requests that do not choose one.
    """

    vocab_size: int
    max_context_len: int
    default_shape: TreeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request that can be served.

    Args:
        text: The prompt, or None if `prompt_ids` came from the client.
        prompt_ids: The prompt; empty until `text` is tokenized.
        sampling: Resolved, seed included.
        max_new_tokens: None = up to the context length.
        shape: Tree shape, or None when speculation is off.
        requires_draft: Speculation is ON: a draft worker must be configured.
        round_times: The client wants to know where each round's time goes.
        round_trees: The client wants to see the tree of every round.
        routed_experts: The client wants to know which experts the model chose for every token.
        is_traced: Its trace has spans of rounds.
        resume_fingerprint: What `resume_ids` were computed by; "" if the client does not say.
        num_refusals: How often it was refused for want of room.
        adds_special: Tokenize `text` with the special tokens that the tokenizer adds by itself.
        keeps_special: Special tokens are spelled in the text.
        grammar: Of the output; None: it is free.
        compiled_grammar: What workers get of it, once it is compiled.
        tenant: Whose it is; "" if nobody says.
    """

    request_id: str
    text: str | None = None
    prompt_ids: tuple[int, ...] = ()
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False
    shape: TreeShape | None = None
    requires_draft: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    omit_text: bool = False
    omit_token_ids: bool = False
    round_times: bool = False
    round_trees: bool = False
    routed_experts: bool = False
    is_traced: bool = False
    priority: int = 0
    session_id: str = ""
    resume_ids: tuple[int, ...] = ()
    resume_fingerprint: str = ""
    num_refusals: int = 0
    adds_special: bool = True
    keeps_special: bool = False
    grammar: Grammar | None = None
    compiled_grammar: bytes = b""
    tenant: str = ""

    @property
    def is_timed(self) -> bool:
        """Return whether workers say where the time of its rounds goes."""
        return self.round_times or self.is_traced


def parse_request(message: pb.GenerateRequest, limits: ModelLimits) -> GenerationRequest:
    """Check a request and resolve its defaults; a text prompt still has to be tokenized.

    Raises: InvalidArgumentError naming the field to blame.
    """
    text, prompt_ids = _prompt(message, limits)
    with Within("sampling"):
        sampling: SamplingParams = from_proto(message.sampling)
        if not message.sampling.HasField("seed"):
            sampling = dataclasses.replace(sampling, seed=secrets.randbits(_SEED_BITS))
        check_vocabulary(
            [token_id for token_id, _ in sampling.logit_bias], limits.vocab_size, field="logit_bias"
        )
    stopping = message.stopping
    max_new_tokens = None
    if stopping.HasField("max_new_tokens"):
        max_new_tokens = require_range(stopping.max_new_tokens, "stopping.max_new_tokens", 1)
    resume_ids = tuple(message.resume_token_ids.ids)
    check_vocabulary(resume_ids, limits.vocab_size, field="resume_token_ids")
    if max_new_tokens is not None and len(resume_ids) > max_new_tokens:
        raise InvalidArgumentError(
            f"resume_token_ids holds {len(resume_ids)} tokens, more than max_new_tokens = "
            f"{max_new_tokens}; they count as output, so resend the original max_new_tokens",
            field="resume_token_ids",
        )
    mode = _speculation_mode(message.speculation)
    return GenerationRequest(
        request_id=_request_id(message.request_id),
        text=text,
        prompt_ids=prompt_ids,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        min_new_tokens=_min_new_tokens(stopping, max_new_tokens),
        stop_strings=_stop_strings(stopping),
        stop_token_ids=check_vocabulary(
            stopping.stop_token_ids, limits.vocab_size, field="stopping.stop_token_ids"
        ),
        ignore_eos=stopping.ignore_eos,
        include_stop_in_output=stopping.include_stop_in_output,
        shape=_shape(message.speculation, mode, limits.default_shape),
        requires_draft=mode == pb.SPECULATION_MODE_ON,
        logprobs=message.output.logprobs,
        top_logprobs=_top_logprobs(message.output),
        omit_text=message.output.omit_text,
        omit_token_ids=message.output.omit_token_ids,
        round_times=message.output.round_times,
        round_trees=message.output.round_trees,
        routed_experts=message.output.routed_experts,
        priority=message.priority,
        session_id=_short(message.session_id, "session_id"),
        resume_ids=resume_ids,
        resume_fingerprint=_short(message.resume_fingerprint, "resume_fingerprint"),
        num_refusals=message.num_refusals,
        adds_special=message.add_special_tokens or not message.HasField("add_special_tokens"),
        keeps_special=message.output.keep_special_tokens,
        grammar=parse_grammar(message),
    )


def with_prompt(
    request: GenerationRequest, prompt_ids: Sequence[int], limits: ModelLimits
) -> GenerationRequest:
    """Return the request with its tokenized prompt, checked against the context length."""
    prompt_ids = tuple(prompt_ids)
    field = "token_ids" if request.text is None else "text"
    if not prompt_ids:
        raise InvalidArgumentError(f"{field} gives no token at all; send at least one", field=field)
    check_vocabulary(prompt_ids, limits.vocab_size, field=field)
    _check_fits(len(prompt_ids), limits, field=field)
    if len(prompt_ids) + len(request.resume_ids) > limits.max_context_len:
        raise InvalidArgumentError(
            f"prompt and resume_token_ids have {len(prompt_ids) + len(request.resume_ids)} tokens,"
            f" the context {limits.max_context_len}; they cannot come from this model",
            reason="PROMPT_TOO_LONG",
            field="resume_token_ids",
        )
    return dataclasses.replace(request, prompt_ids=prompt_ids)


def _prompt(message: pb.GenerateRequest, limits: ModelLimits) -> tuple[str | None, tuple[int, ...]]:
    match message.WhichOneof("prompt"):
        case "text":
            if not message.text:
                raise InvalidArgumentError("text is empty; send a prompt", field="text")
            return message.text, ()
        case "token_ids":
            _check_fits(len(message.token_ids.ids), limits, field="token_ids")
            ids = require_ids(message.token_ids.ids, "token_ids", at_least=1)
            return None, check_vocabulary(ids, limits.vocab_size, field="token_ids")
        case _:
            raise InvalidArgumentError(
                "there is no prompt; set either text or token_ids", field="prompt"
            )


def _check_fits(num_tokens: int, limits: ModelLimits, *, field: str) -> None:
    if num_tokens >= limits.max_context_len:
        raise InvalidArgumentError(
            f"the prompt has {num_tokens} tokens, the context {limits.max_context_len}; "
            "shorten it so that at least one token can follow",
            reason="PROMPT_TOO_LONG",
            field=field,
        )


def _request_id(request_id: str) -> str:
    return _short(request_id, "request_id") or uuid.uuid4().hex


def _short(value: str, field: str) -> str:
    if len(value) > MAX_REQUEST_ID_LEN:
        raise InvalidArgumentError(
            f"{field} has {len(value)} characters, at most {MAX_REQUEST_ID_LEN} are allowed",
            field=field,
        )
    if value and not value.isprintable():
        raise InvalidArgumentError(
            f"{field} holds unprintable characters; use letters, digits and punctuation",
            field=field,
        )
    return value


def _min_new_tokens(stopping: pb.StoppingCriteria, max_new_tokens: int | None) -> int:
    min_new_tokens = require_range(stopping.min_new_tokens, "stopping.min_new_tokens", 0)
    if max_new_tokens is not None and min_new_tokens > max_new_tokens:
        raise InvalidArgumentError(
            f"min_new_tokens is {min_new_tokens}, must be at most max_new_tokens = "
            f"{max_new_tokens}",
            field="stopping.min_new_tokens",
        )
    return min_new_tokens


def _stop_strings(stopping: pb.StoppingCriteria) -> tuple[str, ...]:
    field = "stopping.stop_strings"
    if len(stopping.stop_strings) > MAX_STOP_STRINGS:
        raise InvalidArgumentError(
            f"there are {len(stopping.stop_strings)} stop strings, at most {MAX_STOP_STRINGS} "
            "are allowed",
            field=field,
        )
    for index, value in enumerate(stopping.stop_strings):
        if not 1 <= len(value) <= MAX_STOP_STRING_LEN:
            raise InvalidArgumentError(
                f"stop_strings[{index}] has {len(value)} characters, must have "
                f"1..{MAX_STOP_STRING_LEN}",
                field=field,
            )
    return tuple(stopping.stop_strings)


def _top_logprobs(output: pb.OutputOptions) -> int:
    field = "output.top_logprobs"
    top_logprobs = require_range(output.top_logprobs, field, 0, MAX_TOP_LOGPROBS)
    if top_logprobs and not output.logprobs:
        raise InvalidArgumentError("top_logprobs needs logprobs; set it as well", field=field)
    return top_logprobs


def _speculation_mode(options: pb.SpeculationOptions) -> int:
    if options.mode not in pb.SpeculationMode.values():
        raise InvalidArgumentError(
            f"mode has the unknown value {options.mode}; use AUTO, OFF or ON",
            field="speculation.mode",
        )
    return options.mode


def _shape(options: pb.SpeculationOptions, mode: int, default: TreeShape) -> TreeShape | None:
    """Return the tree shape; a default size gives way to explicit depth and width."""
    shape = TreeShape(
        num_steps=options.num_steps if options.HasField("num_steps") else default.num_steps,
        topk=options.topk if options.HasField("topk") else default.topk,
        num_draft_tokens=options.num_draft_tokens
        if options.HasField("num_draft_tokens")
        else default.num_draft_tokens,
    )
    if not options.HasField("num_draft_tokens") and shape.num_steps > 0 and shape.topk > 0:
        most = shape.max_num_draft_tokens
        shape = dataclasses.replace(shape, num_draft_tokens=min(shape.num_draft_tokens, most))
    check_shape(shape)
    return None if mode == pb.SPECULATION_MODE_OFF else shape


def check_vocabulary(ids: Sequence[int], vocab_size: int, *, field: str) -> tuple[int, ...]:
    """Return ids as a tuple.

    Raises: InvalidArgumentError naming the first one that is not in the vocabulary.
    """
    ids = tuple(ids)
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        index = next(i for i, value in enumerate(ids) if not 0 <= value < vocab_size)
        raise InvalidArgumentError(
            f"{field} holds id {ids[index]} at index {index}; the vocabulary has ids "
            f"0..{vocab_size - 1}",
            reason="TOKEN_OUT_OF_VOCABULARY",
            field=field,
        )
    return ids
