"""What a training run says while it runs: one live line on a terminal, plain lines in a log."""

from __future__ import annotations

import math
import os
import sys
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as LiveProgress


def duration(seconds: float) -> str:
    """45s, 2m10s, 1h03m, 2d04h: the two largest units."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if not minutes:
        return f"{whole}s"
    if not hours:
        return f"{minutes}m{whole % 60:02d}s"
    if not days:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{days}d{hours % 24:02d}h"


class Progress:
    """`update` while training, `message` for what happens in between; used as a context manager.

    A log gets a line at most every `every` steps, and one for the last step; a terminal shows each update.
    """

    def __init__(self, total_steps: int, *, stream: TextIO | None = None, quiet: bool = False, every: int = 1) -> None:
        self.total_steps = total_steps
        self.quiet = quiet
        self.every = every
        self.stream = sys.stderr if stream is None else stream
        self.live = None if quiet or not _is_terminal(self.stream) else _live(self.stream)
        self.task = None if self.live is None else self.live.add_task("", total=total_steps, text="starting")
        self._last_line: int | None = None

    def __enter__(self) -> Progress:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def update(
        self,
        step: int,
        *,
        loss: float,
        tokens_per_second: float,
        utilisation: float | None,
        learning_rate: float,
        seconds_left: float,
    ) -> None:
        if self.quiet:
            return
        share = "" if utilisation is None else f"{utilisation:.0%} of"
        speed = f"{tokens_per_second:,.0f} tok/s"
        left = f"{duration(seconds_left)} left"
        if self.live is not None and self.task is not None:
            parts = [f"{step:,}/{self.total_steps:,}", f"loss {loss:.3f}", speed, share and f"{share} peak", left]
            self.live.update(self.task, completed=step, text=" · ".join(part for part in parts if part), refresh=True)
        elif self._is_due(step):
            self._last_line = step
            parts = [f"step {step}/{self.total_steps}", f"loss {loss:.3f}", f"lr {learning_rate:.1e}", speed]
            parts += [share and f"{share} matrix rate", left]
            self._write("  ".join(part for part in parts if part))

    def message(self, text: str) -> None:
        """A line that stays, above the live one: an evaluation, a warning, a file saved."""
        if self.quiet:
            return
        if self.live is not None:
            self.live.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
        else:
            self._write(text)

    def _is_due(self, step: int) -> bool:
        return self._last_line is None or step >= self._last_line + self.every or step == self.total_steps

    def _write(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()  # a log is read while the run goes on


def _is_terminal(stream: TextIO) -> bool:
    """Whether a line can be drawn over; a colour forced into a log does not make it a terminal."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _live(stream: TextIO) -> LiveProgress:
    """Drawn at each update and not by a thread, which would compete with training."""
    columns = (BarColumn(bar_width=24), TextColumn("{task.fields[text]}", markup=False))
    return LiveProgress(*columns, console=Console(file=stream), auto_refresh=False)


def in_bytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
