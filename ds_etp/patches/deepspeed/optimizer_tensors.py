"""Optimizer state of one tensor that the base optimizer (torch's, FusedAdam, DeepSpeedCPUAdam) steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ds_etp.checkpoint.states import split_state


class BaseOptimizerTensor:
    """`checkpoint.states.OptimizerTensor` of a base optimizer.

    Args:
        base: the optimizer.
        group_index: of the tensor's group in `base.param_groups`.
        owner: a parameter, its fp32 master or a flat partition: the key of its state in `base.state`.
    """

    def __init__(self, base: Any, group_index: int, owner: Tensor) -> None:
        self.base, self.owner, self._group_index = base, owner, group_index

    @property
    def group(self) -> dict[str, Any]:
        """Looked up anew each time: schedulers and ZeRO exchange the dicts."""
        group: dict[str, Any] = self.base.param_groups[self._group_index]
        return group

    @property
    def state(self) -> dict[str, Any]:
        """Without making an entry in the optimizer's defaultdict."""
        state: dict[str, Any] = self.base.state.get(self.owner, {})
        return state

    def states(self) -> dict[str, Tensor]:
        """The states with one entry per weight."""
        return split_state(f"param group {self._group_index}", self.owner, self.state)[0]

    def state_dtypes(self) -> dict[str, torch.dtype]:
        """See `OptimizerTensor`."""
        return {name: tensor.dtype for name, tensor in self.states().items()}

    def scalars(self) -> dict[str, float]:
        """See `OptimizerTensor`. FusedAdam has had `step` in the group."""
        own = split_state(f"param group {self._group_index}", self.owner, self.state)[1]
        return {"step": self.group["step"], **own} if self.state and "step" in self.group else own

    def set_scalars(self, values: Mapping[str, float]) -> None:
        """See `OptimizerTensor`."""
        for key, value in values.items():
            current = self.state.get(key)
            if isinstance(current, Tensor):
                current.fill_(value)
            elif current is not None:
                self.state[key] = type(current)(value)
        if "step" in self.group and "step" in values:
            self.group["step"] = type(self.group["step"])(values["step"])

    def drop_state(self) -> None:
        """See `OptimizerTensor`."""
        self.base.state.pop(self.owner, None)

    def init_state(self) -> None:
        """One step of the base optimizer with zero gradients and no learning rate."""
        owner, base = self.owner, self.base
        weights, gradient, groups = owner.detach().clone(), owner.grad, base.param_groups
        group = {**self.group, "params": [owner], "lr": 0.0}
        owner.grad = torch.zeros_like(owner)
        base.param_groups = [group]
        try:
            # The class's step: on the instance, schedulers count calls.
            type(base).step(base)
        finally:
            base.param_groups, owner.grad = groups, gradient
            with torch.no_grad():
                owner.copy_(weights)
        if "step" in group:
            self.group.setdefault("step", group["step"])
