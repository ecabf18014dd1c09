"""The command line: what flags mean, and how mistakes are refused."""

from __future__ import annotations

import dataclasses
import importlib
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import coppice
from coppice.cli import bench_options, generate, options, serve, up
from coppice.cli import main as main_module
from coppice.cli.main import build_parser, main
from coppice.cli.render import TokenPrinter, stats_rows
from coppice.cli.request_options import SAMPLING, SHAPE, request_keywords
from coppice.request import RequestOptions, build_request
from coppice.stack import StackConfig
from coppice.stack import config as stack_config_module
from coppice.v1 import generation_pb2 as pb
from shared.config import DraftConfig, GatewayConfig, OrchestratorConfig, TargetConfig
from shared.config.check import parse_shape
from shared.errors import ConfigError, InvalidArgumentError, UnavailableError
from shared.messages import (
    FinishInfo,
    FinishReason,
    PromptInfo,
    SpeculationStats,
    TokenDelta,
    TreeShape,
)
from shared.rpc.status import to_status
from tests.fakes.generation import FakeGeneration, serving
from tests.scrape import free_ports


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("COPPICE_"):
            monkeypatch.delenv(name)


def parse(*argv: str) -> Any:
    arguments, extras = build_parser().parse_known_args(argv)
    assert extras == []
    return arguments


def up_config(*argv: str) -> StackConfig:
    return up.config_of(parse("up", *argv))


# --- mistakes ---


FRONT = ["serve", "orchestrator", "--targets=127.0.0.1:1"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "target", "--pagesize=3"], "--pagesize; did you mean --page-size?"),
        (["bench", "--shedule", "a.json"], "--shedule; did you mean --schedule?"),
        (["up", "--num-target", "2"], "--num-target; did you mean --num-targets?"),
        (["generate", "hi", "there"], "unexpected argument 'there'"),
        (["serve", "targets"], "invalid choice: 'targets'"),
    ],
)
def test_unknown_arguments_are_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["up", "--num-steps", "3", "--topk", "2", "--num-draft-tokens", "12"],
            "--num-draft-tokens: num_draft_tokens is 12, expected at most 1 + topk + "
            "(num_steps - 1) * topk^2 = 11; lower it, or raise topk or num_steps",
        ),
        (["up", "--num-draft-tokens", "65"], "--num-draft-tokens is 65, expected at most 64"),
        (["up", "--log-level", "loud"], "--log-level is 'loud', expected one of debug, info"),
        (["up", "--page-size", "many"], "--page-size is 'many', expected a whole number"),
        (["up", "--draft-model", "none", "--num-drafts", "1"], "--num-drafts needs a draft"),
        (["serve", "orchestrator", "--num-steps", "17"], "--num-steps is 17"),
        (["serve", "draft", "--algorithm", "none"], "--algorithm is 'none', expected one of"),
        (["generate", "x", "--num-steps", "1", "--topk=1", "--num-draft-tokens=3"], "= 2; lower"),
        (["generate", "x", "--logit-bias", "7"], "--logit-bias is '7', expected ID=VALUE"),
        (["bench", "--concurrency", "1,x"], "--concurrency is '1,x'"),
        (["bench", "--speculation", "5/8"], "--speculation: '5/8' is no tree shape"),
        (["bench", "--speculation", "on"], "--speculation is 'on', expected a list of off, auto"),
        (["bench", "--speculation", ","], "--speculation is empty"),
        (["bench", "--new-tokens", "1"], "--new-tokens is 1, expected at least 2"),
        (["bench", "--repeat", "0"], "--repeat is 0, expected at least 1"),
        (["bench", "--rate", "fast"], "--rate is 'fast', expected requests per second"),
        (["bench", "--rate", "0.001", "--seconds", "1"], "nobody arrives within 1 s"),
        (["bench", "--seconds", "5"], "--seconds means something with --rate only"),
        (["bench", "--requests", "5"], "--requests means something with --timeline only"),
        (["bench", "--timeline", "--rate", "5"], "--rate means nothing with --timeline"),
        (["bench", "--schedule", "/none"], "cannot read --schedule /none"),
        (["bench", "--schedule", "x", "--new-tokens", "5"], "--new-tokens means nothing with"),
        (["bench", "--goodput", "fast"], "--goodput is 'fast', expected limits of ttft"),
        (["top", "--interval-s", "-1"], "--interval-s is -1, expected more than 0"),
        (["top", "--interval-s", "nan"], "--interval-s is nan, expected more than 0"),
        (["health", "a:1", "--timeout-s", "0"], "--timeout-s is 0, expected more than 0"),
        (["bench", "--output", "/none/a.json"], "--output /none/a.json: there is no such folder"),
        (["bench", "--output", "/"], "cannot write --output /: Is a directory"),
        (["bench", "--plot", "/proc/a.svg"], "cannot write --plot /proc/a.svg: "),
        (["bench", "--compare-outputs", "/none"], "cannot read /none"),
        (["bench", "compare", "/none", "/none"], "cannot read /none"),
        (["bench", "compare", "a", "b", "--rate", "5"], "--rate means nothing with compare"),
        (["bench", "compare", "a"], "'compare a' is unexpected; expected options only, or"),
        (["bench", "--prompts", "/none"], "cannot read --prompts /none"),
        (["serve", "target", "--config", "/none.toml"], "cannot read the configuration file"),
        (["serve", "target", "--host", "0.0.0.0"], "give --secret-file (or COPPICE_SECRET)"),
        (["serve", "draft", "--host", "::"], "give --secret-file (or COPPICE_SECRET)"),
        (["serve", "draft", "--secret-file", "/none"], "cannot read --secret-file /none"),
        (["serve", "draft", "--tls-server-name", "a"], "means something with --tls-ca-file only"),
        (["serve", "draft", "--tls-ca-file", "/none"], "/none holds no certificates (PEM)"),
        (["serve", "draft", "--targets", "a:b"], "--targets holds 'a:b', expected HOST"),
        ([*FRONT, "--host", "0.0.0.0"], "give --token-file with the tokens of clients"),
        ([*FRONT, "--token-file", "/none"], "cannot read --token-file /none"),
        ([*FRONT, "--tls-cert-file", "/none"], "--tls-cert-file needs --tls-key-file"),
        (["up", "--port=0", "--host", "0.0.0.0"], "give --token-file with the tokens of clients"),
        (["up", "--port=0", "--token-file", "/none"], "cannot read --token-file /none"),
        (["up", "--port=0", "--secret-file", "/none"], "cannot read --secret-file /none"),
        (["generate", "hi", "--token-file", "/none"], "cannot read --token-file /none"),
        (["generate", "hi", "--tls-key-file", "a"], "with --tls or --tls-ca-file only"),
        (["generate", "hi", "--tls", "--tls-cert-file", "a"], "needs both its file and that of"),
        (["bench", "--tls-ca-file", "/none"], "/none holds no certificates (PEM)"),
        (["health", "a:1", "--tls-server-name", "b"], "with --tls or --tls-ca-file only"),
        (["generate", "x", "--server", "a:b"], "--server is 'a:b', expected HOST:PORT"),
        (["bench", "--server", "a:65536"], "--server is 'a:65536', expected HOST:PORT"),
        (["admin", "workers", "--address", "a:"], "--address is 'a:', expected HOST:PORT"),
        (["health", "a:0"], "HOST:PORT is 'a:0', expected HOST:PORT"),
        (["generate", "x", "--max-new-tokens", "-1"], "--max-new-tokens is -1, expected 1 or more"),
        (
            ["generate", "x", "--no-speculation", "--show-tree"],
            "--show-tree means nothing with --no-speculation",
        ),
        (
            ["generate", "x", "--no-speculation", "--topk", "2"],
            "--topk means nothing with --no-speculation",
        ),
        (["up", "--target-model", "/nowhere"], "--target-model: there is no directory /nowhere"),
        (["up", "--draft-model", "/dev"], "--draft-model: /dev holds no config.json"),
    ],
)
def test_impossible_options_exit_with_2_and_the_fix(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"coppice {coppice.__version__}\n"


@pytest.mark.parametrize("command", [["generate", "hi"], ["bench"]])
def test_without_a_server_it_says_at_once_what_to_start(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "CONNECT_TIMEOUT_S", 3600.0)
    port = free_ports(1)
    assert main([*command, "--server", f"127.0.0.1:{port}"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"no server listens at 127.0.0.1:{port}; start one with `coppice up`" in err


class QuietHandler(BaseHTTPRequestHandler):
    """Refuses all there is, and logs nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def web_server() -> Iterator[str]:
    """Yield HOST:PORT of a server that speaks HTTP and no gRPC."""
    with ThreadingHTTPServer(("127.0.0.1", 0), QuietHandler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("command", "option", "hint"),
    [
        (["generate", "hi"], "--server", "name its orchestrator's --port"),
        (["bench"], "--server", "name its orchestrator's --port"),
        (["admin", "workers"], "--address", "name the --admin-port"),
    ],
)
def test_who_speaks_no_grpc_is_told_from_nobody(
    command: list[str],
    option: str,
    hint: str,
    web_server: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The port of a gateway, or of a server with TLS: something does listen there."""
    assert main([*command, option, web_server]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"something listens at {web_server}, but answers no plain gRPC" in err
    assert "--tls-ca-file" in err and hint in err
    assert main([*command, option, web_server, "--tls"]) == 1
    err = capsys.readouterr().err
    for flag in ("--tls-ca-file", "--tls-cert-file", "--tls-server-name"):
        assert flag in err


@pytest.mark.parametrize(
    ("command", "option", "port"),
    [
        (["generate", "hi"], "--server", "client port (--port, default: 50051)"),
        (["bench", "--concurrency=1"], "--server", "client port (--port, default: 50051)"),
        (["admin", "workers"], "--address", "operators' port (--admin-port, default: 51051)"),
    ],
)
def test_another_port_of_grpc_is_told_from_a_bug(
    command: list[str], option: str, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a worker's."""
    server = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        assert main([*command, option, address]) == 1
    finally:
        server.stop(None).wait()
    err = capsys.readouterr().err
    assert "UNIMPLEMENTED: what answers there has no such method" in err
    assert f"it is no orchestrator's {port}" in err


# --- up ---


def test_up_without_options_runs_the_bundled_models() -> None:
    config = up_config()
    assert (config.num_targets, config.num_drafts) == (1, 1)
    assert config.target == TargetConfig()
    assert config.draft == DraftConfig()
    assert config.orchestrator == OrchestratorConfig(
        host="127.0.0.1", port=50051, workers=config.orchestrator.workers
    )


def test_up_spreads_its_options_over_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_config_module, "list_machine_gpus", lambda: ["GPU-a", "GPU-b"])
    config = up_config(
        *("--target-model", "/t", "--draft-model", "/d", "--algorithm", "standalone"),
        *("--num-steps", "3", "--topk", "2", "--num-draft-tokens", "6", "--page-size", "4"),
        *("--dtype", "float16", "--draft-dtype", "bfloat16", "--device", "cuda", "--port", "7"),
        *("--target-gpus", "0,1", "--draft-gpus", "1", "--num-targets", "2", "--num-drafts", "3"),
        *("--workers", "6"),
    )
    assert config.target == TargetConfig(
        model="/t",
        draft_model="/d",
        algorithm="standalone",
        page_size=4,
        dtype="float16",
        device="cuda",
    )
    assert config.draft == DraftConfig(
        model="/d",
        target_model="/t",
        algorithm="standalone",
        page_size=4,
        dtype="bfloat16",
        device="cuda",
        warm_up_trees=f"3/2/6,{DraftConfig().warm_up_trees}",
    )
    shape = {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}
    assert config.orchestrator == OrchestratorConfig(
        host="127.0.0.1", port=7, model="/t", workers=6, **shape
    )
    assert (config.target_gpus, config.draft_gpus) == (("0", "1"), ("1",))
    for argv, level in (((), "info"), (("--log-level", "debug"), "debug")):
        told = up_config(*argv)
        services = (told.orchestrator, told.target, told.draft)
        assert [service.log_level for service in services] == [level] * 3
    assert (config.num_targets, config.num_drafts) == (2, 3)


@pytest.mark.parametrize(("num_cores", "workers"), [(1, 1), (15, 1), (16, 2), (24, 3), (200, 4)])
def test_up_starts_orchestrators_by_the_cores_of_the_machine(
    num_cores: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a flag, or the orchestrator's table, says how many."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(num_cores)))
    assert up_config().orchestrator.workers == workers
    assert up_config("--workers", "1").orchestrator.workers == 1
    path = tmp_path / "coppice.toml"
    path.write_text("[orchestrator]\nworkers = 5\n")
    assert up_config("--config", str(path)).orchestrator.workers == 5
    assert up_config("--config", str(path), "--workers", "2").orchestrator.workers == 2


def test_a_command_line_of_sglang_ports_as_it_is() -> None:
    sglang = up_config(
        *("--model-path", "/t", "--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", "/d", "--speculative-num-steps", "5"),
        *("--speculative-eagle-topk", "8", "--speculative-num-draft-tokens", "32"),
    )
    assert sglang == up_config(
        *("--target-model", "/t", "--algorithm", "eagle3", "--draft-model", "/d"),
        *("--num-steps", "5", "--topk", "8", "--num-draft-tokens", "32"),
    )


@pytest.mark.parametrize("argv", [("--draft-model", "none"), ("--algorithm", "none")])
def test_up_without_a_draft(argv: tuple[str, ...]) -> None:
    config = up_config(*argv)
    assert config.num_drafts == 0
    assert (config.target.draft_model, config.target.algorithm) == ("none", "none")


def test_up_leaves_what_the_file_says_about_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "coppice.toml"
    path.write_text(
        "[up]\nnum_targets = 2\npage_size = 8\n"
        "[target]\nnum_pages = 99\npage_size = 4\ndtype = 'float32'\n"
        "[orchestrator]\nmax_num_requests = 5\n"
    )
    monkeypatch.setenv("COPPICE_NUM_DRAFTS", "4")
    monkeypatch.setenv("COPPICE_CONFIG", str(path))
    config = up_config("--num-targets", "3")
    assert (config.num_targets, config.num_drafts) == (3, 4)
    assert (config.target.num_pages, config.target.dtype) == (99, "float32")
    assert (config.target.page_size, config.draft.page_size) == (8, 8)
    assert config.orchestrator.max_num_requests == 5


def test_up_listens_where_the_tables_of_services_say(tmp_path: Path) -> None:
    """A file that was written for `coppice serve` means the same here; [up] and flags go first."""
    path = tmp_path / "coppice.toml"
    tables = "[orchestrator]\nhost = '::1'\nport = 7001\n[gateway]\nport = 7002\n"
    path.write_text(tables)
    config = up_config("--config", str(path))
    assert (config.orchestrator.host, config.orchestrator.port) == ("::1", 7001)
    assert config.gateway is not None and config.gateway.port == 7002
    assert up_config("--config", str(path), "--port", "7003").orchestrator.port == 7003
    path.write_text(f"{tables}[up]\nport = 7004\n")
    assert up_config("--config", str(path)).orchestrator.port == 7004


def test_up_takes_the_variables_of_every_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flag, variable, file, default: of all options, and a variable goes to whoever has it."""
    path = tmp_path / "coppice.toml"
    path.write_text(
        "[target]\nnum_pages = 99\ncpu_threads = 2\n[draft]\nnum_pages = 98\nwindow = 7\n"
        "[orchestrator]\nlog_level = 'error'\nmax_calls = 3\n"
    )
    for name, value in {
        **{"CONFIG": str(path), "NUM_PAGES": "50", "MAX_CALLS": "4", "LOG_LEVEL": "warning"},
        **{"DTYPE": "float32", "START_TIMEOUT_S": "30", "METRICS_HOST": "0.0.0.0"},
        **{"SERVER": "box:1", "KV_MEMORY_FRACTION": ""},
    }.items():
        monkeypatch.setenv(f"COPPICE_{name}", value)
    config = up_config("--start-timeout-s", "40")
    target, draft, orchestrator = config.target, config.draft, config.orchestrator
    assert (target.num_pages, draft.num_pages, orchestrator.max_calls) == (50, 50, 4)
    assert (target.cpu_threads, draft.cpu_threads, draft.window) == (2, 0, 7)
    assert {part.log_level for part in (target, draft, orchestrator)} == {"warning"}
    assert {part.metrics_host for part in (target, draft, orchestrator)} == {"0.0.0.0"}
    # An option of `up` means what --help of `up` says: the target's dtype.
    assert (target.dtype, draft.dtype) == ("float32", "auto")
    assert (config.start_timeout_s, target.kv_memory_fraction) == (40.0, 0.85)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("MODEL", "COPPICE_TARGET_MODEL and COPPICE_DRAFT_MODEL"),
        ("TARGETS", "coppice serve orchestrator"),
        ("DRAFTS", "coppice serve orchestrator"),
        ("HEALTH_PORT", "health_port into its table"),
    ],
)
def test_up_refuses_a_variable_that_cannot_mean_every_service(
    name: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"COPPICE_{name}", "1")
    with pytest.raises(ConfigError, match=f"cannot take COPPICE_{name}: .*{fix}"):
        up_config()


def test_up_ignores_no_variable_of_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    default = up_config()
    valid = {"device": "cpu", "warm_up_trees": "1/1/2", "num_draft_tokens": "2"}
    specs = {
        spec.name: spec
        for config_type in (TargetConfig, DraftConfig, OrchestratorConfig, GatewayConfig)
        for spec in dataclasses.fields(config_type)
    }
    assert up.NOT_HERE.keys() < specs.keys()
    for name in sorted(specs.keys() - up.NOT_HERE.keys()):
        spec = specs[name]
        choices = [choice for choice in spec.metadata["choices"] if choice != spec.default]
        other: Any = (*choices, "x")[0]
        if isinstance(spec.default, bool):
            other = not spec.default
        elif isinstance(spec.default, int):
            other = spec.default + 2
        elif isinstance(spec.default, float):
            other = spec.metadata["minimum"] or 0.5
        with monkeypatch.context() as patch:
            patch.setenv(f"COPPICE_{name.upper()}", str(valid.get(name, other)))
            assert up_config() != default, name


def test_serve_calls_the_service_with_its_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    class FakeServer:
        @staticmethod
        def main(config: Any) -> int:
            calls.append(config)
            return 7

    monkeypatch.setattr(importlib, "import_module", lambda name: FakeServer)
    monkeypatch.setenv("COPPICE_PAGE_SIZE", "2")
    assert main(["serve", "target", "--model", "/t"]) == 7
    assert main(["serve", "draft"]) == 7
    assert main(["serve", "orchestrator", "--targets", "a:1"]) == 7
    assert calls == [
        TargetConfig(model="/t", page_size=2),
        DraftConfig(page_size=2),
        OrchestratorConfig(targets="a:1"),
    ]


def test_every_role_names_a_module_with_a_main() -> None:
    for _, module in serve.ROLES.values():
        assert callable(importlib.import_module(module).main)


# --- generate ---


def test_request_flags_become_keywords() -> None:
    arguments = parse(
        *("generate", "hi", "--max-new-tokens", "5", "--temperature", "0.7", "--top-p", "0.9"),
        *("--seed", "3", "--stop", "a", "--stop", "b", "--stop-token-id", "9", "--ignore-eos"),
        *("--logit-bias", "4=-1.5", "--num-steps", "2", "--min-new-tokens", "1"),
        *("--request-id", "mine"),
    )
    assert request_keywords(arguments) == {
        "request_id": "mine",
        "max_new_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 3,
        "stop_strings": ["a", "b"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "logit_bias": {4: -1.5},
        "num_steps": 2,
        "min_new_tokens": 1,
    }
    assert request_keywords(parse("generate", "hi", "--no-speculation"))["speculation"] is False


def test_ctrl_c_while_commands_are_imported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "build_parser", interrupt)
    assert main(["generate", "x"]) == 130


@pytest.mark.parametrize("option", ["--address", "--token-file", "--tls", "--tls-ca-file"])
def test_options_before_an_action_of_admin_are_told_where_they_go(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["admin", option, "a:1", "workers"])
    assert ended.value.code == 2
    assert (
        f"{option} goes behind the action: coppice admin ACTION {option}" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--peer-host", ": write peer_host into [target] of the --config file"),
        ("--num-pages=9", ": write num_pages into [target] or [draft] of the --config file"),
        ("--admin-port", ": write admin_port into [orchestrator] of the --config file"),
        ("--target-modl", "; did you mean --target-model?"),
    ],
)
def test_up_says_where_an_option_of_one_service_goes(
    flag: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", flag, "5"])
    assert ended.value.code == 2
    assert f"unknown option {flag.partition('=')[0]}{said}" in capsys.readouterr().err


def test_flags_say_what_an_output_must_be(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    for argv, expected in (
        (["--json-schema", str(file)], {"json_schema": '{"type": "object"}'}),
        (["--json-schema", ' {"a": 1}'], {"json_schema": ' {"a": 1}'}),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--ebnf", 'root ::= "a"'], {"ebnf": 'root ::= "a"'}),
        (["--ebnf", str(file)], {"ebnf": '{"type": "object"}'}),
        (["--structural-tag", "{}"], {"structural_tag": "{}"}),
        (["--choice", "a", "--choice", "b"], {"choice": ["a", "b"]}),
    ):
        assert request_keywords(parse("generate", "hi", *argv)) == {
            "max_new_tokens": 256,
            **expected,
        }
    with pytest.raises(ConfigError, match="cannot read --json-schema nowhere"):
        request_keywords(parse("generate", "hi", "--json-schema", "nowhere"))


class Model:
    """As pydantic has it."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"title": "é"}


def test_keywords_say_what_an_output_must_be() -> None:
    def built(**options: Any) -> pb.StructuredOutput:
        return build_request("x", RequestOptions(**options)).structured_output

    for given in (Model, {"title": "é"}, '{"title": "é"}'):
        assert built(json_schema=given) == pb.StructuredOutput(json_schema='{"title": "é"}')
    assert built(json_schema=True) == pb.StructuredOutput(json_schema="true")
    assert built(structural_tag={"a": 1}) == pb.StructuredOutput(structural_tag='{"a": 1}')
    assert built(regex="a", ebnf=None) == pb.StructuredOutput(regex="a")
    assert built(choice=("a", "b")) == pb.StructuredOutput(choice=pb.Choices(texts=["a", "b"]))
    assert not build_request("x", RequestOptions(regex=None)).HasField("structured_output")


@pytest.mark.parametrize(
    ("options", "field", "problem"),
    [
        ({"regex": "a", "choice": ["a"]}, "choice", "regex and choice both say"),
        ({"regex": 3}, "regex", "must be a text, and is int"),
        ({"choice": "ab"}, "choice", "must be a list of texts, and is str"),
        ({"choice": [1]}, "choice", "must be a list of texts"),
        ({"json_schema": 3}, "json_schema", "a pydantic model, and is int"),
        ({"json_schema": {"a": object()}}, "json_schema", "cannot be JSON"),
        ({"structural_tag": Model}, "structural_tag", "must be a dict or its JSON"),
    ],
)
def test_a_keyword_that_cannot_be_is_named(
    options: dict[str, Any], field: str, problem: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=problem) as caught:
        build_request("x", RequestOptions(**options))  # type: ignore[typeddict-item]
    assert caught.value.field == field


def test_no_request_runs_to_the_end_of_the_context_unless_asked_to() -> None:
    def limit_of(prompt: str, **options: Any) -> int | None:
        stopping = build_request(prompt, RequestOptions(**options)).stopping
        return stopping.max_new_tokens if stopping.HasField("max_new_tokens") else None

    assert request_keywords(parse("generate", "hi")) == {"max_new_tokens": 256}
    assert limit_of("hi") == limit_of("hi", **request_keywords(parse("generate", "hi"))) == 256
    whole = request_keywords(parse("generate", "hi", "--max-new-tokens", "0"))
    assert limit_of("hi", **whole) is limit_of("hi", max_new_tokens=None) is None


def test_every_request_flag_is_a_keyword_of_the_client() -> None:
    flags = {flag for flag, _, _ in (*SAMPLING, *SHAPE)}
    argv = [item for flag in sorted(flags) for item in (flag, "2")]
    assert (
        request_keywords(parse("generate", "hi", *argv)).keys()
        <= RequestOptions.__annotations__.keys()
    )


def test_the_server_comes_from_flag_or_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("generate", "hi").server == "localhost:50051"
    monkeypatch.setenv("COPPICE_SERVER", "box:1")
    assert parse("generate", "hi").server == "box:1"
    assert parse("generate", "hi", "--server", "other:2").server == "other:2"


DELTA = TokenDelta(
    token_offset=0,
    token_ids=(1, 2, 3),
    text="drafted bonus",
    num_accepted_drafts=2,
    num_accepted_draft_chars=8,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def render(out: io.StringIO, *, shows_tree: bool) -> str:
    TokenPrinter(out, shows_tree=shows_tree).write(DELTA)
    return out.getvalue()


def test_drafted_text_is_coloured_apart_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert render(Terminal(), shows_tree=True) == "\x1b[32mdrafted \x1b[0m\x1b[1;33mbonus\x1b[0m"
    assert render(Terminal(), shows_tree=False) == "drafted bonus"
    printer = TokenPrinter(Terminal(), shows_tree=True)
    legend = printer.legend(Terminal())
    assert "\x1b[32maccepted draft tokens" in legend and "\x1b[1;33mbonus" in legend
    in_a_file = printer.legend(io.StringIO())
    assert in_a_file.startswith("green: accepted draft tokens, yellow: bonus")


def test_elsewhere_and_without_colour_drafted_text_is_bracketed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert render(io.StringIO(), shows_tree=True) == "[drafted ]bonus"
    monkeypatch.setenv("TERM", "dumb")
    assert render(Terminal(), shows_tree=True) == "[drafted ]bonus"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert render(Terminal(), shows_tree=True) == "[drafted ]bonus"
    legend = TokenPrinter(io.StringIO(), shows_tree=True).legend(Terminal())
    assert legend.startswith("[accepted draft tokens], bonus")


def test_what_follows_a_broken_output_stands_on_its_own_line() -> None:
    out = io.StringIO()
    printer = TokenPrinter(out, shows_tree=False)
    printer.end_line()
    assert out.getvalue() == "", "nothing was written"
    printer.write(DELTA)
    printer.end_line()
    printer.end_line()
    assert out.getvalue() == "drafted bonus\n"


INFO = PromptInfo(request_id="r", model="m", num_prompt_tokens=4, num_cached_tokens=0, seed=9)


def finish(**stats: Any) -> FinishInfo:
    return FinishInfo(
        reason=FinishReason.STOP, matched_stop="\n", speculation=SpeculationStats(**stats)
    )


def test_stats_say_what_it_took() -> None:
    ended = finish(num_rounds=4, num_accepted_drafts=6, accept_length_histogram=(1, 0, 3))
    rows = dict(stats_rows(INFO, ended, num_tokens=10, elapsed_s=0.5))
    assert rows["tokens per second"] == "20.0"
    assert rows["accept_length (mean, bonus included)"] == "2.50"
    assert rows["rounds by accepted drafts"] == "0:1 1:0 2:3"
    assert rows["finish reason"] == "STOP ('\\n')"
    assert rows["seed"] == "9"


def test_a_stream_is_shown_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    shown = generate.show([INFO, DELTA, finish()], TokenPrinter(out, shows_tree=False))
    assert out.getvalue() == shown.text == "drafted bonus"
    assert shown.token_ids == [1, 2, 3]
    assert shown.elapsed_s > 0 and shown.tokens_per_second > 0


# --- bench ---


def test_tree_shapes_are_parsed() -> None:
    assert parse_shape("5/8/32") == TreeShape(num_steps=5, topk=8, num_draft_tokens=32)
    with pytest.raises(ConfigError, match="no tree shape"):
        parse_shape("0/8/32")
    with pytest.raises(ConfigError, match="= 11; lower it"):
        parse_shape("3/2/12")


def test_ways_to_speculate_of_a_bench() -> None:
    def names(*argv: str) -> list[str]:
        return [mode.name for mode in bench_options.modes_of(parse("bench", *argv))]

    assert names() == ["off", "auto"]
    assert names("--rate", "8") == names("--schedule", "a.json", "b.json") == ["auto"]
    assert names("--speculation", "off, 3/2/6,5/8/32") == ["off", "3/2/6", "5/8/32"]


# --- health ---


def test_health_of_a_real_server(capsys: pytest.CaptureFixture[str]) -> None:
    servicer = health.HealthServicer()
    servicer.set("up.Service", health_pb2.HealthCheckResponse.SERVING)
    servicer.set("down.Service", health_pb2.HealthCheckResponse.NOT_SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        codes = [
            main(["health", address, "--service", name])
            for name in ("", "up.Service", "down.Service", "no.Service")
        ]
    finally:
        server.stop(None).wait()
    assert codes == [0, 0, 1, 1]
    assert main(["health", address, "--timeout-s", "0.2"]) == 1
    printed = capsys.readouterr()
    said = printed.out.split()
    assert said == ["SERVING", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN", "UNREACHABLE"]
    assert f"nothing listens at {address}" in printed.err
    assert f"{address} has no service 'no.Service'; full names are coppice.v1." in printed.err


def test_health_of_a_gateways_http_port_says_where_to_ask(
    web_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["health", web_server]) == 1
    out, err = capsys.readouterr()
    assert out == "UNREACHABLE\n" and err.count("\n") == 1
    assert f"something listens at {web_server}" in err and "--health-port" in err


class Draftless(FakeGeneration):
    """Refuses requests that must have trees."""

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        if request.speculation.mode == pb.SPECULATION_MODE_ON:
            error = UnavailableError("there is no draft worker", reason="NO_DRAFT")
            context.abort_with_status(to_status(error))
        return super().Generate(request, context)


def test_trees_of_a_server_without_drafts_are_refused_by_their_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(Draftless()) as address:
        command = ["generate", "hi", "--server", address, "--max-new-tokens", "2"]
        assert main(command) == 0
        assert main([*command, "--show-tree"]) == 1
    assert "--show-tree asks for trees, leave it out here: there is no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_targets", "num_drafts", "is_told"),
    [(3, 1, True), (3, 3, False), (1, 1, False), (2, 0, False)],
)
def test_up_says_that_each_target_could_have_a_draft_of_its_own(
    num_targets: int, num_drafts: int, *, is_told: bool
) -> None:
    config = up.config_of(
        parse("up", "--num-targets", str(num_targets), "--num-drafts", str(num_drafts))
    )
    said: list[str] = []
    progress = SimpleNamespace(say=said.append)
    stack = SimpleNamespace(address="127.0.0.1:1", http_url="", metrics_urls={})
    up._announce(cast("Any", progress), cast("Any", stack), config)
    assert any("each has its own" in line for line in said) == is_told
