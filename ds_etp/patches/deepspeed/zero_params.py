"""What DeepSpeed must be told about expert shards, so that ZeRO treats every one of them as distinct."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from deepspeed import zero
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn

from ds_etp.experts.sharded import LocalShards, Shard, convert_module
from ds_etp.parallel.process_groups import ExpertGroups, ProcessGroupInfo


def mark_expert_params(parameters: Iterable[nn.Parameter], groups: ExpertGroups) -> None:
    """Marks parameters as expert shards of these groups.

    `tensor_model_parallel` is set too: without it ZeRO-1/2 count only tensor-parallel rank 0's experts in
    the gradient norm.
    """
    for parameter in parameters:
        parameter.allreduce = False  # type: ignore[attr-defined]
        parameter.group_name = groups.name  # type: ignore[attr-defined]
        parameter.ds_zero_partition_group_name = groups.name  # type: ignore[attr-defined]
        parameter.ds_zero_placement_family = "autoep_expert"  # type: ignore[attr-defined]
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def set_zero3_leaf_modules(modules: Sequence[nn.Module]) -> None:
    """Marks each experts module as a ZeRO-3 leaf, so that its parameters are gathered together.

    Otherwise the activation function, called once per non-empty expert, makes ranks record different prefetch traces.
    Skipped for modules that share parameters: DeepSpeed would drop the second module's gradient. DeepSpeed marks the
    modules of a few families (Mixtral, Qwen) itself.
    """
    owners = Counter(id(parameter) for module in modules for parameter in module.parameters())
    for module in modules:
        # ZeRO-3 (0.19.5 to 0.19.8) reduces a leaf's gradients once the leaf has run backward; of parameters that two
        # modules share (diffusion_gemma's encoder and decoder) that is before the second module's gradient is there.
        if all(owners[id(parameter)] == 1 for parameter in module.parameters()):
            set_z3_leaf_module(module, True)


def is_partitioned(module: nn.Module) -> bool:
    """Whether `zero.Init` has partitioned a module's parameters."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def shard_partitioned(module: nn.Module, shard: Shard, expert_dp: dist.ProcessGroup) -> None:
    """Shards a module whose parameters `zero.Init` partitioned over the world, and partitions them anew.

    One parameter at a time is gathered while it is sliced: with its shard beside it, that is less than one
    full layer. The parameter objects stay; they are partitioned over `expert_dp`. Collective over the world.
    """
    for name, parameter in module.named_parameters():
        if not shard.is_whole(name, parameter):
            continue
        convert = parameter.convert_to_zero_parameters  # type: ignore[attr-defined]
        with zero.GatheredParameters(LocalShards([parameter])):
            part = shard.slice(name, parameter.data)
        for attribute in [key for key in vars(parameter) if key.startswith("ds_")]:
            if attribute not in ("ds_zero_partition_group_name", "ds_zero_placement_family"):
                delattr(parameter, attribute)
        parameter.ds_zero_partition_process_group = expert_dp  # type: ignore[attr-defined]
        parameter.data = part
        del part
        convert(param_list=[parameter])
        # ZeRO's parameter methods are closures in reference cycles that keep the old full tensor alive; they
        # must not pile up over the layers.
        gc.collect()
    convert_module(module, shard)


def global_grad_norm(parameters: Iterable[nn.Parameter], groups: ExpertGroups) -> Tensor:
    """The 2-norm of all gradients of the whole model, for unpartitioned reduced gradients (stage 0).

    Expert shards differ over the expert-model-parallel group and repeat over `expert_dp`; AutoTP's shards
    differ over the tensor-parallel group; everything else repeats on every rank of a pipeline stage. Of what stages
    share, the first one's counts.

    Returns:
        A scalar on the gradients' device, without a host sync.
    """
    parameters = list(parameters)
    squares: dict[str, list[Tensor]] = {"expert": [], "tensor": [], "whole": []}
    for parameter in parameters:
        if parameter.grad is None or getattr(parameter, "ds_pipe_replicated", False):
            continue
        if is_moe_param(parameter):
            kind = "expert"
        elif is_model_parallel_parameter(parameter):
            kind = "tensor"
        else:
            kind = "whole"
        squares[kind].append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32).square())
    reference = torch.zeros((), device=parameters[0].device)
    total = _summed(squares["whole"], reference)
    total = total + _all_reduce(groups.expert_model_parallel, _summed(squares["expert"], reference))
    total = total + _all_reduce(groups.tp, _summed(squares["tensor"], reference))
    return _all_reduce(groups.pp, total).sqrt()


def _summed(squares: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(squares).sum() if squares else torch.zeros_like(like)


def _all_reduce(peers: ProcessGroupInfo, value: Tensor) -> Tensor:
    if peers.size > 1:
        dist.all_reduce(value, group=peers.group)
    return value
