from coppice.v1 import generation_pb2 as _generation_pb2
from coppice.v1 import tree_pb2 as _tree_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftServiceSessionRequest(_message.Message):
    __slots__ = ("opens", "rounds", "closes")
    OPENS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    opens: _containers.RepeatedCompositeFieldContainer[DraftOpen]
    rounds: _containers.RepeatedCompositeFieldContainer[DraftRound]
    closes: _containers.RepeatedCompositeFieldContainer[DraftClose]
    def __init__(self, opens: _Optional[_Iterable[_Union[DraftOpen, _Mapping]]] = ..., rounds: _Optional[_Iterable[_Union[DraftRound, _Mapping]]] = ..., closes: _Optional[_Iterable[_Union[DraftClose, _Mapping]]] = ...) -> None: ...

class DraftServiceSessionResponse(_message.Message):
    __slots__ = ("trees", "failures", "retracted", "load")
    TREES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    RETRACTED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    trees: _containers.RepeatedCompositeFieldContainer[_tree_pb2.TokenTree]
    failures: _containers.RepeatedCompositeFieldContainer[_tree_pb2.RequestFailure]
    retracted: _containers.RepeatedCompositeFieldContainer[_tree_pb2.RequestRetracted]
    load: _tree_pb2.WorkerLoad
    def __init__(self, trees: _Optional[_Iterable[_Union[_tree_pb2.TokenTree, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[_tree_pb2.RequestFailure, _Mapping]]] = ..., retracted: _Optional[_Iterable[_Union[_tree_pb2.RequestRetracted, _Mapping]]] = ..., load: _Optional[_Union[_tree_pb2.WorkerLoad, _Mapping]] = ...) -> None: ...

class DraftOpen(_message.Message):
    __slots__ = ("request_id", "target_epoch", "draft_epoch", "target_address", "token_ids", "sampling", "is_timed", "target_socket", "target_peer_address", "compiled_grammar", "num_prompt_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    IS_TIMED_FIELD_NUMBER: _ClassVar[int]
    TARGET_SOCKET_FIELD_NUMBER: _ClassVar[int]
    TARGET_PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COMPILED_GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    draft_epoch: int
    target_address: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _generation_pb2.SamplingParams
    is_timed: bool
    target_socket: str
    target_peer_address: str
    compiled_grammar: bytes
    num_prompt_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., draft_epoch: _Optional[int] = ..., target_address: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., is_timed: _Optional[bool] = ..., target_socket: _Optional[str] = ..., target_peer_address: _Optional[str] = ..., compiled_grammar: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ...) -> None: ...

class DraftRound(_message.Message):
    __slots__ = ("request_id", "target_epoch", "draft_epoch", "round_idx", "seq_len", "token_offset", "token_ids", "num_steps", "topk", "num_draft_tokens", "unless_attached")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_IDX_FIELD_NUMBER: _ClassVar[int]
    SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOPK_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNLESS_ATTACHED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    draft_epoch: int
    round_idx: int
    seq_len: int
    token_offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_steps: int
    topk: int
    num_draft_tokens: int
    unless_attached: bool
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., draft_epoch: _Optional[int] = ..., round_idx: _Optional[int] = ..., seq_len: _Optional[int] = ..., token_offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_steps: _Optional[int] = ..., topk: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., unless_attached: _Optional[bool] = ...) -> None: ...

class DraftClose(_message.Message):
    __slots__ = ("request_id", "draft_epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    draft_epoch: int
    def __init__(self, request_id: _Optional[str] = ..., draft_epoch: _Optional[int] = ...) -> None: ...

class DraftServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceGetInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _tree_pb2.WorkerInfo
    def __init__(self, info: _Optional[_Union[_tree_pb2.WorkerInfo, _Mapping]] = ...) -> None: ...
