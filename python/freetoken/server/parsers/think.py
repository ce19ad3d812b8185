"""Thoughts between ``<think>`` and ``</think>``: Qwen3 and later, DeepSeek-R1 and its kin (torch-free)."""

from __future__ import annotations

from freetoken.server.parsers.base import Delta, Reasoning, Text, join, possible_start

START, END = "<think>", "</think>"


def leaves_open(prompt: str, continued: str | None = None) -> bool:
    """Whether the output begins inside a think block.

    ``prompt`` is the rendered prompt: templates of models that always think open the block themselves. ``continued`` is the
    assistant's message that the output goes on with, if it does.
    """
    if continued is not None:
        return continued.rfind(START) > continued.rfind(END)
    return prompt.rstrip().endswith(START)


class ThinkParser:
    """Splits an output into one block of thoughts at its beginning, and the answer.

    ``inside`` says that the prompt has opened the block. White space next to the tags is dropped; ``verbatim`` keeps it, and
    gives the tags out with the thoughts.
    """

    markers = (START, END)

    def __init__(self, inside: bool, verbatim: bool = False) -> None:
        self._state = "inside" if inside else "start"
        self._verbatim = verbatim
        self._held = ""
        self._thought = False

    def feed(self, text: str) -> list[Delta]:
        """Pieces that ``text`` makes certain."""
        out: list[Delta] = []
        data, self._held = self._held + text, ""
        while data:
            data = getattr(self, f"_{self._state}")(data, out)
        return join(out)

    def finish(self) -> list[Delta]:
        """What was held back, at the end of the output."""
        held, self._held = self._held, ""
        if self._state != "inside":
            return join([Text(held)])
        return join([Reasoning(held if self._verbatim else held.rstrip())])

    def _start(self, data: str, out: list[Delta]) -> str:
        bare = data.lstrip()
        if bare.startswith(START):
            self._state = "inside"
            if self._verbatim:
                out.append(Reasoning(data[: data.index(START) + len(START)]))
            return bare[len(START) :]
        if START.startswith(bare):
            self._held = data
            return ""
        self._state = "answer"
        return data

    def _inside(self, data: str, out: list[Delta]) -> str:
        if not self._verbatim and not self._thought:
            data = data.lstrip()
        at = data.find(END)
        if at >= 0:
            if self._verbatim:
                out.append(Reasoning(data[: at + len(END)]))
            else:
                out.append(Reasoning(data[:at].rstrip()))
            self._state = "answer" if self._verbatim else "between"
            return data[at + len(END) :]
        keep = possible_start(data, (END,))
        if not self._verbatim:
            keep = len(data[:keep].rstrip())
        self._thought = self._thought or keep > 0
        out.append(Reasoning(data[:keep]))
        self._held = data[keep:]
        return ""

    def _between(self, data: str, out: list[Delta]) -> str:
        data = data.lstrip()
        if data:
            self._state = "answer"
        return data

    def _answer(self, data: str, out: list[Delta]) -> str:
        out.append(Text(data))
        return ""
