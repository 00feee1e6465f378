"""Optimizers that the user made, or makes when called: checked, and given groups of the experts where ZeRO wants them.

DeepSpeed (0.19.5 to 0.19.8) takes expert parameters from param groups of their own, marked `moe`: all of ZeRO's
stages, its bf16 optimizer of pipelines, and the 16-bit optimizer of FusedAdam. Elsewhere (stage 0) the user's object
is stepped as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

from ds_etp.config.optimizers import check_optimizer
from ds_etp.patches.deepspeed.muon import prepare_muon
from ds_etp.patches.deepspeed.overrides import refresh_optimizer_flags

# A group's own fields: these don't follow the group it was split from.
_OWN_FIELDS = ("params", "name", "moe")
_WHOLE = "_ds_etp_whole"
_SYNC = "_ds_etp_hyperparams"


def accept_optimizer(engine: Any, optimizer: Any) -> Any:
    """Checks an optimizer object and returns the one to step.

    Args:
        engine: has sharded its experts.
        optimizer: the client's, or what the client's callable made.

    Raises:
        ConfigError: its step doesn't fit split experts.
    """
    extension = vars(engine)["ds_etp"]
    check_optimizer(optimizer, extension.block, extension.topology)
    if any(kind.__name__ == "MuonWithAuxAdam" for kind in type(optimizer).__mro__):
        groups = (group for group in optimizer.param_groups if group.get("use_muon"))
        stepped = {id(parameter) for group in groups for parameter in group["params"]}
        prepare_muon(engine.module, extension.groups, lambda parameter: id(parameter) in stepped)
    return split_optimizer(optimizer) if _needs_marked_groups(engine, optimizer) else optimizer


def accept_named_optimizer(engine: Any) -> None:
    """Prepares for the optimizer that the config names, which was checked with the config."""
    if engine.optimizer_name() == "muon":
        if not all(hasattr(parameter, "use_muon") for parameter in engine.module.parameters()):
            # Some were replaced on the way here. Not for all: `per_head_muon` counts heads before AutoTP splits them.
            refresh_optimizer_flags(engine, engine.module)
        prepare_muon(engine.module, vars(engine)["ds_etp"].groups, lambda parameter: parameter.use_muon)


def _needs_marked_groups(engine: Any, optimizer: Any) -> bool:
    if engine.zero_optimization_stage() > 0:
        return True
    if not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        return False
    # By name: importing DeepSpeed's FusedAdam is not for every machine, and apex has one of the same name.
    fused = any(kind.__name__ == "FusedAdam" for kind in type(optimizer).__mro__)
    return fused or bool(engine.pipeline_parallelism)


def split_param_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Moves the expert parameters of optimizer param groups to groups of their own, as ZeRO-1/2 want.

    Args:
        groups: an optimizer's `param_groups`; changed in place, hyperparameters kept.

    Returns:
        `groups`, with a group marked `moe` after the others for each one that had experts.
    """
    if any(group.get("moe") for group in groups):
        return groups
    for place, group in enumerate(groups):
        group.setdefault("name", f"group{place}")
    groups[:] = [group for group in split_params_into_different_moe_groups_for_optimizer(groups) if group["params"]]
    return groups


class _SyncHyperparams:
    """Keeps an expert group's hyperparameters at those of the group it was split from.

    A learning-rate scheduler made before `initialize` knows only the groups of that time, and would leave
    the experts at their first rate for good. As an optimizer's step pre-hook this passes on what it
    changes, until someone sets an expert group apart.

    Args:
        groups: all groups of the optimizer.
        pairs: places in `groups`: of the group that was split, and of the experts' group that came of it.
    """

    def __init__(self, groups: list[dict[str, Any]], pairs: list[tuple[int, int]]) -> None:
        self._pairs = pairs
        self.follow(groups)

    def follow(self, groups: list[dict[str, Any]]) -> None:
        """Starts anew, with these groups: a state dict that is loaded replaces them."""
        self._groups = [(groups[source], groups[experts]) for source, experts in self._pairs]
        self._last = [self._settings(source) for source, _ in self._groups]
        self._before = self._last

    @staticmethod
    def _settings(group: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in group.items() if key not in _OWN_FIELDS}

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """The optimizer's step pre-hook."""
        # Schedulers look here to see whether they are called in the right order.
        optimizer._opt_called = True
        self.pass_on()
        self._before = [self._settings(source) for source, _ in self._groups]

    def pass_on(self) -> None:
        """Gives the experts' groups what has changed since."""
        for (source, group), last in zip(self._groups, self._last, strict=True):
            for key, value in self._settings(source).items():
                if key in last and value != last[key] and group.get(key) == last[key]:
                    group[key] = last[key] = value

    def after_step(self, *_: Any) -> None:
        """The optimizer's step post-hook: what a step itself counts in a group (schedule-free: `k`) isn't passed on."""
        for groups, last, before in zip(self._groups, self._last, self._before, strict=True):
            for key, value in self._settings(groups[0]).items():
                if key in last and last[key] == before[key] != value:
                    last[key] = value


class _StepFilledGroups:
    """Hides groups without parameters from a step.

    ZeRO-3 steps part by part, with all groups there and parameters in one of them. Optimizers that count steps in
    their groups (schedule-free) would count every part; with plain DeepSpeed and one group there is only one.
    """

    def __init__(self) -> None:
        self._all: list[dict[str, Any]] | None = None

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """The optimizer's step pre-hook."""
        self.after_step(optimizer)  # if the last step raised
        self._all = optimizer.param_groups
        optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """The optimizer's step post-hook."""
        if self._all is not None:
            optimizer.param_groups, self._all = self._all, None


def split_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A client optimizer with the experts in param groups of their own.

    The returned one is all that the client's was: its class, state, options and hooks. The client's object becomes
    a view of it, which shows the groups it had: a scheduler made before counts on them (torch 2.13 refuses to step
    one that finds more groups than it was made with). All else that is done with it, state dicts, `zero_grad()`,
    `train()` and `eval()` of schedule-free optimizers, is done with the returned one.

    Args:
        optimizer: a client's, with expert parameters among its groups.

    Returns:
        The optimizer to step. The client's own, where its groups are marked `moe` already or hold no experts.
    """
    sources = list(optimizer.param_groups)
    if any(group.get("moe") for group in sources):
        return optimizer
    owners = {id(parameter): place for place, group in enumerate(sources) for parameter in group["params"]}
    groups = split_param_groups(list(sources))
    places: dict[int, int] = {}  # where each of the client's groups is now; of one with experts alone, theirs
    pairs: list[tuple[int, int]] = []
    for place, group in enumerate(groups):
        source = owners[id(group["params"][0])]
        if source in places:
            pairs.append((places[source], place))
        else:
            places[source] = place
    if not any(group.get("moe") for group in groups):
        return optimizer
    whole: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(whole).update(vars(optimizer))
    # A scheduler wraps `step` on the instance; the wrapper would step the client's object.
    vars(whole).pop("step", None)
    whole.param_groups = groups
    sync, filled = _SyncHyperparams(groups, pairs), _StepFilledGroups()
    vars(whole)[_SYNC] = sync
    for hooks in (sync, filled):
        whole.register_step_pre_hook(hooks.before_step)
        whole.register_step_post_hook(hooks.after_step)
    whole.register_load_state_dict_post_hook(lambda loaded: sync.follow(loaded.param_groups))

    def shown() -> list[dict[str, Any]]:
        held = whole.param_groups
        if len(held) != len(groups):  # ZeRO steps one group at a time
            return held
        return [held[places[place]] if place in places else group for place, group in enumerate(sources)]

    vars(optimizer).clear()
    vars(optimizer).update({_WHOLE: whole, "param_groups": shown, "step": _counted(whole)})
    kind: Any = type(optimizer)
    optimizer.__class__ = _view_class(kind)
    return whole


def pass_on_hyperparams(optimizer: Any) -> None:
    """Gives the experts' groups what a scheduler has set since the last step, for whoever reads them before the next.

    Args:
        optimizer: the one that is stepped; it may be one that was never split.
    """
    sync = vars(optimizer).get(_SYNC)
    if sync is not None:
        sync.pass_on()


def follow_hyperparams(optimizer: Any) -> None:
    """Takes the groups' hyperparameters, which a checkpoint has filled, for the ones to go on from.

    Args:
        optimizer: see `pass_on_hyperparams`.
    """
    sync = vars(optimizer).get(_SYNC)
    if sync is not None:
        sync.follow(optimizer.param_groups)


def _counted(whole: torch.optim.Optimizer) -> Callable[..., Any]:
    """The step that a view shows: the optimizer's, marked as one that schedulers have wrapped."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return whole.step(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


@cache
def _view_class(kind: Any) -> Any:
    """The class of a client's optimizer that has become a view of the one that is stepped."""

    class View(kind):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            own = object.__getattribute__(self, "__dict__")
            if name == "param_groups":
                return own[name]()
            if name == "step":
                return own[name]
            if name.startswith("__"):
                return object.__getattribute__(self, name)
            return getattr(own[_WHOLE], name)

        def __setattr__(self, name: str, value: Any) -> None:
            # Schedulers put a wrapped step here, which is the view's own.
            if name == "step":
                object.__getattribute__(self, "__dict__")[name] = value
            else:
                setattr(object.__getattribute__(self, "__dict__")[_WHOLE], name, value)

    View.__name__, View.__qualname__, View.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return View
