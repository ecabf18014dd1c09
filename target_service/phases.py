"""Typed inputs and outputs of the target's phases: (take trees) -> extend -> verify -> commit.

T rows are computed by one extend; L of them (the logit rows) are sampled; B requests are sampled,
each with up to N nodes. A prefill's last row is a tree of one node. Nothing here changes state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.accept_walk import AcceptWalk
from shared.kernels.penalties import Penalties
from shared.step.packing import PackedRows
from shared.step.read_back import ReadBack

TOKEN_IS_KNOWN = -1
"""In `root_idx` of an ExtendInput: `token_ids` holds the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendInput:
    """Rows of new tokens.

    Args:
        token_ids: [T] i64.
        position_ids: [T] i64, seq_len + depth for a tree node.
        root_idx: [T] i64, request whose newest token is the row's token, by row of the page table:
            only the device knows it so far; or TOKEN_IS_KNOWN.
        rows: Where their KV goes and what they see.
        bucket: T, if the rows were padded up to it (see buckets.py); else None.
        wants_experts: Whether the experts of the rows are kept. Padded rows' always are: a graph
            writes them anyway.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    root_idx: torch.Tensor
    rows: PackedRows
    bucket: int | None = None
    wants_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendOutput:
    """What a forward gave.

    Args:
        hidden: [T, h], after the final norm.
        features: [T, captured width] in the model's dtype; None when the target captures none.
        expert_ids: [layers with experts, at least T, top_k] i32; None where they are not kept.
    """

    hidden: torch.Tensor
    features: torch.Tensor | None
    expert_ids: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxTrees:
    """Trees that the device takes from the mailbox: those of the first B requests of a step.

    Args:
        words: [S, 64] i64, the mailbox's trees.
        slot, round_tag: [B] i32, where each tree will be, and the number of its round.
        is_behind: [B] i32; not 0: the request's round before is in flight, so that only the device
            will know where the root is.
        num_nodes: Of the largest tree, root included.
        max_depth: Of the deepest.
        awaited: By slot, round tags of the trees that the stream waits for, before the kernel.
    """

    words: torch.Tensor
    slot: torch.Tensor
    round_tag: torch.Tensor
    is_behind: torch.Tensor
    num_nodes: int
    max_depth: int
    awaited: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxPaths:
    """Where the accepted paths of a step are posted.

    Args:
        words: [S, MAX_PATH] i64, the mailbox's paths.
        rows: [B] i64, addresses of the feature rows of each request's draft, [2, S, MAX_PATH, W];
            None: drafts take none.
        slot, round_tag: [B] i32, place and number of each path; slot -1: it is not posted.
    """

    words: torch.Tensor
    rows: torch.Tensor | None
    slot: torch.Tensor
    round_tag: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyInput:
    """The trees to sample and walk.

    Where rows are padded, L is a bucket, N is 64 and B as many trees as L rows can have.

    Args:
        bucket: L, if the rows were padded up to it (see buckets.py); else None.
        num_trees: Of the step, without padding.
        path_width: Nodes of the longest path that the step can accept.
        req_idx: [B] i64, rows of the page table; of padding, the spare one past them.
        seq_len: [B] i64, logical slot of each root.
        logit_rows: [L] i64, rows of the extend.
        node_rows: [B, N] i64, logit row of each node; padding nodes point at row 0.
        token_ids: [B, N] i64, root included.
        parent_index: [B, N] i64, root = -1, padding = -2.
        position: [L] i64, absolute position of the token sampled at each row.
        max_depth: Bounds the depth of every tree.
        may_move_kv: Whether some accepted path may not be contiguous.
        sampling: How the rows are sampled.
        logprob_rows: [P] i64, logit rows whose logprobs were asked for; None: no request did.
        num_top_logprobs: Alternatives per row.
        wants_features: Whether some request keeps the features of its path.
        wants_experts: Whether some request asks which experts its path was routed to.
        mailbox_paths: Where paths are posted; None: there is no mailbox.
        num_device_trees: Of how many requests, the first ones, the host does not know the trees.
    """

    bucket: int | None
    num_trees: int
    path_width: int
    req_idx: torch.Tensor
    seq_len: torch.Tensor
    logit_rows: torch.Tensor
    node_rows: torch.Tensor
    token_ids: torch.Tensor
    parent_index: torch.Tensor
    position: torch.Tensor
    max_depth: int
    may_move_kv: bool
    sampling: SamplingInput
    logprob_rows: torch.Tensor | None = None
    num_top_logprobs: int = 0
    wants_features: bool = False
    wants_experts: bool = False
    mailbox_paths: MailboxPaths | None = None
    num_device_trees: int = 0

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logit rows of what an extend computed, [T, ...] -> [L, ...]."""
        return rows.index_select(0, self.logit_rows)

    @property
    def is_rare(self) -> bool:
        """Return whether some request asks for what no graph has."""
        return self.logprob_rows is not None or self.sampling.edits_logits

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return everything on the device that a graph reads of this."""
        tensors = [self.req_idx, self.seq_len, self.logit_rows, self.node_rows, self.token_ids]
        tensors += [self.parent_index, self.position, *self.sampling.columns]
        paths = self.mailbox_paths
        if paths is None:
            return tensors
        rows = [] if paths.rows is None else [paths.rows]
        return [*tensors, paths.slot, paths.round_tag, *rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasInput:
    """Single logits to add to: `rows`, `token_ids` [M] i64 and `values` [M] f32."""

    rows: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ForbiddenInput:
    """Tokens that may not be sampled yet: `rows` and `token_ids`, [M] i64 each."""

    rows: torch.Tensor
    token_ids: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskInput:
    """Rows with a grammar.

    Args:
        rows: [M] i64.
        masks: [M, ceil(V / 32)] i32 of the tokens allowed.
        shut: Rows, on the host, of nodes that no path may lead to.
    """

    rows: torch.Tensor
    masks: torch.Tensor
    shut: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInput:
    """How each logit row is sampled.

    Args:
        temperature, top_p, min_p: [L] f32.
        top_k: [L] i32.
        seed: [L] i64 bit pattern of the unsigned seed.
        has_filters: Whether some row's filters may drop a token.
        bias, penalties, forbidden, masks: None where no row has any.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    has_filters: bool
    bias: BiasInput | None = None
    penalties: Penalties | None = None
    forbidden: ForbiddenInput | None = None
    masks: MaskInput | None = None

    @property
    def columns(self) -> tuple[torch.Tensor, ...]:
        """Return what every row has."""
        return (self.temperature, self.top_k, self.top_p, self.min_p, self.seed)

    def part(self, rows: slice) -> SamplingInput:
        """Return what belongs to some rows, where none is edited."""
        assert not self.edits_logits
        temperature, top_k, top_p, min_p, seed = [column[rows] for column in self.columns]
        return SamplingInput(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            has_filters=self.has_filters,
        )

    @property
    def edits_logits(self) -> bool:
        """Return whether sampling changes logits in place."""
        return not (self.bias is self.penalties is self.forbidden is self.masks is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOutput:
    """Sampled tokens at every node, and each request's accepted path.

    Args:
        node_outputs: Registered node-indexed tensors, [L, ...] each.
        walk: Accepted paths.
        num_nodes: [M] i64, of the M trees from the mailbox, the first ones; None: the host knows
            all trees.
        taken_token_ids, taken_parents: [M, N] i64, `token_ids` and `parent_index` of these trees.
    """

    node_outputs: NodeOutputs
    walk: AcceptWalk
    num_nodes: torch.Tensor | None = None
    taken_token_ids: torch.Tensor | None = None
    taken_parents: torch.Tensor | None = None


class NodeOutputs:
    """The one place where node-indexed outputs are registered, so that none escapes the commit.

    Every tensor is [L, ...]; `read` takes the same rows of all of them.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._tensors: dict[str, torch.Tensor] = {}

    def register(self, name: str, tensor: torch.Tensor) -> None:
        """Add a node-indexed output, [L, ...]."""
        assert tensor.shape[0] == self._num_rows, f"{name} has {tensor.shape[0]} rows"
        assert name not in self._tensors, f"{name} is registered twice"
        self._tensors[name] = tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def get(self, name: str) -> torch.Tensor | None:
        """Return a registered tensor; None if there is none of the name."""
        return self._tensors.get(name)

    def without(self, name: str) -> NodeOutputs:
        """Return all but one of the outputs, which need not be there."""
        others = NodeOutputs(self._num_rows)
        others._tensors = {key: value for key, value in self._tensors.items() if key != name}
        return others

    def beside(self, name: str, tensor: torch.Tensor) -> NodeOutputs:
        """Return the outputs and one more; these, which may be a graph's, stay as they are."""
        others = type(self)(self._num_rows)
        others._tensors = dict(self._tensors)
        others.register(name, tensor)
        return others

    def read(self, into: ReadBack, rows: torch.Tensor) -> None:
        """Read every registered tensor at `rows` [...] i64, as [..., *rest]."""
        for name, tensor in self._tensors.items():
            into.add(name, tensor, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOutputs:
    """What each request's accepted path carries, on the host. [B, D + 1, ...] each; padding past
    it. Copy what outlives the step.

    Args:
        accept_index: Nodes of the path, root first, -1 padded.
        accept_length: [B], bonus included.
        token_ids: The target's token at each path node.
        is_finite: 0 where the raw logits of that token were not all finite.
        num_nodes: [M], of the M trees from the mailbox, the first ones; root included. 1: the tree
            did not come in time. None: all trees were here.
        taken_token_ids, taken_parents: [M, N], these trees; -2: what is no node. None when no
            request of theirs wants to see its trees.
        logprobs: Of those tokens; None when no request asked.
        top_ids, top_logprobs: [B, D + 1, num_top].
        features: [B, D + 1, row_bytes] u8; None when no request keeps them.
        routed_experts: [B, D + 1, layers with experts, top_k] u8, or i16 that holds the bits of
            u16; None when no request asked.
    """

    accept_index: NDArray[np.int64]
    accept_length: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    is_finite: NDArray[np.uint8]
    num_nodes: NDArray[np.int64] | None = None
    taken_token_ids: NDArray[np.int64] | None = None
    taken_parents: NDArray[np.int64] | None = None
    logprobs: NDArray[np.float32] | None = None
    top_ids: NDArray[np.int64] | None = None
    top_logprobs: NDArray[np.float32] | None = None
    features: NDArray[np.uint8] | None = None
    routed_experts: NDArray[np.uint8] | NDArray[np.int16] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """What a step computed, on the host.

    Args:
        paths: None when nothing was sampled.
        chain_features: For each prefill chunk and replay its feature rows, [n, row_bytes] u8; None
            where the request keeps none. Copy what outlives the step.
    """

    paths: PathOutputs | None
    chain_features: Sequence[NDArray[np.uint8] | None]
