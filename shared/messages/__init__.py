"""Values that cross a process or service seam, and their protobuf messages. No torch here.

Import them from here: the modules are one per concept. `codec.py` maps values to messages,
`columnar.py` registers those that are converted by hand, `batches.py` packs session messages.
Names follow docs/glossary.md.
"""

import shared.messages.columnar  # noqa: F401
from shared.messages.codec import from_proto, to_proto
from shared.messages.draft import DraftClose, DraftOpen, DraftRound
from shared.messages.failures import RequestFailure, RequestRetracted
from shared.messages.features import (
    MAX_CHUNK_BYTES,
    FeatureAck,
    FeatureChunk,
    FeatureCommand,
    FeatureFailure,
    FeatureSpec,
    FeatureSubscribe,
    FeatureUnsubscribe,
    PathRows,
    RingSpan,
)
from shared.messages.generation import (
    FinishInfo,
    FinishReason,
    GenerateEvent,
    PromptInfo,
    RoundTimes,
    RoundTree,
    SpeculationStats,
    Timings,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from shared.messages.params import MIN_TEMPERATURE, SamplingParams, StoppingParams
from shared.messages.peer import (
    ROWS_HANDLE_BYTES,
    PathBatch,
    PathEntry,
    PeerAttach,
    PeerDetach,
    RowsAnswer,
    RowsOffer,
)
from shared.messages.routed_experts import RoutedExperts
from shared.messages.target import (
    MAX_TOP_LOGPROBS,
    Credit,
    CreditUpdate,
    DraftDetached,
    DraftRest,
    PeerTrees,
    RootOnly,
    TargetAdmitted,
    TargetClose,
    TargetOpen,
    VerifyRound,
)
from shared.messages.times import AnswerTimes, StageTime
from shared.messages.tree import (
    MAX_NUM_STEPS,
    MAX_TOPK,
    MAX_TREE_NODES,
    AcceptedPath,
    PeerTree,
    TokenTree,
    TreeBatch,
    TreeShape,
    check_shape,
)
from shared.messages.worker import WorkerInfo, WorkerLoad

__all__ = [
    "AcceptedPath",
    "AnswerTimes",
    "Credit",
    "CreditUpdate",
    "DraftClose",
    "DraftDetached",
    "DraftRest",
    "DraftOpen",
    "DraftRound",
    "FeatureAck",
    "FeatureChunk",
    "FeatureCommand",
    "FeatureFailure",
    "FeatureSpec",
    "FeatureSubscribe",
    "FeatureUnsubscribe",
    "FinishInfo",
    "FinishReason",
    "GenerateEvent",
    "MAX_CHUNK_BYTES",
    "MAX_NUM_STEPS",
    "MAX_TOPK",
    "MAX_TOP_LOGPROBS",
    "MAX_TREE_NODES",
    "MIN_TEMPERATURE",
    "PathBatch",
    "PathEntry",
    "PeerAttach",
    "PeerDetach",
    "PeerTree",
    "PeerTrees",
    "PromptInfo",
    "RequestFailure",
    "RequestRetracted",
    "PathRows",
    "ROWS_HANDLE_BYTES",
    "RingSpan",
    "RootOnly",
    "RoundTimes",
    "RoundTree",
    "RoutedExperts",
    "RowsAnswer",
    "RowsOffer",
    "SamplingParams",
    "SpeculationStats",
    "StageTime",
    "StoppingParams",
    "TargetAdmitted",
    "TargetClose",
    "TargetOpen",
    "Timings",
    "TokenDelta",
    "TokenLogprob",
    "TokenTree",
    "TreeBatch",
    "TreeShape",
    "Usage",
    "VerifyRound",
    "WorkerInfo",
    "WorkerLoad",
    "check_shape",
    "from_proto",
    "to_proto",
]
