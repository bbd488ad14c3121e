"""Rows and tokens as they are counted: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any


class Counting:
    def __init__(self, title: str, say: Callable[[str], None], every: float = 5.0) -> None:
        self.title, self.say, self.every = title, say, every
        self.shown = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> Counting:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, rows: int, tokens: int) -> None:
        text = f"{self.title}: {rows:,} rows, {tokens:,} tokens"
        if self.bar is not None:
            self.bar.update(self.task, description=text)
        elif time.monotonic() - self.shown > self.every:
            self.shown = time.monotonic()
            self.say(text)
