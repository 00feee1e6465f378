"""Experts modules: finding them in a model, and reading how each is laid out.

The layout is read from the flags transformers' `use_experts_implementation` leaves on a module, or from a row of
`register_layout`, never from the model type. What isn't understood in full is refused: a half-split model trains,
and trains wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_etp import aliases
from ds_etp.experts.adapters import ExpertMajorRows, IdentityExperts
from ds_etp.experts.layout import ExpertsLayout, ParameterLayout, ShardSpec, UnsupportedExperts, apply_specs
from ds_etp.experts.sharded import ShardedExperts
from ds_etp.parallel.topology import Topology
from ds_etp.patches.transformers.experts_flags import apply_gate, is_decorated, is_split_by_transformers

# What `use_experts_implementation` says where a transformers release doesn't have the flag yet: what all modules were.
_FLAG_DEFAULTS = {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
_KNOWN_FLAGS = (*_FLAG_DEFAULTS, "is_concatenated", "_is_expert_parallel")


@dataclass(frozen=True)
class _Row:
    """What is known of one class: how its parameters are sharded, or why they can't be."""

    specs: dict[str, ShardSpec]
    adapter: type[Any] | None = None
    refusal: str = ""


_GATE_UP = {"gate_up_proj": ShardSpec(dim=1, fused_chunks=2), "down_proj": ShardSpec(dim=2)}
# Classes of transformers (5.0 to 5.24) without flags, each by the module and the name it has there: a class that
# moves or is renamed is refused until someone has looked at it.
_ROWS: dict[str, _Row] = {
    "transformers.models.step3p7.modeling_step3p7.Step3p7Experts": _Row(_GATE_UP),
    "transformers.models.llama4.modeling_llama4.Llama4TextExperts": _Row(
        {"gate_up_proj": ShardSpec(dim=2, fused_chunks=2), "down_proj": ShardSpec(dim=1)}, ExpertMajorRows
    ),
    "transformers.models.longcat_flash.modeling_longcat_flash.LongcatFlashExperts": _Row(
        {"gate_up_proj": ShardSpec(dim=1, fused_chunks=2, has_zero_compute_rows=True), "down_proj": ShardSpec(dim=2)},
        IdentityExperts,
    ),
    "transformers.models.dbrx.modeling_dbrx.DbrxExperts": _Row(
        {}, refusal="it keeps the rows of all experts in one matrix [E * I, H]"
    ),
    "transformers.models.jetmoe.modeling_jetmoe.JetMoeParallelExperts": _Row(
        {}, refusal="it is one projection of experts, called with rows that its block has sorted, for attention too"
    ),
    "transformers.models.switch_transformers.modeling_switch_transformers.SwitchTransformersExperts": _Row(
        {}, refusal="each expert is a module of its own, called with one-hot masks, and tokens above a capacity drop"
    ),
    "transformers.models.nllb_moe.modeling_nllb_moe.NllbMoeExperts": _Row(
        {}, refusal="each expert is a module of its own, with dropout inside"
    ),
}


def register_layout(
    experts_class: type[nn.Module] | str,
    specs: Mapping[str, ShardSpec] | None = None,
    adapter: type[ShardedExperts] | None = None,
    **old_names: Any,
) -> None:
    """Tells ds_etp how the parameters of an experts class of yours are sharded. Call it before `initialize`.

    The class's own forward then runs on shards: with `E / ep` experts, `I / etp` columns each, and expert indices that
    count from 0 on every rank. Its output may have no term that isn't a sum over the I columns, parameters with
    `ShardSpec(dim=None)` apart.

    Args:
        experts_class: the class, or its full name (`package.module.Class`).
        specs: how each of its parameters `[E, ...]` is sharded, by name; all of them.
        adapter: for a class that isn't called as `experts(x [T, H], index [T, K], weights [T, K])`: a subclass of
            `ShardedExperts` whose `forward` takes what it is called with.

    Raises:
        ConfigError: no parameter holds I.
    """
    specs = aliases.argument(specs, "specs", old_names)
    name = experts_class if isinstance(experts_class, str) else _full_name(experts_class)
    if not any(spec.dim is not None for spec in specs.values()):
        raise UnsupportedExperts(
            f"register_layout({name!r}): no parameter is sharded. Give one a ShardSpec with a dim."
        )
    _ROWS[name] = _Row(dict(specs), adapter)


def _full_name(experts_class: type) -> str:
    return f"{experts_class.__module__}.{experts_class.__qualname__}"


def _row_of(module: nn.Module) -> _Row | None:
    return _ROWS.get(_full_name(type(module)))


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Every module that holds routed experts, supported or not, by its path in `model`."""
    return dict(_walk_experts(model))


def _walk_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside: str | None = None
    known = [path for path, module in model.named_modules() if _is_known(module)]
    for path, module in model.named_modules():
        if inside is not None and path.startswith(inside):
            continue  # a part of experts already found
        if _is_known(module) or (_looks_like_experts(path, module) and not _contains(path, known)):
            inside = path + "."
            yield path, module


def _is_known(module: nn.Module) -> bool:
    return is_decorated(module) or _row_of(module) is not None


def _contains(path: str, known: list[str]) -> bool:
    """Whether it is only wrapped around experts, as PEFT's layers are."""
    return any(other.startswith(path + ".") for other in known)


def _looks_like_experts(path: str, module: nn.Module) -> bool:
    attribute = path.rpartition(".")[2]
    named_so = attribute == "experts" or (type(module).__name__.endswith("Experts") and "shared" not in attribute)
    return named_so and next(module.parameters(), None) is not None


def read_layout(path: str, module: nn.Module) -> ExpertsLayout:
    """The layout of an experts module.

    Args:
        path: where it is in the model, for messages.
        module: the unsharded module; its parameters may be partitioned by ZeRO-3, or on the meta device.

    Raises:
        UnsupportedExperts: the class name, and what keeps it from being split.
    """
    reasons = list(_obstacles(module))
    layout: ExpertsLayout | str = ""
    if not reasons:
        layout = _read(module)
        reasons = [layout] if isinstance(layout, str) else []
    if isinstance(layout, str):
        raise UnsupportedExperts(
            f"expert_tensor_parallel cannot split {path} ({type(module).__name__}): {'; '.join(reasons)}. "
            f"{_advice(module)} No layer of this model was changed."
        )
    return layout


def _advice(module: nn.Module) -> str:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return "ds_etp.fuse_experts makes one module of such experts, with a forward of yours for their block."
    return "ds_etp.register_layout tells ds_etp how the weights of a class are sharded."


def _obstacles(module: nn.Module) -> Iterator[str]:
    """What keeps a module from being split whatever its weights are, one phrase each."""
    row = _row_of(module)
    if "ds_etp_shard" in vars(module):
        yield "it is a shard already, of an engine made from the same model"
    if "forward" in vars(module):
        yield "its forward was replaced on the instance (by a device_map, a hook or a kernel)"
    if row is not None:
        if row.refusal:
            yield row.refusal
        return
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        yield f"it is a list of {len(module)} modules, one an expert, which their block calls one by one"
        return
    if not is_decorated(module):
        yield "it carries none of transformers' layout flags (no use_experts_implementation)"
        return
    if getattr(module, "has_post_expert_norm", False):
        yield "a norm follows each expert's down projection, and the norm of a part is not the part of a norm"
    if is_split_by_transformers(module):
        yield "transformers has split its experts already"
    for name, value in vars(module).items():
        if isinstance(value, bool) and name.startswith(("has_", "is_")) and name not in _KNOWN_FLAGS:
            yield f"an unknown layout flag {name}={value}, newer than this ds_etp"


def _read(module: nn.Module) -> ExpertsLayout | str:
    row = _row_of(module)
    if row is not None:
        return apply_specs(module, row.specs, row.adapter)
    flags = {flag: bool(getattr(module, flag, default)) for flag, default in _FLAG_DEFAULTS.items()}
    concatenated = getattr(module, "is_concatenated", None)
    # Before transformers 5.8 nothing says so of gate and up: the gate function does.
    choices = [bool(concatenated)] if concatenated is not None else [True, False]
    reason = ""
    for choice in choices if flags["has_gate"] else [True]:
        layout = apply_specs(module, _flagged_specs(flags, concatenated=choice))
        if isinstance(layout, str):
            return layout
        reason = _gate_fault(module, layout.intermediate_size, choice) if flags["has_gate"] else ""
        if not reason:
            return layout
    return reason


def _flagged_specs(flags: Mapping[str, bool], *, concatenated: bool) -> dict[str, ShardSpec]:
    """How the parameters are sharded that a module with these flags has."""
    up = "gate_up_proj" if flags["has_gate"] else "up_proj"
    columns, rows = (2, 1) if flags["is_transposed"] else (1, 2)
    fused_chunks, interleave = (1, 1) if not flags["has_gate"] else (2, 1) if concatenated else (1, 2)
    specs = {up: ShardSpec(columns, fused_chunks, interleave), "down_proj": ShardSpec(rows)}
    if flags["has_bias"]:
        specs |= {f"{up}_bias": ShardSpec(1, fused_chunks, interleave), "down_proj_bias": ShardSpec(None)}
    return specs


def _gate_fault(module: Any, intermediate_size: int, concatenated: bool) -> str:
    """Why a gate function can't work on a slice of the columns; empty where it gives the same there as on all."""
    columns = intermediate_size - intermediate_size % 2
    if columns == 0:
        return ""  # one column can't be split anyway
    generator = torch.Generator(device="cpu").manual_seed(0)
    gate_up = 3 * torch.randn(4, 2 * columns, generator=generator, device="cpu")
    layout, halves = ParameterLayout((4, 2 * columns), dim=1, fused_chunks=2 if concatenated else 1), Topology(2, etp=2)
    try:
        with torch.no_grad():
            whole = apply_gate(module, gate_up)
            for half in range(2):
                own = layout.shard(gate_up, halves, 0, half)
                # Vectorized functions round the ends of rows in another way than their middle.
                if not torch.allclose(apply_gate(module, own), whole.chunk(2, -1)[half], rtol=1e-4, atol=1e-5):
                    return "its gate function (_apply_gate) gives something else on a part of the columns"
    except Exception as error:
        return f"its gate function (_apply_gate) doesn't run on a part of the columns ({error})"
    return ""
