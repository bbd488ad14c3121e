"""Several processes as one: started by torchrun, through torch.distributed only."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..models import Model
from .step import BatchLoss

CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """The processes of a run; one alone is a world too."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    sharded: bool = False  # fsdp

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Each value, summed over the processes."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def wrap(self, loss: BatchLoss) -> nn.Module:
        """Gradients are averaged over the processes in the backward pass; sharded, weights are gathered as needed."""
        if self.size == 1:
            return loss
        if not self.sharded:
            from torch.nn.parallel import DistributedDataParallel

            devices = [self.device.index] if self.device.type == "cuda" else None
            return DistributedDataParallel(loss, device_ids=devices, broadcast_buffers=False)
        from torch.distributed.fsdp import fully_shard

        for block in blocks(loss.model):
            fully_shard(block)
        fully_shard(loss)
        return loss

    def quiet(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Leave the gradients where they are until the last batch of a step."""
        if self.size == 1:
            return nullcontext()
        if self.sharded:
            wrapped.set_requires_gradient_sync(last)  # type: ignore[operator]
            return nullcontext()
        return nullcontext() if last else wrapped.no_sync()  # type: ignore[operator]

    @contextmanager
    def gathered(self, wrapped: nn.Module) -> Iterator[None]:
        """Sharded weights outside the blocks, whole for calls that do not go through `wrapped`."""
        if not self.sharded:
            yield
            return
        wrapped.unshard()  # type: ignore[operator]
        try:
            yield
        finally:
            wrapped.reshard()  # type: ignore[operator]


def blocks(model: Model) -> list[nn.Module]:
    stacks = [getattr(model, side) for side in ("encoder", "decoder") if hasattr(model, side)]
    return [block for stack in stacks for block in stack.blocks]


def join(device: str | None, parallel: str) -> World:
    """The world torchrun describes in the environment, or this process alone."""
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local = int(os.environ.get("LOCAL_RANK", 0))
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if kind.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"train.device is {device!r}, and torch finds no GPU here; use cpu")
        kind = torch.device("cuda", local if kind.index is None else kind.index)
        torch.cuda.set_device(kind)
    if size == 1:
        if parallel == "fsdp":
            raise ValueError("train.parallel is 'fsdp' with one process; start several: torchrun --nproc-per-node 2 …")
        return World(device=kind)
    if not dist.is_initialized():
        backend = "nccl" if kind.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(minutes=30))
    return World(rank, size, kind, parallel == "fsdp")


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which each process may hold a part, gathered; every process must ask."""
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor
