"""Other versions: what the last release said is still understood, and two versions away refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from coppice.v1 import (
    draft_pb2,
    generation_pb2,
    peer_pb2,
    target_pb2,
    tree_pb2,
)
from orchestrator.pairing import draft_problem, pair_problem, target_problem
from shared.errors import StaleStateError
from shared.rpc.protocol import METADATA, PROTOCOL_VERSION, check_caller
from tests.fakes import FakeDraft, FakeTarget

RELEASES = sorted((Path(__file__).resolve().parents[1] / "data").glob("release_*.binpb"))
"""What protoc made of the protos of each release that must still be understood."""
NOW: dict[str, FileDescriptor] = {
    module.DESCRIPTOR.name: module.DESCRIPTOR
    for module in (draft_pb2, generation_pb2, peer_pb2, target_pb2, tree_pb2)
}
_NUMBERS = {
    FieldDescriptor.CPPTYPE_BOOL: True,
    FieldDescriptor.CPPTYPE_DOUBLE: 0.5,
    FieldDescriptor.CPPTYPE_FLOAT: 0.5,
    FieldDescriptor.CPPTYPE_STRING: "s",
}


@cache
def pool_of(release: Path) -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(release.read_bytes()).file:
        pool.Add(file)
    return pool


def files_of(release: Path) -> Iterator[FileDescriptor]:
    files = descriptor_pb2.FileDescriptorSet.FromString(release.read_bytes()).file
    return (pool_of(release).FindFileByName(file.name) for file in files)


def messages_of(release: Path) -> list[Descriptor]:
    return [m for file in files_of(release) for m in file.message_types_by_name.values()]


def same(old: FieldDescriptor, new: FieldDescriptor) -> bool:
    types = [
        (
            field.number,
            field.type,
            field.is_repeated,
            field.has_presence,
            field.message_type.full_name if field.message_type else "",
            field.enum_type.full_name if field.enum_type else "",
        )
        for field in (old, new)
    ]
    return types[0] == types[1]


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.stem)
def test_no_field_of_a_release_has_changed(release: Path) -> None:
    """Numbers, types and names stay; what is not sent any more is reserved, not given away."""
    assert messages_of(release)
    for old in messages_of(release):
        new = NOW[old.file.name].message_types_by_name[old.name]
        for field in old.fields:
            known = new.fields_by_name.get(field.name)
            if known is None:
                assert field.number not in new.fields_by_number, f"{old.name}.{field.name}"
            else:
                assert same(field, known), f"{old.name}.{field.name}"


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.stem)
def test_no_method_or_value_of_a_release_has_gone(release: Path) -> None:
    for file in files_of(release):
        now = NOW[file.name]
        for name, service in file.services_by_name.items():
            for method in service.methods:
                kept = now.services_by_name[name].methods_by_name[method.name]
                assert method.input_type.full_name == kept.input_type.full_name
                assert method.output_type.full_name == kept.output_type.full_name
                assert method.client_streaming == kept.client_streaming
                assert method.server_streaming == kept.server_streaming
        for name, enum in file.enum_types_by_name.items():
            values = {value.name: value.number for value in now.enum_types_by_name[name].values}
            assert {value.name: value.number for value in enum.values}.items() <= values.items()


def fill(message: Any, depth: int = 0) -> Any:
    """Set every field of a message, of oneofs the last, down to a few levels."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.message_type is not None:
            if depth < 4:
                place = getattr(message, field.name)
                fill(place.add() if field.is_repeated else place, depth + 1)
                if not field.is_repeated:
                    place.SetInParent()
            continue
        value: Any = _NUMBERS.get(field.cpp_type, 1)
        if field.type == FieldDescriptor.TYPE_BYTES:
            value = b"bytes"
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    return message


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.stem)
def test_messages_of_a_release_survive_the_way_through_this_one(release: Path) -> None:
    """Both directions: what it says is read whole, and what is said to it has what it knows."""
    for old in messages_of(release):
        old_class = message_factory.GetMessageClass(old)
        new_class = message_factory.GetMessageClass(
            NOW[old.file.name].message_types_by_name[old.name]
        )
        said = fill(old_class())
        heard = new_class.FromString(said.SerializeToString(deterministic=True))
        assert not _unknown(heard), old.full_name
        back = old_class.FromString(heard.SerializeToString(deterministic=True))
        assert back == said, old.full_name


def _unknown(message: Any) -> bool:
    """Return whether anything in a message was not understood."""
    copy = type(message)()
    copy.CopyFrom(message)
    copy.DiscardUnknownFields()
    return bool(copy.SerializeToString() != message.SerializeToString())


@pytest.mark.parametrize(
    ("distance", "works"), [(-2, False), (-1, True), (0, True), (1, True), (2, False)]
)
def test_versions_one_apart_work_together_and_others_are_refused_by_name(
    distance: int,
    works: bool,  # noqa: FBT001
) -> None:
    version = PROTOCOL_VERSION + distance
    target = replace(FakeTarget().info, protocol_version=version)
    draft = replace(FakeDraft().info, protocol_version=version)
    here = replace(FakeTarget().info, protocol_version=PROTOCOL_VERSION)
    problems = [
        target_problem(target, tokenizer_hash="", others=None),
        draft_problem(draft),
        pair_problem(here, draft),
    ]
    assert [not problem for problem in problems] == [works] * 3
    for problem in problems:
        assert works or f"protocol version {version}" in problem
    if works:
        check_caller([("coppice-protocol", str(version))] if version else [])
    else:
        with pytest.raises(StaleStateError) as caught:
            check_caller([("coppice-protocol", str(version))])
        assert caught.value.reason == "PROTOCOL_MISMATCH"


def test_this_release_says_its_version() -> None:
    check_caller(METADATA)
    assert METADATA[0][1] == str(PROTOCOL_VERSION)
