"""Configuration: precedence, conversion, and messages that say what to do."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from shared.config import DraftConfig, OrchestratorConfig, TargetConfig
from shared.config.check import check_config
from shared.config.loader import (
    add_config_flags,
    load_config,
    read_config_file,
    to_arguments,
    variables_of,
)
from shared.errors import ConfigError

KNOWN = variables_of((OrchestratorConfig, TargetConfig, DraftConfig))


def load(
    config_type: type[Any] = TargetConfig,
    *,
    argv: list[str] | None = None,
    environ: dict[str, str] | None = None,
    file: dict[str, dict[str, Any]] | None = None,
) -> Any:
    parser = argparse.ArgumentParser()
    add_config_flags(parser, config_type)
    return load_config(
        config_type,
        section="service",
        flags=vars(parser.parse_args(argv or [])),
        environ=environ or {},
        file=file or {},
        known_variables=KNOWN,
    )


def test_flag_beats_variable_beats_file_beats_default() -> None:
    argv = ["--page-size", "2"]
    environ = {"COPPICE_PAGE_SIZE": "3", "COPPICE_NUM_PAGES": "30"}
    file = {"service": {"page_size": 4, "num_pages": 40, "cpu_threads": 5}}
    config = load(argv=argv, environ=environ, file=file)
    assert (config.page_size, config.num_pages, config.cpu_threads) == (2, 30, 5)
    assert config.prefill_chunk_len == TargetConfig().prefill_chunk_len


def test_a_flag_with_the_default_value_still_beats_the_rest() -> None:
    assert load(argv=["--page-size", "16"], environ={"COPPICE_PAGE_SIZE": "3"}).page_size == 16


@pytest.mark.parametrize("config_type", [TargetConfig, DraftConfig, OrchestratorConfig])
def test_flags_rebuild_every_field(config_type: type[Any]) -> None:
    changed: dict[str, Any] = {}
    for spec in fields(config_type):
        match spec.default:
            case bool():
                changed[spec.name] = not spec.default
            case int():
                changed[spec.name] = spec.default + 2
            case float():
                changed[spec.name] = spec.default / 2
            case str():
                choices = spec.metadata["choices"]
                changed[spec.name] = choices[-1] if choices else "-dashed, value"
    if "device" in changed:
        changed["device"] = "cuda:1"
    if "warm_up_trees" in changed:
        changed["warm_up_trees"] = "3/2/6, 16/16/64"
    config = config_type(**changed)
    assert load(config_type, argv=to_arguments(config)) == config
    assert to_arguments(config_type()) == []


@pytest.mark.parametrize(("text", "expected"), [("0", False), ("No", False), ("true", True)])
def test_boolean_variables(text: str, expected: bool) -> None:  # noqa: FBT001
    assert load(environ={"COPPICE_SELF_TEST": text}).self_test is expected


def test_boolean_flags_come_in_pairs() -> None:
    assert load(argv=["--no-self-test"]).self_test is False
    assert load(argv=["--self-test"], environ={"COPPICE_SELF_TEST": "0"}).self_test is True


def test_an_empty_variable_counts_as_not_set() -> None:
    config = load(environ={"COPPICE_PAGE_SIZE": "", "COPPICE_MODEL": ""})
    assert (config.page_size, config.model) == (16, "demo")


def test_a_variable_of_another_service_is_no_mistake() -> None:
    assert load(environ={"COPPICE_TOPK": "3"}) == TargetConfig()


def test_a_list_in_the_file_is_a_comma_separated_string() -> None:
    file = {"service": {"targets": ["a:1", "b:2"]}}
    assert load(OrchestratorConfig, file=file).targets == "a:1,b:2"


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("--model-path", "model", "/m"),
        ("--speculative-draft-model-path", "draft_model", "/d"),
        ("--speculative-algorithm", "algorithm", "eagle3"),
    ],
)
def test_names_of_sglang_on_the_target(flag: str, field: str, value: str) -> None:
    assert getattr(load(argv=[flag, value]), field) == value


@pytest.mark.parametrize(("name", "ours"), [("EAGLE3", "eagle3"), ("NEXTN", "mtp")])
def test_algorithms_of_sglang(name: str, ours: str) -> None:
    assert load(argv=["--speculative-algorithm", name]).algorithm == ours


def test_tree_shape_by_the_names_of_sglang() -> None:
    argv = ["--speculative-num-steps=3", "--speculative-eagle-topk=2"]
    config = load(OrchestratorConfig, argv=[*argv, "--speculative-num-draft-tokens=6"])
    assert (config.num_steps, config.topk, config.num_draft_tokens) == (3, 2, 6)


@pytest.mark.parametrize(
    ("environ", "file", "message"),
    [
        ({"COPPICE_PAGESIZE": "1"}, {}, "COPPICE_PAGESIZE; did you mean COPPICE_PAGE_SIZE?"),
        ({"COPPICE_PAGE_SIZE": "big"}, {}, "COPPICE_PAGE_SIZE is 'big', expected a whole number"),
        ({"COPPICE_PAGE_SIZE": "1.5"}, {}, "expected a whole number"),
        ({"COPPICE_SELF_TEST": "maybe"}, {}, "expected true or false"),
        ({"COPPICE_PAGE_SIZE": "0"}, {}, "--page-size is 0, expected at least 1"),
        ({"COPPICE_DTYPE": "fp8"}, {}, "--dtype is 'fp8', expected one of auto, float32"),
        ({"COPPICE_QUANTIZATION": "lm_head"}, {}, "expected one of auto, fp8, fp8_lm_head, none"),
        ({"COPPICE_DEVICE": "tpu"}, {}, "--device is 'tpu', expected auto, cpu, cuda or cuda:N"),
        ({"COPPICE_KV_MEMORY_FRACTION": "nan"}, {}, "--kv-memory-fraction is nan"),
        ({}, {"page_sise": 1}, "unknown key 'page_sise' in [service]; did you mean page_size?"),
        ({}, {"page_size": "16"}, "page_size in [service] is '16', expected a value like 16"),
        ({}, {"page_size": True}, "expected a value like 16"),
        ({}, {"self_test": 1}, "expected a value like True"),
    ],
)
def test_mistakes_are_refused_by_name(
    environ: dict[str, str], file: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ=environ, file={"service": file})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 1, 3), "at most 1 + topk + (num_steps - 1) * topk^2 = 2; lower it"),
        ((3, 2, 12), "= 11; lower it"),
        ((5, 8, 65), "--num-draft-tokens is 65, expected at most 64"),
        ((5, 17, 32), "--topk is 17, expected at most 16"),
        ((17, 1, 8), "--num-steps is 17, expected at most 16"),
        ((3, 2, 1), "num_draft_tokens is 1, expected 2..64, root included"),
        ((0, 1, 20), "= 17; lower it"),
    ],
)
def test_impossible_tree_shapes_are_refused(shape: tuple[int, int, int], message: str) -> None:
    steps, topk, nodes = shape
    with pytest.raises(ConfigError) as caught:
        check_config(OrchestratorConfig(num_steps=steps, topk=topk, num_draft_tokens=nodes))
    assert message in str(caught.value)


@pytest.mark.parametrize("shape", [(3, 2, 2), (5, 8, 64), (1, 1, 2), (0, 0, 0), (0, 0, 64)])
def test_possible_tree_shapes_pass(shape: tuple[int, int, int]) -> None:
    steps, topk, nodes = shape
    check_config(replace(OrchestratorConfig(), num_steps=steps, topk=topk, num_draft_tokens=nodes))


def test_a_file_is_read_by_table(tmp_path: Path) -> None:
    path = tmp_path / "coppice.toml"
    path.write_text('[target]\nmodel = "/m"\n\n[draft]\npage_size = 4\n')
    file = read_config_file(path, ("target", "draft"))
    assert file == {"target": {"model": "/m"}, "draft": {"page_size": 4}}
    assert read_config_file(None, ("target",)) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[targets]\n", "unknown table [targets]"),
        ("target = 3\n", "target in"),
        ("[target\n", "is not valid TOML"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "coppice.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config_file(path, ("target", "draft"))
    assert message in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        read_config_file(tmp_path / "none.toml", ("target",))
