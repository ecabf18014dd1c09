"""How one field of a dataclass travels in a protobuf message, by its type and annotations.

codec.py puts the fields of a message together and documents what can be declared.
"""

from __future__ import annotations

import enum
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from functools import partial
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar

from google.protobuf.descriptor import FieldDescriptor, OneofDescriptor
from google.protobuf.message import Message

from shared.errors import InvalidArgumentError
from shared.messages.fields import put_within

T = TypeVar("T")
Encode = Callable[[Any], dict[str, Any]]  # value -> keyword arguments of its message
Decode = Callable[[Any], Any]  # message -> value
ToWire = Callable[[Any], Any]  # a field's value -> what the message takes
FromWire = Callable[[Any, str], Any]  # what the message holds, the field's name -> value; a rule


class Mark(enum.Enum):
    """Where a dataclass field is that is no field of the message."""

    FLAT = enum.auto()  # a dataclass whose own fields are fields of the message
    OFF_WIRE = enum.auto()  # in this process only


class Via(NamedTuple):
    """A field with another form on the wire, and another name there unless `wire_name` is empty."""

    to_wire: ToWire
    from_wire: FromWire
    wire_name: str = ""


class Codec(NamedTuple):
    """Both directions of one type of message."""

    message_type: type[Message]
    encode: Encode
    decode: Decode


CODEC_OF_VALUE: dict[type[Any], Codec] = {}
CODEC_OF_MESSAGE: dict[type[Any], Codec] = {}


class Field(NamedTuple):
    """A field of a dataclass; its type is without None and what was annotated."""

    name: str
    default: Any
    type: Any
    is_optional: bool
    notes: list[Any]

    @property
    def rules(self) -> list[FromWire]:
        """Return the rules among the annotations."""
        return [note for note in self.notes if callable(note)]

    def note(self, kind: type[T]) -> T | None:
        """Return the annotation of a kind, if there is one."""
        return next((note for note in self.notes if isinstance(note, kind)), None)


def fields_of(value_type: Any) -> Iterator[Field]:
    """Yield the fields of a dataclass that travel."""
    hints = typing.get_type_hints(value_type, include_extras=True)
    for declared in fields(value_type):
        field = Field(declared.name, declared.default, *_bare(hints[declared.name]))
        if field.note(Mark) is not Mark.OFF_WIRE:
            yield field
        elif field.default is MISSING:
            raise TypeError(f"{value_type.__name__}.{field.name} is off the wire, without default")


def _bare(hint: Any) -> tuple[Any, bool, list[Any]]:
    if typing.get_origin(hint) is Annotated:
        bare, is_optional, notes = _bare(hint.__origin__)
        return bare, is_optional, [*notes, *hint.__metadata__]
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, UnionType) and NoneType in args:
        bare, _, notes = _bare(typing.Union[tuple(arg for arg in args if arg is not NoneType)])  # noqa: UP007
        return bare, True, notes
    return hint, False, []


# --- how one field travels ------------------------------------------------------------------------


class FieldCodec(NamedTuple):
    """How one field travels; None everywhere: as it is.

    Args:
        taken: The message's fields that belong to it.
        from_wire: Applied one after the other to what the message's field holds.
        read: Reads the field off the message instead, where presence matters.
        spread: Gives keyword arguments for all of `taken`.
        parts: The fields of a flat dataclass, for writing.
    """

    name: str
    taken: tuple[str, ...]
    from_wire: tuple[FromWire, ...] = ()
    to_wire: ToWire | None = None
    read: Decode | None = None
    spread: Encode | None = None
    parts: tuple[FieldCodec, ...] = ()


def field_codec(field: Field, descriptor: Any) -> FieldCodec:
    """Return how a field travels in the message of a descriptor.

    Raises: KeyError, TypeError or ValueError if it cannot.
    """
    if field.name in descriptor.oneofs_by_name:
        return _oneof(field, descriptor.oneofs_by_name[field.name])
    via = field.note(Via)
    name = via.wire_name if via and via.wire_name else field.name
    proto = descriptor.fields_by_name[name]
    steps, to_wire = ([via.from_wire], via.to_wire) if via else _conversion(field, proto)
    steps += field.rules
    if field.is_optional or (proto.has_presence and proto.message_type is None):
        read = _presence(field, name, steps)
        return FieldCodec(field.name, (name,), to_wire=to_wire and _unless_none(to_wire), read=read)
    return FieldCodec(field.name, (name,), tuple(steps), to_wire)


def _conversion(field: Field, proto: FieldDescriptor) -> tuple[list[FromWire], ToWire | None]:
    if proto.is_repeated:
        return _repeated(typing.get_args(field.type)[0], proto)
    if proto.message_type is not None:
        codec = _codec_of(field.type, proto)
        return [partial(_read_part, codec.decode)], codec.encode
    if proto.enum_type is not None:
        return [partial(_read_member, {int(member): member for member in field.type})], None
    _require_type(field.type, proto)
    return [], None


def _repeated(part: Any, proto: FieldDescriptor) -> tuple[list[FromWire], ToWire | None]:
    if proto.message_type is None:
        return [lambda values, _: tuple(values[:])], None
    if proto.message_type.GetOptions().map_entry:
        return [lambda entries, _: tuple(sorted(entries.items())) if entries else ()], dict
    if part in CODEC_OF_VALUE:
        _, encode, decode = _codec_of(part, proto)
    else:
        encode, decode = _tuple_codec(part, [field.name for field in proto.message_type.fields])

    def read(parts: Any, name: str) -> Any:
        if not parts:
            return ()
        return _read_part(lambda parts: tuple([decode(part) for part in parts]), parts, name)

    return [read], lambda parts: [encode(part) for part in parts]


def _tuple_codec(part: Any, names: list[str]) -> tuple[Encode, Decode]:
    """Return both directions of a tuple or NamedTuple: the message's fields in their order."""
    if len(names) < 2 or names != [*getattr(part, "_fields", names)]:
        raise TypeError(f"{part} does not have the fields {names}")
    get, make = attrgetter(*names), getattr(part, "_make", tuple)
    return lambda value: dict(zip(names, value, strict=True)), lambda message: make(get(message))


def _oneof(field: Field, oneof: OneofDescriptor) -> FieldCodec:
    name, taken = field.name, tuple(proto.name for proto in oneof.fields)
    encodes: dict[type[Any], tuple[str, ToWire]] = {}
    decodes: dict[str, FromWire] = {}
    for part, proto in zip(typing.get_args(field.type), oneof.fields, strict=True):
        if proto.message_type is not None:
            codec = _codec_of(part, proto)
            encodes[part], decodes[proto.name] = (
                (proto.name, codec.encode),
                partial(_read_part, codec.decode),
            )
        else:
            _require_type(part, proto)
            encodes[part], decodes[proto.name] = (proto.name, _same), _same

    def spread(part: Any) -> dict[str, Any]:
        if part is None:
            return {}
        arm, encode = encodes[type(part)]
        return {arm: encode(part)}

    def read(message: Any) -> Any:
        arm = message.WhichOneof(name)
        if arm is not None:
            return decodes[arm](getattr(message, arm), arm)
        if field.is_optional:
            return None
        expected = " or ".join(taken)
        raise InvalidArgumentError(f"{name} is absent or unknown, must be {expected}", field=name)

    return FieldCodec(name, taken, read=read, spread=spread)


def _presence(field: Field, name: str, steps: list[FromWire]) -> Decode:
    absent = None if field.is_optional else field.default

    def read(message: Any) -> Any:
        if message.HasField(name):
            return apply(steps, getattr(message, name), name)
        if absent is MISSING:
            raise InvalidArgumentError(f"{name} is absent; workers need it resolved", field=name)
        return absent

    return read


def apply(steps: list[FromWire], value: Any, name: str) -> Any:
    """Return what rules and conversions make of a value, one after the other."""
    for step in steps:
        value = step(value, name)
    return value


def _read_part(decode: Decode, part: Any, name: str) -> Any:
    try:
        return decode(part)
    except InvalidArgumentError as error:
        put_within(name, error)
        raise


def _read_member(members: dict[int, enum.IntEnum], number: int, name: str) -> enum.IntEnum:
    member = members.get(number)
    if member is None:
        raise InvalidArgumentError(
            f"{name} has the unknown value {number}; the sender may be newer than this program",
            field=name,
        )
    return member


def _same(value: Any, _name: str = "") -> Any:
    return value


def _unless_none(to_wire: ToWire) -> ToWire:
    return lambda value: None if value is None else to_wire(value)


def _require_type(value_type: Any, proto: FieldDescriptor) -> None:
    if value_type is not type(proto.default_value):
        raise TypeError(f"{value_type} is not {type(proto.default_value)}")


def _codec_of(value_type: Any, proto: FieldDescriptor) -> Codec:
    codec = CODEC_OF_VALUE.get(value_type)
    if codec is None or codec.message_type.DESCRIPTOR is not proto.message_type:
        raise TypeError(f"{value_type} does not travel as the message of {proto.full_name}")
    return codec
