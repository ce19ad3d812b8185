"""What the scheduler needs of a model runner (torch-free)."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from freetoken.scheduler.request import ScheduleBatch, StepResult


class Runner(Protocol):
    """Runs the steps of a scheduler, in the order of their launch."""

    @property
    def num_pages(self) -> int:
        """KV pages, page 0 (padding) included."""

    @property
    def max_rows(self) -> int:
        """Requests that can be resident at once."""

    @property
    def has_state(self) -> bool:
        """Whether requests have recurrent state, so that a prefix is of use only with it; taken as ``False`` if missing."""

    @property
    def state_blocks(self) -> int:
        """Blocks of host memory for such state, numbered from 0; taken as 0 if missing."""

    def launch(self, batch: ScheduleBatch) -> Any:
        """Start a step and return a handle for :meth:`collect`, without waiting for it.

        Where ``batch.masked`` is not empty nothing is drawn before :meth:`draw`.
        """

    def draw(self, handle: Any, masks: Any) -> None:
        """Draw the ids of the step launched last: ``masks [len(batch.masked), words] int32``, a bit for each id that may be
        drawn, belong to the places in ``batch.masked``. Does not wait, and keeps no reference to ``masks``."""

    def collect(self, handle: Any) -> StepResult:
        """Wait for a step and return what it produced."""


class Flight(NamedTuple):
    """A launched step that has not been drained."""

    batch: ScheduleBatch
    handle: Any
