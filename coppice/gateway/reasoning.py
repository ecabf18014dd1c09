"""Reasoning apart from the answer, for the families that mark it in their text."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.gateway.chat_template import ChatTemplate

_MARKS = {"think": ("<think>", "</think>"), "bracket": ("[THINK]", "[/THINK]")}


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What stands before and after reasoning."""

    begin: str
    end: str

    @property
    def is_special(self) -> bool:
        """Return whether the marks are special tokens, which must be spelled."""
        return self.begin == _MARKS["bracket"][0]

    def is_open_in(self, prompt: str, *, continued: str = "") -> bool:
        """Return whether a prompt ends inside of reasoning.

        What users have written says nothing: only the end of the prompt counts, which is the
        template's, and the message that the model goes on with.

        Args:
            continued: Text of that message, at the end of the prompt; "": there is none.
        """
        if self.end in continued:
            return False
        if continued.lstrip().startswith(self.begin):
            return True
        return prompt.removesuffix(continued).rstrip().endswith(self.begin)


def reasoning_marks(parser: str, template: ChatTemplate) -> ReasoningMarks | None:
    """Return the marks of a model; None: its reasoning, if any, is not told from answers.

    Args:
        parser: A name, "none", or "auto": as the template says.
    """
    if parser == "auto":
        parser = next((name for name, (_, end) in _MARKS.items() if template.mentions(end)), "none")
    return ReasoningMarks(*_MARKS[parser]) if parser in _MARKS else None


class ReasoningSplitter:
    """Splits a text that comes in pieces: reasoning first, if there is any, then the answer.

    Args:
        is_open: The text begins inside of reasoning.
    """

    def __init__(self, marks: ReasoningMarks, *, is_open: bool) -> None:
        self._marks = marks
        self._held = ""
        self._is_before = not is_open  # of the mark that begins reasoning
        self._is_open = is_open
        self._is_after_mark = False

    def feed(self, text: str) -> tuple[str, str]:
        """Return what is known now of the reasoning and of the answer."""
        text = self._held + text
        self._held = ""
        if self._is_before:
            text = self._begin(text)
        reasoning = ""
        if self._is_open:
            reasoning, text = self._until_end(text)
        return reasoning, "" if self._is_before or self._is_open else self._answer(text)

    def flush(self) -> tuple[str, str]:
        """Return what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return (held, "") if self._is_open else ("", held)

    def _begin(self, text: str) -> str:
        """Look whether the text begins with the mark; return what follows it."""
        start = text.lstrip()
        if start.startswith(self._marks.begin):
            self._is_before, self._is_open = False, True
            return start[len(self._marks.begin) :]
        if self._marks.begin.startswith(start):
            self._held = text
            return ""
        self._is_before = False
        return text

    def _until_end(self, text: str) -> tuple[str, str]:
        """Return the reasoning of a text and what follows it; what may be a mark is held back."""
        reasoning, mark, rest = text.partition(self._marks.end)
        if mark:
            self._is_open, self._is_after_mark = False, True
            return reasoning, rest
        num_held = overlap(text, self._marks.end)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], ""

    def _answer(self, text: str) -> str:
        """Return a text without the line ends between the mark and the answer."""
        if self._is_after_mark:
            text = text.lstrip("\n")
            self._is_after_mark = not text
        return text


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that begins a mark."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)
