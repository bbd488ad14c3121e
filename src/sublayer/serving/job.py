"""What is asked of an engine, and what comes back from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..generation.answer import Chance
from ..generation.options import Options


class Busy(ValueError):
    """The queue is full; the caller may try again after some seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooLong(ValueError):
    """The prompt, or prompt and answer together, do not fit."""


class Closing(ValueError):
    """The server is shutting down and takes nothing more."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A piece of an answer. The last one has a reason ("stop" or "length") or an error ("timeout", …)."""

    text: str = ""
    chances: tuple[Chance, ...] = ()
    tokens: int = 0  # made so far, the one that ends the answer included
    reason: str | None = None
    error: str | None = None
    vector: tuple[float, ...] = ()

    @property
    def last(self) -> bool:
        return self.reason is not None or self.error is not None


@dataclass(eq=False, kw_only=True)
class Job:
    """One answer, or one vector. `deliver` is called from the engine's thread and must not block."""

    prompt: list[int]
    deliver: Callable[[Event], None]
    options: Options = field(default_factory=lambda: Options(max_new_tokens=1))
    text: str = ""  # what a vector is made of
    adapter: str | None = None  # of the model; None: its base alone
    stop: tuple[str, ...] = ()
    top: int | None = None  # how many likeliest tokens to tell beside each; None: tell nothing of chances
    deadline: float = float("inf")  # on the clock of time.monotonic
    submitted: float = field(default_factory=time.monotonic)
    cancelled: bool = False

    def cancel(self) -> None:
        """Nobody waits for the answer any more; its place is freed before the next step."""
        self.cancelled = True
