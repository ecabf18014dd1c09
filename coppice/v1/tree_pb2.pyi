from coppice.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_DTYPE_UNSPECIFIED: _ClassVar[TensorDtype]
    TENSOR_DTYPE_FLOAT32: _ClassVar[TensorDtype]
    TENSOR_DTYPE_FLOAT16: _ClassVar[TensorDtype]
    TENSOR_DTYPE_BFLOAT16: _ClassVar[TensorDtype]
TENSOR_DTYPE_UNSPECIFIED: TensorDtype
TENSOR_DTYPE_FLOAT32: TensorDtype
TENSOR_DTYPE_FLOAT16: TensorDtype
TENSOR_DTYPE_BFLOAT16: TensorDtype

class TopkScores(_message.Message):
    __slots__ = ("cumulative_logprobs",)
    CUMULATIVE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    cumulative_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, cumulative_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenTree(_message.Message):
    __slots__ = ("request_id", "target_epoch", "draft_epoch", "round_idx", "seq_len", "token_ids", "parent_index", "scores", "times")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_IDX_FIELD_NUMBER: _ClassVar[int]
    SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    draft_epoch: int
    round_idx: int
    seq_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parent_index: _containers.RepeatedScalarFieldContainer[int]
    scores: TopkScores
    times: AnswerTimes
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., draft_epoch: _Optional[int] = ..., round_idx: _Optional[int] = ..., seq_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., parent_index: _Optional[_Iterable[int]] = ..., scores: _Optional[_Union[TopkScores, _Mapping]] = ..., times: _Optional[_Union[AnswerTimes, _Mapping]] = ...) -> None: ...

class AnswerTimes(_message.Message):
    __slots__ = ("clock_id", "begin_ns", "stages")
    CLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    clock_id: int
    begin_ns: int
    stages: _containers.RepeatedCompositeFieldContainer[_generation_pb2.StageTime]
    def __init__(self, clock_id: _Optional[int] = ..., begin_ns: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[_generation_pb2.StageTime, _Mapping]]] = ...) -> None: ...

class AcceptedPath(_message.Message):
    __slots__ = ("request_id", "target_epoch", "round_idx", "seq_len", "accept_index", "token_ids", "num_accepted_drafts", "num_draft_tokens", "logprobs", "finish_reason", "matched_stop_token_id", "times", "tree", "routed_experts", "is_forced")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_IDX_FIELD_NUMBER: _ClassVar[int]
    SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    IS_FORCED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    round_idx: int
    seq_len: int
    accept_index: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_accepted_drafts: int
    num_draft_tokens: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    finish_reason: _generation_pb2.FinishReason
    matched_stop_token_id: int
    times: AnswerTimes
    tree: _generation_pb2.RoundTree
    routed_experts: _generation_pb2.RoutedExperts
    is_forced: bool
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., round_idx: _Optional[int] = ..., seq_len: _Optional[int] = ..., accept_index: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_accepted_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., matched_stop_token_id: _Optional[int] = ..., times: _Optional[_Union[AnswerTimes, _Mapping]] = ..., tree: _Optional[_Union[_generation_pb2.RoundTree, _Mapping]] = ..., routed_experts: _Optional[_Union[_generation_pb2.RoutedExperts, _Mapping]] = ..., is_forced: _Optional[bool] = ...) -> None: ...

class FeatureHandle(_message.Message):
    __slots__ = ("shape", "dtype", "inline_data", "ring_span")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    INLINE_DATA_FIELD_NUMBER: _ClassVar[int]
    RING_SPAN_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: TensorDtype
    inline_data: bytes
    ring_span: RingSpan
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[TensorDtype, str]] = ..., inline_data: _Optional[bytes] = ..., ring_span: _Optional[_Union[RingSpan, _Mapping]] = ...) -> None: ...

class RingSpan(_message.Message):
    __slots__ = ("ring", "begin")
    RING_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    ring: str
    begin: int
    def __init__(self, ring: _Optional[str] = ..., begin: _Optional[int] = ...) -> None: ...

class FeatureSpec(_message.Message):
    __slots__ = ("layer_ids", "width", "dtype", "projection", "kv_layer_ids")
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_FIELD_NUMBER: _ClassVar[int]
    KV_LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    width: int
    dtype: TensorDtype
    projection: str
    kv_layer_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer_ids: _Optional[_Iterable[int]] = ..., width: _Optional[int] = ..., dtype: _Optional[_Union[TensorDtype, str]] = ..., projection: _Optional[str] = ..., kv_layer_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestFailure(_message.Message):
    __slots__ = ("request_id", "target_epoch", "draft_epoch", "round_idx", "code", "reason", "message", "field")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_IDX_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    draft_epoch: int
    round_idx: int
    code: int
    reason: str
    message: str
    field: str
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., draft_epoch: _Optional[int] = ..., round_idx: _Optional[int] = ..., code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ...) -> None: ...

class RequestRetracted(_message.Message):
    __slots__ = ("request_id", "target_epoch", "draft_epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target_epoch: int
    draft_epoch: int
    def __init__(self, request_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., draft_epoch: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_free_pages", "num_pages", "num_steps", "num_rows", "num_request_steps", "num_moved_rounds", "kernel_launches", "num_compiles", "num_captures", "num_eager_launches", "counts")
    class KernelLaunchesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUEST_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    KERNEL_LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPILES_FIELD_NUMBER: _ClassVar[int]
    NUM_CAPTURES_FIELD_NUMBER: _ClassVar[int]
    NUM_EAGER_LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    num_steps: int
    num_rows: int
    num_request_steps: int
    num_moved_rounds: int
    kernel_launches: _containers.ScalarMap[str, int]
    num_compiles: int
    num_captures: int
    num_eager_launches: int
    counts: _containers.ScalarMap[str, float]
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_free_pages: _Optional[int] = ..., num_pages: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_request_steps: _Optional[int] = ..., num_moved_rounds: _Optional[int] = ..., kernel_launches: _Optional[_Mapping[str, int]] = ..., num_compiles: _Optional[int] = ..., num_captures: _Optional[int] = ..., num_eager_launches: _Optional[int] = ..., counts: _Optional[_Mapping[str, float]] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("incarnation", "model", "model_hash", "tokenizer_hash", "vocab_size", "max_context_len", "page_size", "dtype", "device", "features", "kind", "load", "eos_token_ids", "draft_window", "feature_ring", "peer_socket", "device_model", "versions", "cpu_threads", "logits_hash", "peer_address", "protocol_version", "has_grammars", "quantization", "num_experts", "kv_cache_dtype", "gpu")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WINDOW_FIELD_NUMBER: _ClassVar[int]
    FEATURE_RING_FIELD_NUMBER: _ClassVar[int]
    PEER_SOCKET_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    CPU_THREADS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_HASH_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    HAS_GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    model: str
    model_hash: str
    tokenizer_hash: str
    vocab_size: int
    max_context_len: int
    page_size: int
    dtype: str
    device: str
    features: FeatureSpec
    kind: str
    load: WorkerLoad
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_window: int
    feature_ring: str
    peer_socket: str
    device_model: str
    versions: str
    cpu_threads: int
    logits_hash: str
    peer_address: str
    protocol_version: int
    has_grammars: bool
    quantization: str
    num_experts: int
    kv_cache_dtype: str
    gpu: str
    def __init__(self, incarnation: _Optional[str] = ..., model: _Optional[str] = ..., model_hash: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context_len: _Optional[int] = ..., page_size: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., features: _Optional[_Union[FeatureSpec, _Mapping]] = ..., kind: _Optional[str] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., draft_window: _Optional[int] = ..., feature_ring: _Optional[str] = ..., peer_socket: _Optional[str] = ..., device_model: _Optional[str] = ..., versions: _Optional[str] = ..., cpu_threads: _Optional[int] = ..., logits_hash: _Optional[str] = ..., peer_address: _Optional[str] = ..., protocol_version: _Optional[int] = ..., has_grammars: _Optional[bool] = ..., quantization: _Optional[str] = ..., num_experts: _Optional[int] = ..., kv_cache_dtype: _Optional[str] = ..., gpu: _Optional[str] = ...) -> None: ...
