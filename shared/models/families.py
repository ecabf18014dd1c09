"""The supported architectures. No torch here."""

from __future__ import annotations

from shared.models.dense_families import DENSE_FAMILIES
from shared.models.expert_families import EXPERT_FAMILIES
from shared.models.family import Family
from shared.models.gemma_families import GEMMA_FAMILIES

FAMILIES: dict[str, Family] = {**DENSE_FAMILIES, **GEMMA_FAMILIES, **EXPERT_FAMILIES}
TARGET_ARCHITECTURES = tuple(FAMILIES)
