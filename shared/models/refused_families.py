"""Architectures that are refused, and what each has that nothing here computes. No torch here."""

from __future__ import annotations

from collections.abc import Mapping

_DELTA_RULE = "linear attention layers (gated delta rule)"
_MAMBA = "Mamba-2 layers"
_CONVOLUTIONS = "layers of short convolutions"
_INDEXER = "sparse attention (an indexer chooses the tokens that are attended to)"
_GEMMA_3N = "layers that share K and V, and several residual streams"
_TEXT_EXPERTS = "experts and routers for images beside those for text"
_CHUNKS = "attention within chunks"

REFUSED: Mapping[str, str] = {
    "Qwen3NextForCausalLM": _DELTA_RULE,
    "Qwen3_5ForCausalLM": _DELTA_RULE,
    "Qwen3_5ForConditionalGeneration": _DELTA_RULE,
    "Qwen3_5MoeForCausalLM": _DELTA_RULE,
    "Qwen3_5MoeForConditionalGeneration": _DELTA_RULE,
    "KimiLinearForCausalLM": _DELTA_RULE,
    "OlmoHybridForCausalLM": _DELTA_RULE,
    "MiniMaxForCausalLM": "linear attention layers (lightning attention)",
    "NemotronHForCausalLM": _MAMBA,
    "FalconH1ForCausalLM": _MAMBA,
    "GraniteMoeHybridForCausalLM": _MAMBA,
    "Lfm2ForCausalLM": _CONVOLUTIONS,
    "Lfm2MoeForCausalLM": _CONVOLUTIONS,
    "DeepseekV32ForCausalLM": _INDEXER,
    "DeepseekV4ForCausalLM": _INDEXER,
    "GlmMoeDsaForCausalLM": _INDEXER,
    "MistralLarge4ForConditionalGeneration": _INDEXER,
    "Ernie4_5_VLMoeForConditionalGeneration": _TEXT_EXPERTS,
    "Ernie4_5_VL_MoeForConditionalGeneration": _TEXT_EXPERTS,
    "Gemma3nForCausalLM": _GEMMA_3N,
    "Gemma3nForConditionalGeneration": _GEMMA_3N,
    "LongcatFlashForCausalLM": "two attentions in a layer, and experts that return their input",
    "Llama4ForCausalLM": _CHUNKS,
    "Llama4ForConditionalGeneration": _CHUNKS,
}
"""Architecture -> what would have to be implemented."""

REFUSED_FIELDS: Mapping[str, str] = {
    "use_bidirectional_attention": "tokens would see those after them",
    "attention_projection_layout": "q, k and v would have to be found in parts of one tensor",
    "hybrid_block_size": "it says which layers have a window, as hybrid_layer_pattern should",
    "rope_scaling": "it leaves open which layers it is for: write rope_parameters with "
    "full_attention and sliding_attention",
}
"""Field of a family that is served -> what would have to be implemented for other values."""
