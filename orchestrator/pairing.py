"""Which workers belong together: same model, same tokens, the features that a draft needs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

from shared.messages import WorkerInfo
from shared.rpc.protocol import protocol_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """What two targets must share so that a request can move between them and stay exact."""

    model_hash: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    device_type: str
    device_model: str
    versions: str
    cpu_threads: int
    logits_hash: str

    @classmethod
    def of(cls, info: WorkerInfo) -> ModelIdentity:
        """Return the identity of a target."""
        return cls(
            model_hash=info.model_hash,
            dtype=info.dtype,
            quantization=info.quantization,
            kv_cache_dtype=info.kv_cache_dtype,
            device_type=info.device.partition(":")[0],
            device_model=info.device_model,
            versions=info.versions,
            cpu_threads=info.cpu_threads,
            logits_hash=info.logits_hash,
        )

    @property
    def fingerprint(self) -> str:
        """Return the identity as one word, which clients send back when they resume."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:32]

    def difference(self, other: ModelIdentity) -> str:
        """Return in which fields two identities differ, with both values."""
        return ", ".join(
            f"{field.name} {getattr(self, field.name)!r} instead of {getattr(other, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        )


def target_problem(info: WorkerInfo, *, tokenizer_hash: str, others: ModelIdentity | None) -> str:
    """Say why a target must not be used, or "".

    Args:
        tokenizer_hash: Of the orchestrator's own tokenizer, "" if it has none.
        others: Identity of the targets already in use.
    """
    if problem := protocol_problem(info.protocol_version, who="it"):
        return problem
    if info.kind != "target":
        return f"it is a {info.kind!r} worker; list it under --drafts"
    if tokenizer_hash and info.tokenizer_hash and tokenizer_hash != info.tokenizer_hash:
        return (
            f"its tokenizer {info.tokenizer_hash[:12]} is not the orchestrator's "
            f"{tokenizer_hash[:12]}; start both with the same --model"
        )
    identity = ModelIdentity.of(info)
    if others is not None and identity != others:
        return (
            f"it differs from the targets in use: {identity.difference(others)}; requests could "
            "not move between them. Start all targets with the same checkpoint, --dtype, "
            "--quantization and --kv-cache-dtype on machines of one kind"
        )
    return ""


def draft_problem(draft: WorkerInfo) -> str:
    """Say why a worker is no draft at all, or ""."""
    if draft.kind == "target":
        return "it is a target; list it under --targets"
    return protocol_problem(draft.protocol_version, who="it")


def pair_problem(target: WorkerInfo, draft: WorkerInfo) -> str:
    """Say why this draft cannot draft for this target, or ""."""
    versions = draft.protocol_version, target.protocol_version
    if problem := protocol_problem(versions[0], who="the draft", other=versions[1]):
        return problem
    if draft.vocab_size != target.vocab_size:
        return (
            f"the draft's vocabulary has {draft.vocab_size} ids, the target's {target.vocab_size}; "
            "use a draft of the same vocabulary"
        )
    hashes = draft.tokenizer_hash, target.tokenizer_hash
    if all(hashes) and hashes[0] != hashes[1]:
        return (
            f"the draft's tokenizer {hashes[0][:12]} is not the target's {hashes[1][:12]}; "
            "use a draft of the same tokenizer"
        )
    needs, has = draft.features, target.features
    if not needs.width:
        return ""
    if not has.width:
        return "the target captures no features; start it with the draft's checkpoint"
    if needs.layer_ids != has.layer_ids:
        return (
            f"the draft needs features of layers {list(needs.layer_ids)}, the target captures "
            f"{list(has.layer_ids)}; start the target with the draft's checkpoint"
        )
    if needs.kv_layer_ids != has.kv_layer_ids:
        return (
            f"the draft needs K and V of layers {list(needs.kv_layer_ids)}, the target captures "
            f"those of {list(has.kv_layer_ids)}; start the target with the draft's checkpoint"
        )
    if needs.projection != has.projection:
        return (
            f"the draft needs {_projected(needs.projection)}, the target sends "
            f"{_projected(has.projection)}; start both with the same draft checkpoint and the same "
            "--project-features"
        )
    if needs.width != has.width or needs.dtype not in ("", has.dtype):
        return (
            f"the draft needs feature rows of {needs.width} x {needs.dtype or 'any dtype'}, the "
            f"target sends {has.width} x {has.dtype}; start both with the same two checkpoints"
        )
    return ""


def _projected(projection: str) -> str:
    return f"features projected by head {projection[:12]}" if projection else "features as captured"
