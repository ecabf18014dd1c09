"""A small trained model inside a large one, tensor by tensor: same function, every byte read.

The residual stream of the large model holds the small one's in its first dimensions and zeros in
the others. So:

    writes to the residual     (embedding, o_proj, down_proj, fc): zero outside of the small block
    reads of the residual      (q, k, v, gate, up, lm_head): filler outside, multiplied by zeros
    RMSNorm                    sum / D is d / D of the small model's mean: eps times d / D, weight
                               divided by sqrt(D / d); exact in any float type if D / d = 4^n.
                               If it is 2 * 4^n, the stream holds the small one twice, and norms
                               multiply the second by zero: it counts in the mean alone
    extra heads, FFN columns   filler, into zero columns of o_proj and down_proj
    extra layers               filler, with o_proj and down_proj zero
    experts                    each is the small model's FFN; their weights sum to 1;
                               the router is filler, so that it spreads tokens over all of them
    extra vocabulary rows      embeddings repeat a token; output rows give logits near UNUSED_LOGIT

Query heads keep their KV head, head_dim and the rotary embedding stay the small model's. Norms of q
and k cannot be had: the small model's are as long as they are.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.calibration import final_hidden_rows
from shared.models.checkpoint import CheckpointReader
from shared.models.config import DraftKind, HeadConfig, ModelConfig
from shared.models.config_file import read_config_json
from shared.models.tensor_files import TensorInfo, read_tensor_infos

FILLER_STD = 1 / 64  # a power of two: rounded alike on every device
# Mean logit of a vocabulary row that nobody uses: e^-40 of probability, 10^5 times, is nothing.
UNUSED_LOGIT = -40.0
# A prime: rows of a matrix never start at the same filler value.
_NUM_FILLER = (1 << 24) - 3

# What Mixtral calls the projections of an expert.
MIXTRAL_PARTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}

Recipes = Mapping[str, "Recipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """Experts of every layer of the target, a Mixtral then.

    Args:
        width: Width of an expert.
    """

    num_experts: int
    num_experts_per_tok: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the large pair.

    Args:
        intermediate_size: Width of the feed-forwards; with experts, of the head's alone.
        num_layers: Of the target; a head has one.
        draft_vocab_size: Rows of the head's output layer.
        max_position_embeddings: The target's; the head keeps its own, its window.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    experts: ExpertsShape | None = None


SHAPES = {
    "llama-3.1-8b": Shape(
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        vocab_size=128256,
        draft_vocab_size=32000,
        max_position_embeddings=131072,
    ),
    "30b-a3b": Shape(
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        vocab_size=151936,
        draft_vocab_size=32000,
        max_position_embeddings=40960,
        experts=ExpertsShape(num_experts=128, num_experts_per_tok=8, width=768),
    ),
    "small": Shape(
        hidden_size=1024,
        intermediate_size=1280,
        num_layers=16,
        num_heads=8,
        num_kv_heads=2,
        vocab_size=4608,
        draft_vocab_size=3328,
        max_position_embeddings=4096,
    ),
    "small-experts": Shape(
        hidden_size=512,
        intermediate_size=1024,
        num_layers=16,
        num_heads=8,
        num_kv_heads=1,
        vocab_size=4608,
        draft_vocab_size=3328,
        max_position_embeddings=4096,
        experts=ExpertsShape(num_experts=8, num_experts_per_tok=2, width=768),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to make one tensor.

    Args:
        std: Standard deviation of the filler; 0 = none, `constant` everywhere.
        blocks: What replaces parts of it: index and value, broadcast.
        filler: What its filler starts by instead of the tensor's name; tensors of one recipe with
            it are alike.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    std: float = 0.0
    constant: float = 0.0
    blocks: tuple[tuple[tuple[slice, ...], torch.Tensor], ...] = ()
    filler: str = ""

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def make(self, name: str, device: torch.device) -> torch.Tensor:
        """Return the tensor, the same on every device.

        Args:
            name: Where in the filler it starts, unless `filler` says so.
        """
        if self.std:
            name = self.filler or name
            out = _filler_at(zlib.crc32(name.encode()), math.prod(self.shape), device)
            out = out.view(self.shape).mul_(self.std)
        else:
            out = torch.full(self.shape, self.constant, dtype=self.dtype, device=device)
        for index, value in self.blocks:
            out[index] = value.to(device)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that need not exist as a file.

    Args:
        base: The small model's directory: tokenizer and generation_config.json.
        fields: Its config.json.
    """

    base: Path
    fields: Mapping[str, Any]
    recipes: Recipes


class InflatedReader(CheckpointReader):
    """Makes every tensor on the device instead of reading it.

    Args:
        directory: Holds config.json, and safetensors files whose headers alone count.
    """

    def __init__(
        self,
        directory: Path,
        recipes: Recipes,
        *,
        device: torch.device,
        dtype: torch.dtype,
        rename: Callable[[str], str] | None = None,
        quantization: str = "",
    ) -> None:
        super().__init__(
            directory, device=device, dtype=dtype, rename=rename, quantization=quantization
        )
        self._recipes = recipes

    def read_ahead(self, stacks: Iterable[Sequence[str]]) -> None:
        """Do nothing: there is nothing to read."""

    def read_stack(self, infos: Sequence[TensorInfo], dtype: torch.dtype | None) -> torch.Tensor:
        values = torch.empty((len(infos), *infos[0].shape), dtype=dtype, device=self._device)
        for info, to in zip(infos, values, strict=True):
            to.copy_(self._recipes[info.name].make(info.name, self._device))
        return values


def inflate_pair(shape: Shape, target_dir: Path, head_dir: Path) -> tuple[Checkpoint, Checkpoint]:
    """Return the large target and the large EAGLE-3 head.

    Args:
        target_dir: A LlamaForCausalLM, untied, without biases.
        head_dir: Its EAGLE-3 head, without an embedding of its own.
    Raises: ValueError if the small model does not fit into the shape.
    """
    rows = final_hidden_rows(target_dir, head_dir)
    target = _Inflation(shape, ModelConfig.from_checkpoint(target_dir), target_dir)
    head_config = HeadConfig.from_checkpoint(head_dir, DraftKind.EAGLE3)
    head = _Inflation(shape, head_config.decoder, head_dir)
    return (
        Checkpoint(
            base=target_dir, fields=target.target_fields(), recipes=target.target(rows.target)
        ),
        Checkpoint(
            base=head_dir,
            fields=head.head_fields(),
            recipes=head.head(rows.draft, head_config.draft_vocab_size),
        ),
    )


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers whose outputs an EAGLE-3 head reads unless its config says otherwise."""
    return 1, num_layers // 2 - 1, num_layers - 4


def place_layers(num_small: int, num_large: int) -> list[int]:
    """Return where each layer of the small model goes.

    Between layers with a job only identities lie, so what counts is which of them come before each
    captured layer. Those captured themselves, but the first, are identities as well: reading their
    input, as some engines do by the same number, gives the same feature.

    Raises: ValueError if the large model has too few layers.
    """
    small, large = (-1, *feature_layers(num_small)), (-1, *feature_layers(num_large))
    places: list[int] = []
    for part in range(4):
        count = (num_small - 1 if part == 3 else small[part + 1]) - small[part]
        first = large[part] + 1 + (part == 1)  # an identity at layer 2, too
        stop = num_large if part == 3 else large[part + 1] + (part == 0)
        if count > stop - first:
            raise ValueError(f"{num_small} layers do not fit into {num_large}")
        places += [first + i * (stop - first) // count for i in range(count)]
    return places


class _Inflation:
    """The tensors of one checkpoint.

    Args:
        config: The small decoder.
    """

    def __init__(self, shape: Shape, config: ModelConfig, directory: Path) -> None:
        copies, ratio = _fit(config.hidden_size, shape.hidden_size)
        group = config.num_heads // config.num_kv_heads
        large_group = shape.num_heads // shape.num_kv_heads
        # One group of the small model is the beginning of a larger one.
        if large_group < group or (large_group > group and config.num_kv_heads > 1):
            raise ValueError(f"{group} query heads share a KV head in the small model")
        if config.is_tied or config.has_qkv_bias or config.has_o_bias or config.has_mlp_bias:
            raise ValueError("tied embeddings and biases are not inflated")
        self._shape = shape
        self._small = config
        self._copies = copies
        self._scale = math.sqrt(ratio)  # a power of two
        self._infos = read_tensor_infos(directory)
        self._reader = CheckpointReader(directory, device=torch.device("cpu"), dtype=torch.bfloat16)
        self._fields = read_config_json(directory) | {
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": config.head_dim,
            "rms_norm_eps": config.rms_norm_eps / ratio,
        }

    def target_fields(self) -> dict[str, Any]:
        """Return config.json of the target."""
        fields = self._fields | {
            "num_hidden_layers": self._shape.num_layers,
            "max_position_embeddings": self._shape.max_position_embeddings,
        }
        experts = self._shape.experts
        if experts is None:
            return fields
        return fields | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": experts.num_experts,
            "num_experts_per_tok": experts.num_experts_per_tok,
            "intermediate_size": experts.width,
            "sliding_window": None,
        }

    def head_fields(self) -> dict[str, Any]:
        """Return config.json of the head."""
        layer_ids = list(feature_layers(self._shape.num_layers))
        eagle = self._fields["eagle_config"] | {"eagle_aux_hidden_state_layer_ids": layer_ids}
        return self._fields | {
            "draft_vocab_size": self._shape.draft_vocab_size,
            "eagle_config": eagle,
        }

    def target(self, hidden_rows: torch.Tensor) -> Recipes:
        """Return the target's tensors, by name.

        Args:
            hidden_rows: [n, d] f32 inputs of its output layer.
        """
        wide, rows = self._shape.hidden_size, self._shape.vocab_size
        narrow, used = self._small.hidden_size, self._small.vocab_size
        embedding = self._load("model.embed_tokens.weight")
        recipes = {
            "model.embed_tokens.weight": Recipe(
                shape=(rows, wide),
                blocks=tuple(
                    ((ids, columns), value)
                    for columns in self._written(narrow)
                    for ids, value in (
                        (slice(used), embedding),
                        (slice(used, None), embedding[-1]),
                    )
                ),
            ),
            "model.norm.weight": self._norm("model.norm.weight"),
            "lm_head.weight": self._output("lm_head.weight", rows, hidden_rows),
        }
        places = place_layers(self._small.num_layers, self._shape.num_layers)
        for layer in range(self._shape.num_layers):
            source = f"model.layers.{places.index(layer)}" if layer in places else None
            recipes |= self._layer(
                f"model.layers.{layer}", source, num_inputs=1, experts=self._shape.experts
            )
        return recipes

    def head(self, hidden_rows: torch.Tensor, num_used: int) -> Recipes:
        """Return the head's tensors, by name.

        Args:
            hidden_rows: [n, d] f32 inputs of its output layer.
            num_used: Rows of the small output layer.
        """
        rows, wide, narrow = (
            self._shape.draft_vocab_size,
            self._shape.hidden_size,
            self._small.hidden_size,
        )
        fc = self._load("fc.weight")  # [d, 3 d]
        used_ids = torch.arange(num_used) + self._load_int64("d2t")
        unused_ids = self._small.vocab_size + torch.arange(rows - num_used)
        if rows - num_used > self._shape.vocab_size - self._small.vocab_size:
            raise ValueError("there are not enough unused target ids for the draft's vocabulary")
        target_ids = torch.cat([used_ids, unused_ids])
        is_drafted = torch.zeros(self._shape.vocab_size, dtype=torch.bool)
        is_drafted[target_ids] = True
        return {
            "fc.weight": Recipe(
                shape=(wide, fc.shape[1] // narrow * wide),
                blocks=tuple(
                    ((written, slice(i * wide, i * wide + narrow)), part)
                    for written in self._written(narrow)
                    for i, part in enumerate(fc.split(narrow, dim=1))
                ),
            ),
            "midlayer.hidden_norm.weight": self._norm("midlayer.hidden_norm.weight"),
            **self._layer("midlayer", "midlayer", num_inputs=2),
            "norm.weight": self._norm("norm.weight"),
            "lm_head.weight": self._output("lm_head.weight", rows, hidden_rows),
            "d2t": Recipe(
                shape=(rows,),
                dtype=torch.int64,
                blocks=(((slice(None),), target_ids - torch.arange(rows)),),
            ),
            "t2d": Recipe(
                shape=(self._shape.vocab_size,),
                dtype=torch.bool,
                blocks=(((slice(None),), is_drafted),),
            ),
        }

    def _layer(
        self,
        name: str,
        source: str | None,
        num_inputs: int,
        experts: ExpertsShape | None = None,
    ) -> Recipes:
        """Return a decoder layer.

        Args:
            source: The small model's layer; None: an identity.
            num_inputs: Vectors side by side that its attention reads.
            experts: What it has instead of one feed-forward.
        """
        shape, head_dim = self._shape, self._small.head_dim
        q_width, kv_width = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
        attention = {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width}
        recipes = {}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            recipes[f"{norm}.weight"] = self._norm(source and f"{source}.{norm}.weight")
        for part, rows in attention.items():
            part = f"self_attn.{part}.weight"
            recipes[part] = self._read(rows, num_inputs, source and f"{source}.{part}")
        part = "self_attn.o_proj.weight"
        recipes[part] = self._write(q_width, source and f"{source}.{part}")
        if experts is None:
            for part, recipe in self._feed_forward(shape.intermediate_size, source).items():
                recipes[f"mlp.{part}.weight"] = recipe
        else:
            recipes |= self._experts(name, source, experts)
        return {f"{name}.{part}": recipe for part, recipe in recipes.items()}

    def _feed_forward(self, width: int, source: str | None) -> Recipes:
        """Return its projections."""
        if width < self._small.intermediate_size and source:
            raise ValueError(f"a feed-forward of {width} cannot hold the small model's")
        recipes = {
            part: self._read(width, 1, source and f"{source}.mlp.{part}.weight")
            for part in ("gate_proj", "up_proj")
        }
        down = source and f"{source}.mlp.down_proj.weight"
        return recipes | {"down_proj": self._write(width, down)}

    def _experts(self, name: str, source: str | None, experts: ExpertsShape) -> dict[str, Recipe]:
        """Return a router and experts that are all the same, with the names of Mixtral.

        Args:
            name: The layer: its filler is its own.
        """
        block = "block_sparse_moe"
        recipes = {f"{block}.gate.weight": self._read(experts.num_experts, 1, None)}
        parts = {
            MIXTRAL_PARTS[part]: dataclasses.replace(recipe, filler=f"{name}.{part}")
            for part, recipe in self._feed_forward(experts.width, source).items()
        }
        for i in range(experts.num_experts):
            for part, recipe in parts.items():
                recipes[f"{block}.experts.{i}.{part}.weight"] = recipe
        return recipes

    def _written(self, narrow: int) -> list[slice]:
        """Return where the small residual stream is in the large one."""
        return [slice(i * narrow, (i + 1) * narrow) for i in range(self._copies)]

    def _norm(self, source: str | None) -> Recipe:
        blocks: tuple[Any, ...] = ()
        if source:
            weight = self._load(source)
            first, *others = self._written(len(weight))
            blocks = (
                ((first,), weight / self._scale),
                *(((other,), torch.zeros_like(weight)) for other in others),
            )
        return Recipe(shape=(self._shape.hidden_size,), constant=1 / self._scale, blocks=blocks)

    def _read(self, rows: int, num_inputs: int, source: str | None) -> Recipe:
        """Return a matrix that reads the residual stream."""
        wide, narrow = self._shape.hidden_size, self._small.hidden_size
        blocks: tuple[Any, ...] = ()
        if source:
            weight = self._load(source)
            blocks = tuple(
                ((slice(len(weight)), slice(i * wide, i * wide + narrow)), part)
                for i, part in enumerate(weight.split(narrow, dim=1))
            )
        return Recipe(shape=(rows, num_inputs * wide), std=FILLER_STD, blocks=blocks)

    def _write(self, columns: int, source: str | None) -> Recipe:
        """Return a matrix that adds to the residual stream."""
        blocks: tuple[Any, ...] = ()
        if source:
            weight = self._load(source)
            columns_used = slice(weight.shape[1])
            blocks = tuple(
                ((written, columns_used), weight) for written in self._written(len(weight))
            )
        return Recipe(shape=(self._shape.hidden_size, columns), blocks=blocks)

    def _output(self, source: str, rows: int, hidden_rows: torch.Tensor) -> Recipe:
        """Return an output layer whose unused rows no hidden row ever prefers."""
        recipe = self._read(rows, 1, source)
        weight = self._load(source)
        unused = unused_row(hidden_rows).bfloat16()
        block = (slice(len(weight), None), slice(weight.shape[1]))
        return dataclasses.replace(recipe, blocks=(*recipe.blocks, (block, unused)))

    def _load(self, name: str) -> torch.Tensor:
        return self._reader.load(name, self._infos[name].shape)

    def _load_int64(self, name: str) -> torch.Tensor:
        return self._reader.load_int64(name, self._infos[name].shape)


def _fit(narrow: int, wide: int) -> tuple[int, int]:
    """Return how often a residual stream holds the small one, and 4^n: how many times these fit.

    Raises: ValueError if they do not.
    """
    for copies in (1, 2):
        ratio = wide // (copies * narrow)
        if ratio * copies * narrow == wide and ratio and math.log(ratio, 4).is_integer():
            return copies, ratio
    raise ValueError(f"hidden size {wide} is not a power of two times {narrow}")


def unused_row(hidden_rows: torch.Tensor) -> torch.Tensor:
    """Return the row of an output layer whose logit is closest to UNUSED_LOGIT everywhere.

    It points against the mean of the hidden rows, more where they vary less (least squares).

    Args:
        hidden_rows: [n, d] f32.
    Returns: [d] f32.
    """
    rows = hidden_rows.double()
    covariance = rows.T @ rows / len(rows)
    ridge = 1e-4 * covariance.diagonal().mean() * torch.eye(rows.shape[1], dtype=rows.dtype)
    row = torch.linalg.solve(covariance + ridge, rows.mean(0))
    return (row * (UNUSED_LOGIT / (rows @ row).mean())).float()


@cache
def _filler(device: torch.device) -> torch.Tensor:
    """Return normal values, the same on every device. [_NUM_FILLER] bf16."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_NUM_FILLER, generator=generator).bfloat16().to(device)


def _filler_at(start: int, count: int, device: torch.device) -> torch.Tensor:
    """Return `count` filler values from `start` on, round and round. [count] bf16."""
    filler = _filler(device)
    out = torch.empty(count, dtype=filler.dtype, device=device)
    start %= len(filler)
    done = 0
    while done < count:
        part = filler[start : start + count - done]
        out[done : done + len(part)] = part
        done += len(part)
        start = 0
    return out
