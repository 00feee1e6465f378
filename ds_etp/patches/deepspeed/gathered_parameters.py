"""`deepspeed.zero.GatheredParameters` (0.19.5 to 0.19.8) on parameters of a split model: the whole ones.

DeepSpeed gathers a parameter over its ZeRO group, which for split experts and AutoTP's layers gives this rank's shard
under the whole's name: a weight sync sends it, an edit on `modifier_rank` reaches only what that rank has, and a copy
between two engines mixes shards. Here the shard is gathered on, over etp, ep or tp, for as long as the context lasts,
and `ds_shape`, which weight syncs announce, is the whole's.
DeepSpeed's forward and backward don't go through this class. A module that runs inside the context (TRL's and
DeepSpeed's generation) computes with its shard. Can go when DeepSpeed gathers parameters over all that splits them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus
from torch import Tensor, nn

from ds_etp.errors import CheckpointError
from ds_etp.experts.sharded import LocalShards
from ds_etp.parameters.checks import check_rank
from ds_etp.patches.base import MethodPatch
from ds_etp.patches.deepspeed.split_parameters import SplitParameter, split_of

_STATE = "_ds_etp_whole"


@dataclass
class _Whole:
    """What a context has put together.

    Attributes:
        marks: of its parameters, by id.
        modifier: the rank, in the world, whose changes count; None where nothing is changed.
        shards: what ZeRO gathered, with the whole, by id; a module that runs takes the first instead of the second.
        hooks: on those modules.
        shapes: parameters with their shard's `ds_shape`, for as long as they have the whole's.
    """

    marks: dict[int, SplitParameter]
    modifier: int | None
    shards: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)
    shapes: list[tuple[Any, Any]] = field(default_factory=list)

    def restore_shapes(self) -> None:
        """Gives parameters the shape that DeepSpeed gathers them in."""
        for parameter, shape in self.shapes:
            parameter.ds_shape = shape
        self.shapes.clear()


def install_gathered_parameters() -> None:
    """Patches the class. For parameters without marks it does nothing, so that it stays when ds_etp is unregistered."""
    for name, make in (("__init__", _init), ("__enter__", _enter), ("__exit__", _exit)):
        MethodPatch(GatheredParameters, name, make).apply()


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(
        self: Any, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
    ) -> None:
        marks = {}
        if enabled and not isinstance(params, LocalShards):
            params = list(params) if isinstance(params, Iterable) and not isinstance(params, Tensor) else [params]
            marks = {id(p): mark for p in params if hasattr(p, "ds_id") and (mark := split_of(p)) is not None}
        for mark in marks.values():
            if mark.fault is not None:
                raise CheckpointError(f"GatheredParameters cannot gather {mark.name}: {mark.fault}")
        if not marks:
            original(self, params, modifier_rank, fwd_module, enabled)
            return
        check_rank("modifier_rank", modifier_rank)
        original(self, params, None, fwd_module, enabled)
        setattr(self, _STATE, _Whole(marks, modifier_rank))
        if modifier_rank is not None:
            _set_sources(self, marks, modifier_rank)

    return __init__


def _set_sources(context: Any, marks: dict[int, SplitParameter], modifier: int) -> None:
    """What the original does with a `modifier_rank`, which it takes for a place in each parameter's ZeRO group.

    That group may not have so many ranks. Of marked parameters every rank has the modifier's by then, so that any
    rank of the group will do.
    """
    for parameter in context.params:
        group = parameter.ds_process_group
        if id(parameter) in marks:
            context.src_rank_by_group.setdefault(id(group), dist.get_global_rank(group, 0))
    for parameter in context.params:
        group = parameter.ds_process_group
        if id(parameter) not in marks:
            of_world = group == dist.group.WORLD
            context.src_rank_by_group[id(group)] = modifier if of_world else dist.get_global_rank(group, modifier)
    context.src_rank = context.src_rank_by_group[id(context.params[0].ds_process_group)]


def _enter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __enter__(self: Any) -> Any:
        result = original(self)
        state: _Whole | None = vars(self).get(_STATE)
        if state is None:
            return result
        modules: dict[int, nn.Module] = {}
        for parameter in self.params:
            mark = state.marks.get(id(parameter))
            if mark is None or not mark.parts:
                continue
            shard = parameter.data
            whole = mark.gather(shard)
            state.shards[id(parameter)] = (shard, whole)
            parameter.data = whole
            state.shapes.append((parameter, parameter.ds_shape))
            parameter.ds_shape = whole.shape
            modules |= {id(module): module for ref in mark.modules if (module := ref()) is not None}
        for module in modules.values():
            state.hooks.append(module.register_forward_pre_hook(functools.partial(_use, state, 0)))
            state.hooks.append(module.register_forward_hook(functools.partial(_use, state, 1), always_call=True))
        return result

    return __enter__


def _use(state: _Whole, which: int, module: nn.Module, *_: Any) -> None:
    """Gives a module's parameters their shard (0) or the whole (1)."""
    # Where DeepSpeed's hooks are in place, they take parameters apart behind a module, and gather them again.
    state.restore_shapes()
    for parameter in module.parameters(recurse=False):
        pair = state.shards.get(id(parameter))
        # DeepSpeed's own hooks may have let go of it since.
        if pair is not None and parameter.ds_status == ZeroParamStatus.AVAILABLE:  # type: ignore[attr-defined]
            parameter.data = pair[which]


def _exit(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __exit__(self: Any, *exc: Any) -> Any:
        state: _Whole | None = vars(self).get(_STATE)
        if state is not None:
            for hook in state.hooks:
                hook.remove()
            state.restore_shapes()
            with torch.no_grad():
                for parameter in self.params:
                    _put_back(parameter, state)
            state.shards.clear()
        return original(self, *exc)

    return __exit__


def _put_back(parameter: Any, state: _Whole) -> None:
    """Leaves the parameter as ZeRO gathered it, with the modifier's changes. Collective over the world for these."""
    mark = state.marks.get(id(parameter))
    if mark is None or parameter.ds_status != ZeroParamStatus.AVAILABLE:
        return
    if state.modifier is not None:
        parameter.data = parameter.data.contiguous()
        dist.broadcast(parameter.data, src=state.modifier)
    if mark.parts:
        shard, _ = state.shards.pop(id(parameter))
        if state.modifier is not None:
            mark.put_back(parameter.data, shard)
        parameter.data = shard
