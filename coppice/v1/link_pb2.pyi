from coppice.v1 import draft_pb2 as _draft_pb2
from coppice.v1 import target_pb2 as _target_pb2
from coppice.v1 import tree_pb2 as _tree_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LinkToTarget(_message.Message):
    __slots__ = ("opens", "subscribes", "acks", "trees", "closes")
    OPENS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBES_FIELD_NUMBER: _ClassVar[int]
    ACKS_FIELD_NUMBER: _ClassVar[int]
    TREES_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    opens: _containers.RepeatedCompositeFieldContainer[LinkOpen]
    subscribes: _containers.RepeatedCompositeFieldContainer[_target_pb2.FeatureSubscribe]
    acks: _containers.RepeatedCompositeFieldContainer[_target_pb2.FeatureAck]
    trees: _containers.RepeatedCompositeFieldContainer[_tree_pb2.TokenTree]
    closes: _containers.RepeatedCompositeFieldContainer[LinkClose]
    def __init__(self, opens: _Optional[_Iterable[_Union[LinkOpen, _Mapping]]] = ..., subscribes: _Optional[_Iterable[_Union[_target_pb2.FeatureSubscribe, _Mapping]]] = ..., acks: _Optional[_Iterable[_Union[_target_pb2.FeatureAck, _Mapping]]] = ..., trees: _Optional[_Iterable[_Union[_tree_pb2.TokenTree, _Mapping]]] = ..., closes: _Optional[_Iterable[_Union[LinkClose, _Mapping]]] = ...) -> None: ...

class LinkToDraft(_message.Message):
    __slots__ = ("chunks", "bursts", "failures", "rounds")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BURSTS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[_target_pb2.FeatureChunk]
    bursts: _containers.RepeatedCompositeFieldContainer[FeatureBurst]
    failures: _containers.RepeatedCompositeFieldContainer[_tree_pb2.RequestFailure]
    rounds: _containers.RepeatedCompositeFieldContainer[_draft_pb2.DraftRound]
    def __init__(self, chunks: _Optional[_Iterable[_Union[_target_pb2.FeatureChunk, _Mapping]]] = ..., bursts: _Optional[_Iterable[_Union[FeatureBurst, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[_tree_pb2.RequestFailure, _Mapping]]] = ..., rounds: _Optional[_Iterable[_Union[_draft_pb2.DraftRound, _Mapping]]] = ...) -> None: ...

class FeatureBurst(_message.Message):
    __slots__ = ("request_ids", "target_epochs", "starts", "num_rows", "handle")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    target_epochs: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    num_rows: _containers.RepeatedScalarFieldContainer[int]
    handle: _tree_pb2.FeatureHandle
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., target_epochs: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., num_rows: _Optional[_Iterable[int]] = ..., handle: _Optional[_Union[_tree_pb2.FeatureHandle, _Mapping]] = ...) -> None: ...

class LinkOpen(_message.Message):
    __slots__ = ("request_id", "target_epoch", "draft_epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    draft_epoch: int
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., draft_epoch: _Optional[int] = ...) -> None: ...

class LinkClose(_message.Message):
    __slots__ = ("request_id", "target_epoch", "draft_epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    draft_epoch: int
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., draft_epoch: _Optional[int] = ...) -> None: ...
