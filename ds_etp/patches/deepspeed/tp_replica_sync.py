"""What tensor-parallel ranks hold alike is compared bit by bit every few steps, and put right where it has drifted.

Each of them routes its tokens by its own copy of the router. DeepSpeed (0.19.5 to 0.19.8) reduces the gradients of such
copies over data-parallel groups of their own and never compares them, so an addition in another order, or a flipped
bit, makes copies that differ for good. All-to-all dispatchers then find that routings differ and stop; `replicated`
would mix two routings. Can go when DeepSpeed keeps tensor-parallel replicas in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor, nn

from ds_etp.checkpoint.format import WEIGHT
from ds_etp.experts.sharded import sharded_modules
from ds_etp.log import logger
from ds_etp.parallel.collectives import all_gather_single
from ds_etp.parallel.process_groups import ProcessGroupInfo
from ds_etp.patches.base import override
from ds_etp.patches.deepspeed.optimizer_states import DeepSpeedStates

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # elements that are hashed at once: 32 MiB a temporary
_FACTOR = 0x5851F42D4C957F2D  # odd, so that multiplying by it loses no bit


def sync_replicas(engine: Any, tp: ProcessGroupInfo, interval: int) -> None:
    """Every `interval` steps, after the update: compares, and repairs from the group's first rank. 0: never."""
    if tp.size == 1 or interval == 0:
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def _take_model_step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if engine.global_steps % interval == 0:
                compare_and_repair(engine, tp)
            return result

        return _take_model_step

    override(engine, "_take_model_step", make)


def compare_and_repair(engine: Any, tp: ProcessGroupInfo) -> list[str]:
    """The names of what differed over this rank's tensor-parallel group.

    The comparison is one message of 8 bytes a tensor over that group, and one of a byte over the world: under ZeRO-3
    ranks compare their own partitions, and all have to repair if any does. Then everything that trains is repaired: a
    router that differs has given other gradients to all the rest, which Adam's states show before weights do.
    """
    tensors = dict(replicated_tensors(engine.module))
    own = fingerprints([copies(tensor) for tensor in tensors.values()], engine.device)
    gathered = own.new_empty(tp.size * len(own))
    if tensors:  # a pipeline stage may have none, and takes part in what follows all the same
        all_gather_single(gathered, own, group=tp.group)
    differs = (gathered.view(tp.size, len(own)) != gathered[: len(own)]).any(0)
    anywhere = differs.any().to(torch.uint8)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    if not anywhere:
        return []
    found = [name for name, wrong in zip(tensors, differs.tolist(), strict=True) if wrong]
    trained = [name for name, tensor in tensors.items() if tensor.requires_grad]
    _repair(engine, {name: tensors[name] for name in dict.fromkeys([*found, *trained])}, tp)
    if found and tp.index == 0:
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        logger().warning(
            "step %d: tensor-parallel ranks %s had copies of %s%s that differed. All they hold alike has been set to "
            "rank %d's, with master weights and optimizer states",
            engine.global_steps,
            ", ".join(map(str, tp.ranks)),
            found[0],
            others,
            tp.ranks[0],
        )
    return found


def replicated_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and buffers with a fraction (a router's score biases), that tensor-parallel ranks hold alike."""
    for name, parameter in model.named_parameters():
        if not (is_model_parallel_parameter(parameter) or is_moe_param(parameter)):
            yield name, parameter
    split = {id(module) for _, module in sharded_modules(model)}
    for path, module in model.named_modules():
        if id(module) in split or isinstance(module, TensorParallel_Layer):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                yield f"{path}.{name}", buffer


def copies(tensor: Any) -> list[Tensor]:
    """What this rank keeps of a tensor that the model computes with: under ZeRO-3 its partition, and the whole where
    it persists.
    """
    if not hasattr(tensor, "ds_id"):
        return [tensor.detach()]
    own = tensor.ds_tensor
    kept = [own.detach()] if own is not None and own.numel() else []
    return [*kept, tensor.detach()] if tensor.numel() == tensor.ds_numel else kept


def fingerprints(tensors: list[list[Tensor]], device: torch.device) -> Tensor:
    """A number for the bits of each list of tensors, by place: one that changes if any bit does, or two swap."""
    longest = max((part.numel() for parts in tensors for part in parts), default=0)
    weights = torch.arange(min(_CHUNK, longest), device=device).mul_(2).add_(1).mul_(_FACTOR)
    out = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    for total, parts in zip(out.unbind(), tensors, strict=True):
        for part in parts:
            bits = part.contiguous().view(-1).view(_BITS[part.element_size()])
            for chunk in bits.split(_CHUNK):
                total.mul_(_FACTOR).add_((chunk.to(device, torch.int64) * weights[: len(chunk)]).sum())
    return out


def _repair(engine: Any, found: dict[str, Any], tp: ProcessGroupInfo) -> None:
    if not found:
        return
    states = DeepSpeedStates(engine)
    states_of: dict[str, Any] = {
        name: states.param_state(tensor) for name, tensor in found.items() if isinstance(tensor, nn.Parameter)
    }
    _check_same_fragments(found, tp, engine.device)
    for name, tensor in found.items():
        parts = copies(tensor)
        optimizer_tensor = getattr(states_of.get(name), "optimizer_tensor", None)
        if optimizer_tensor is not None and states_of[name].is_local:
            kept = (WEIGHT, *sorted(optimizer_tensor.states()))
            parts += [states_of[name].local_part(state_name) for state_name in kept]
        for part in parts:
            _broadcast_from_first_rank(part, tp, engine.device)


def _broadcast_from_first_rank(part: Tensor, tp: ProcessGroupInfo, device: torch.device) -> None:
    message = part.to(device).contiguous()
    dist.broadcast(message, src=tp.ranks[0], group=tp.group)
    if tp.index:
        part.copy_(message.view(part.shape))


def _check_same_fragments(found: dict[str, Any], tp: ProcessGroupInfo, device: torch.device) -> None:
    """ZeRO-1/2 cut a flat tensor of all parameters, at the same places on each rank if AutoTP's shards are equal.

    Raises:
        RuntimeError: they aren't, so no rank has the states that its peer needs.
    """
    addresses = []
    for tensor in found.values():
        mapping = getattr(tensor, "_hp_mapping", None)
        address = mapping.lp_fragment_address if mapping else None
        addresses += [address.start, address.numel] if address else [-1, -1]
    own = torch.tensor(addresses, device=device)
    gathered = own.new_empty(tp.size * len(own))
    all_gather_single(gathered, own, group=tp.group)
    by_rank = gathered.view(tp.size, len(own))
    if not torch.equal(by_rank, by_rank[:1].expand_as(by_rank)):
        raise RuntimeError(
            f"copies of {next(iter(found))} have drifted apart on tensor-parallel ranks "
            f"{', '.join(map(str, tp.ranks))}, and can't be repaired: AutoTP has split the model unevenly, so ZeRO has "
            "cut the optimizer's states at other places on each of them. Load the last checkpoint, or go on without "
            "the check: expert_tensor_parallel.replica_check_interval=0"
        )
