"""Print a stream of tokens, drafted ones in another colour, and a table of what it took."""

from __future__ import annotations

import os
from typing import TextIO

from shared.messages import FinishInfo, PromptInfo, SpeculationStats, TokenDelta

DRAFT_STYLE = "\x1b[32m"
BONUS_STYLE = "\x1b[1;33m"
RESET = "\x1b[0m"


def has_color(out: TextIO) -> bool:
    """Return whether colours may be written there: to a terminal with colours, without NO_COLOR."""
    has_none = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return out.isatty() and not has_none


class TokenPrinter:
    """Write text as it arrives.

    Args:
        out: Where to.
        shows_tree: Tell what was drafted from what the target sampled: by colour, or between
            brackets where there are no colours.
    """

    def __init__(self, out: TextIO, *, shows_tree: bool) -> None:
        self._out = out
        self._shows_tree = shows_tree
        self._is_colored = has_color(out)
        self._last = "\n"

    def legend(self, out: TextIO) -> str:
        """Say how to read the output.

        Args:
            out: Where the legend goes, which may know no colours although the output does.
        """
        draft, bonus = "accepted draft tokens", "bonus tokens of the target"
        if self._is_colored and not has_color(out):
            draft, bonus = f"green: {draft}", f"yellow: {bonus}"
        else:
            draft, bonus = self._mark(draft, is_draft=True), self._mark(bonus, is_draft=False)
        return f"{draft}, {bonus} (one per round)"

    def end_line(self) -> None:
        """Make what comes next stand on a line of its own."""
        if self._last != "\n":
            self._out.write("\n")
            self._out.flush()
            self._last = "\n"

    def write(self, delta: TokenDelta) -> None:
        """Write the text of one delta at once."""
        if self._shows_tree:
            split = delta.num_accepted_draft_chars
            self._out.write(self._mark(delta.text[:split], is_draft=True))
            self._out.write(self._mark(delta.text[split:], is_draft=False))
        else:
            self._out.write(delta.text)
        self._out.flush()
        self._last = delta.text[-1:] or self._last

    def _mark(self, text: str, *, is_draft: bool) -> str:
        if not text:
            return ""
        if self._is_colored:
            return f"{DRAFT_STYLE if is_draft else BONUS_STYLE}{text}{RESET}"
        return f"[{text}]" if is_draft else text


def stats_rows(
    info: PromptInfo, finish: FinishInfo, *, num_tokens: int, elapsed_s: float
) -> list[tuple[str, str]]:
    """Return (name, value) rows about one finished request.

    Args:
        num_tokens: Output tokens received.
        elapsed_s: From sending the request to its end, as the client saw it.
    """
    speculation, timings = finish.speculation, finish.timings
    stop = "" if finish.matched_stop is None else f" ({finish.matched_stop!r})"
    rows = [
        ("model", info.model),
        ("seed", str(info.seed)),
        ("prompt tokens", f"{info.num_prompt_tokens} ({info.num_cached_tokens} cached)"),
        ("output tokens", str(num_tokens)),
        ("finish reason", finish.reason.name + stop),
        ("time to first token", f"{timings.time_to_first_token_ms:.1f} ms"),
        ("tokens per second", f"{num_tokens / elapsed_s:.1f}" if elapsed_s > 0 else "-"),
        ("rounds", f"{speculation.num_rounds} ({_rounds_without_trees(speculation)})"),
    ]
    if speculation.num_rounds:
        histogram = " ".join(
            f"{accepted}:{count}"
            for accepted, count in enumerate(speculation.accept_length_histogram)
        )
        sizes = " ".join(
            f"{size}:{count}" for size, count in enumerate(speculation.tree_size_histogram) if count
        )
        rows += [
            ("accept_length (mean, bonus included)", f"{speculation.accept_length:.2f}"),
            ("rounds by accepted drafts", histogram or "-"),
            ("rounds by nodes of their trees", sizes or "-"),
            ("nodes verified, roots excluded", str(speculation.num_draft_tokens)),
            ("mean wait for the draft", f"{timings.mean_draft_wait_ms:.1f} ms"),
            ("mean verify", f"{timings.mean_verify_ms:.1f} ms"),
        ]
    if finish.retries:
        rows.append(("retries", str(finish.retries)))
    return rows


def print_stats(out: TextIO, rows: list[tuple[str, str]]) -> None:
    """Print rows as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(name, value)
    Console(file=out, highlight=False).print(table)


def _rounds_without_trees(speculation: SpeculationStats) -> str:
    text = f"{speculation.num_root_only_rounds} root only"
    resting = speculation.num_resting_rounds
    return f"{text}, {resting} of them because trees did not pay" if resting else text
