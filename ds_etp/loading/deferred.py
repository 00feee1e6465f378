"""Deferred loading of experts: placeholder parameters until an engine splits the model, then each rank's shard is read.

A placeholder has the full shape, takes no memory (stride 0) and holds NaN. So a model's shapes, parameter objects and
names are those of the whole model until an engine splits it, whatever the engine's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ds_etp.checkpoint.chunks import expert_chunks
from ds_etp.errors import ConfigError, config_error
from ds_etp.experts.sharded import Shard, convert_module
from ds_etp.loading.lazy import LazyTensor
from ds_etp.loading.nodes import Node, materialize

_DEFERRED = "ds_etp_deferred"


class DeferredWeights:
    """The deferred weights of one module, by parameter name. Refuses what would use or copy them."""

    def __init__(self, module: nn.Module, path: str, nodes: dict[str, Node], progress: bool) -> None:
        self.path, self.nodes, self.progress = path, nodes, progress
        self._hooks: list[Any] = [
            module.register_forward_pre_hook(self._refuse),
            module.register_state_dict_pre_hook(self._refuse),
        ]

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigError(
            f"{self.path} was loaded by ds_etp.from_pretrained, and its weights are read in deepspeed.initialize. "
            "Use, copy or save the engine's module instead."
        )

    def __deepcopy__(self, _: Any) -> NoReturn:
        self._refuse()

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()


def defer_loading(model: nn.Module, paths: Iterable[str], *, progress: bool) -> None:
    """Replaces a model's lazy parameters: those of the modules at `paths` by placeholders, all others by their data.

    Args:
        model: some or all of its parameters and buffers are `LazyTensor`s.
        paths: of its experts modules.
        progress: whether reading them shows a progress bar.
    """
    experts = {path: model.get_submodule(path) for path in paths}
    keep = {id(parameter) for module in experts.values() for parameter in module.parameters()}
    lazy: dict[str, dict[str, Node]] = {
        path: {name: p.node for name, p in module.named_parameters() if isinstance(p, LazyTensor)}
        for path, module in experts.items()
    }
    made: dict[int, Tensor] = {}  # a tied parameter stays one
    for module in model.modules():
        for name, old in [*module._parameters.items(), *module._buffers.items()]:
            if not isinstance(old, LazyTensor):
                continue
            if id(old) not in made:
                made[id(old)] = _replacement(old, id(old) in keep)
            (module._buffers if name in module._buffers else module._parameters)[name] = made[id(old)]  # type: ignore[assignment]
    for path, module in experts.items():
        if lazy[path]:
            setattr(module, _DEFERRED, DeferredWeights(module, path, lazy[path], progress))


def _replacement(old: LazyTensor, is_placeholder: bool) -> Tensor:
    filling = torch.nan if old.dtype.is_floating_point else 0
    data = torch.full((), filling, dtype=old.dtype).expand(old.shape) if is_placeholder else materialize(old.node)
    if not isinstance(old, nn.Parameter):
        return data
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    for name, value in vars(old).items():
        if name not in ("node", "_is_param"):
            setattr(new, name, value)
    return new


def is_deferred(module: nn.Module) -> bool:
    """Whether a module's weights are still in their files."""
    return _DEFERRED in vars(module)


def deferred_modules(model: nn.Module) -> Iterator[str]:
    """The paths of the modules whose weights are still in their files."""
    return (path for path, module in model.named_modules() if is_deferred(module))


def refuse_deferred(model: nn.Module) -> None:
    """Refuses a model with experts left in their files, for an engine without the block.

    Raises:
        ConfigError: names the first of them.
    """
    for path in deferred_modules(model):
        raise config_error(
            "expert_tensor_parallel",
            None,
            f"is not in this engine's config, but {path} was left to it by ds_etp.from_pretrained",
            works="the config that from_pretrained was given",
        )


@torch.no_grad()
def read_shard(
    module: nn.Module,
    shard: Shard,
    device: torch.device,
    dtype: torch.dtype | None,
    on_param: Callable[[nn.Parameter], None] = lambda _: None,
) -> Exception | None:
    """Reads this rank's shard of a deferred module, one parameter at a time, and converts the module.

    Args:
        module: its parameters have their full shapes.
        shard: what this rank holds of it.
        device: where to.
        dtype: what floating-point weights are cast to; None keeps their type.
        on_param: called with each parameter once it is a shard.

    Returns:
        What went wrong, if anything did. The module is of its new shape then too.
    """
    deferred: DeferredWeights = vars(module).pop(_DEFERRED)
    failure: Exception | None = None
    for name, parameter in module.named_parameters():
        if not shard.is_whole(name, parameter):
            continue  # shared with a module that came before
        source = deferred.nodes.get(name)
        if source is None:
            parameter.data = shard.slice(name, parameter.data)
        else:
            layout = shard.layout.parameters[name]
            target = dtype if dtype is not None and source.dtype.is_floating_point else source.dtype
            part = torch.empty(layout.local_shape(shard.topology), dtype=target)
            try:
                for chunk in expert_chunks(layout, shard):
                    source.fill(chunk.of(part), chunk.logical)
            except Exception as error:
                failure = error
            parameter.data = part.to(device)
            del part
        on_param(parameter)
    deferred.remove_hooks()
    convert_module(module, shard)
    return failure


def with_progress(modules: Mapping[str, nn.Module], *, show: bool) -> Iterator[str]:
    """The paths of experts modules, with a progress bar where their weights are to be read."""
    wanted = show and any(vars(module)[_DEFERRED].progress for module in modules.values() if is_deferred(module))
    if not wanted:
        yield from modules
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    yield from tqdm(modules, desc="reading experts", unit="layer")
