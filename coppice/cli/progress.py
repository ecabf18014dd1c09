"""Show what a stack's services are doing: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

from coppice.stack import ServiceState
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
    """

    def __init__(self, *, shows_log: bool) -> None:
        self._shows_log = shows_log
        self._is_terminal = sys.stderr.isatty()
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
                sys.stderr.write(f"{name:{NAME_WIDTH}} | {line}\n")

    def on_state(self, name: str, state: ServiceState) -> None:
        """Take a service's new state."""
        with self._lock:
            self._states[name] = state
            if state is not ServiceState.STARTING:
                self._loading.pop(name, None)  # it begins anew after a restart
            is_noise = state is ServiceState.STOPPED and not self._shows_log
            if self._live is None and not is_noise:
                elapsed_s = time.monotonic() - self._started
                sys.stderr.write(f"{name:{NAME_WIDTH}} * {state.value} ({elapsed_s:.1f} s)\n")

    def __enter__(self) -> StackProgress:
        if self._is_terminal:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(stderr=True), get_renderable=self._table, refresh_per_second=8
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        live = self._live
        if live is not None:
            live.stop()
            with self._lock:
                self._live = None

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
