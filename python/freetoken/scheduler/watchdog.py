"""A thread that notices a step that does not end (torch-free)."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable

_LONGEST_NAP = 5.0
_SHORTEST_NAP = 0.02
_LAST_RESORT_SECONDS = 15.0


class Watchdog:
    """Watches the work between :meth:`begin` and :meth:`end`.

    After ``soft`` seconds ``on_soft(seconds)`` is called once for that work, after ``hard`` seconds ``on_hard(seconds)``,
    which is not expected to return; 0 turns either off. Both run on the watchdog's thread. Should that thread itself get
    no turn (native code that never lets go of the interpreter), the stacks are written and the process ends with code 1
    some seconds after ``hard``, without ``on_hard``.
    """

    def __init__(
        self,
        soft: float,
        hard: float,
        *,
        on_soft: Callable[[float], None],
        on_hard: Callable[[float], None],
        last_resort: float = _LAST_RESORT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._soft, self._hard = soft, hard
        self._on_soft, self._on_hard = on_soft, on_hard
        self._last_resort = last_resort
        self._clock = clock
        self._since: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="freetoken-watchdog", daemon=True)
        limits = [limit for limit in (soft, hard) if limit]
        self._nap = min(_LONGEST_NAP, max(_SHORTEST_NAP, min(limits) / 4)) if limits else 0.0

    def start(self) -> None:
        """Start watching, if there is anything to watch for."""
        if self._nap:
            self._thread.start()

    def begin(self) -> None:
        """Work begins now."""
        self._since = self._clock()

    def end(self) -> None:
        """The work has ended."""
        self._since = None

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        warned: float | None = None
        try:
            while True:
                self._arm()
                if self._stop.wait(self._nap):
                    return
                since = self._since
                if since is None:
                    continue
                elapsed = self._clock() - since
                if self._hard and elapsed >= self._hard:
                    self._on_hard(elapsed)
                    return
                if self._soft and elapsed >= self._soft and warned != since:
                    warned = since
                    self._on_soft(elapsed)
        finally:
            if self._hard:
                faulthandler.cancel_dump_traceback_later()

    def _arm(self) -> None:
        if self._hard and sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(self._hard + self._last_resort, exit=True, file=sys.__stderr__)
