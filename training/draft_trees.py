"""Dense, unpaged reference of draft trees, for every possible root of a known text at once.

Verification accepts the longest path of the tree that agrees with the target's own tokens. Those
do not depend on the draft, so they are computed once, and a tree is grown at each position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from training.eagle3 import Eagle3Head
from training.model import LlamaForCausalLM, rope_table


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    num_steps: int  # depth without the root
    topk: int  # children per expanded node
    num_draft_tokens: int  # nodes verified per round, root included

    def __str__(self) -> str:
        return f"{self.num_steps}/{self.topk}/{self.num_draft_tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """What a draft computed from the known text: its rows 0..T-1, per layer."""

    keys: list[Tensor]  # [num_kv_heads, T, head_dim]
    values: list[Tensor]
    hidden: Tensor  # [T, hidden_size], recurrent
    log_probs: Tensor  # [T, V], of the token after the one that the row consumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """k rows in each of R trees, and the keys of their ancestors (the root's are in Prefix)."""

    token_ids: Tensor  # [R, k]
    hidden: Tensor  # [R, k, hidden_size]: the parent's recurrent hidden state
    keys: list[Tensor]  # [R, num_kv_heads, k, depth, head_dim]
    values: list[Tensor]


class Draft(Protocol):
    vocabulary: Tensor  # [V] i64: target id of each draft id
    root_offset: int  # row that consumes the token at position p, minus p

    def read(self, token_ids: Tensor, features: Tensor) -> Prefix: ...

    def expand(self, rows: Rows, prefix: Prefix, bases: Tensor, depth: int) -> Prefix: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTrees:
    """C candidate nodes in each of R trees, in order of creation."""

    token_ids: Tensor  # [R, C]
    parent_index: Tensor  # [R, C], root = -1
    selected: Tensor  # [R, C] bool, the best num_draft_tokens - 1
    depths: list[int]  # C


def attend_path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: tuple[Tensor, Tensor],
    path: tuple[Tensor, Tensor],
    bases: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend to prefix rows up to each tree's base, to the row's ancestors and to itself.

    Args:
        q: [R, num_heads, k, D].
        k, v: [R, num_kv_heads, k, D].
        prefix: keys and values [num_kv_heads, T, D].
        path: keys and values [R, num_kv_heads, k, depth, D].
        bases: [R], last visible row of the prefix.
    Returns: output [R, k, num_heads * D]; path keys and values with this row appended.
    """
    prefix_k, prefix_v = prefix
    path_k = torch.cat([path[0], k.unsqueeze(3)], dim=3)
    path_v = torch.cat([path[1], v.unsqueeze(3)], dim=3)
    q = q.unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
    num_rows = prefix_k.shape[1]
    hidden_rows = torch.arange(num_rows, device=q.device) > bases[:, None, None, None, None]
    prefix_scores = torch.einsum("rngkd,ntd->rngkt", q, prefix_k)
    prefix_scores = prefix_scores.masked_fill(hidden_rows, float("-inf"))
    path_scores = torch.einsum("rngkd,rnkjd->rngkj", q, path_k)
    weights = torch.cat([prefix_scores, path_scores], dim=-1).softmax(-1)
    out = torch.einsum("rngkt,ntd->rngkd", weights[..., :num_rows], prefix_v)
    out = out + torch.einsum("rngkj,rnkjd->rngkd", weights[..., num_rows:], path_v)
    return out.flatten(1, 2).transpose(1, 2).flatten(2), path_k, path_v


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend causally within one sequence: [1, heads, T, D] to [1, T, num_heads * D]."""
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


class Eagle3Draft:
    """Row p consumes (token p + 1, feature p), so the root at position L is row L - 1."""

    root_offset = -1

    def __init__(self, head: Eagle3Head, target: LlamaForCausalLM) -> None:
        self.head = head
        self.embed = target.model.embed_tokens
        self.vocabulary = head.hot_token_ids

    def read(self, token_ids: Tensor, features: Tensor) -> Prefix:
        """Run the rows with true features.

        Args:
            token_ids: [T] i64.
            features: [T, num_aux * hidden_size].
        """
        layer = self.head.midlayer
        hidden = self.head.fc(features[None, :-1])
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        cos, sin = rope_table(self.head.config.decoder, positions)
        residual, q, k, v = layer.project(self.embed(token_ids[None, 1:]), hidden, cos, sin)
        hidden = layer.finish(residual, causal_attention(q, k, v))
        log_probs = self.head.logits(hidden).log_softmax(-1)
        return Prefix(keys=[k[0]], values=[v[0]], hidden=hidden[0], log_probs=log_probs[0])

    def expand(self, rows: Rows, prefix: Prefix, bases: Tensor, depth: int) -> Prefix:
        """Run tree rows; the result's tensors are [R, k, ...], keys those of `Rows`."""
        layer = self.head.midlayer
        positions = (bases + depth)[:, None, None]
        cos, sin = rope_table(self.head.config.decoder, positions)
        residual, q, k, v = layer.project(self.embed(rows.token_ids), rows.hidden, cos, sin)
        attended, path_k, path_v = attend_path(
            q, k, v, (prefix.keys[0], prefix.values[0]), (rows.keys[0], rows.values[0]), bases
        )
        hidden = layer.finish(residual, attended)
        log_probs = self.head.logits(hidden).log_softmax(-1)
        return Prefix(keys=[path_k], values=[path_v], hidden=hidden, log_probs=log_probs)


class StandaloneDraft:
    """An ordinary causal model: row p consumes token p; features are not used."""

    root_offset = 0

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        device = model.lm_head.weight.device
        self.vocabulary = torch.arange(model.config.vocab_size, device=device)

    def read(self, token_ids: Tensor, features: Tensor) -> Prefix:
        """Run all rows of [T] token ids."""
        del features
        positions = torch.arange(len(token_ids), device=token_ids.device)
        cos, sin = rope_table(self.model.config, positions)
        x = self.model.model.embed_tokens(token_ids[None])
        keys, values = [], []
        for layer in self.model.model.decoder_layers():
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
            keys.append(k[0])
            values.append(v[0])
            x = x + layer.self_attn.o_proj(causal_attention(q, k, v))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        log_probs = self.model.lm_head(self.model.model.norm(x)).log_softmax(-1)
        return Prefix(keys=keys, values=values, hidden=x[0], log_probs=log_probs[0])

    def expand(self, rows: Rows, prefix: Prefix, bases: Tensor, depth: int) -> Prefix:
        """Run tree rows; the result's tensors are [R, k, ...], keys those of `Rows`."""
        cos, sin = rope_table(self.model.config, (bases + depth)[:, None, None])
        x = self.model.model.embed_tokens(rows.token_ids)
        keys, values = [], []
        for i, layer in enumerate(self.model.model.decoder_layers()):
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
            attended, path_k, path_v = attend_path(
                q, k, v, (prefix.keys[i], prefix.values[i]), (rows.keys[i], rows.values[i]), bases
            )
            keys.append(path_k)
            values.append(path_v)
            x = x + layer.self_attn.o_proj(attended)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        log_probs = self.model.lm_head(self.model.model.norm(x)).log_softmax(-1)
        return Prefix(keys=keys, values=values, hidden=x, log_probs=log_probs)


def best_first(scores: Tensor, count: int) -> Tensor:
    """Return the indices [R, count] of the best scores, ties by lower index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def grow_trees(draft: Draft, prefix: Prefix, roots: Tensor, shape: TreeShape) -> DraftTrees:
    """Grow an EAGLE-2 tree below each root of one text.

    Args:
        roots: [R] positions of the root tokens.
        prefix: `draft.read` of the text up to the last root at least.
    Returns: the candidates: topk children of every expanded node, where the topk candidates of
        each depth with the best cumulative log-probability are expanded.
    Source: arXiv:2406.16858.
    """
    topk, bases = shape.topk, roots + draft.root_offset
    num_roots = len(roots)
    children = prefix.log_probs[bases].topk(topk)
    token_ids = [draft.vocabulary[children.indices]]
    scores = [children.values]
    parents = [torch.full_like(children.indices, -1)]
    depths = [1] * topk
    nodes = torch.arange(topk, device=roots.device).expand(num_roots, -1)  # of the beams
    beam_scores = children.values
    no_path = [
        k.new_zeros(num_roots, k.shape[0], topk, 0, k.shape[2])
        for k in prefix.keys
    ]  # fmt: skip
    rows = Rows(
        token_ids=token_ids[0],
        hidden=prefix.hidden[bases][:, None].expand(-1, topk, -1),
        keys=no_path,
        values=no_path,
    )
    for depth in range(2, shape.num_steps + 1):
        output = draft.expand(rows, prefix, bases, depth - 1)
        children = output.log_probs.topk(topk)  # [R, topk beams, topk]
        child_scores = (beam_scores[..., None] + children.values).flatten(1)
        child_tokens = draft.vocabulary[children.indices].flatten(1)
        first_node = len(depths)
        token_ids.append(child_tokens)
        scores.append(child_scores)
        parents.append(nodes.repeat_interleave(topk, dim=1))
        depths += [depth] * topk**2
        chosen = best_first(child_scores, topk)
        beam_scores = child_scores.gather(1, chosen)
        nodes = first_node + chosen
        beam = chosen // topk
        rows = Rows(
            token_ids=child_tokens.gather(1, chosen),
            hidden=output.hidden.take_along_dim(beam[..., None], dim=1),
            keys=[k.take_along_dim(beam[:, None, :, None, None], dim=2) for k in output.keys],
            values=[v.take_along_dim(beam[:, None, :, None, None], dim=2) for v in output.values],
        )
    all_scores = torch.cat(scores, dim=1)
    selected = torch.zeros_like(all_scores, dtype=torch.bool)
    selected.scatter_(1, best_first(all_scores, shape.num_draft_tokens - 1), value=True)
    return DraftTrees(
        token_ids=torch.cat(token_ids, dim=1),
        parent_index=torch.cat(parents, dim=1),
        selected=selected,
        depths=depths,
    )


def count_accepted(trees: DraftTrees, continuations: Tensor) -> Tensor:
    """Return how many drafted tokens agree with the target, [R].

    Args:
        continuations: [R, num_steps], the target's tokens after each root.
    """
    depths = torch.tensor(trees.depths, device=continuations.device)
    current = torch.full_like(continuations[:, :1], -1)
    accepted = torch.zeros_like(continuations[:, 0])
    for depth in range(1, continuations.shape[1] + 1):
        matches = (
            trees.selected
            & (depths == depth)
            & (trees.parent_index == current)
            & (trees.token_ids == continuations[:, depth - 1 : depth])
        )
        found = matches.any(dim=1)
        accepted += found
        current = torch.where(found, matches.int().argmax(dim=1), -2)[:, None]
    return accepted
