"""An engine is a model and the one thread that runs it. Jobs come from any thread, and wait in a bounded queue.

Decoders and encoder-decoders batch continuously: a job takes a row of the cache as soon as one is free, whatever the
others are at. An encoder embeds waiting texts together.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..generation.pack import free_memory, packed
from ..lm import LM
from .job import Busy, Closing, Event, Job, TooLong
from .metrics import Metrics
from .slots import Row, SlotRow, Slots, answering
from .sources import SourceSlots

log = logging.getLogger("sublayer.serving")
LONGEST = 2048  # tokens of prompt and answer together, unless more are asked for


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_batch: int = 16  # answers under way at once
    max_tokens_cached: int | None = None  # in all rows together
    queue: int = 64  # jobs that may wait beside those under way
    chunk: int = 256  # tokens of prompts read between two steps

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("queue", 0), ("chunk", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.max_tokens_cached is not None and self.max_tokens_cached < self.max_batch:
            raise ValueError(
                f"max_tokens_cached is {self.max_tokens_cached} for {self.max_batch} rows; give each at least one token"
            )

    def capacity(self, max_positions: int) -> int:
        """Tokens of one prompt and its answer."""
        longest = LONGEST if self.max_tokens_cached is None else self.max_tokens_cached // self.max_batch
        return min(longest, max_positions)


class Engine:
    """What all engines share: the queue, the thread, and an end for every job."""

    kind = ""

    def __init__(self, name: str, lm: LM, limits: Limits, metrics: Metrics | None = None) -> None:
        self.name, self.lm, self.limits = name, lm, limits
        self.metrics = metrics or Metrics()
        self.capacity = limits.capacity(lm.config.max_positions)
        self.waiting: deque[Row] = deque()
        self.live: list[Row] = []
        self.adapters: dict[str, str] = {}  # of the model, by the names they are served under
        self.closing = self._abandoned = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"sublayer-{name}", daemon=True)
        self.metrics.gauge("running", lambda: len(self.live), model=name)
        self.metrics.gauge("waiting", lambda: len(self.waiting), model=name)
        self.metrics.gauge("slots", lambda: limits.max_batch, model=name)

    def plan(self) -> str:
        """One line that says what the engine sets aside."""
        return f"{self.name}: {self.kind}, {self.limits.max_batch} at a time, {self.capacity} tokens each"

    def start(self) -> None:
        self.lm.model.eval()
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all jobs or none."""
        self.check_count(len(jobs))
        for job in jobs:
            self.check(job)
        rows = [self._row(job) for job in jobs]
        with self._changed:
            if self.closing:
                raise Closing("the server is shutting down")
            if len(self.waiting) + len(self.live) + len(rows) > self.places:
                self.metrics.count("rejected", model=self.name)
                raise Busy(f"{len(self.waiting)} requests are waiting already; try again later", self._patience())
            self.waiting += rows
            self._changed.notify()

    def drain(self) -> None:
        """Take nothing more, and turn away what has not begun."""
        with self._changed:
            self.closing = True
            rows, self.waiting = list(self.waiting), deque()
            self._changed.notify()
        for row in rows:
            self._end(row, Event(error="closing"))

    def close(self, timeout: float = 30.0) -> None:
        """Finish what has begun, within some seconds."""
        self.drain()
        if self._thread.ident is None:
            return
        self._thread.join(timeout)
        self._abandoned = True
        self._thread.join(10.0)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self.closing

    @property
    def places(self) -> int:
        """Jobs that may be under way or waiting."""
        return self.limits.queue + self.limits.max_batch

    def check_count(self, count: int) -> None:
        if count > self.places:
            raise ValueError(f"{count} answers were asked for at once; this server takes at most {self.places}")

    def room(self, prompt: int) -> int:
        """How many tokens an answer to a prompt of this length may have."""
        return self.capacity

    def check(self, job: Job) -> None:
        """What is wrong with a job is said before it is queued."""
        if not job.prompt:
            raise ValueError("the prompt has no tokens; say something")
        if len(job.prompt) > self.capacity:
            raise TooLong(f"the prompt has {len(job.prompt)} tokens; at most {self.capacity} are read")
        if job.options.max_new_tokens > self.room(len(job.prompt)):
            raise TooLong(
                f"the prompt has {len(job.prompt)} tokens and the answer may have {job.options.max_new_tokens}; "
                f"together they do not fit into the {self.capacity} of this server"
            )
        size = self.lm.config.vocab_size
        outside = next((token for token in job.prompt if not 0 <= token < size), None)
        if outside is not None:
            raise ValueError(f"token {outside} of the prompt is not among the {size} of the model")

    def _row(self, job: Job) -> Row:
        return Row(self.lm, job)

    def _step(self) -> None:
        raise NotImplementedError

    def _release(self, row: Row) -> None:
        """Free what a row holds."""

    @torch.inference_mode()
    def _run(self) -> None:
        with packed(self.lm.model):
            self._serve()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self.waiting or self.live or self.closing):
                    self._changed.wait()
                if self.closing and not self.live:
                    return
            try:
                self._sweep()
                self._step()
            except Exception:
                log.exception("%s: a step failed; the answers under way are lost", self.name)
                if not self._recover():
                    return

    def _recover(self) -> bool:
        """Begin anew after a failure. A device that is lost fails here too, and then everyone is told."""
        rows = list(self.live)
        try:
            for row in rows:
                self._finish(row, Event(error="internal"))
        except Exception:
            log.exception("%s cannot go on", self.name)
            self.drain()
            for row in rows:
                self._deliver(row, Event(error="internal"))
            return False
        return True

    def _admit(self, rows: Sequence[Row]) -> None:
        """Rows leave the queue and come to life at once: at no time are they in neither, or in both."""
        with self._changed:
            for row in rows:
                if row in self.waiting:  # unless it was turned away meanwhile
                    self.waiting.remove(row)
                    self.live.append(row)

    def _sweep(self) -> None:
        """Let go of what nobody waits for, and of what has taken too long."""
        now = time.monotonic()
        with self._changed:
            rows = [row for row in (*self.waiting, *self.live) if row.job.cancelled or now > row.job.deadline]
            if self._abandoned:
                rows = [*self.waiting, *self.live]
        for row in rows:
            error = "cancelled" if row.job.cancelled else "timeout" if now > row.job.deadline else "closing"
            self._finish(row, Event(error=error, tokens=len(row.tokens)))

    def _hand_out(self, row: Row, event: Event) -> None:
        if event.tokens == 1:
            self.metrics.count("prompt_tokens", len(row.prompt), model=self.name)
            self.metrics.observe("first_token_seconds", time.monotonic() - row.job.submitted, model=self.name)
        self.metrics.count("generated_tokens", model=self.name)
        if event.last:
            self._finish(row, event)
        elif event.text or event.chances:
            self._deliver(row, event)

    def _finish(self, row: Row, event: Event) -> None:
        with self._changed:
            if row in self.waiting:
                self.waiting.remove(row)
            alive = row in self.live
            if alive:
                self.live.remove(row)
        if alive:
            self._release(row)
        self._end(row, event)

    def _end(self, row: Row, event: Event) -> None:
        self.metrics.count("requests", model=self.name, ended=event.error or event.reason or "")
        self.metrics.observe("request_seconds", time.monotonic() - row.job.submitted, model=self.name)
        self._deliver(row, event)

    def _deliver(self, row: Row, event: Event) -> None:
        try:
            row.job.deliver(event)
        except Exception:  # whoever waited is gone, and its event loop with it
            row.job.cancel()

    def _patience(self) -> int:
        """Seconds until a place is likely to be free."""
        usual = self.metrics.mean("request_seconds", model=self.name) or 1.0
        return min(60, max(1, math.ceil(usual * len(self.waiting) / self.limits.max_batch)))


class SlotEngine(Engine):
    """Continuous batching: a job takes a row of the cache as soon as one is free, whatever the others are at."""

    slots_of: type[Slots] = Slots

    def __init__(self, name: str, lm: LM, limits: Limits, metrics: Metrics | None = None) -> None:
        super().__init__(name, lm, limits, metrics)
        _check_memory(self)
        self.slots = self.slots_of(lm, limits.max_batch, self.capacity, limits.chunk)
        self.metrics.gauge("cached_tokens", lambda: self.slots.cached, model=name)

    @property
    def held(self) -> int:
        """Tokens that a row of the cache has room for."""
        return self.capacity

    def plan(self) -> str:
        size = _cache_bytes(self) / 2**20
        return f"{super().plan()}; {size:,.1f} MiB for {self.limits.max_batch * self.held:,} cached tokens"

    def _row(self, job: Job) -> Row:
        return SlotRow(self.lm, job)

    def _step(self) -> None:
        before = len(self.live)
        self._admit(list(self.waiting)[: self.slots.free()])
        for row in self.live[before:]:
            assert isinstance(row, SlotRow)
            self.slots.put(row)
        for row, event in self.slots.prefill():
            self._hand_out(row, event)
        events = self.slots.decode()
        if events:
            self.metrics.count("steps", model=self.name)
        for row, event in events:
            self._hand_out(row, event)

    def _release(self, row: Row) -> None:
        if isinstance(row, SlotRow) and row.slot >= 0:
            self.slots.drop(row)


class DecoderEngine(SlotEngine):
    kind = "decoder"

    def room(self, prompt: int) -> int:
        return self.capacity - prompt + 1  # the last token is not read again


class EncoderDecoderEngine(SlotEngine):
    """A source and its answer may each be as long as a decoder's prompt and answer together."""

    kind = "encoder-decoder"
    slots_of = SourceSlots

    @property
    def held(self) -> int:
        return 2 * self.capacity


class EncoderEngine(Engine):
    kind = "encoder"

    def __init__(self, name: str, lm: LM, limits: Limits, metrics: Metrics | None = None) -> None:
        super().__init__(name, lm, limits, metrics)
        self.capacity = lm.config.max_positions  # there is no cache

    def _step(self) -> None:
        self._admit(list(self.waiting)[: self.limits.max_batch])
        rows = list(self.live)
        if not rows:
            return
        with answering(self.lm.model, rows):
            vectors = self.lm.embed([row.job.text for row in rows]).tolist()
        self.metrics.count("steps", model=self.name)
        for row, vector in zip(rows, vectors, strict=True):
            self.metrics.count("prompt_tokens", len(row.prompt), model=self.name)
            self._finish(row, Event(reason="stop", vector=tuple(vector)))


def make_engine(name: str, lm: LM, limits: Limits, metrics: Metrics | None = None) -> Engine:
    config = lm.config
    if config.shape == "encoder":
        if config.image_input:
            raise ValueError(f"{name} reads images; served are models of text")
        return EncoderEngine(name, lm, limits, metrics)
    if config.head != "lm":
        raise ValueError(f"{name} has head {config.head!r}; served are decoders and encoder-decoders with head 'lm'")
    kind = DecoderEngine if config.shape == "decoder" else EncoderDecoderEngine
    return kind(name, lm, limits, metrics)


def _cache_bytes(engine: SlotEngine) -> int:
    config, model = engine.lm.config, engine.lm.model
    token = 2 * config.num_decoder_layers * config.kv_heads * config.head_size * model.cache_dtype.itemsize
    return token * engine.limits.max_batch * (engine.held + 1)  # one more for padding


def _check_memory(engine: SlotEngine) -> None:
    """Say that the cache is too large before the system kills the process for it."""
    needed, device = _cache_bytes(engine), engine.lm.model.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    if needed > free:
        raise ValueError(
            f"{engine.name}: a cache of {engine.limits.max_batch} × {engine.held} tokens needs "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free; "
            "lower --max-batch or --max-tokens-cached"
        )
