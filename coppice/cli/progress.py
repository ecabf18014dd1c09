"""Show what a stack's services are doing: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from typing import Any

from coppice.stack import ServiceState
from shared.logs import json_head
from shared.rpc.startup_lines import Loading, parse_line

STATE_STYLES = {
    ServiceState.STARTING: "yellow",
    ServiceState.READY: "green",
    ServiceState.RESTARTING: "yellow",
    ServiceState.FAILED: "red",
    ServiceState.STOPPED: "dim",
}
FIRST_STAGE = {ServiceState.STARTING: "launching", ServiceState.RESTARTING: "waiting to restart"}
NAME_WIDTH = 12


class StackProgress:
    """Callbacks for a Stack, drawn on stderr; a context for the time until everything is ready.

    Args:
        shows_log: Pass the services' lines through once they are ready (and before, when stderr is
            no terminal).
        is_json: Services log in JSON, and what is said here is JSON as well: each line is an
            object whose `service` says where it comes from.
    """

    def __init__(self, *, shows_log: bool, is_json: bool = False) -> None:
        self._shows_log = shows_log
        self._is_json = is_json
        self._is_terminal = sys.stderr.isatty() and not is_json
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._states: dict[str, ServiceState] = {}
        self._loading: dict[str, Loading] = {}
        self._live: Any = None

    def on_log(self, name: str, line: str) -> None:
        """Take a line that a service wrote."""
        with self._lock:
            said = parse_line(line)
            if isinstance(said, Loading):
                self._loading[name] = said
            if self._live is None and self._shows_log:
                sys.stderr.write(self._log_line(name, line))

    def on_state(self, name: str, state: ServiceState) -> None:
        """Take a service's new state."""
        with self._lock:
            self._states[name] = state
            if state is not ServiceState.STARTING:
                self._loading.pop(name, None)  # it begins anew after a restart
            is_noise = state is ServiceState.STOPPED and not self._shows_log
            if self._live is None and not is_noise:
                said = f"{state.value} ({time.monotonic() - self._started:.1f} s)"
                is_text = not self._is_json
                sys.stderr.write(
                    f"{name:{NAME_WIDTH}} * {said}\n" if is_text else _json_line(name, said)
                )

    def say(self, text: str) -> None:
        """Print a line for whoever started this."""
        sys.stdout.write(_json_line("up", text) if self._is_json else text + "\n")
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Print a line beside those of the services."""
        sys.stderr.write(_json_line("up", text) if self._is_json else text + "\n")

    def __enter__(self) -> StackProgress:
        if self._is_terminal:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(stderr=True), get_renderable=self._table, refresh_per_second=8
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        live = self._live
        if live is not None:
            live.stop()
            with self._lock:
                self._live = None

    def _log_line(self, name: str, line: str) -> str:
        if not self._is_json:
            return f"{name:{NAME_WIDTH}} | {line}\n"
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                return json.dumps({"service": name, **entry}, ensure_ascii=False) + "\n"
        return _json_line(name, line)  # of a library, or of a process that could not start

    def _table(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        elapsed_s = time.monotonic() - self._started
        with self._lock:
            for name, state in self._states.items():
                style = STATE_STYLES[state]
                said = self._loading.get(name) if state is ServiceState.STARTING else None
                table.add_row(
                    Text(name, style="bold"),
                    Text(state.value, style=style),
                    ProgressBar(total=1.0, completed=said.fraction, width=24) if said else "",
                    Text(said.stage if said else FIRST_STAGE.get(state, ""), style="dim"),
                )
        table.add_row(Text(f"{elapsed_s:.1f} s", style="dim"), "", "", "")
        return table


def _json_line(name: str, text: str) -> str:
    head = json_head("info", __name__, role="up", at=time.time())
    return json.dumps({"service": name, **head, "message": text}, ensure_ascii=False) + "\n"
