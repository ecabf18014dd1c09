from coppice.v1 import generation_pb2 as _generation_pb2
from coppice.v1 import tree_pb2 as _tree_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TargetServiceSessionRequest(_message.Message):
    __slots__ = ("opens", "verifies", "closes", "credits")
    OPENS_FIELD_NUMBER: _ClassVar[int]
    VERIFIES_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    opens: _containers.RepeatedCompositeFieldContainer[TargetOpen]
    verifies: _containers.RepeatedCompositeFieldContainer[VerifyRound]
    closes: _containers.RepeatedCompositeFieldContainer[TargetClose]
    credits: _containers.RepeatedCompositeFieldContainer[CreditUpdate]
    def __init__(self, opens: _Optional[_Iterable[_Union[TargetOpen, _Mapping]]] = ..., verifies: _Optional[_Iterable[_Union[VerifyRound, _Mapping]]] = ..., closes: _Optional[_Iterable[_Union[TargetClose, _Mapping]]] = ..., credits: _Optional[_Iterable[_Union[CreditUpdate, _Mapping]]] = ...) -> None: ...

class TargetServiceSessionResponse(_message.Message):
    __slots__ = ("admitted", "accepted_paths", "failures", "retracted", "load", "detached", "path_batch", "rests")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PATHS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    RETRACTED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    PATH_BATCH_FIELD_NUMBER: _ClassVar[int]
    RESTS_FIELD_NUMBER: _ClassVar[int]
    admitted: _containers.RepeatedCompositeFieldContainer[TargetAdmitted]
    accepted_paths: _containers.RepeatedCompositeFieldContainer[_tree_pb2.AcceptedPath]
    failures: _containers.RepeatedCompositeFieldContainer[_tree_pb2.RequestFailure]
    retracted: _containers.RepeatedCompositeFieldContainer[_tree_pb2.RequestRetracted]
    load: _tree_pb2.WorkerLoad
    detached: _containers.RepeatedCompositeFieldContainer[DraftDetached]
    path_batch: AcceptedPathBatch
    rests: _containers.RepeatedCompositeFieldContainer[DraftRest]
    def __init__(self, admitted: _Optional[_Iterable[_Union[TargetAdmitted, _Mapping]]] = ..., accepted_paths: _Optional[_Iterable[_Union[_tree_pb2.AcceptedPath, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[_tree_pb2.RequestFailure, _Mapping]]] = ..., retracted: _Optional[_Iterable[_Union[_tree_pb2.RequestRetracted, _Mapping]]] = ..., load: _Optional[_Union[_tree_pb2.WorkerLoad, _Mapping]] = ..., detached: _Optional[_Iterable[_Union[DraftDetached, _Mapping]]] = ..., path_batch: _Optional[_Union[AcceptedPathBatch, _Mapping]] = ..., rests: _Optional[_Iterable[_Union[DraftRest, _Mapping]]] = ...) -> None: ...

class AcceptedPathBatch(_message.Message):
    __slots__ = ("request_ids", "target_epochs", "round_idx", "seq_lens", "num_tokens", "num_accepted_drafts", "num_draft_tokens", "token_ids", "accept_index")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    ROUND_IDX_FIELD_NUMBER: _ClassVar[int]
    SEQ_LENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    target_epochs: _containers.RepeatedScalarFieldContainer[int]
    round_idx: _containers.RepeatedScalarFieldContainer[int]
    seq_lens: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_accepted_drafts: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    accept_index: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., target_epochs: _Optional[_Iterable[int]] = ..., round_idx: _Optional[_Iterable[int]] = ..., seq_lens: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., num_accepted_drafts: _Optional[_Iterable[int]] = ..., num_draft_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., accept_index: _Optional[_Iterable[int]] = ...) -> None: ...

class TargetOpen(_message.Message):
    __slots__ = ("request_id", "target_epoch", "token_ids", "num_prompt_tokens", "sampling", "stopping", "logprobs", "top_logprobs", "wants_features", "priority", "is_timed", "credit", "compiled_grammar", "grows_forced", "wants_trees", "wants_routed_experts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WANTS_FEATURES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    IS_TIMED_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    COMPILED_GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    GROWS_FORCED_FIELD_NUMBER: _ClassVar[int]
    WANTS_TREES_FIELD_NUMBER: _ClassVar[int]
    WANTS_ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: _generation_pb2.SamplingParams
    stopping: _generation_pb2.StoppingCriteria
    logprobs: bool
    top_logprobs: int
    wants_features: bool
    priority: int
    is_timed: bool
    credit: Credit
    compiled_grammar: bytes
    grows_forced: bool
    wants_trees: bool
    wants_routed_experts: bool
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_generation_pb2.StoppingCriteria, _Mapping]] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., wants_features: _Optional[bool] = ..., priority: _Optional[int] = ..., is_timed: _Optional[bool] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., compiled_grammar: _Optional[bytes] = ..., grows_forced: _Optional[bool] = ..., wants_trees: _Optional[bool] = ..., wants_routed_experts: _Optional[bool] = ...) -> None: ...

class TargetAdmitted(_message.Message):
    __slots__ = ("request_id", "target_epoch", "num_cached_tokens", "times")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    num_cached_tokens: int
    times: _tree_pb2.AnswerTimes
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., times: _Optional[_Union[_tree_pb2.AnswerTimes, _Mapping]] = ...) -> None: ...

class VerifyRound(_message.Message):
    __slots__ = ("request_id", "target_epoch", "round_idx", "seq_len", "root_token_id", "tree")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_IDX_FIELD_NUMBER: _ClassVar[int]
    SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    ROOT_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    round_idx: int
    seq_len: int
    root_token_id: int
    tree: _tree_pb2.TokenTree
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., round_idx: _Optional[int] = ..., seq_len: _Optional[int] = ..., root_token_id: _Optional[int] = ..., tree: _Optional[_Union[_tree_pb2.TokenTree, _Mapping]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("until_round_idx", "root_only", "peer")
    UNTIL_ROUND_IDX_FIELD_NUMBER: _ClassVar[int]
    ROOT_ONLY_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    until_round_idx: int
    root_only: RootOnly
    peer: PeerTrees
    def __init__(self, until_round_idx: _Optional[int] = ..., root_only: _Optional[_Union[RootOnly, _Mapping]] = ..., peer: _Optional[_Union[PeerTrees, _Mapping]] = ...) -> None: ...

class RootOnly(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PeerTrees(_message.Message):
    __slots__ = ("draft_epoch", "num_steps", "topk", "num_draft_tokens", "adapts")
    DRAFT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOPK_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTS_FIELD_NUMBER: _ClassVar[int]
    draft_epoch: int
    num_steps: int
    topk: int
    num_draft_tokens: int
    adapts: bool
    def __init__(self, draft_epoch: _Optional[int] = ..., num_steps: _Optional[int] = ..., topk: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., adapts: _Optional[bool] = ...) -> None: ...

class CreditUpdate(_message.Message):
    __slots__ = ("request_id", "target_epoch", "credit")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    credit: Credit
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ...) -> None: ...

class DraftDetached(_message.Message):
    __slots__ = ("request_id", "target_epoch", "draft_epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    draft_epoch: int
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., draft_epoch: _Optional[int] = ...) -> None: ...

class DraftRest(_message.Message):
    __slots__ = ("request_id", "target_epoch", "draft_epoch", "is_resting")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_RESTING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    draft_epoch: int
    is_resting: bool
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., draft_epoch: _Optional[int] = ..., is_resting: _Optional[bool] = ...) -> None: ...

class TargetClose(_message.Message):
    __slots__ = ("request_id", "target_epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ...) -> None: ...

class StreamFeaturesRequest(_message.Message):
    __slots__ = ("subscribe", "unsubscribe", "acks")
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    UNSUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    ACKS_FIELD_NUMBER: _ClassVar[int]
    subscribe: FeatureSubscribe
    unsubscribe: FeatureUnsubscribe
    acks: _containers.RepeatedCompositeFieldContainer[FeatureAck]
    def __init__(self, subscribe: _Optional[_Union[FeatureSubscribe, _Mapping]] = ..., unsubscribe: _Optional[_Union[FeatureUnsubscribe, _Mapping]] = ..., acks: _Optional[_Iterable[_Union[FeatureAck, _Mapping]]] = ...) -> None: ...

class FeatureSubscribe(_message.Message):
    __slots__ = ("request_id", "target_epoch", "from_position", "ring_nonce", "draft_epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FROM_POSITION_FIELD_NUMBER: _ClassVar[int]
    RING_NONCE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    from_position: int
    ring_nonce: bytes
    draft_epoch: int
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., from_position: _Optional[int] = ..., ring_nonce: _Optional[bytes] = ..., draft_epoch: _Optional[int] = ...) -> None: ...

class FeatureAck(_message.Message):
    __slots__ = ("request_id", "target_epoch", "position")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    position: int
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class FeatureUnsubscribe(_message.Message):
    __slots__ = ("request_id", "target_epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ...) -> None: ...

class StreamFeaturesResponse(_message.Message):
    __slots__ = ("chunks", "failures", "feature_ring")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    FEATURE_RING_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[FeatureChunk]
    failures: _containers.RepeatedCompositeFieldContainer[_tree_pb2.RequestFailure]
    feature_ring: str
    def __init__(self, chunks: _Optional[_Iterable[_Union[FeatureChunk, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[_tree_pb2.RequestFailure, _Mapping]]] = ..., feature_ring: _Optional[str] = ...) -> None: ...

class FeatureChunk(_message.Message):
    __slots__ = ("request_id", "target_epoch", "start", "handle")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    start: int
    handle: _tree_pb2.FeatureHandle
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., start: _Optional[int] = ..., handle: _Optional[_Union[_tree_pb2.FeatureHandle, _Mapping]] = ...) -> None: ...

class TargetServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TargetServiceGetInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _tree_pb2.WorkerInfo
    def __init__(self, info: _Optional[_Union[_tree_pb2.WorkerInfo, _Mapping]] = ...) -> None: ...
