"""Reading the whole parameters of a live engine, for a weight sync, a comparison or a file of one's own."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_etp.checkpoint.export import LiveTensors
from ds_etp.checkpoint.export_api import as_dtype
from ds_etp.errors import config_error
from ds_etp.parallel.consensus import assert_same_on_all_ranks, raise_if_any_failed
from ds_etp.parameters.checks import check_expert_owners, check_names, check_rank
from ds_etp.patches.deepspeed.compute_weights import compute_weights
from ds_etp.patches.deepspeed.optimizer_states import states_of
from ds_etp.patches.deepspeed.pipeline import topology_of
from ds_etp.patches.peft.expert_lora import is_adapted, is_peft_model
from ds_etp.patches.peft.export import without_empty_wrapper
from ds_etp.patches.peft.merge import MergeStep, merge, merge_steps


def full_parameters(
    engine: Any,
    *,
    to_rank: int | None = None,
    merge_adapters: bool = False,
    dtype: torch.dtype | str | None = None,
    names: Iterable[str] | None = None,
) -> Iterator[tuple[str, Tensor | None]]:
    """Every parameter of a model, whole, under the name and in the shape that it has in the unsharded model.

    Gathered over ZeRO, tp, etp, ep and pipeline stages, one at a time: a whole parameter (a layer's fused experts) and
    one rank's part of it are the most that is in memory, beside the item before, while the loop's variable still has
    it. Every rank has to call this and to run the same iterations. Each is complete when its item is there, so that all
    ranks may stop after any of them. A tied parameter comes once, under its first name; buffers don't come.

        for name, tensor in ds_etp.full_parameters(engine, to_rank=0):
            if tensor is not None:
                send(name, tensor)

    Args:
        engine: a DeepSpeed engine, its experts split by ds_etp or not, at any ZeRO stage.
        to_rank: the only rank that gets tensors; the others get None in their place. By default all ranks get them.
        merge_adapters: of a model of PEFT, the base model's parameters with the active adapters merged into them, under
            the base model's names. Otherwise its parameters as they are, adapters among them, under the PEFT model's
            names. The engine's own weights don't change.
        dtype: what floating-point tensors are cast to. None keeps the type the model computes in. `torch.float32` takes
            the optimizer's master weights, where there are any.
        names: which parameters, by the names they come under; all by default.

    Returns:
        Names, each with its tensor on the engine's device: a copy, which the caller may keep or change.

    Raises:
        ConfigError: an argument is wrong, or the model has experts that something else has split.
        CheckpointError: ranks gave different arguments, AutoTP has split a parameter in a way that it doesn't describe,
            or PEFT cannot merge an adapter; on every rank alike.
    """
    return reader_of(engine, to_rank=to_rank, merge_adapters=merge_adapters, dtype=dtype, names=names).items()


@dataclass(frozen=True)
class Reader:
    """A reading that is set up on all ranks.

    Attributes:
        tensors: the model's.
        steps: what comes out, in order.
        specs: type and shape of each item, by name.
        to_rank: the rank that gets tensors; None for all.
    """

    tensors: LiveTensors
    steps: list[MergeStep]
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    to_rank: int | None

    def items(self) -> Iterator[tuple[str, Tensor | None]]:
        """See `full_parameters`."""
        tensors, root = self.tensors, self.to_rank or 0
        for step in self.steps:
            found = {name: tensors.full(name) for name in (*step.outputs, *step.adapters)}
            if step.wrappers:
                _merge_on(root, step, found)
            for source, name in step.outputs.items():
                tensor = found.pop(source)
                if name not in self.specs:
                    continue
                dtype, shape = self.specs[name]
                if tensor is not None:
                    tensor = tensor.to(dtype)
                if self.to_rank is None:
                    if tensor is None:
                        tensor = torch.empty(shape, dtype=dtype, device=tensors.device)
                    dist.broadcast(tensor, src=root)
                yield name, tensor
                # Not to hold it while the next one is gathered.
                del tensor


def _merge_on(root: int, step: MergeStep, found: dict[str, Tensor | None]) -> None:
    failure: Exception | None = None
    if dist.get_rank() == root:
        try:
            merge(step, found)
        except Exception as error:
            failure = error
    raise_if_any_failed(f"merging the adapters of {', '.join(step.outputs.values())}", failure)


def reader_of(
    engine: Any,
    *,
    to_rank: int | None = None,
    merge_adapters: bool = False,
    dtype: torch.dtype | str | None = None,
    names: Iterable[str] | None = None,
) -> Reader:
    """What `full_parameters` runs through, with the shapes of all items. Collective; the same arguments and errors."""
    target = as_dtype(dtype)
    check_rank("to_rank", to_rank)
    check_expert_owners(engine)
    model = without_empty_wrapper(engine.module)
    if merge_adapters and is_adapted(model) and not is_peft_model(model):
        raise config_error(
            "merge_adapters",
            True,
            f"needs a PeftModel around the adapters of {type(model).__name__}",
            works="False",
        )
    root = 0 if to_rank is None else to_rank
    states = states_of(engine) if target == torch.float32 else compute_weights(engine)
    tensors = LiveTensors(engine, topology_of(engine), states, model=model, root=root, device=engine.device)
    if merge_adapters and is_peft_model(model):
        steps = merge_steps(model)
    else:
        steps = [MergeStep({name: name}) for name, spec in tensors.specs.items() if spec.is_parameter]
    known = [name for step in steps for name in step.outputs.values()]
    wanted = set(known) if names is None else check_names(names, known)
    listed = zlib.crc32("\n".join(known + sorted(wanted)).encode())
    given = {"to_rank": to_rank, "merge_adapters": merge_adapters, "dtype": target, "names": listed}
    assert_same_on_all_ranks("reading the parameters of an engine", str(given))
    chosen = [step for step in steps if wanted.intersection(step.outputs.values())]
    specs = {}
    for step in chosen:
        for source, name in step.outputs.items():
            if name in wanted:
                spec = tensors.specs[source]
                kind = target if target is not None and spec.dtype.is_floating_point else spec.dtype
                specs[name] = (kind, tuple(spec.shape))
    return Reader(tensors, chosen, specs, to_rank)
