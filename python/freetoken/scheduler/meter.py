"""Generated tokens a second, over windows of about a second (torch-free)."""

from __future__ import annotations

from collections.abc import Callable

WINDOW_SECONDS = 1.0


class Meter:
    """Counts tokens as they are drained. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start: float | None = None
        self._tokens = 0
        self._last: float | None = None

    def count(self, tokens: int) -> None:
        """The tokens of one step. The first step after a stop begins the time, so its own tokens are in no rate."""
        if self._start is None:
            self._start = self._clock()
        else:
            self._tokens += tokens

    def stop(self) -> None:
        """Nothing runs: the next token starts afresh."""
        self._start, self._tokens, self._last = None, 0, None

    def rate(self) -> float:
        """Tokens a second since the last call that closed a window, or since the start before any; 0 when stopped."""
        if self._start is None:
            return 0.0
        elapsed = self._clock() - self._start
        if elapsed >= WINDOW_SECONDS:
            self._last = self._tokens / elapsed
            self._start, self._tokens = self._clock(), 0
        elif self._last is None:
            return self._tokens / elapsed if elapsed > 0.0 else 0.0
        return self._last
