"""The learning rate as a function of the step: no state, so a resumed run continues where it stopped."""

from __future__ import annotations

import math

from ..config import unknown

SCHEDULES = ("constant", "linear", "cosine", "inverse-sqrt", "wsd")


def learning_rate(
    step: int,
    *,
    schedule: str,
    peak: float | None,
    steps: int,
    warmup: int = 0,
    final: float = 0.0,
    decay: int | None = None,
    d_model: int | None = None,
) -> float:
    """The rate of update `step`, counted from 1; after `steps` it stays where it ended.

    Every schedule first rises in a straight line and reaches `peak` at step `warmup`. Then "constant" stays, "linear"
    and "cosine" fall to `final` × `peak` at the last step, "wsd" stays and falls in a straight line over the last
    `decay` steps (None: a tenth of all), and "inverse-sqrt" falls with 1/√step without end.

    `peak=None` is for "inverse-sqrt" only: d_model^-0.5 · min(step^-0.5, step · warmup^-1.5), equation 3 of Vaswani et
    al. 2017, whose peak follows from the width.
    """
    if schedule not in SCHEDULES:
        raise ValueError(unknown("schedule", schedule, SCHEDULES))
    if step < 1 or steps < 1 or warmup < 0:
        raise ValueError(
            f"step is {step}, steps {steps} and warmup {warmup}; step and steps count from 1, warmup from 0"
        )
    if not 0.0 <= final <= 1.0:
        raise ValueError(f"final is {final}; it is the part of the peak left at the end, from 0 to 1")
    if schedule == "inverse-sqrt" and warmup < 1:
        raise ValueError("'inverse-sqrt' falls from the end of the warm-up; set warmup to at least 1 (the paper: 4000)")
    peak = _paper_peak(schedule, warmup, d_model) if peak is None else peak
    if step < warmup:
        return peak * step / warmup
    match schedule:
        case "linear":
            return peak * _between(1.0 - _progress(step, warmup, steps), final)
        case "cosine":
            return peak * _between(0.5 * (1.0 + math.cos(math.pi * _progress(step, warmup, steps))), final)
        case "inverse-sqrt":
            return peak * math.sqrt(warmup / step)
        case "wsd":
            start = steps - _decay_steps(decay, steps, warmup)
            return peak * _between(1.0 - _progress(step, start, steps), final)
        case _:
            return peak


def _progress(step: int, start: int, end: int) -> float:
    """From 0 at `start`, and before it, to 1 at `end`, and after it."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))


def _between(left: float, final: float) -> float:
    return final + (1.0 - final) * left


def _decay_steps(decay: int | None, steps: int, warmup: int) -> int:
    decay = max(1, steps // 10) if decay is None else decay
    if decay < 1 or warmup + decay > steps:
        raise ValueError(
            f"'wsd' with a warmup of {warmup} and a decay of {decay} in {steps} steps; "
            "decay must be at least 1, and both must fit in the steps"
        )
    return decay


def _paper_peak(schedule: str, warmup: int, d_model: int | None) -> float:
    if schedule != "inverse-sqrt" or d_model is None:
        raise ValueError(
            f"schedule {schedule!r} has no peak learning rate; give one (it follows from d_model and warmup "
            "for 'inverse-sqrt' only)"
        )
    return (d_model * warmup) ** -0.5
