"""Experts modules: finding them, reading their layout, slicing and un-slicing their weights.

Legend: E experts, H hidden size, I intermediate size. A shard is `I / etp` columns of `E / ep` experts.

The layout is read from the flags transformers' `use_experts_implementation` leaves on a module, never from
the model type or the class name. What isn't understood in full is refused: a half-split model trains, and
trains wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_etp.errors import ConfigError
from ds_etp.topology import Topology


@dataclass(frozen=True)
class ParameterLayout:
    """How one expert parameter `[E, ...]` is cut over etp.

    Attributes:
        dim: the dimension that holds I.
        parts: how many blocks of I it holds: 2 where gate and up are concatenated.
    """

    dim: int
    parts: int = 1

    def shard(self, full: Tensor, topology: Topology, ep_index: int, etp_index: int) -> Tensor:
        """One rank's shard, a view of `full` where there is one block, a new tensor where there are more."""
        experts = full.shape[0] // topology.ep
        own = full.narrow(0, ep_index * experts, experts)
        if topology.etp == 1:
            return own
        pieces = [part.chunk(topology.etp, self.dim)[etp_index] for part in own.chunk(self.parts, self.dim)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def unshard(self, shards: Sequence[Sequence[Tensor]]) -> Tensor:
        """The full parameter from `shards[ep_index][etp_index]`."""
        rows = []
        for peers in shards:
            pieces = [shard.chunk(self.parts, self.dim) for shard in peers]
            blocks = [torch.cat([piece[part] for piece in pieces], self.dim) for part in range(self.parts)]
            rows.append(torch.cat(blocks, self.dim))
        return torch.cat(rows, 0)


@dataclass(frozen=True)
class ExpertsLayout:
    """The layout of one experts module.

    Attributes:
        num_experts, hidden_size, intermediate_size: E, H, I of the unsharded module.
        parameters: layout by parameter name; the module has no other parameters.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    parameters: dict[str, ParameterLayout]


class UnsupportedExperts(ConfigError):
    """An experts module whose layout ds_etp doesn't know."""


# What `use_experts_implementation` says of the standard layout. A flag that a transformers release doesn't
# have yet takes the value that all modules had then.
_STANDARD_FLAGS = {
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
    "_is_expert_parallel": False,
}
_FLAG_MEANING = {
    "has_gate": "experts without a gate",
    "has_bias": "experts with biases",
    "is_transposed": "transposed expert weights",
    "is_concatenated": "interleaved gate and up weights",
    "has_post_expert_norm": "a norm after the down projection",
    "_is_expert_parallel": "experts that transformers has split already",
}


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Every module that holds routed experts, supported or not, by its path in `model`."""
    return dict(_walk_experts(model))


def _walk_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside: str | None = None
    for path, module in model.named_modules():
        if inside is not None and path.startswith(inside):
            continue  # a part of experts already found
        if _holds_experts(path, module):
            inside = path + "."
            yield path, module


def _holds_experts(path: str, module: nn.Module) -> bool:
    if _is_decorated(module):
        return True
    if any(_is_decorated(inner) for inner in module.modules()):
        return False  # a wrapper (PEFT's): what it wraps is found under its own path
    named_so = path.rpartition(".")[2] == "experts" or type(module).__name__.endswith("Experts")
    return named_so and next(module.parameters(), None) is not None


def _is_decorated(module: nn.Module) -> bool:
    return hasattr(type(module), "_apply_gate") and "has_bias" in vars(module)


def read_layout(path: str, module: nn.Module, default_gate: Callable[..., Tensor]) -> ExpertsLayout:
    """The layout of an experts module.

    Args:
        path: where it is in the model, for messages.
        module: the unsharded module; its parameters may be partitioned by ZeRO-3.
        default_gate: transformers' own `_apply_gate`, which works on any slice of gate and up.

    Raises:
        UnsupportedExperts: the class name, and what keeps it from being split.
    """
    missing = list(_unsupported(module, default_gate))
    if missing:
        raise UnsupportedExperts(
            f"expert_tensor_parallel cannot split {path} ({type(module).__name__}): {'; '.join(missing)}. "
            "ds_etp splits experts modules of transformers with one gate_up_proj [E, 2I, H] and one "
            "down_proj [E, H, I]. No layer of this model was changed."
        )
    num_experts, hidden_size, intermediate_size = full_shape(module.down_proj)  # type: ignore[arg-type]
    parameters = {"gate_up_proj": ParameterLayout(dim=1, parts=2), "down_proj": ParameterLayout(dim=2)}
    return ExpertsLayout(num_experts, hidden_size, intermediate_size, parameters)


def _unsupported(module: nn.Module, default_gate: Callable[..., Tensor]) -> Iterator[str]:
    """What keeps a module from the standard layout, one phrase each."""
    if not _is_decorated(module):
        yield "it carries none of transformers' layout flags (no use_experts_implementation)"
        return
    for flag, standard in _STANDARD_FLAGS.items():
        if getattr(module, flag, standard) != standard:
            yield f"{_FLAG_MEANING[flag]} ({flag}={getattr(module, flag)})"
    for name, value in vars(module).items():
        if isinstance(value, bool) and name.startswith(("has_", "is_")) and name not in _STANDARD_FLAGS:
            yield f"an unknown layout flag {name}={value}, newer than this ds_etp"
    gate: Any = type(module)
    if gate._apply_gate is not default_gate:
        yield "a gate function of its own (_apply_gate)"
    if "ds_etp_shard" in vars(module):
        yield "it is a shard already, of an engine made from the same model"
    if "forward" in vars(module):
        yield "its forward was replaced on the instance (by a device_map, a hook or a kernel)"
    shapes = {name: full_shape(parameter) for name, parameter in module.named_parameters()}
    if set(shapes) != {"gate_up_proj", "down_proj"}:
        yield f"its parameters are {', '.join(sorted(shapes)) or 'none'}"
    elif len(shapes["down_proj"]) != 3 or shapes["gate_up_proj"] != (
        shapes["down_proj"][0],
        2 * shapes["down_proj"][2],
        shapes["down_proj"][1],
    ):
        yield f"gate_up_proj {shapes['gate_up_proj']} and down_proj {shapes['down_proj']} don't fit together"


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """A parameter's shape, also while ZeRO-3 has it partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
