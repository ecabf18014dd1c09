"""Checkpoint directories: strict both ways, sharded or not, fingerprints, errors that name."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import CheckpointError
from shared.models import digest
from shared.models.checkpoint import CheckpointReader
from shared.models.checkpoint_names import resolve_model, tokenizer_hash
from shared.models.digest import HashCache, default_cache_dir, model_hash, start_model_hash
from shared.models.draft import load_draft
from shared.models.llama import CausalLM
from shared.models.tensor_files import read_tensor_infos
from shared.models.tensor_reads import report_reads
from shared.models.weight_memory import stored_bytes
from tests import checkpoints
from tests.checkpoints import Tensors, edit_checkpoint

CPU = torch.device("cpu")


def load(directory: Path) -> CausalLM:
    return CausalLM.from_checkpoint(directory, CPU, torch.float32)


def load_head(directory: Path, target: Path) -> object:
    return load_draft("auto", directory, target, device=CPU, dtype=torch.float32)


TARGET_TENSORS = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.1.post_attention_layernorm.weight",
    "model.layers.2.self_attn.q_proj.weight",
    "model.layers.2.self_attn.k_proj.bias",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.1.mlp.gate_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
]


@pytest.mark.parametrize("name", TARGET_TENSORS)
def test_missing_target_tensor_is_named(tmp_path: Path, name: str) -> None:
    directory = checkpoints.write_qwen2(tmp_path, is_tied=False)
    edit_checkpoint(directory, tensors=lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=f"missing tensor '{name}'"):
        load(directory)


@pytest.mark.parametrize("name", TARGET_TENSORS)
def test_mis_shaped_target_tensor_is_named(tmp_path: Path, name: str) -> None:
    directory = checkpoints.write_qwen2(tmp_path, is_tied=False)

    def grow(tensors: Tensors) -> None:
        tensors[name] = torch.cat([tensors[name], tensors[name][:1]])

    edit_checkpoint(directory, tensors=grow)
    with pytest.raises(CheckpointError, match=f"tensor '{name}' has shape"):
        load(directory)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (checkpoints.write_llama, "model.layers.0.self_attn.q_norm.weight"),
        (checkpoints.write_llama, "model.layers.3.mlp.up_proj.weight"),
        (checkpoints.write_llama, "model.layers.0.self_attn.q_proj.bias"),
        (checkpoints.write_qwen3, "model.layers.0.self_attn.v_proj.bias"),
        (checkpoints.write_qwen2, "model.mtp_layers.0.input_proj.weight"),
        (checkpoints.write_mistral, "extra"),
    ],
)
def test_left_over_target_tensor_is_named(
    tmp_path: Path, write: Callable[[Path], Path], name: str
) -> None:
    directory = write(tmp_path)
    edit_checkpoint(directory, tensors=lambda t: t.update({name: torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=f"left-over tensors.*{name}"):
        load(directory)


def test_known_extras_of_a_target_are_accepted(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path)
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    edit_checkpoint(directory, tensors=lambda t: t.update({name: torch.zeros(8)}))
    load(directory)


def test_tied_head_must_be_the_embedding_if_written(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path, is_tied=True)
    edit_checkpoint(
        directory,
        tensors=lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )
    load(directory)
    edit_checkpoint(directory, tensors=lambda t: t["lm_head.weight"][5].add_(1))
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings.*lm_head\.weight"):
        load(directory)


EAGLE3_TENSORS = [
    "fc.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.self_attn.q_proj.weight",
    "norm.weight",
    "lm_head.weight",
    "d2t",
]
EAGLE_TENSORS = ["fc.weight", "fc.bias", "layers.0.post_attention_layernorm.weight"]
MTP_TENSORS = [
    f"model.mtp_layers.0.{name}"
    for name in (
        "token_layernorm.weight",
        "hidden_layernorm.weight",
        "input_proj.weight",
        "final_layernorm.weight",
        "self_attn.q_proj.bias",
        "input_layernorm.weight",
    )
]


@pytest.mark.parametrize("name", EAGLE3_TENSORS)
def test_missing_eagle3_tensor_is_named(tmp_path: Path, name: str) -> None:
    target = checkpoints.write_llama(tmp_path / "target")
    head = checkpoints.write_eagle3(tmp_path / "head", target)
    edit_checkpoint(head, tensors=lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=f"missing tensor '{name}'"):
        load_head(head, target)


@pytest.mark.parametrize("name", EAGLE_TENSORS)
def test_missing_eagle_tensor_is_named(tmp_path: Path, name: str) -> None:
    target = checkpoints.write_llama(tmp_path / "target")
    head = checkpoints.write_eagle(tmp_path / "head", target)
    edit_checkpoint(head, tensors=lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=f"missing tensor '{name}'"):
        load_head(head, target)


@pytest.mark.parametrize("name", MTP_TENSORS)
def test_missing_mtp_tensor_is_named(tmp_path: Path, name: str) -> None:
    target = checkpoints.write_mimo(tmp_path)
    edit_checkpoint(target, tensors=lambda t: t.pop(name))
    load(target)  # the target does not need it
    with pytest.raises(CheckpointError, match=f"missing tensor '{name}'"):
        load_head(target, target)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("eagle3", "midlayer.self_attn.q_proj.bias"),
        ("eagle3", "fc.bias"),
        ("eagle3", "fc_norm.0.weight"),
        ("eagle3", "layers.1.mlp.up_proj.weight"),
        ("eagle", "layers.0.input_layernorm.weight"),
        ("eagle", "norm.weight"),
        ("eagle", "d2t"),
        ("mtp", "model.mtp_layers.0.mlp.gate_proj.bias"),
        ("mtp", "model.mtp_layers.1.input_proj.weight"),
    ],
)
def test_left_over_draft_tensor_is_named(tmp_path: Path, kind: str, name: str) -> None:
    if kind == "mtp":
        target = head = checkpoints.write_mimo(tmp_path)
    else:
        write = checkpoints.write_eagle3 if kind == "eagle3" else checkpoints.write_eagle
        target = checkpoints.write_llama(tmp_path / "target")
        head = write(tmp_path / "head", target)
    edit_checkpoint(head, tensors=lambda t: t.update({name: torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=f"left-over tensors.*{name}"):
        load_head(head, target)


def test_known_extras_of_heads_are_accepted(tmp_path: Path) -> None:
    target = checkpoints.write_llama(tmp_path / "target")
    eagle3 = checkpoints.write_eagle3(tmp_path / "eagle3", target)
    assert "t2d" in read_tensor_infos(eagle3)
    load_head(eagle3, target)
    eagle = checkpoints.write_eagle(tmp_path / "eagle", target)
    assert "embed_tokens.weight" in read_tensor_infos(eagle)
    edit_checkpoint(eagle, tensors=lambda t: t.update({"lm_head.weight": torch.zeros(3, 48)}))
    load_head(eagle, target)


@pytest.mark.parametrize(
    ("has_bias", "says"), [(False, True), (True, False)], ids=["missing", "left over"]
)
def test_eagle_fc_bias_follows_the_config(tmp_path: Path, *, has_bias: bool, says: bool) -> None:
    target = checkpoints.write_llama(tmp_path / "target")
    head = checkpoints.write_eagle(tmp_path / "head", target, has_fc_bias=has_bias)
    edit_checkpoint(head, config=lambda c: c.pop("bias"))
    load_head(head, target)  # not said: the checkpoint decides
    edit_checkpoint(head, config=lambda c: c.update({"bias": says}))
    with pytest.raises(CheckpointError, match=r"fc\.bias"):
        load_head(head, target)


@pytest.mark.parametrize("values", [[500, 0], [-1, 0], [1, 0]], ids=["high", "low", "twice"])
def test_d2t_must_map_to_distinct_target_ids(tmp_path: Path, values: list[int]) -> None:
    target = checkpoints.write_llama(tmp_path / "target")
    head = checkpoints.write_eagle3(tmp_path / "head", target)
    edit_checkpoint(head, tensors=lambda t: t["d2t"][:2].copy_(torch.tensor(values)))
    with pytest.raises(CheckpointError, match="d2t"):
        load_head(head, target)


def test_narrow_head_cannot_borrow_the_targets_embedding(tmp_path: Path) -> None:
    target = checkpoints.write_llama(tmp_path / "target")
    head = checkpoints.write_eagle3(tmp_path / "head", target, hidden_size=32, has_embedding=False)
    with pytest.raises(CheckpointError, match=r"missing tensor 'embed_tokens\.weight'"):
        load_head(head, target)


def test_head_reads_only_what_it_lacks_from_the_target(tmp_path: Path) -> None:
    target = checkpoints.write_llama(tmp_path / "target")
    head = checkpoints.write_eagle(tmp_path / "head", target)
    keep = {"model.embed_tokens.weight", "lm_head.weight"}

    def strip(tensors: Tensors) -> None:
        for name in set(tensors) - keep:
            del tensors[name]

    edit_checkpoint(target, tensors=strip)
    load_head(head, target)


def test_sharded_equals_unsharded(tmp_path: Path) -> None:
    one = checkpoints.write_llama(tmp_path / "one")
    many = checkpoints.write_llama(tmp_path / "many", num_shards=4)
    assert len(list(many.glob("*.safetensors"))) == 4
    names = read_tensor_infos(one).keys()
    assert names == read_tensor_infos(many).keys()
    readers = [CheckpointReader(d, device=CPU, dtype=torch.float32) for d in (one, many)]
    with readers[0], readers[1]:
        for name in names:
            a, b = (reader.load(name, reader.shape(name)) for reader in readers)
            assert torch.equal(a, b)
        for reader in readers:
            reader.finish()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tensors_come_in_the_wanted_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = checkpoints.write_llama(tmp_path, dtype=torch.bfloat16)
    with CheckpointReader(directory, device=CPU, dtype=dtype) as reader:
        got = reader.load("model.norm.weight", (48,))
    assert got.dtype is dtype
    assert torch.equal(
        got, load_file(directory / "model.safetensors")["model.norm.weight"].to(dtype)
    )


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e5m2])
def test_weights_in_other_types_are_refused(tmp_path: Path, stored: torch.dtype) -> None:
    directory = checkpoints.write_llama(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    edit_checkpoint(directory, tensors=lambda t: t.update({name: t[name].to(stored)}))
    with pytest.raises(CheckpointError, match=f"{name}.*must be one of"):
        load(directory)


def test_index_that_names_an_absent_tensor(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path, num_shards=2)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.ghost"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.ghost"):
        load(directory)


def test_shard_with_a_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path, num_shards=2)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        load(directory)


@pytest.mark.parametrize(
    "index",
    [[], {}, "x", {"weight_map": []}, {"weight_map": {"a": 3}}, {"weight_map": {"a": "../b"}}],
    ids=str,
)
def test_index_that_is_none(tmp_path: Path, index: Any) -> None:
    directory = checkpoints.write_llama(tmp_path, num_shards=2)
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map must be an object"):
        load(directory)


def test_absent_shard_is_named(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path, num_shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        load(directory)


@pytest.mark.parametrize("keep", [0, 6, 100, -50])
def test_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    directory = checkpoints.write_llama(tmp_path)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(directory)


def test_directory_without_safetensors(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path)
    (directory / "model.safetensors").rename(directory / "consolidated.00.pth")
    with pytest.raises(
        CheckpointError, match=r"no safetensors file; .*convert consolidated.00.pth"
    ):
        load(directory)
    (directory / "consolidated.00.pth").unlink()
    with pytest.raises(CheckpointError, match=r"no safetensors file$"):
        load(directory)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path, num_shards=2)
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="2 safetensors files and no"):
        load(directory)


def test_two_names_for_one_tensor(tmp_path: Path) -> None:
    target = checkpoints.write_llama(tmp_path / "target")
    head = checkpoints.write_eagle3(tmp_path / "head", target)
    edit_checkpoint(
        head, tensors=lambda t: t.update({"model.norm.weight": t["norm.weight"].clone()})
    )
    with pytest.raises(CheckpointError, match=r"both mean 'norm\.weight'"):
        load_head(head, target)


def test_model_hash_does_not_depend_on_sharding(tmp_path: Path) -> None:
    one = checkpoints.write_llama(tmp_path / "one")
    many = checkpoints.write_llama(tmp_path / "many", num_shards=3)
    assert model_hash(one) == model_hash(many)
    assert len(model_hash(one)) == 64


def _flip(name: str, index: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors[name].view(-1)[index : index + 1].add_(1)


@pytest.mark.parametrize(
    "change",
    [
        _flip("model.embed_tokens.weight", 0),
        _flip("model.embed_tokens.weight", -255),
        _flip("model.norm.weight", 20),
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].half()}),
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].view(6, 8)}),
        lambda t: t.update({"model.other": t.pop("model.norm.weight")}),
    ],
    ids=["first kilobyte", "last kilobyte", "small tensor", "dtype", "shape", "name"],
)
def test_model_hash_sees_a_change(tmp_path: Path, change: Callable[[Tensors], None]) -> None:
    directory = checkpoints.write_llama(tmp_path)
    before = model_hash(directory)
    edit_checkpoint(directory, tensors=change)
    assert model_hash(directory) != before


def test_a_damaged_file_ends_the_hash_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """.. of what other threads have not begun, too."""
    directory = checkpoints.write_llama(tmp_path / "model")
    num_begun = 0

    def fail(*_: object) -> str:
        nonlocal num_begun
        num_begun += 1
        raise CheckpointError("damaged")

    monkeypatch.setattr(digest, "_digest_of", fail)
    with pytest.raises(CheckpointError, match="damaged"):
        model_hash(directory, HashCache(tmp_path / "cache"))
    assert num_begun <= len(os.sched_getaffinity(0))


def test_model_hash_sees_the_config_and_every_byte(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path)
    hashes = {model_hash(directory)}
    path = directory / "model.safetensors"
    info = read_tensor_infos(directory)["model.embed_tokens.weight"]
    for offset in (0, 2048, info.end - info.start - 1):
        data = bytearray(path.read_bytes())
        data[info.start + offset] ^= 1
        path.write_bytes(bytes(data))
        hashes.add(model_hash(directory))
    (directory / "config.json").write_text((directory / "config.json").read_text() + " ")
    assert model_hash(directory) not in hashes
    assert len(hashes) == 4


def test_a_digest_is_remembered_until_size_or_time_of_a_file_changes(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path / "model")
    cache = HashCache(tmp_path / "cache", settle_s=0.0)
    weights = directory / "model.safetensors"
    first = model_hash(directory, cache)
    (entry,) = (tmp_path / "cache").rglob("*.json")
    assert list(directory.rglob("*cache*")) == []

    # What is remembered is what is answered: a digest that no computation gives shows it.
    entry.write_text(entry.read_text().replace(first, "0" * 64))
    assert model_hash(directory, cache) == "0" * 64

    stat = weights.stat()
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert model_hash(directory, cache) == first

    entry.write_text(entry.read_text().replace(first, "0" * 64))
    data = weights.read_bytes()
    weights.write_bytes(data + b"\0")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert model_hash(directory, cache) == first  # of a longer file with the same tensors


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path) -> None:
    """It could change again within one tick of its clock."""
    directory = checkpoints.write_llama(tmp_path / "model")
    model_hash(directory, HashCache(tmp_path / "cache", settle_s=3600.0))
    assert list((tmp_path / "cache").rglob("*")) == []


@pytest.mark.parametrize("content", [None, "", "[]", '{"version": 1}', "\xff"])
def test_a_cache_that_cannot_be_used_is_no_obstacle(tmp_path: Path, content: str | None) -> None:
    directory = checkpoints.write_llama(tmp_path / "model")
    expected = model_hash(directory)
    cache = HashCache(tmp_path / "cache", settle_s=0.0)
    if content is None:
        (tmp_path / "cache").write_text("a file where a directory should be")
    else:
        model_hash(directory, cache)
        (entry,) = (tmp_path / "cache").rglob("*.json")
        entry.write_text(content, encoding="latin-1")
    assert model_hash(directory, cache) == expected


def test_a_digest_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path / "model")
    cache = HashCache(tmp_path / "cache", settle_s=0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        model_hash(directory, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_the_cache_lies_in_the_users_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "coppice"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "coppice"


def test_a_hash_beside_other_work(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path)
    assert start_model_hash(directory)() == model_hash(directory)
    wait = start_model_hash(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="nowhere"):
        wait()


def test_tokenizer_hash_is_of_what_ids_mean(tmp_path: Path) -> None:
    directory = checkpoints.write_tokenizer(tmp_path)
    path = directory / "tokenizer.json"
    before = tokenizer_hash(directory)
    fields = json.loads(path.read_text())
    fields["padding"] = {"strategy": "BatchLongest"}
    path.write_text(json.dumps(fields, indent=3))
    assert tokenizer_hash(directory) == before
    fields["added_tokens"][0]["content"] = "<other>"
    path.write_text(json.dumps(fields))
    other = tokenizer_hash(directory)
    assert other != before
    fields["model"]["vocab"]["a"], fields["model"]["vocab"]["b"] = 65, 64
    path.write_text(json.dumps(fields))
    assert tokenizer_hash(directory) not in (before, other)
    path.unlink()
    assert tokenizer_hash(directory) == ""
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        tokenizer_hash(directory)


def test_resolve_model_of_a_path(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path / "model")
    assert resolve_model(str(directory), "target") == directory
    with pytest.raises(CheckpointError, match=r"config\.json"):
        resolve_model(str(tmp_path), "target")


@pytest.mark.parametrize("role", ["target", "eagle3", "standalone"])
def test_resolve_model_of_the_demo(role: str) -> None:
    directory = resolve_model("demo", role)
    assert directory.parts[-3:] == ("coppice", "bundled", role)


def test_broken_copy_of_a_shard_is_found_before_weights_are_read(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path, num_shards=2)
    first, second = sorted(directory.glob("*.safetensors"))
    shutil.copyfile(first, second)
    with pytest.raises(CheckpointError, match="which the index does not say"):
        load(directory)


def test_single_file_of_another_name_is_read(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    save_file(tensors, directory / "weights.safetensors")
    load(directory)


def test_loading_is_reported_by_bytes(tmp_path: Path) -> None:
    directory = checkpoints.write_qwen2(tmp_path, is_tied=False)
    num_bytes = stored_bytes(directory)
    assert 0 < num_bytes < (directory / "model.safetensors").stat().st_size
    said: list[tuple[str, float]] = []

    def note(text: str, share: float) -> None:
        said.append((text, share))

    with report_reads(note, num_bytes=num_bytes, interval_s=0.0):
        load(directory)
    shares = [share for _, share in said]
    assert len(said) == len(read_tensor_infos(directory))
    assert shares == sorted(shares) and 0 < shares[0] < shares[-1] == 1.0
    assert said[-1][0] == f"loading weights, {num_bytes / 1e9:.1f} of {num_bytes / 1e9:.1f} GB"
    with report_reads(note, num_bytes=num_bytes):
        load(directory)
    load(directory)
    assert len(said) == len(shares), "not in its first second, and not outside of the block"
