"""Keywords of a request -> GenerateRequest. Ranges are the server's to check."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from google.protobuf.descriptor import FieldDescriptor

from coppice.structured_output import structured_output
from coppice.v1 import generation_pb2 as pb
from shared.errors import InvalidArgumentError

DEFAULT_MAX_NEW_TOKENS = 256


class RequestOptions(TypedDict, total=False):
    """Keywords of `Client.generate` and `Client.stream`; those not given are the server's choice.

    Args:
        token_ids: Prompt as token ids, instead of text.
        temperature: 0 = greedy, the default.
        seed: Chosen by the server when absent; the result says it.
        logit_bias: Token id -> value added to its logit.
        max_new_tokens: Default: 256; None = up to the context length.
        stop_strings: Where to stop; cut from the output unless include_stop_in_output.
        json_schema: The output is JSON of this schema: a dict, its text, or a pydantic model.
            At most one of json_schema, regex, ebnf, choice and structural_tag may be given.
        regex: The whole output is matched by it.
        ebnf: The output is of this grammar, in GBNF, from its rule `root` on.
        choice: The output is one of these texts.
        structural_tag: Free text with parts that have grammars: a dict, or its JSON.
        speculation: None = when a draft is available, False = never, True = fail without a draft.
            The output does not depend on it, nor on the three sizes of the tree.
        num_steps: Tree depth without the root.
        topk: Children kept per expanded node.
        num_draft_tokens: Nodes verified per round, root included.
        logprobs: Ask for the log-probability of every output token.
        top_logprobs: Most likely alternatives per token; needs logprobs.
        omit_text: Ask for token ids only.
        keep_special_tokens: Spell special tokens in the text.
        add_special_tokens: False: the prompt has its special tokens already, as a rendered chat
            template has.
        round_times: Have FinishInfo say where every round's time went.
        round_trees: Have every TokenDelta bring the tree of its round.
        routed_experts: Have the result, and every TokenDelta, say which experts the model chose for
            each output token; refused if the model has none.
        priority: Larger is served sooner when requests wait.
        session_id: Name of a conversation, whose requests prefer the target that had the last one.
            It saves no reading of prompts: targets keep nothing of a request that has ended.
        request_id: Name of the request, in logs too; made up by the server when absent.
        resume_token_ids: Output that is there already; goes on exactly after it.
        resume_fingerprint: `model_fingerprint` of the PromptInfo under which that output came: a
            server that computes with anything else refuses.
        timeout_s: Deadline of the whole request, seconds.
    """

    token_ids: Sequence[int] | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    max_new_tokens: int | None
    min_new_tokens: int
    stop_strings: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_in_output: bool
    json_schema: Mapping[str, Any] | type[Any] | str | bool | None
    regex: str | None
    ebnf: str | None
    choice: Sequence[str] | None
    structural_tag: Mapping[str, Any] | str | None
    speculation: bool | None
    num_steps: int
    topk: int
    num_draft_tokens: int
    logprobs: bool
    top_logprobs: int
    omit_text: bool
    keep_special_tokens: bool
    add_special_tokens: bool
    round_times: bool
    round_trees: bool
    routed_experts: bool
    priority: int
    session_id: str
    request_id: str
    resume_token_ids: Sequence[int]
    resume_fingerprint: str
    timeout_s: float | None


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logit_bias",
)
_STOPPING = (
    "max_new_tokens",
    "min_new_tokens",
    "stop_strings",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_in_output",
)
_SHAPE = ("num_steps", "topk", "num_draft_tokens")
_OUTPUT = (
    "logprobs",
    "top_logprobs",
    "omit_text",
    "keep_special_tokens",
    "round_times",
    "round_trees",
    "routed_experts",
)
_REQUEST = ("priority", "session_id", "request_id", "resume_fingerprint", "add_special_tokens")
_MODES = {
    None: pb.SPECULATION_MODE_AUTO,
    False: pb.SPECULATION_MODE_OFF,
    True: pb.SPECULATION_MODE_ON,
}

_MISFITS = (TypeError, ValueError, OverflowError)
# (path of the field, message, keyword -> its name there)
_PARTS: tuple[tuple[str, Any, Mapping[str, str]], ...] = (
    ("", pb.GenerateRequest, {"prompt": "text", **{name: name for name in _REQUEST}}),
    ("", pb.TokenIds, {"token_ids": "ids", "resume_token_ids": "ids"}),
    ("sampling.", pb.SamplingParams, {name: name for name in _SAMPLING}),
    ("stopping.", pb.StoppingCriteria, {name: name for name in _STOPPING}),
    ("speculation.", pb.SpeculationOptions, {name: name for name in _SHAPE}),
    ("output.", pb.OutputOptions, {name: name for name in _OUTPUT}),
)
_EXPECTED = {
    FieldDescriptor.CPPTYPE_INT32: "a whole number of -2^31 to 2^31 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "a whole number of 0 to 2^64 - 1",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_STRING: "a text that UTF-8 can hold",
    FieldDescriptor.CPPTYPE_MESSAGE: "a token id -> a number",  # logit_bias
}


def build_request(prompt: str | None, options: RequestOptions) -> pb.GenerateRequest:
    """Build the message of a request.

    Raises: TypeError for an unknown keyword, InvalidArgumentError for values that no message can
        hold and unless there is exactly one prompt.
    """
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown keyword {min(unknown)!r}")
    options = {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS, **options}
    token_ids = options.get("token_ids")
    if (prompt is None) == (token_ids is None):
        raise InvalidArgumentError("give either a prompt or token_ids", field="prompt")
    if not isinstance(prompt, str | None):
        raise InvalidArgumentError("a prompt is a str; ids are token_ids=[..]", field="prompt")

    try:
        mode = _MODES[options.get("speculation")]
    except (KeyError, TypeError):
        raise InvalidArgumentError(
            "speculation must be None, True or False", field="speculation"
        ) from None

    stops = options.get("stop_strings")
    if isinstance(stops, str):  # protobuf would take each of its characters
        raise InvalidArgumentError(
            f"stop_strings is {reprlib.repr(stops)}, expected a list of texts",
            field="stopping.stop_strings",
        )

    def given(names: Sequence[str]) -> dict[str, object]:
        return {name: options[name] for name in names if options.get(name) is not None}  # type: ignore[literal-required]

    try:
        return pb.GenerateRequest(
            text=prompt,
            token_ids=None if token_ids is None else pb.TokenIds(ids=token_ids),
            sampling=pb.SamplingParams(**given(_SAMPLING)),  # type: ignore[arg-type]
            stopping=pb.StoppingCriteria(**given(_STOPPING)),  # type: ignore[arg-type]
            speculation=pb.SpeculationOptions(
                mode=mode,
                **given(_SHAPE),  # type: ignore[arg-type]
            ),
            output=pb.OutputOptions(**given(_OUTPUT)),  # type: ignore[arg-type]
            structured_output=structured_output(options),
            resume_token_ids=pb.TokenIds(ids=options.get("resume_token_ids", ())),
            **given(_REQUEST),  # type: ignore[arg-type]
        )
    except _MISFITS as error:
        raise _misfit({**options, "prompt": prompt}) or InvalidArgumentError(
            f"a value does not fit the request: {error}"
        ) from error


def _misfit(values: Mapping[str, Any]) -> InvalidArgumentError | None:
    """Return the error of the first value that its field cannot hold, if one is to blame."""
    for prefix, kind, names in _PARTS:
        for name, field_name in names.items():
            field = kind.DESCRIPTOR.fields_by_name[field_name]
            value = values.get(name)
            try:
                kind(**{field_name: value})
            except _MISFITS:
                expected = _EXPECTED[field.cpp_type]
                return InvalidArgumentError(
                    f"{name} is {reprlib.repr(value)}, expected "
                    f"{'several, each ' if field.is_repeated else ''}{expected}",
                    field=prefix + name,
                )
    return None


def tokenize_request(text: str, *, add_special_tokens: bool) -> pb.TokenizeRequest:
    """Build the message of a text. Raises: InvalidArgumentError if it is none."""
    try:
        return pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"text is no text: {error}", field="text") from error


def detokenize_request(
    token_ids: Sequence[int], *, skip_special_tokens: bool
) -> pb.DetokenizeRequest:
    """Build the message of token ids. Raises: InvalidArgumentError for one that cannot be."""
    try:
        return pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"token_ids: {error}", field="token_ids") from error
