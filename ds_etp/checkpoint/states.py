"""Optimizer states as a checkpoint reads and writes them: protocols that hold at every ZeRO stage.

`ds_etp.patches.deepspeed.optimizer_states` implements them: it knows in which tensors DeepSpeed keeps master weights
and states. Here is what doesn't depend on that: hyperparameters and scalar states as plain values, and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ds_etp.checkpoint.format import WEIGHT
from ds_etp.errors import CheckpointError

# How a group is stepped on this machine, not what is learned: these stay as the engine was configured.
_IMPLEMENTATION = ("params", "name", "moe", "step", "foreach", "fused", "capturable", "differentiable")


class OptimizerTensor(Protocol):
    """A tensor that the base optimizer steps: a parameter, its master copy, or a flat partition of many.

    Attributes:
        group: the optimizer group it is in; without an optimizer, None.
    """

    @property
    def group(self) -> dict[str, Any]:
        """The optimizer's param group."""

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state of it; empty before the first step."""

    def state_dtypes(self) -> dict[str, torch.dtype]:
        """Names and dtypes of the states with one entry per weight."""

    def scalars(self) -> dict[str, float]:
        """The states that are one number, `step` first among them."""

    def set_scalars(self, values: Mapping[str, float]) -> None:
        """Puts the numbers back, each in the form (tensor or number) that this optimizer keeps it in."""

    def drop_state(self) -> None:
        """Drops the state, as if the optimizer had never stepped."""


class ParamState(Protocol):
    """The weight and optimizer states of one parameter on this rank."""

    @property
    def optimizer_tensor(self) -> OptimizerTensor | None:
        """The tensor that the optimizer steps; None where the parameter is frozen or in no optimizer."""

    @property
    def is_local(self) -> bool:
        """Whether there is anything of it to fill on this rank."""

    def dtype(self, state_name: str) -> torch.dtype:
        """The dtype that a state is kept in."""

    def read(self, state_name: str, reader: int) -> Tensor | None:
        """The rank's shard, gathered over its ZeRO group, on rank `reader`; None elsewhere.

        Collective over the ZeRO group, of which all members have to call it. Groups without `reader` do
        nothing.
        """

    def write(self, state_name: str, shard: Tensor) -> None:
        """Copies this rank's ZeRO partition out of the shard, a CPU tensor of the local shape. Not collective."""


class EngineStates(Protocol):
    """The states of every parameter of an engine, and what has to be done around filling them.

    Attributes:
        optimizer_class: the base optimizer's class name; None without one.
    """

    optimizer_class: str | None

    def param_state(self, parameter: nn.Parameter) -> ParamState:
        """One parameter's tensors."""

    def optimizer_tensors(self) -> list[OptimizerTensor]:
        """Every tensor that the optimizer steps on this rank, once."""

    def init_states(self, tensors: Iterable[OptimizerTensor]) -> None:
        """Makes the optimizer state of tensors that have none yet. Weights and hyperparameters stay as they are."""

    def before_load(self) -> None:
        """Brings the parameters to the form in which they are filled. Collective."""

    def after_load(self) -> None:
        """Passes master weights on to the weights that compute. Collective."""

    def loss_scale(self) -> dict[str, Any]:
        """The loss scaler's numbers."""

    def set_loss_scale(self, values: Mapping[str, Any]) -> None:
        """Puts them back."""


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group's hyperparameters as JSON has them."""
    return {key: _plain(value) for key, value in group.items() if key not in _IMPLEMENTATION and _is_plain(value)}


def apply_hyperparameters(group: dict[str, Any], stored: Mapping[str, Any]) -> None:
    """Gives a param group the stored hyperparameters that it knows, in the form it keeps them in."""
    for key, value in stored.items():
        if key in _IMPLEMENTATION or (key not in group and key != "initial_lr"):
            continue
        current = group.get(key)
        if isinstance(current, Tensor):
            current.fill_(value)
        elif isinstance(current, tuple):
            group[key] = tuple(value)
        else:
            group[key] = value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str) or _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, Tensor) else value


def split_state(name: str, owner: Tensor, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """An optimizer's state of one tensor: entries with one value per weight, and single numbers.

    Raises:
        CheckpointError: an entry is neither, so that it can't be cut along with the weights.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, float] = {}
    for key, value in state.items():
        if value is None:
            continue
        if isinstance(value, Tensor) and value.shape == owner.shape and key != "step":
            tensors[key] = value
        elif isinstance(value, bool | int | float) or _is_scalar(value):
            scalars[key] = _plain(value)
        else:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(
                f"the optimizer's state {key!r} of {name} ({shape}) has not one entry per weight "
                f"({tuple(owner.shape)}), so that it cannot be saved for other layouts"
            )
    assert WEIGHT not in tensors
    return tensors, scalars
