"""The optimisers of torch, with the groups a Transformer needs, and their state as named tensors.

A parameter is in one of three groups. "matrices": the weights inside the blocks, where Muon is asked for. "decayed":
every other weight of two or more dimensions, embeddings too. "plain": biases and the gains of norms, never decayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from ..config import unknown

OPTIMIZERS = ("adamw", "adafactor", "muon")


def make_optimizer(
    model: nn.Module,
    name: str = "adamw",
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-9,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    factors: Mapping[str, float] | None = None,
) -> Optimizer:
    """An optimiser over what `model` trains; frozen parameters are left out.

    `factors` has what the learning rate of a parameter, by its name, is multiplied by, where that is not 1.

    "muon" gives the weights inside the blocks to Muon (with `momentum`) and the rest to AdamW (with `betas` and `eps`).
    Its update is scaled to the size of AdamW's (Liu et al. 2025), so that one learning rate serves both. "adafactor"
    has neither betas nor eps; its learning rate is relative to the size of each weight, and 1e-2 is usual.
    """
    if name not in OPTIMIZERS:
        raise ValueError(unknown("optimizer", name, OPTIMIZERS))
    groups = _groups(model, matrices=name == "muon", weight_decay=weight_decay, factors=factors or {})
    if name == "adafactor":
        return torch.optim.Adafactor(groups, lr=lr)
    adam: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "fused": _can_fuse(model)}
    if name == "adamw":
        return AdamW(groups, **adam)
    inner = [group for group in groups if group["name"] == "matrices"]
    outer = [group for group in groups if group["name"] != "matrices"]
    parts: list[Optimizer] = [AdamW(outer, **adam)] if outer else []
    if inner:
        parts.insert(0, Muon(inner, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw"))
    return Together(parts)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Give every group the rate times its own "lr_scale"."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


class Together(Optimizer):
    """Optimisers over different parameters that are used, stored and scheduled as one."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts
        self.sizes = [len(part.param_groups) for part in parts]
        super().__init__([group for part in parts for group in part.param_groups], {})

    # Typed loosely, because torch declares `step` twice: with a closure, and without.
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        start = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            # The groups and the state are ours: `load_state_dict` puts new ones in their place.
            part.param_groups, part.state = self.param_groups[start : start + size], self.state
            part.step()
            start += size
        return loss


def state_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The whole state, as "<what>/<parameter name>": "exp_avg/decoder.final_norm.weight", say.

    A parameter without state yet has the zeros it would start from, so that the names do not depend on the step. The
    tensors are the optimiser's own; store or copy them before the next step.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter, group in _named(optimizer, model):
        state = optimizer.state.get(parameter) or _initial_state(group, parameter)
        tensors |= {f"{what}/{name}": value for what, value in state.items()}
    return tensors


def load_state_tensors(optimizer: Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `state_tensors` gave, bit for bit. What does not fit is refused before anything is changed."""
    states: dict[Tensor, dict[str, Tensor]] = {}
    used: set[str] = set()
    for name, parameter, group in _named(optimizer, model):
        states[parameter] = _initial_state(group, parameter)
        for what, value in states[parameter].items():
            key = f"{what}/{name}"
            if key not in tensors:
                raise ValueError(f"the optimiser state lacks {key!r}; was it stored with another optimiser or model?")
            stored = tensors[key]
            if stored.shape != value.shape or (stored.dtype != value.dtype and what != "step"):
                raise ValueError(
                    f"optimiser state {key!r} is {_kind(stored)}, and this model needs {_kind(value)}; "
                    "resume with the model and the dtype it was stored with"
                )
            value.copy_(stored)
            used.add(key)
    for key in tensors:
        if key not in used:
            raise ValueError(f"the optimiser state holds {key!r}, which this optimiser and model do not have")
    optimizer.state.clear()
    optimizer.state.update(states)


def _groups(
    model: nn.Module, *, matrices: bool, weight_decay: float, factors: Mapping[str, float]
) -> list[dict[str, Any]]:
    kinds = ("matrices", "decayed", "plain")
    members: dict[tuple[str, float], list[Tensor]] = {(kind, 1.0): [] for kind in kinds}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if matrices and parameter.dim() == 2 and "blocks" in name.split("."):
            kind = "matrices"
        else:
            kind = "decayed" if parameter.dim() >= 2 else "plain"
        members.setdefault((kind, factors.get(name, 1.0)), []).append(parameter)
    if not any(members.values()):
        raise ValueError("the model has no parameter to train; set requires_grad on those that should learn")
    return [
        {"name": name, "params": params, "weight_decay": 0.0 if name == "plain" else weight_decay, "lr_scale": factor}
        for (name, factor), params in members.items()
        if params
    ]


def _can_fuse(model: nn.Module) -> bool:
    return all(
        p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in model.parameters() if p.requires_grad
    )


def _named(optimizer: Optimizer, model: nn.Module) -> list[tuple[str, Tensor, dict[str, Any]]]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return [(names[p], p, group) for group in optimizer.param_groups for p in group["params"]]


def _initial_state(group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """What torch's optimisers start from, told apart by the settings that only one of them has."""
    if "ns_steps" in group:
        return {"momentum_buffer": torch.zeros_like(parameter)}
    if "betas" in group:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device if group["fused"] else "cpu")
        return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    step = torch.zeros((), dtype=torch.float32, device="cpu")
    if parameter.dim() < 2:
        return {"step": step, "variance": torch.zeros_like(parameter)}
    row, column = parameter.detach()[..., :1], parameter.detach()[..., :1, :]
    return {"step": step, "row_var": row.new_zeros(row.shape), "col_var": column.new_zeros(column.shape)}


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
