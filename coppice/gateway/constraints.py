"""What an output must be, as fields of HTTP say it: OpenAI's, and those of vLLM and SGLang."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from coppice.gateway.errors import ApiError, bad_request, unsupported
from coppice.gateway.fields import ChatFields, GenerationFields
from coppice.gateway.reasoning import ReasoningMarks

Format = dict[str, Any]
_SCHEMA, _REGEX, _EBNF, _CHOICE, _TAG = "json_schema", "regex", "ebnf", "choice", "structural_tag"
ANY_OBJECT = {"type": "object"}
# Field -> keyword of RequestOptions.
_PLAIN = {
    "guided_json": _SCHEMA,
    "guided_regex": _REGEX,
    "guided_choice": _CHOICE,
    "guided_grammar": _EBNF,
    "json_schema": _SCHEMA,
    "regex": _REGEX,
    "ebnf": _EBNF,
}
_STRUCTURED_OUTPUTS = {
    "json": _SCHEMA,
    "regex": _REGEX,
    "choice": _CHOICE,
    "grammar": _EBNF,
    "json_object": _SCHEMA,
    "structural_tag": _TAG,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What an output must be.

    Args:
        keyword: Of RequestOptions, and its value.
        param: Field of the HTTP request that says it.
    """

    keyword: str
    value: Any
    param: str

    @property
    def format(self) -> Format:
        """Return it as a part of a structural tag."""
        match self.keyword:
            case "json_schema":
                return json_format(self.value)
            case "regex":
                return {"type": "regex", "pattern": self.value}
            case "ebnf":
                return {"type": "grammar", "grammar": self.value}
            case "choice":
                texts = [{"type": "const_string", "value": text} for text in self.value]
                return {"type": "or", "elements": texts}
        found: Format = self.value["format"]
        return found


def json_format(schema: Any) -> Format:
    """Return the format of JSON; no more than one white space stands anywhere in it."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def tag_of(form: Format, param: str) -> Constraint:
    """Return the constraint of a whole output by its format."""
    return Constraint(keyword=_TAG, value={"type": "structural_tag", "format": form}, param=param)


def constraint_of(fields: GenerationFields) -> Constraint | None:
    """Return what the fields of a request say of its output, but for tools; None: it is free.

    Raises: ApiError if they say two things, or one that cannot be.
    """
    found = [
        Constraint(keyword=keyword, value=getattr(fields, name), param=name)
        for name, keyword in _PLAIN.items()
        if getattr(fields, name) is not None
    ]
    found += _structured_outputs(fields.structured_outputs)
    if isinstance(fields, ChatFields):
        found += _response_format(fields.response_format)
    if len(found) > 1:
        raise clash(found[0].param, found[1].param)
    return _checked(found[0]) if found else None


def _checked(constraint: Constraint) -> Constraint:
    """Return a constraint whose value has the type that it must have. Raises: ApiError."""
    value, param = constraint.value, constraint.param
    if constraint.keyword in (_SCHEMA, _TAG):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise bad_request(f"{param} is no JSON: {error}", param=param) from None
        is_fine = isinstance(value, dict)
        wanted = "an object, or its JSON"
        if constraint.keyword == _TAG and is_fine:
            is_fine, wanted = isinstance(value.get("format"), dict), "an object with a format"
    elif constraint.keyword == _CHOICE:
        is_fine = isinstance(value, list) and all(isinstance(text, str) for text in value)
        wanted = "a list of texts"
    else:
        is_fine, wanted = isinstance(value, str), "a text"
    if not is_fine:
        raise bad_request(f"{param} must be {wanted}", param=param)
    return replace(constraint, value=value)


def clash(first: str, second: str) -> ApiError:
    """Return the error of two fields that both say what the output must be."""
    return bad_request(
        f"{first} and {second} both say what the output must be; give one of them", param=second
    )


def after_reasoning(
    constraint: Constraint, marks: ReasoningMarks | None, *, is_open: bool
) -> Constraint:
    """Return a constraint of what follows reasoning, for a model that may begin with some.

    Args:
        marks: None: the model does not reason.
        is_open: The prompt ends inside of reasoning.
    """
    if marks is None:
        return constraint
    begin = "" if is_open else marks.begin
    thought: Format = {
        "type": "tag",
        "begin": begin,
        "content": {"type": "any_text", "excludes": [marks.begin]},
        "end": marks.end,
    }
    lines: Format = {"type": "regex", "pattern": r"\n{0,2}"}
    head: Format = {"type": "sequence", "elements": [thought, lines]}
    if not is_open:
        head = {"type": "optional", "content": head}
    return tag_of({"type": "sequence", "elements": [head, constraint.format]}, constraint.param)


def _structured_outputs(given: dict[str, Any] | None) -> list[Constraint]:
    """Return what vLLM's object says. Raises: ApiError unless that is one thing."""
    param = "structured_outputs"
    if given is None:
        return []
    said = {name: value for name, value in given.items() if value not in (None, False)}
    if len(said) != 1 or not said.keys() <= _STRUCTURED_OUTPUTS.keys():
        names = ", ".join(_STRUCTURED_OUTPUTS)
        raise bad_request(f"{param} must have exactly one of {names}", param=param)
    ((name, value),) = said.items()
    if name == "json_object":
        value = ANY_OBJECT
    return [Constraint(keyword=_STRUCTURED_OUTPUTS[name], value=value, param=param)]


def _response_format(given: dict[str, Any]) -> list[Constraint]:
    param = "response_format"
    match given.get("type"):
        case "text":
            return []
        case "json_object":
            return [Constraint(keyword=_SCHEMA, value=ANY_OBJECT, param=param)]
        case "json_schema":
            inner = given.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if not isinstance(schema, dict):
                raise bad_request(
                    f"{param}.json_schema.schema is missing; it must be a JSON schema",
                    param=param,
                    code="missing_required_parameter",
                )
            return [Constraint(keyword=_SCHEMA, value=schema, param=param)]
        case "structural_tag":
            return [Constraint(keyword=_TAG, value=given, param=param)]
    raise unsupported(f"{param}.type", "it may be text, json_object, json_schema or structural_tag")
