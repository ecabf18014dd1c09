from coppice.v1 import draft_pb2 as _draft_pb2
from coppice.v1 import target_pb2 as _target_pb2
from coppice.v1 import tree_pb2 as _tree_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerToTarget(_message.Message):
    __slots__ = ("attaches", "subscribes", "acks", "trees", "detaches", "rows_offers")
    ATTACHES_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBES_FIELD_NUMBER: _ClassVar[int]
    ACKS_FIELD_NUMBER: _ClassVar[int]
    TREES_FIELD_NUMBER: _ClassVar[int]
    DETACHES_FIELD_NUMBER: _ClassVar[int]
    ROWS_OFFERS_FIELD_NUMBER: _ClassVar[int]
    attaches: _containers.RepeatedCompositeFieldContainer[PeerAttach]
    subscribes: _containers.RepeatedCompositeFieldContainer[_target_pb2.FeatureSubscribe]
    acks: _containers.RepeatedCompositeFieldContainer[_target_pb2.FeatureAck]
    trees: _containers.RepeatedCompositeFieldContainer[TreeBatch]
    detaches: _containers.RepeatedCompositeFieldContainer[PeerDetach]
    rows_offers: _containers.RepeatedCompositeFieldContainer[RowsOffer]
    def __init__(self, attaches: _Optional[_Iterable[_Union[PeerAttach, _Mapping]]] = ..., subscribes: _Optional[_Iterable[_Union[_target_pb2.FeatureSubscribe, _Mapping]]] = ..., acks: _Optional[_Iterable[_Union[_target_pb2.FeatureAck, _Mapping]]] = ..., trees: _Optional[_Iterable[_Union[TreeBatch, _Mapping]]] = ..., detaches: _Optional[_Iterable[_Union[PeerDetach, _Mapping]]] = ..., rows_offers: _Optional[_Iterable[_Union[RowsOffer, _Mapping]]] = ...) -> None: ...

class PeerToDraft(_message.Message):
    __slots__ = ("chunks", "failures", "rounds", "path_batches", "rows_answers")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PATH_BATCHES_FIELD_NUMBER: _ClassVar[int]
    ROWS_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[_target_pb2.FeatureChunk]
    failures: _containers.RepeatedCompositeFieldContainer[_tree_pb2.RequestFailure]
    rounds: _containers.RepeatedCompositeFieldContainer[_draft_pb2.DraftRound]
    path_batches: _containers.RepeatedCompositeFieldContainer[PathBatch]
    rows_answers: _containers.RepeatedCompositeFieldContainer[RowsAnswer]
    def __init__(self, chunks: _Optional[_Iterable[_Union[_target_pb2.FeatureChunk, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[_tree_pb2.RequestFailure, _Mapping]]] = ..., rounds: _Optional[_Iterable[_Union[_draft_pb2.DraftRound, _Mapping]]] = ..., path_batches: _Optional[_Iterable[_Union[PathBatch, _Mapping]]] = ..., rows_answers: _Optional[_Iterable[_Union[RowsAnswer, _Mapping]]] = ...) -> None: ...

class PathBatch(_message.Message):
    __slots__ = ("request_ids", "target_epochs", "draft_epochs", "round_idx", "seq_lens", "num_tokens", "token_ids", "num_steps", "topk", "num_draft_tokens", "handle", "mailbox_slots", "round_tags", "following_num_steps", "following_topk", "following_num_draft_tokens")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    ROUND_IDX_FIELD_NUMBER: _ClassVar[int]
    SEQ_LENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOPK_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    MAILBOX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TAGS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_TOPK_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    target_epochs: _containers.RepeatedScalarFieldContainer[int]
    draft_epochs: _containers.RepeatedScalarFieldContainer[int]
    round_idx: _containers.RepeatedScalarFieldContainer[int]
    seq_lens: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_steps: int
    topk: int
    num_draft_tokens: int
    handle: _tree_pb2.FeatureHandle
    mailbox_slots: _containers.RepeatedScalarFieldContainer[int]
    round_tags: _containers.RepeatedScalarFieldContainer[int]
    following_num_steps: int
    following_topk: int
    following_num_draft_tokens: int
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., target_epochs: _Optional[_Iterable[int]] = ..., draft_epochs: _Optional[_Iterable[int]] = ..., round_idx: _Optional[_Iterable[int]] = ..., seq_lens: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_steps: _Optional[int] = ..., topk: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., handle: _Optional[_Union[_tree_pb2.FeatureHandle, _Mapping]] = ..., mailbox_slots: _Optional[_Iterable[int]] = ..., round_tags: _Optional[_Iterable[int]] = ..., following_num_steps: _Optional[int] = ..., following_topk: _Optional[int] = ..., following_num_draft_tokens: _Optional[int] = ...) -> None: ...

class TreeBatch(_message.Message):
    __slots__ = ("request_ids", "target_epochs", "draft_epochs", "round_idx", "seq_lens", "num_nodes", "token_ids", "parent_index", "times", "is_overlapped", "num_targets")
    class TimesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: _tree_pb2.AnswerTimes
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[_tree_pb2.AnswerTimes, _Mapping]] = ...) -> None: ...
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    ROUND_IDX_FIELD_NUMBER: _ClassVar[int]
    SEQ_LENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    IS_OVERLAPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGETS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    target_epochs: _containers.RepeatedScalarFieldContainer[int]
    draft_epochs: _containers.RepeatedScalarFieldContainer[int]
    round_idx: _containers.RepeatedScalarFieldContainer[int]
    seq_lens: _containers.RepeatedScalarFieldContainer[int]
    num_nodes: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parent_index: _containers.RepeatedScalarFieldContainer[int]
    times: _containers.MessageMap[int, _tree_pb2.AnswerTimes]
    is_overlapped: bool
    num_targets: int
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., target_epochs: _Optional[_Iterable[int]] = ..., draft_epochs: _Optional[_Iterable[int]] = ..., round_idx: _Optional[_Iterable[int]] = ..., seq_lens: _Optional[_Iterable[int]] = ..., num_nodes: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., parent_index: _Optional[_Iterable[int]] = ..., times: _Optional[_Mapping[int, _tree_pb2.AnswerTimes]] = ..., is_overlapped: _Optional[bool] = ..., num_targets: _Optional[int] = ...) -> None: ...

class PeerAttach(_message.Message):
    __slots__ = ("request_id", "target_epoch", "draft_epoch", "has_mailbox", "num_tokens", "protocol_version", "streams_wait")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HAS_MAILBOX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    STREAMS_WAIT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    draft_epoch: int
    has_mailbox: bool
    num_tokens: int
    protocol_version: int
    streams_wait: bool
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., draft_epoch: _Optional[int] = ..., has_mailbox: _Optional[bool] = ..., num_tokens: _Optional[int] = ..., protocol_version: _Optional[int] = ..., streams_wait: _Optional[bool] = ...) -> None: ...

class PeerDetach(_message.Message):
    __slots__ = ("request_id", "target_epoch", "draft_epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    draft_epoch: int
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., draft_epoch: _Optional[int] = ...) -> None: ...

class RowsOffer(_message.Message):
    __slots__ = ("handle", "gpu", "num_bytes")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    gpu: str
    num_bytes: int
    def __init__(self, handle: _Optional[bytes] = ..., gpu: _Optional[str] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class RowsAnswer(_message.Message):
    __slots__ = ("is_taken",)
    IS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    is_taken: bool
    def __init__(self, is_taken: _Optional[bool] = ...) -> None: ...
