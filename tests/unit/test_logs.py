"""Lines of logs: text for people, or an object of JSON for machines."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator

import pytest

from coppice.cli.progress import StackProgress
from coppice.stack import ServiceState
from shared.logs import (
    JsonFormatter,
    LogSettings,
    configure_logging,
    log_request,
    log_settings,
    log_worker_request,
    note_worker_id,
)
from shared.request_ids import parse_worker_id, worker_request_id
from shared.rpc.startup_lines import Loading, announce, loading_line, parse_line

logger = logging.getLogger("coppice.test")

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


@contextlib.contextmanager
def configured(settings: LogSettings | None = None) -> Iterator[None]:
    """Let the root logger be as a new process has it, and then as these settings make it."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        if settings is not None:
            configure_logging(settings)
        yield
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.captureWarnings(capture=False)


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json_has_an_object_per_record(capsys: pytest.CaptureFixture[str]) -> None:
    end = {"event": "request_end", "a": ""}
    with configured(LogSettings(level="info", format="json", role="target")):
        logger.info("two\nlines of %s", "text")
        note_worker_id("abc")
        log_request(logger, logging.WARNING, "50%d", "done in %d rounds", 3, **end)  # type: ignore[arg-type]
        try:
            raise ValueError("no")
        except ValueError:
            logger.exception("failed")
        logger.debug("too quiet")
    first, second, third = lines_of(capsys)
    assert first["message"] == "two\nlines of text" and "request_id" not in first
    assert {name: first[name] for name in ("level", "logger", "role")} == {
        "level": "info",
        "logger": "coppice.test",
        "role": "target",
    }
    assert str(first["ts"]).endswith("Z") and isinstance(first["pid"], int)
    assert second["message"] == "done in 3 rounds"
    assert (second["request_id"], second["event"], second["worker_id"]) == (
        "50%d",
        "request_end",
        "abc",
    )
    assert "a" not in second, "empty fields are left out"
    assert "ValueError: no" in str(third["traceback"])


def test_text_says_the_request_in_front(capsys: pytest.CaptureFixture[str]) -> None:
    with configured(LogSettings()):
        log_worker_request(logger, logging.INFO, "0123abcd.7.a%b.c", "dropped: %s", "why")
        log_worker_request(logger, logging.INFO, "line\nbreak", "dropped")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("INFO coppice.test: [a%b.c] dropped: why")
    assert second.endswith(r"['line\nbreak'] dropped")


def test_processes_that_are_started_log_alike() -> None:
    with configured(LogSettings(level="warning", format="json", role="draft")):
        assert log_settings(suffix="-engine") == LogSettings(
            level=logging.WARNING, format="json", role="draft-engine"
        )
    with configured():  # a process that logs in its own way
        logging.getLogger().setLevel(logging.ERROR)
        assert log_settings() == LogSettings(level=logging.ERROR, format="text", role="")


@pytest.mark.parametrize("trace_id", ["", TRACE_ID])
@pytest.mark.parametrize("request_id", ["r1", "a.b.c", "", "7.8", "line\nbreak", f"-{TRACE_ID}.r"])
def test_a_clients_id_and_its_trace_are_found_in_that_on_the_workers(
    request_id: str, trace_id: str
) -> None:
    worker_id = worker_request_id("0123abcd", 12, request_id, trace_id=trace_id)
    assert parse_worker_id(worker_id) == (request_id, trace_id)


def test_lines_of_workers_name_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    worker_id = worker_request_id("0123abcd", 7, "r1", trace_id=TRACE_ID)
    with configured(LogSettings()):
        log_worker_request(logger, logging.INFO, worker_id, "dropped")
    with configured(LogSettings(format="json")):
        log_worker_request(logger, logging.INFO, worker_id, "dropped")
    text, line = capsys.readouterr().err.splitlines()
    assert text.endswith(f"[r1 trace {TRACE_ID}] dropped")
    told = json.loads(line)
    assert (told["request_id"], told["trace_id"], told["message"]) == ("r1", TRACE_ID, "dropped")


def test_startup_lines_are_understood_in_both_formats(capsys: pytest.CaptureFixture[str]) -> None:
    line = loading_line("target", "reading weights", 0.4)
    announce(line)
    with configured(LogSettings(level="error", format="json", role="target")):
        announce(line)
    text, as_json = capsys.readouterr().out.splitlines()
    expected = Loading(role="target", fraction=0.4, stage="reading weights")
    assert parse_line(text) == parse_line(as_json) == expected
    assert json.loads(as_json)["role"] == "target"
    assert parse_line('{"message": 7}') is parse_line("{") is None


def test_merged_lines_of_a_stack_stay_json(capsys: pytest.CaptureFixture[str]) -> None:
    progress = StackProgress(shows_log=True, is_json=True)
    progress.on_log("target-0", json.dumps({"level": "info", "message": "ü"}))
    progress.on_log("target-0", "Fatal Python error: something of a library")
    progress.on_log("target-0", "[1, 2]")
    progress.on_state("draft-0", ServiceState.READY)
    progress.note("stopping")
    first, *others = lines_of(capsys)
    assert first == {"service": "target-0", "level": "info", "message": "ü"}
    assert [(line["service"], str(line["message"])[:5]) for line in others] == [
        ("target-0", "Fatal"),
        ("target-0", "[1, 2"),
        ("draft-0", "ready"),
        ("up", "stopp"),
    ]
    progress.say("listening")
    assert json.loads(capsys.readouterr().out)["message"] == "listening"


def test_prompts_are_in_no_field() -> None:
    """What a record holds beside its message goes into JSON only if it was meant to."""
    record = logging.makeLogRecord({"msg": "x", "prompt": "secret"})
    assert "secret" not in JsonFormatter("target").format(record)
