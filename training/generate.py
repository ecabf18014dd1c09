"""Decoding with a dense key-value cache, for evaluation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from training.model import LlamaForCausalLM, rope_table


@torch.no_grad()
def generate(
    model: LlamaForCausalLM,
    prompts: list[list[int]],
    *,
    num_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Continue every prompt by exactly `num_tokens` tokens; nothing stops at end of text.

    Args:
        temperature: 0 is greedy.
    Returns: [num prompts, num_tokens] i64.
    """
    generator = torch.Generator(model.lm_head.weight.device).manual_seed(seed)
    config, device = model.config, model.lm_head.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    batch, longest = len(prompts), int(lengths.max())
    padded = torch.zeros(batch, longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    capacity = longest + num_tokens
    cache_shape = (config.num_layers, 2, batch, config.num_kv_heads, capacity, config.head_dim)
    cache = torch.zeros(cache_shape, device=device)
    rows = torch.arange(batch, device=device)
    generated = []
    token_ids = padded.to(device)  # [B, T]; T is 1 after the prompt
    positions = torch.arange(longest, device=device).expand(batch, -1)
    last = lengths - 1
    for step in range(num_tokens):
        cos, sin = (table[:, None] for table in rope_table(config, positions))
        visible = torch.arange(capacity, device=device) <= positions[:, None, :, None]
        x = model.model.embed_tokens(token_ids)
        for layer, (keys, values) in zip(model.model.decoder_layers(), cache, strict=True):
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
            keys[rows[:, None], :, positions] = k.transpose(1, 2)
            values[rows[:, None], :, positions] = v.transpose(1, 2)
            out = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=visible, enable_gqa=True
            )
            x = x + layer.self_attn.o_proj(out.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        hidden = model.model.norm(x)
        hidden = hidden[rows, last] if step == 0 else hidden[:, 0]
        logits = model.lm_head(hidden)
        if temperature > 0:
            probs = (logits / temperature).softmax(-1)
            token_ids = torch.multinomial(probs, 1, generator=generator)
        else:
            token_ids = logits.argmax(-1, keepdim=True)
        generated.append(token_ids)
        positions = (lengths + step)[:, None]
    return torch.cat(generated, dim=1)
