"""Fields of requests: what is honoured is declared here, what is not is refused by its name.

Nothing is ignored silently: a field that OpenAI's API has and this server does not is in `_REFUSED`
with the values that change nothing, and a field that nobody knows is refused as such. A null is a
field that is not there. docs/http.md has the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from coppice.gateway.errors import ApiError, bad_request, shortened, unsupported
from coppice.request import RequestOptions
from shared.messages import MAX_TOP_LOGPROBS

_MAX_STOPS = 16
_MAX_MESSAGES = 4096
_MAX_TOOLS = 1024
_MAX_NAME_CHARS = 1024
_MAX_TIMEOUT_S = 365 * 86400.0
_SPECULATION_MODES: dict[str, bool | None] = {"auto": None, "off": False, "on": True}
_TREE = ("num_steps", "topk", "num_draft_tokens")

Refused = Mapping[str, tuple[tuple[Any, ...], str]]
# Lists end at their first wrong item: an error for each of a million takes gigabytes.
Ids = Annotated[list[int], FailFast()]
Name = Annotated[str, Field(max_length=_MAX_NAME_CHARS)]
OptionalTexts = Annotated[list[str] | None, FailFast()]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _short_list(value: list[str]) -> list[str]:
    if len(value) > _MAX_STOPS:
        raise ValueError(f"{len(value)} stop strings, at most {_MAX_STOPS} are allowed")
    return value


def _bias_of_ids(value: Any) -> Any:
    """Take token ids as JSON has them, which are strings."""
    if not isinstance(value, dict):
        return value
    try:
        found = {int(key): bias for key, bias in value.items()}
    except ValueError:
        raise ValueError("its keys are token ids, e.g. {'1234': -100}") from None
    for bias in found.values():
        if type(bias) not in (int, float) or not -math.inf < bias < math.inf:
            raise ValueError("its values are numbers, e.g. {'1234': -100}")
    return found


def _mode_of(value: Any) -> Any:
    """Take speculation as a mode, a bool, or an object with a mode and a shape."""
    if isinstance(value, bool):
        value = "on" if value else "off"
    return {"mode": value} if isinstance(value, str) else value


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, value: Any) -> Any:
        """Refuse the first unknown name, before pydantic has an error for each."""
        names = value if isinstance(value, dict) else ()
        unknown = next((name for name in names if name not in cls.model_fields), None)
        if unknown is not None:
            raise PydanticCustomError("extra_forbidden", "{name}", {"name": unknown})
        return value


class Speculation(_Fields):
    """How to speculate; the output does not depend on it."""

    mode: Literal["auto", "on", "off"] = "auto"
    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None


class StreamOptions(_Fields):
    """Of OpenAI's API."""

    include_usage: bool = False
    # True asks for random padding of chunks, False for none, which is what there is.
    include_obfuscation: Literal[False] = False


class GenerationFields(_Fields):
    """What /v1/completions and /v1/chat/completions share; defaults are OpenAI's."""

    model: str
    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Annotated[
        list[str], FailFast(), BeforeValidator(_as_list), AfterValidator(_short_list)
    ] = []
    logit_bias: Annotated[dict[int, float], BeforeValidator(_bias_of_ids)] = {}
    user: Name = ""
    # Beside OpenAI's: by the names that other servers have for them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Ids = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    speculation: Annotated[Speculation, BeforeValidator(_mode_of)] = Speculation()
    resume_token_ids: Ids = []
    resume_fingerprint: str = ""
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    session_id: Name = ""
    request_id: Name = ""
    timeout_s: float | None = Field(default=None, gt=0, le=_MAX_TIMEOUT_S)
    return_token_ids: bool = False
    return_speculation: bool = False
    return_trees: bool = False
    return_routed_experts: bool = False
    # What the output must be: vLLM's, vLLM's of old, SGLang's.
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: OptionalTexts = None
    guided_grammar: str | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None

    refused: ClassVar[Refused] = {}

    @property
    def wants_usage(self) -> bool:
        """Return whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self, *, choice: int) -> RequestOptions:
        """Return the request to the orchestrator that these fields mean.

        Args:
            choice: Of n; each has a seed of its own.
        """
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": None if self.seed is None else (self.seed + choice) % 2**64,
            "logit_bias": self.logit_bias,
            "min_new_tokens": self.min_tokens,
            "stop_strings": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "include_stop_in_output": self.include_stop_str_in_output,
            "keep_special_tokens": not self.skip_special_tokens,
            "priority": self.priority,
            "session_id": self.session_id,
            "resume_fingerprint": self.resume_fingerprint,
            "timeout_s": self.timeout_s,
            "round_trees": self.return_trees,
            "routed_experts": self.return_routed_experts,
            **{name: getattr(self.speculation, name) for name in _TREE},
        }
        options = {name: value for name, value in given.items() if value is not None}
        options["speculation"] = _SPECULATION_MODES[self.speculation.mode]
        options["resume_token_ids"] = self.resume_token_ids
        return cast(RequestOptions, options)


class CompletionFields(GenerationFields):
    """Of /v1/completions."""

    prompt: Any
    max_tokens: int = 16
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True

    refused: ClassVar[Refused] = {"suffix": (("",), "nothing is written in front of a suffix")}

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts: texts or token ids.

        Raises: ApiError.
        """
        value = self.prompt
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            if all(map(_is_id, value)):
                return [value]
            if all(isinstance(item, str) for item in value):
                return list(value)
            if all(isinstance(item, list) and item and all(map(_is_id, item)) for item in value):
                return list(value)
        raise bad_request(
            "prompt must be a string, a list of strings, a list of token ids, or a list of those",
            param="prompt",
        )


class Function(_Fields):
    """A function that may be called."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Fields):
    """Of `tools`."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], FailFast(), Field(max_length=_MAX_TOOLS)]


class ChatFields(GenerationFields):
    """Of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], FailFast()] = Field(
        min_length=1, max_length=_MAX_MESSAGES
    )
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Tools = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] = {"type": "text"}
    reasoning_effort: str | None = None
    prompt_cache_key: Name = ""
    safety_identifier: Name = ""
    # Beside OpenAI's: by the names that other servers have for them.
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False

    refused: ClassVar[Refused] = {
        "audio": ((), "models of text only"),
        "modalities": ((["text"],), "models of text only"),
        "prediction": ((), "a draft model predicts the output; see speculation"),
        "web_search_options": ((), "the model has no tools of the server's"),
        "functions": (([],), "use tools"),
        "function_call": (("none", "auto"), "use tool_choice"),
        "store": ((False,), "nothing is stored"),
        "metadata": (({},), "nothing is stored"),
        "service_tier": (("auto", "default"), "there is one tier; see priority"),
        "verbosity": (("medium",), "the model takes no such hint"),
        "prompt_cache_retention": ((), "the cache keeps what fits"),
    }

    @property
    def max_new_tokens(self) -> int | None:
        """Return the limit of the output; None: the context's."""
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise bad_request(
                "max_tokens and max_completion_tokens differ; give one of them",
                param="max_tokens",
            )
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens


class TokenizeFields(_Fields):
    """Of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[
        list[dict[str, Any]] | None, FailFast(), Field(max_length=_MAX_MESSAGES)
    ] = None
    tools: Tools = []
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False

    refused: ClassVar[Refused] = {}


class DetokenizeFields(_Fields):
    """Of /detokenize."""

    model: str | None = None
    tokens: Ids

    refused: ClassVar[Refused] = {}


Kind = TypeVar("Kind", CompletionFields, ChatFields, TokenizeFields, DetokenizeFields)


def parse_fields(kind: type[Kind], body: Any) -> Kind:
    """Read the fields of a request.

    Raises: ApiError that names the first field that cannot be.
    """
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object", param=None)
    given = {name: value for name, value in body.items() if value is not None}
    for name, (harmless, why) in kind.refused.items():
        if name in given and given.pop(name) not in harmless:
            raise unsupported(name, why)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _error_of(error) from None


def _error_of(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        param = shortened(_path((*first["loc"], first["msg"])))
        return bad_request(
            f"unrecognized request argument: {param}", param=param, code="unknown_parameter"
        )
    if first["type"] == "missing":
        return bad_request(
            f"missing required parameter: {param}", param=param, code="missing_required_parameter"
        )
    message = first["msg"].removeprefix("Value error, ")
    return bad_request(f"{param}: {message}", param=param)


def _path(location: Sequence[int | str]) -> str:
    """Return a location as a.b[0].c."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).removeprefix(".")


def _is_id(value: Any) -> bool:
    return type(value) is int
