"""The one mapping between dataclasses and protobuf messages, declared where the fields are.

    @message(tree_pb2.RequestRetracted)
    @dataclass(frozen=True, slots=True, kw_only=True)
    class RequestRetracted:
        request_id: RequestId
        target_epoch: Count = 0

A field of the dataclass is the field, or the oneof, of the same name in the message. Its type says
how the field travels: numbers, text, bytes, enums, tuples (repeated fields; tuples of pairs are
maps, or messages of two fields), dataclasses that have a message, and unions (a oneof, whose fields
are in the order of the union's types). `X | None` is absent when it is None; an absent `optional`
field takes the dataclass field's default. `Annotated` adds a rule (see fields.py) or a mark.

`to_proto` trusts its input. `from_proto` checks the rules, and raises InvalidArgumentError naming
the field relative to its message; vocabularies, epochs and tree topology are checked by those who
know them. A field that only one side has is a TypeError when the class is defined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import repeat
from operator import attrgetter
from typing import Any, TypeVar

from google.protobuf.message import Message

from shared.messages.field_codec import (
    CODEC_OF_MESSAGE,
    CODEC_OF_VALUE,
    Codec,
    Decode,
    Encode,
    Field,
    FieldCodec,
    FromWire,
    Mark,
    Via,
    apply,
    field_codec,
    fields_of,
)
from shared.messages.fields import NOT_NEGATIVE

T = TypeVar("T")

__all__ = ["Codec", "Mark", "Via", "arguments_of", "from_proto", "message", "register", "to_proto"]


def message(
    message_type: type[Message],
    *,
    check: Callable[[Any], None] | None = None,
    derived: tuple[str, ...] = (),
    ignored: tuple[str, ...] = (),
) -> Callable[[type[T]], type[T]]:
    """Declare that a dataclass travels as this message.

    Args:
        check: Raises InvalidArgumentError if fields of a value that was read disagree.
        derived: Properties of the dataclass that are written and never read.
        ignored: Fields of the message that the dataclass does not have.
    Raises: TypeError if a field of one has no counterpart in the other.
    """

    def declare(value_type: type[T]) -> type[T]:
        codecs = _field_codecs(value_type, message_type.DESCRIPTOR)
        taken = {name for codec in codecs for name in codec.taken} | {*derived, *ignored}
        unknown = taken ^ {proto.name for proto in message_type.DESCRIPTOR.fields}
        if unknown:
            raise TypeError(
                f"{value_type.__name__} does not map to {message_type.DESCRIPTOR.full_name}: only "
                f"one of them has {sorted(unknown)}; add the field, or declare it as ignored"
            )
        encode, decode = _encoder(codecs, derived), _decoder(value_type, codecs, check)
        register(value_type, Codec(message_type, encode, decode))
        return value_type

    return declare


def register(value_type: type[Any], codec: Codec) -> None:
    """Declare how a type travels whose message is converted by hand."""
    CODEC_OF_VALUE[value_type] = CODEC_OF_MESSAGE[codec.message_type] = codec


def arguments_of(value: Any) -> dict[str, Any]:
    """Return the keyword arguments of a value's message; `add(**arguments)` saves a copy of it."""
    return CODEC_OF_VALUE[type(value)].encode(value)


def to_proto(value: Any) -> Any:
    """Return the message of a value."""
    codec = CODEC_OF_VALUE[type(value)]
    return codec.message_type(**codec.encode(value))


def from_proto(message: Any) -> Any:
    """Return the value of a message after checking the rules of its fields.

    Raises: InvalidArgumentError naming the field, relative to the message.
    """
    return CODEC_OF_MESSAGE[type(message)].decode(message)


def _field_codecs(value_type: Any, descriptor: Any) -> list[FieldCodec]:
    codecs = []
    for field in fields_of(value_type):
        is_flat = field.note(Mark) is Mark.FLAT
        try:
            codecs.append((_flat if is_flat else field_codec)(field, descriptor))
        except (KeyError, TypeError, ValueError) as error:
            raise TypeError(
                f"{value_type.__name__}.{field.name} does not map to a field of "
                f"{descriptor.full_name}: {error}"
            ) from error
    return codecs


def _flat(field: Field, descriptor: Any) -> FieldCodec:
    codecs = _field_codecs(field.type, descriptor)
    taken = tuple(name for codec in codecs for name in codec.taken)
    decode, rules = _decoder(field.type, codecs, None), field.rules
    return FieldCodec(
        field.name,
        taken,
        read=lambda message: apply(rules, decode(message), field.name),
        parts=tuple(codec._replace(name=f"{field.name}.{codec.name}") for codec in codecs),
    )


def _encoder(codecs: list[FieldCodec], derived: tuple[str, ...]) -> Encode:
    codecs = [part for codec in codecs for part in codec.parts or (codec,)]
    single = [codec for codec in codecs if codec.spread is None]
    get = _get_all([*(codec.name for codec in single), *derived])
    names = [*(codec.taken[0] for codec in single), *derived]
    conversions = [(codec.taken[0], codec.to_wire) for codec in single if codec.to_wire is not None]
    spreads = [
        (attrgetter(codec.name), codec.spread) for codec in codecs if codec.spread is not None
    ]

    def encode(value: Any) -> dict[str, Any]:
        arguments = dict(zip(names, get(value), strict=False))
        for name, to_wire in conversions:
            arguments[name] = to_wire(arguments[name])
        for get_parts, spread in spreads:
            arguments |= spread(get_parts(value))
        return arguments

    return encode


def _decoder(
    value_type: Any, codecs: list[FieldCodec], check: Callable[[Any], None] | None
) -> Decode:
    single = [codec for codec in codecs if codec.read is None]
    single.sort(key=lambda codec: codec.from_wire != (NOT_NEGATIVE,))  # counts are checked at once
    get = _get_all([codec.taken[0] for codec in single])
    counts = [codec.name for codec in single if codec.from_wire == (NOT_NEGATIVE,)]
    num_counts = len(counts)
    steps = _steps(single, start=num_counts)
    reads = [codec.read for codec in codecs if codec.read is not None]
    others = [codec.name for codec in codecs if codec.read is not None]
    build = _builder(value_type, [*(codec.name for codec in single), *others])

    def decode(message: Any) -> Any:
        values = [*get(message)]
        if num_counts and min(values[:num_counts]) < 0:
            _refuse_negative(counts, values)
        for i, name, step in steps:
            values[i] = step(values[i], name)
        for read in reads:
            values.append(read(message))
        value = build(values)
        if check is not None:
            check(value)
        return value

    return decode


def _steps(codecs: list[FieldCodec], *, start: int) -> list[tuple[int, str, FromWire]]:
    """Return index, field and function of each conversion of the codecs from `start` on."""
    return [
        (i, codec.name, step)
        for i, codec in enumerate(codecs[start:], start)
        for step in codec.from_wire
    ]


def _refuse_negative(names: list[str], counts: list[int]) -> None:
    for name, count in zip(names, counts, strict=False):
        NOT_NEGATIVE(count, name)


def _builder(value_type: Any, names: list[str]) -> Callable[[list[Any]], Any]:
    """Return what makes a value of the values of these fields; others take their defaults."""
    if hasattr(value_type, "__post_init__"):
        raise TypeError(f"{value_type.__name__} has a __post_init__, which would not run")
    defaults = {field.name: field.default for field in fields(value_type)}
    absent = {name: default for name, default in defaults.items() if name not in names}
    names, rest = [*names, *absent], [*absent.values()]
    new, set_field = object.__new__, object.__setattr__

    def build(values: list[Any]) -> Any:
        # As the __init__ of a frozen dataclass does, without a statement of Python per field.
        value = new(value_type)
        any(map(set_field, repeat(value), names, [*values, *rest] if rest else values))
        return value

    return build


def _get_all(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what gets all these attributes of a value as a tuple, however few they are."""
    if len(names) > 1:
        return attrgetter(*names)
    gets = [attrgetter(name) for name in names]
    return lambda value: tuple([get(value) for get in gets])
