"""Messages that nobody should send: random ones, nearly good ones, and bytes that are none."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

AnyMessage = TypeVar("AnyMessage", bound=Message)

_MAX_DEPTH = 3
_FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-30, 3e38, -3e38, math.nan, math.inf, -math.inf)
_COUNTS = (0, 1, 1, 2, 3, 8, 65, 600)
_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(1 << 31), (1 << 31) - 1),
}


class Mutator:
    """Makes messages.

    Args:
        names: Strings that mean something to the receiver, such as names of requests.
        max_text: Longest other string, characters.
    """

    def __init__(
        self, rng: random.Random, names: Sequence[str] = (), *, max_text: int = 2000
    ) -> None:
        self.rng = rng
        self._names = list(names)
        self._max_text = max_text

    def fill(self, message: AnyMessage, depth: int = 0) -> AnyMessage:
        """Set about half of the fields of a message to anything; return it."""
        for field in message.DESCRIPTOR.fields:
            if self.rng.random() < 0.5:
                self._set(message, field, depth)
        return message

    def tweak(self, good: AnyMessage) -> AnyMessage:
        """Return a copy of a message, one or two fields of which are set to anything."""
        message = type(good)()
        message.CopyFrom(good)
        for _ in range(self.rng.choice([1, 1, 2])):
            part: Message = message
            while True:
                within = [p for f, v in part.ListFields() for p in _messages(f, v)]
                if not within or self.rng.random() < 0.2:
                    break
                part = self.rng.choice(within)
            if part.DESCRIPTOR.fields:
                self._set(part, self.rng.choice(part.DESCRIPTOR.fields), 1)
        return message

    def damage(self, data: bytes) -> bytes:
        """Return bytes that were a message."""
        damaged = bytearray(data or self.rng.randbytes(8))
        for _ in range(self.rng.choice([1, 1, 2, 8])):
            place = self.rng.randrange(len(damaged) + 1)
            match self.rng.randrange(4):
                case 0:
                    damaged[place : place + 1] = self.rng.randbytes(1)
                case 1:
                    damaged[place:place] = self.rng.randbytes(self.rng.randrange(1, 12))
                case 2:
                    del damaged[place : place + self.rng.randrange(1, 12)]
                case 3:
                    damaged[place:place] = damaged[self.rng.randrange(len(damaged) + 1) :]
            if not damaged:
                break
        return bytes(damaged)

    def any_of(self, goods: Sequence[Message]) -> bytes:
        """Return one of these messages as it is, with other values, or filled anew."""
        good = self.rng.choice(goods)
        match self.rng.randrange(6):
            case 0:
                return good.SerializeToString()
            case 1:
                return self.fill(type(good)()).SerializeToString()
        return self.tweak(good).SerializeToString()

    def noise(self, goods: Sequence[Message]) -> bytes:
        """Return one of these messages damaged, or bytes that never were a message."""
        if self.rng.random() < 0.3:
            return self.rng.randbytes(self.rng.randrange(60))
        return self.damage(self.rng.choice(goods).SerializeToString())

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        message.ClearField(field.name)
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map:
            self._set_map(message, field, depth)
        elif field.is_repeated:
            values = getattr(message, field.name)
            for _ in range(self.rng.choice(_COUNTS) if depth < 2 else self.rng.randrange(4)):
                if field.message_type is None:
                    values.append(self._scalar(field))
                elif depth < _MAX_DEPTH:
                    self.fill(values.add(), depth + 1)
        elif field.message_type is None:
            setattr(message, field.name, self._scalar(field))
        elif depth < _MAX_DEPTH:
            part = getattr(message, field.name)
            part.SetInParent()
            self.fill(part, depth + 1)

    def _set_map(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        key, value = field.message_type.fields
        entries = getattr(message, field.name)
        for _ in range(self.rng.randrange(4)):
            if value.message_type is None:
                entries[self._scalar(key)] = self._scalar(value)
            elif depth < _MAX_DEPTH:
                self.fill(entries[self._scalar(key)], depth + 1)

    def _scalar(self, field: FieldDescriptor) -> Any:
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return self.rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return self.rng.choice(_FLOATS)
            case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
                return self.rng.randbytes(self.rng.choice([0, 1, 16, 400]))
            case FieldDescriptor.CPPTYPE_STRING:
                return self._text()
        low, high = _BITS[field.cpp_type]
        near = self.rng.choice([0, 0, 0, 1, 4, 64, 4096, low, high]) + self.rng.randrange(-2, 3)
        return min(max(near, low), high)

    def _text(self) -> str:
        if self._names and self.rng.random() < 0.7:
            return self.rng.choice(self._names)
        length = self.rng.choice([0, 1, 7, self._max_text])
        return "".join(self.rng.choice("aé\0\n/:0💥") for _ in range(length))


def _messages(field: FieldDescriptor, value: Any) -> list[Message]:
    """Return the messages in a field."""
    if field.message_type is None:
        return []
    if field.message_type.GetOptions().map_entry:
        (_, entry) = field.message_type.fields
        return list(value.values()) if entry.message_type is not None else []
    return list(value) if field.is_repeated else [value]
