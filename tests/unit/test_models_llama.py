"""Targets of every family against transformers: logits, captured layers, greedy text."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shared.messages import MAX_TREE_NODES
from shared.models.llama import CausalLM, ForwardOutput
from tests import checkpoints, families
from tests.checkpoints import EOS_ID, Shape
from tests.families import PHI3, YARN, longrope
from tests.marks import exhaustive
from tests.paged import Block, PagedKV
from tests.reference.causal_lm import ReferenceLM

CPU = torch.device("cpu")
LINEAR_ROPE = {"rope_type": "linear", "factor": 2.0}
PARTIAL_LONGROPE = longrope(6) | {"partial_rotary_factor": 0.75}
ODD_SHAPE = Shape(head_dim=20, num_heads=6, num_kv_heads=1)

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "llama3": checkpoints.write_llama,
    "llama-linear-rope": lambda d: checkpoints.write_llama(d, rope=LINEAR_ROPE),
    "llama-plain-rope-tied": lambda d: checkpoints.write_llama(
        d, rope={"rope_type": "default"}, is_tied=True
    ),
    "llama-biases": lambda d: checkpoints.write_llama(
        d, has_attention_bias=True, has_mlp_bias=True
    ),
    "llama-old-config": lambda d: checkpoints.write_llama(d, old_names=True),
    "llama-sharded": lambda d: checkpoints.write_llama(d, num_shards=3),
    "llama-mqa-odd-head-dim": lambda d: checkpoints.write_llama(d, shape=ODD_SHAPE),
    "mistral-window": checkpoints.write_mistral,
    "mistral-no-window": lambda d: checkpoints.write_mistral(d, sliding_window=None),
    "qwen2": checkpoints.write_qwen2,
    "qwen2-untied": lambda d: checkpoints.write_qwen2(d, is_tied=False),
    "qwen3": checkpoints.write_qwen3,
    "mimo": checkpoints.write_mimo,
}
# The plain reference of other tests does not know these.
BY_TRANSFORMERS: dict[str, Callable[[Path], Path]] = {
    **families.WRITERS,
    "llama-yarn": lambda d: families.write(d, "llama", rope_parameters=YARN),
    "phi3": lambda d: families.write(d, "phi3", **PHI3),
    "phi4-mini": lambda d: families.write(
        d, "phi3", **PHI3 | {"sliding_window": None, "rope_parameters": PARTIAL_LONGROPE}
    ),
    "gemma4-unified-shared-kv": lambda d: families.write(
        d, "gemma4_unified_text", **families.GEMMA4_UNIFIED_SHARED_KV
    ),
    "internlm3": lambda d: families.write_internlm3(d, **families.INTERNLM3),
    "internlm3-biases": lambda d: families.write_internlm3(d, **families.INTERNLM3_BIASES),
    "granite-tied": lambda d: families.write(
        d, "granite", **families.GRANITE | {"tie_word_embeddings": True}
    ),
    "gpt-oss": lambda d: families.write(d, "gpt_oss", **families.GPT_OSS),
    "deepseek-v2-groups": lambda d: families.write(
        d, "deepseek_v2", **families.DEEPSEEK_V2 | {"topk_method": "group_limited_greedy"}
    ),
    "deepseek-v3": lambda d: families.write(d, "deepseek_v3", **families.DEEPSEEK_V3),
    "hunyuan-yarn": lambda d: families.write(d, "hunyuan_v1_dense", **families.HUNYUAN_YARN),
}


def tokens_of(num_tokens: int, seed: int = 7) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, EOS_ID, (num_tokens,), generator=generator).tolist()


def load_transformers(directory: Path) -> Any:
    """Load a checkpoint with transformers; it knows MiMo's target as the Qwen2 that it is, and Kimi
    K2 as the DeepSeek-V3; Kimi K2.5 and K-EXAONE have other names there.
    """
    fields = json.loads((directory / "config.json").read_text())
    if fields["model_type"] == "mimo":
        state = checkpoints.read_tensors(directory)
        state = {name: t for name, t in state.items() if "mtp_layers" not in name}
        known = {k: v for k, v in fields.items() if k not in ("architectures", "model_type")}
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**known))
        model.load_state_dict(state)
    else:
        model_class: Any = transformers.AutoModelForCausalLM
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        if "vision_config" in fields or fields["model_type"] == "mistral4":
            name = fields["architectures"][0].replace("KimiK25", "Kimi_K25")
            model_class = getattr(transformers, name)
        elif fields["model_type"] == "kimi_k2":
            config = transformers.DeepseekV3Config(**fields | {"model_type": "deepseek_v3"})
            options["config"] = config
        model = model_class.from_pretrained(directory, **options)
    return model.eval()


class Runner:
    """One request over a CausalLM and paged caches."""

    def __init__(self, model: CausalLM, *, page_size: int = 4) -> None:
        self.model = model
        config = model.config
        self.kv = PagedKV(
            config.kv_layout,
            page_size=page_size,
        )
        self.seq_len = 0

    def extend(self, token_ids: list[int], capture: tuple[int, ...] = ()) -> ForwardOutput:
        rows = self.kv.chain(token_ids, self.seq_len, window=self.model.config.sliding_window)
        output = self.model.forward(rows, capture_layers=capture)
        self.seq_len += len(token_ids)
        return output

    def greedy(self, prompt: list[int], num_new: int) -> list[int]:
        hidden = self.extend(prompt).hidden[-1:]
        output = [int(self.model.logits(hidden).argmax())]
        while len(output) < num_new:
            hidden = self.extend(output[-1:]).hidden
            output.append(int(self.model.logits(hidden).argmax()))
        return output


@pytest.fixture(scope="module", params=FAMILIES | BY_TRANSFORMERS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write = (FAMILIES | BY_TRANSFORMERS)[request.param]
    return write(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(family: Path) -> CausalLM:
    return CausalLM.from_checkpoint(family, CPU, torch.float32)


@pytest.fixture(scope="module")
def oracle(family: Path) -> Any:
    return load_transformers(family)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_prefill_in_one_chunk_matches_transformers(model: CausalLM, oracle: Any) -> None:
    ids = tokens_of(70)
    want = oracle(torch.tensor([ids])).logits[0]
    got = model.logits(Runner(model).extend(ids).hidden)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("page_size", [3, *exhaustive([1, 16])])
def test_chunks_then_decode_rows_match_transformers(
    model: CausalLM, oracle: Any, page_size: int
) -> None:
    ids = tokens_of(50)
    want = oracle(torch.tensor([ids])).logits[0]
    runner = Runner(model, page_size=page_size)
    chunks = [ids[:17], ids[17:40], *([i] for i in ids[40:])]
    got = torch.cat([model.logits(runner.extend(chunk).hidden) for chunk in chunks])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    whole = model.logits(Runner(model).extend(ids).hidden)
    assert torch.equal(got, whole), "chunks and page size must not change a bit"


def test_greedy_text_equals_generate(model: CausalLM, oracle: Any) -> None:
    prompt = tokens_of(40, seed=11)  # past the original context of longrope
    ids = torch.tensor([prompt])
    want = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=30,
        min_new_tokens=30,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    assert Runner(model).greedy(prompt, 30) == want
    assert len(set(want)) > 3, "the text does not wander: the comparison would prove little"


def test_captured_layers_are_layer_outputs(model: CausalLM, oracle: Any) -> None:
    ids = tokens_of(40)
    want = oracle(torch.tensor([ids]), output_hidden_states=True).hidden_states
    output = Runner(model).extend(ids, capture=(1, 0))
    assert output.captured is not None
    # hidden_states[0] is the embedding, so the output of layer i is hidden_states[i + 1].
    torch.testing.assert_close(
        output.captured, torch.cat([want[2][0], want[1][0]], dim=-1), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(output.hidden, want[-1][0], atol=1e-4, rtol=1e-4)
    assert Runner(model).extend(ids).captured is None


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_reference_matches_transformers(family: Path, oracle: Any) -> None:
    ids = tokens_of(40)
    want = oracle(torch.tensor([ids]), output_hidden_states=True)
    got = ReferenceLM(family).forward(ids)
    torch.testing.assert_close(got.logits, want.logits[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(got.layers[0], want.hidden_states[1][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.final, want.hidden_states[-1][0], atol=1e-4, rtol=1e-4)


def test_tree_rows_equal_chains_of_their_paths(tmp_path: Path) -> None:
    model = CausalLM.from_checkpoint(checkpoints.write_llama(tmp_path), CPU, torch.float32)
    prompt = tokens_of(21)
    tree, parents = tokens_of(7, seed=3), [-1, 0, 0, 1, 2, 2, 4]
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*paths[parent], node] if node else [0])
    runner = Runner(model)
    runner.extend(prompt)
    block = Block(req_idx=0, prefix_len=len(prompt), num_rows=len(tree), paths=paths)
    got = model.forward(runner.kv.rows(tree, [block])).hidden
    for node, path in enumerate(paths):
        alone = Runner(model)
        want = alone.extend(prompt + [tree[i] for i in path]).hidden[-1]
        assert torch.equal(got[node], want), f"node {node}"


def test_a_row_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    model = CausalLM.from_checkpoint(checkpoints.write_qwen3(tmp_path), CPU, torch.float32)
    config = model.config
    kv = PagedKV(
        config.kv_layout,
        num_requests=3,
    )
    texts = [tokens_of(n, seed=n) for n in (5, 30, 11)]
    blocks = [Block(req_idx=i, prefix_len=0, num_rows=len(text)) for i, text in enumerate(texts)]
    hidden = model.forward(kv.rows(sum(texts, []), blocks)).hidden
    got = hidden.split([len(text) for text in texts])
    for text, rows in zip(texts, got, strict=True):
        assert torch.equal(rows, Runner(model).extend(text).hidden)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_stay_close(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = checkpoints.write_llama(tmp_path, dtype=dtype)
    ids = tokens_of(40)
    exact = CausalLM.from_checkpoint(directory, CPU, torch.float32)
    half = CausalLM.from_checkpoint(directory, CPU, dtype)
    runner = Runner(half)
    runner.kv.layers = [tuple(cache.to(dtype) for cache in layer) for layer in runner.kv.layers]
    output = runner.extend(ids)
    assert output.hidden.dtype is dtype
    got = half.logits(output.hidden)
    assert got.dtype is torch.float32
    want = exact.logits(Runner(exact).extend(ids).hidden)
    tolerance = 0.02 if dtype is torch.float16 else 0.15
    torch.testing.assert_close(got, want, atol=tolerance, rtol=0)


def test_positions_past_the_table_need_a_longer_table(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path, shape=Shape(max_position_embeddings=16))
    ids = tokens_of(16 + MAX_TREE_NODES + 1)
    with pytest.raises(IndexError):
        Runner(CausalLM.from_checkpoint(directory, CPU, torch.float32)).extend(ids)
    model = CausalLM.from_checkpoint(directory, CPU, torch.float32, context_len=17)
    want = ReferenceLM(directory).forward(ids).logits
    got = model.logits(Runner(model).extend(ids).hidden)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_longrope_is_chosen_by_the_context_of_the_engine(tmp_path: Path) -> None:
    directory = families.write(tmp_path, "phi3", **PHI3)
    oracle = load_transformers(directory)
    short = CausalLM.from_checkpoint(directory, CPU, torch.float32, context_len=32)
    long = CausalLM.from_checkpoint(directory, CPU, torch.float32, context_len=33)
    for model, ids in ((short, tokens_of(32)), (long, tokens_of(33))):
        want = oracle(torch.tensor([ids])).logits[0]
        got = model.logits(Runner(model).extend(ids).hidden)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    # A prefix of a long text has the bits that the whole text has.
    ids = tokens_of(40)
    whole = Runner(long).extend(ids).hidden
    assert torch.equal(Runner(long).extend(ids[:9]).hidden, whole[:9])


def test_loading_does_not_alias_the_file(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path)
    model = CausalLM.from_checkpoint(directory, CPU, torch.float32)
    ids = tokens_of(12)
    before = copy.deepcopy(Runner(model).extend(ids).hidden)
    size = (directory / "model.safetensors").stat().st_size
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\x00" * (size // 2))
    assert torch.equal(Runner(model).extend(ids).hidden, before)
