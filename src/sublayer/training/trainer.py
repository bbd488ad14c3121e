"""The training loop, one for all objectives.

Whatever is random in a step follows from the seed, the step and the number of the batch in it. So a run that goes on
from a checkpoint needs no state of random generators, and gives the same weights, bit for bit on a CPU, as one that
never stopped.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.layout import trusting
from ..data.batches import Loader, Step, ahead
from ..models import Model
from .checkpoint import SHARDS, checkpoints, clean, load_checkpoint, load_shards, save_checkpoint
from .distributed import World, blocks
from .journal import Journal, Metrics, State, listening
from .optimizer import load_state_tensors, make_optimizer, set_learning_rate, state_tensors
from .recipe import TrainSettings
from .schedule import learning_rate
from .select import learning_rate_factors
from .step import BatchLoss

REPORT_EVERY = 30.0  # seconds


class Trainer:
    def __init__(
        self,
        model: Model,
        loader: Loader,
        settings: TrainSettings,
        folder: Path,
        *,
        save_model: Callable[[Model, Path], None],
        load_model: Callable[[Path], Model],
        evaluate: Callable[[Model, int], Metrics] | None = None,
        report: Callable[[str], None] | None = None,
        world: World | None = None,
        class_weights: Sequence[float] | None = None,
        quiet: bool = False,
    ) -> None:
        self.model, self.loader, self.settings, self.folder = model, loader, settings, folder
        self.save_model, self.load_model, self.evaluate = save_model, load_model, evaluate
        self.report = report or (lambda status: None)
        self.world = world or World(device=model.device)
        self.device = self.world.device
        self.state = State()
        self.asked_by: str | None = None  # the signal this process has had
        self.stopped_by: str | None = None  # the signal all processes stop for
        model.train()
        if settings.recompute:
            recompute(model)
        if settings.compile:
            for block in blocks(model):  # all layers share what is compiled for one, which is ready in seconds
                block.compile(dynamic=False if loader.row_count else None)
        loss = BatchLoss(model, settings.label_smoothing, settings.loss_chunk, class_weights)
        self.share = loss.share
        self.loss = self.world.wrap(loss)
        self.optimizer = make_optimizer(
            model, settings.optimizer, lr=1.0, betas=(settings.betas[0], settings.betas[1]), eps=settings.eps,
            weight_decay=settings.weight_decay, momentum=settings.momentum,
            factors=learning_rate_factors(model, settings.layer_decay, settings.lr_factors),
        )  # fmt: skip
        self.parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.average = [parameter.detach().clone() for parameter in self.parameters] if settings.ema else []
        self.usual_norm = torch.zeros((), device=self.device)  # running mean of the gradient's norm
        self.journal = Journal(folder, model, settings, self.world, quiet)
        # Steps skipped since it was last said, and the last of them in a row; on a GPU they wait there to be read.
        self.bad = torch.zeros(2, dtype=torch.long, device=self.device)

    # The loop

    def run(self) -> State:
        """Train to the last step, or until a signal; the folder then holds a checkpoint of where it ended."""
        state, settings, journal = self.state, self.settings, self.journal
        saved_at = state.step if state.step else -1
        reported = -math.inf
        with journal.progress, listening(self._heard):
            journal.start(state)
            first = settings.eval_first and not state.step and not self.world.sharded  # FSDP begins with a step
            if self.evaluate is not None and first:
                self._evaluate()
            for step in ahead(self.loader.steps(state.epoch, state.index)):
                if state.step >= settings.steps or state.done or self.stopped_by:
                    break
                self.learn(step)
                state.step, state.epoch, state.index = state.step + 1, step.epoch, step.index + 1
                if _due(state.step, settings.log_every) or state.step == settings.steps:
                    self._answer_for_bad(state.step)
                    journal.log(state, self._learning_rate(state.step))
                    if time.monotonic() - reported > REPORT_EVERY:
                        self.report(self.status)
                        reported = time.monotonic()
                if self.evaluate is not None and (
                    _due(state.step, settings.eval_every) or state.step == settings.steps
                ):
                    self._evaluate()
                if _due(state.step, settings.save_every) and state.step < settings.steps:
                    saved_at = self._try_to_save(saved_at)
            if saved_at != state.step:
                self.save()
        self.report(self.status)
        return state

    def _heard(self, what: signal.Signals) -> None:
        """SIGINT and SIGTERM ask for a checkpoint and an end; the second SIGINT does not wait."""
        if self.asked_by and what == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked_by = what.name
        if self.world.size == 1:  # several processes agree on it in the next step
            self.stopped_by = self.asked_by
        self.journal.progress.message(f"{self.asked_by}: saving after this step, then leaving")

    @property
    def status(self) -> str:
        if self.stopped_by:
            return f"stopped: {self.stopped_by} at step {self.state.step}"
        return "finished" if self.state.step >= self.settings.steps or self.state.done else "running"

    def learn(self, step: Step) -> None:
        """One update from the batches of one step, over all processes."""
        settings, world = self.settings, self.world
        own = sum(self.share(batch) for batch in step.batches)
        count = sum(batch.targets for batch in step.batches)
        share, targets, stop = world.sum(own, count, self.asked_by is not None)
        if stop:  # every process leaves at the same step
            self.stopped_by = self.asked_by or "a signal to another process"
        set_learning_rate(self.optimizer, self._learning_rate(self.state.step + 1))
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(step.batches):
            torch.manual_seed(_seed(settings.seed, self.state.step, number * world.size + world.rank))
            batch = batch.to(self.device)
            with world.quiet(self.loss, last=number == len(step.batches) - 1):
                with trusting(), torch.autocast(self.device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
                    loss, _ = self.loss(batch)
                # Gradients are averaged over processes, and a step's loss is divided by all its targets at once.
                (loss * (batch.weight * world.size / (share or 1.0))).backward()
            total += loss.detach() * batch.weight
            self.journal.count(batch)
        self.state.tokens += int(targets)
        norm, bad = self._update()
        self.journal.learned(total, own, norm, bad)
        if settings.nonfinite == "stop" or self.device.type == "cpu":
            self._answer_for_bad(self.state.step + 1)

    def _update(self) -> tuple[Tensor, Tensor]:
        """Clip, then step, and tell the gradient's norm; if it is not finite, or a spike, nothing is changed."""
        settings = self.settings
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=None)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        bad = ~torch.isfinite(norm)
        if settings.spike:
            bad |= (self.usual_norm > 0) & (norm > settings.spike * self.usual_norm)
        self.usual_norm = torch.where(
            bad, self.usual_norm, torch.where(self.usual_norm > 0, self.usual_norm.lerp(norm, 0.02), norm)
        )
        shrink = (norm / settings.clip).clamp(min=1.0) if settings.clip else torch.ones_like(norm)
        if self.optimizer.defaults.get("fused") and not self.world.sharded:
            # The fused kernel divides by the scale and leaves everything as it was where it is told of a bad gradient;
            # the host need not wait to know.
            self.optimizer.grad_scale, self.optimizer.found_inf = shrink, bad.to(norm.dtype)  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not bool(bad):
            torch._foreach_div_(gradients, shrink)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average:
            torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1.0 - self.settings.ema)
        self.bad = torch.stack([self.bad[0] + bad, (self.bad[1] + 1) * bad])
        return norm, bad

    def _learning_rate(self, step: int) -> float:
        settings = self.settings
        return learning_rate(
            step, schedule=settings.schedule, peak=settings.lr or None, steps=settings.steps,
            warmup=settings.warmup_steps, final=settings.final_lr, decay=settings.decay,
            d_model=self.model.config.d_model,
        )  # fmt: skip

    def _answer_for_bad(self, step: int) -> None:
        """Say what was skipped, and stop if it must not be or does not end."""
        bad, row = self.bad.tolist()
        self.state.skipped_in_a_row = row
        if not bad:
            return
        self.state.skipped += bad
        self.bad[0] = 0
        what = f"step {step}: the gradient is not finite or a spike"
        if self.settings.nonfinite == "stop":
            raise ValueError(f"{what}; stopped, as train.nonfinite says. The last checkpoint is whole: lower train.lr")
        if row >= self.settings.max_skips:
            raise ValueError(f"{what}, {row} steps in a row; stopped. The last checkpoint is whole: lower train.lr")
        self.journal.say(self.state, f"{what}; {bad} step{'s' if bad > 1 else ''} skipped, {self.state.skipped} in all")

    # Evaluating

    def _evaluate(self) -> None:
        assert self.evaluate is not None
        self.model.eval()
        with self.journal.pause(), self.averaged(), self.world.gathered(self.loss):
            metrics = self.evaluate(self.model, self.state.step)
            self.journal.write(self.state, {"step": self.state.step, **metrics})
            self.journal.progress.message(
                f"step {self.state.step}: "
                + ", ".join(f"{name.replace('_', ' ')} {n:.4g}" for name, n in metrics.items())
            )
            self._judge(metrics)
            self.report(self.status)
        self.model.train()

    def _judge(self, metrics: Metrics) -> None:
        """Is it the best so far? If not for `patience` evaluations, the run is done."""
        settings, state = self.settings, self.state
        if settings.judge not in metrics:
            known = ", ".join(metrics)
            key = "metric" if settings.best is None else "best"
            raise ValueError(f"train.{key} is {settings.judge!r}, which is not among what was measured: {known}")
        value = metrics[settings.judge]
        sign = 1.0 if settings.judge in ("valid_loss", "valid_perplexity") else -1.0
        if state.best is None or sign * value < sign * state.best:
            state.best, state.worse = value, 0
            if settings.keeps_best and not self.world.sharded:
                if self.world.main:
                    self.save_model(self.model, self.folder / "best")
                self.world.wait()
        else:
            state.worse += 1
        if settings.patience and state.worse >= settings.patience and state.step < settings.steps:
            state.done = True
            self.journal.say(
                self.state,
                f"step {state.step}: {settings.judge} was better {state.worse} evaluations ago; stopped early",
            )

    # Saving and going on

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The averaged weights in the model's place, where the run keeps an average."""
        if not self.average:
            yield
            return
        own = [parameter.detach().clone() for parameter in self.parameters]
        self._put(self.average)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):  # sharded, foreach knows no copy
            parameter.copy_(value)

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"optimizer/{name}": value for name, value in state_tensors(self.optimizer, self.model).items()}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for parameter, average in zip(self.parameters, self.average, strict=False):
            tensors[f"average/{names[id(parameter)]}"] = average
        if self.world.sharded:
            kept = self.model.state_dict().keys()  # of tied weights, one name is enough
            own = [*self.model.named_parameters(), *self.model.named_buffers()]
            tensors |= {f"model/{name}": tensor.detach() for name, tensor in own if name in kept}
        sums = torch.tensor(self.world.sum(*self.journal.sums.tolist()), device=self.device)
        return tensors | {"usual_norm": self.usual_norm, "sums": sums}

    def save(self) -> None:
        self._answer_for_bad(self.state.step)
        write = None if self.world.sharded else lambda path: self.save_model(self.model, path)
        with self.journal.pause():
            save_checkpoint(
                self.folder / "checkpoints", self.state.step, dataclasses.asdict(self.state), self._tensors(), write,
                keep=self.settings.keep, world=self.world,
            )  # fmt: skip

    def _try_to_save(self, saved_at: int) -> int:
        """A full disk must not end a run that can still free room and save at its end."""
        try:
            self.save()
            return self.state.step
        except OSError as error:
            if self.world.size > 1:
                raise
            self.journal.say(self.state, f"step {self.state.step}: {error}")
            return saved_at

    def resume(self) -> bool:
        """Go on from the newest checkpoint; False where there is none."""
        folder = self.folder / "checkpoints"
        if self.world.main:
            clean(folder)
        self.world.wait()
        found = checkpoints(folder)
        if not found:
            return False
        if (found[-1] / SHARDS).exists() != self.world.sharded:
            other = "without" if self.world.sharded else "with"
            raise ValueError(f"{found[-1]} was saved {other} train.parallel=fsdp; resume it the same way")
        state, tensors = load_checkpoint(found[-1])
        self.state = State(**state)
        if self.world.sharded:
            tensors = self._tensors()
            load_shards(found[-1], tensors)
        else:
            self.model.load_state_dict(self.load_model(found[-1]).state_dict())
        part = _under("optimizer/", tensors)
        load_state_tensors(self.optimizer, self.model, part)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        with torch.no_grad():
            for parameter, average in zip(self.parameters, self.average, strict=False):
                average.copy_(tensors[f"average/{names[id(parameter)]}"])
        self.usual_norm = tensors["usual_norm"].to(self.device)
        self.journal.sums = tensors["sums"].to(self.device) * self.world.main
        self.bad[1] = self.state.skipped_in_a_row
        return True


def recompute(model: Model) -> None:
    """Have every block forget its activations in the forward pass and compute them again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    for block in blocks(model):
        plain = block.forward

        def forward(*args: Any, _plain: Callable[..., Any] = plain, **kwargs: Any) -> Any:
            return checkpoint(_plain, *args, use_reentrant=False, **kwargs)

        block.forward = forward


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _seed(*numbers: int) -> int:
    """One seed for a generator from several numbers, well mixed."""
    out = 0x9E3779B97F4A7C15
    for number in numbers:
        out = ((out ^ number) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        out ^= out >> 31
    return out & (2**63 - 1)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
