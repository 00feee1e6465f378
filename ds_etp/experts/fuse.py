"""One experts module out of a list of expert modules, for models that call their experts one by one.

Models written for transformers 4, most of those with code on the hub among them, keep each expert in a module
of its own and loop over them in the block's forward. Nothing can be sent to another rank from inside such a
loop. `fuse_experts` makes one module of the list, and a forward of the user's calls it with all tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations import use_experts_implementation

from ds_etp.errors import config_error
from ds_etp.experts.layout import UnsupportedExperts

# What the field calls the gate, up and down projection of an expert.
_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@use_experts_implementation
class FusedExperts(nn.Module):
    """Experts `[E, 2I, H]` and `[E, H, I]`, called as `experts(x [T, H], index [T, K], weights [T, K])`: `[T, H]`.

    Args:
        config: says which experts implementation computes, as `_experts_implementation`.
        experts: E modules of equal shape, each with three linear layers without bias and an activation.
        names: of the gate, up and down projection in each.
    """

    def __init__(self, config: Any, experts: Sequence[Any], names: Sequence[str]) -> None:
        super().__init__()
        gate, up, down = names
        self.names = tuple(names)
        self.num_experts = len(experts)
        first = experts[0]
        (self.act_fn,) = (child for name, child in first.named_children() if name not in names)
        pairs = [torch.cat([getattr(e, gate).weight.data, getattr(e, up).weight.data]) for e in experts]
        self.gate_up_proj = nn.Parameter(torch.stack(pairs), getattr(first, gate).weight.requires_grad)
        downs = torch.stack([getattr(expert, down).weight.data for expert in experts])
        self.down_proj = nn.Parameter(downs, getattr(first, down).weight.requires_grad)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See the class."""
        out = torch.zeros_like(hidden_states)
        gate: Any = self._apply_gate
        for expert in top_k_index.unique():
            token, choice = (top_k_index == expert).nonzero(as_tuple=True)
            inner = gate(F.linear(hidden_states[token], self.gate_up_proj[expert]))
            rows = F.linear(inner, self.down_proj[expert]) * top_k_weights[token, choice, None]
            out.index_add_(0, token, rows.to(out.dtype))
        return out


def fuse_experts(
    model: nn.Module,
    forwards: Mapping[type[nn.Module], Callable[..., Any]],
    *,
    names: Sequence[str] | None = None,
    implementation: str = "eager",
) -> list[str]:
    """Makes one module of each list of experts in a model. Call it before the optimizer and the engine are made.

    Args:
        model: built outside `zero.Init`.
        forwards: by class of the MoE blocks, which have the list as `experts`: the forward they get,
            `forward(block, hidden_states, ...)`. It routes as the block does and calls
            `block.experts(x [T, H], index [T, K], weights [T, K])`, which returns `[T, H]`.
        names: of each expert's gate, up and down projection, where they are neither `gate_proj, up_proj, down_proj`
            nor `w1, w3, w2`.
        implementation: `eager`, `grouped_mm` or another experts implementation of transformers.

    Returns:
        The paths of the fused modules. Exports take them apart again, under the names they had.

    Raises:
        ConfigError: no such block is in the model, or experts are not what this can fuse; nothing was changed then.
    """
    blocks = {path: block for path, block in model.named_modules() if type(block) in forwards}
    if not blocks:
        wanted = ", ".join(block.__name__ for block in forwards) or "no class"
        raise config_error("forwards", wanted, f"names no block of {type(model).__name__}")
    config = SimpleNamespace(_experts_implementation=implementation)
    found = {
        path: _checked_names(f"{path}.experts", getattr(block, "experts", None), names, config)
        for path, block in blocks.items()
    }
    for path, block in blocks.items():
        experts: Any = block.experts
        block.experts = FusedExperts(config, list(experts), found[path])
        family = type(block)
        block.__class__ = type(f"Fused{family.__name__}", (family,), {"forward": forwards[family]})
    return [f"{path}.experts" for path in blocks]


def _checked_names(path: str, experts: Any, names: Sequence[str] | None, config: Any) -> Sequence[str]:
    """The names of the projections in each of a list of experts that can be fused."""
    if not isinstance(experts, nn.ModuleList) or len(experts) == 0:
        raise UnsupportedExperts(f"fuse_experts: {path} is {type(experts).__name__}, not a list of experts.")
    first = experts[0]
    known = [names] if names is not None else _NAMES
    fitting = [choice for choice in known if all(isinstance(getattr(first, n, None), nn.Linear) for n in choice)]
    shapes = [{name: tuple(parameter.shape) for name, parameter in expert.named_parameters()} for expert in experts]
    if any(hasattr(parameter, "ds_id") for parameter in experts.parameters()):
        reason = "they were built under zero.Init. Build the model outside of it"
    elif not fitting:
        reason = f"they have none of {' or '.join(str(tuple(choice)) for choice in known)} as linear layers"
    elif set(shapes[0]) != {f"{name}.weight" for name in fitting[0]}:
        reason = f"each has the parameters {', '.join(shapes[0])}, and only the weights of {fitting[0]} can be fused"
    elif any(shape != shapes[0] for shape in shapes):
        reason = "they differ in shape"
    elif len(list(first.children())) != 4:
        reason = "each has more than three projections and an activation"
    elif not _computes_alike(first, FusedExperts(config, [first], fitting[0])):
        reason = "an expert computes something else than down(act(gate(x)) * up(x))"
    else:
        return fitting[0]
    raise UnsupportedExperts(f"fuse_experts cannot fuse {path} ({type(first).__name__}): {reason}.")


@torch.no_grad()
def _computes_alike(expert: nn.Module, fused: Any) -> bool:
    weight = fused.down_proj
    if weight.is_meta:
        return True
    rows = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    index = torch.zeros(4, 1, dtype=torch.long, device=weight.device)
    wanted = expert(rows)
    limit = 16 * torch.finfo(weight.dtype).eps  # the same products, summed in another order at most
    found = fused(rows, index, torch.ones_like(index, dtype=weight.dtype))
    return torch.allclose(found, wanted, rtol=limit, atol=limit * float(wanted.abs().max()))


def unfuse(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict in which each fused tensor is taken apart into the weights it was made of, under their names."""
    apart: dict[str, Tensor] = {}
    owners = {
        f"{path}.{name}": (path, module, name)
        for path, module in model.named_modules()
        if isinstance(module, FusedExperts)
        for name in ("gate_up_proj", "down_proj")
    }
    for key, tensor in state.items():
        if key not in owners:
            apart[key] = tensor
            continue
        path, module, name = owners[key]
        gate, up, down = module.names
        for place, expert in enumerate(tensor):
            parts = zip((gate, up), expert.chunk(2), strict=True) if name == "gate_up_proj" else [(down, expert)]
            apart |= {f"{path}.{place}.{part}.weight": weight.contiguous() for part, weight in parts}
    return apart
