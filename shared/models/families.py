"""The supported architectures. No torch here."""

from __future__ import annotations

from dataclasses import replace

from shared.models.dense_families import DENSE_FAMILIES, MINISTRAL3, MISTRAL
from shared.models.expert_families import EXPERT_FAMILIES, MISTRAL4
from shared.models.family import Family
from shared.models.gemma_families import GEMMA_FAMILIES

FAMILIES: dict[str, Family] = {
    **DENSE_FAMILIES,
    **GEMMA_FAMILIES,
    **EXPERT_FAMILIES,
    # One name for the language models of three generations.
    "Mistral3ForConditionalGeneration": replace(
        MISTRAL,
        text_types=("mistral",),
        variants=(
            replace(MINISTRAL3, text_types=("ministral3",)),
            replace(MISTRAL4, text_types=("mistral4",)),
        ),
    ),
}
TARGET_ARCHITECTURES = tuple(FAMILIES)
