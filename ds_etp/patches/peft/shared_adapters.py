"""Adapters that PEFT has filled with random numbers, the same on all ranks of a tensor-parallel group.

DeepSpeed gives the ranks of a data-parallel group the weights of its first one. Tensor-parallel ranks are in other
groups, and each keeps its own: adapters that differ where a trainer seeds ranks apart (ms-swift does), as the base
weights, which come from a file, do not. Nobody would notice: with B zero, A's first gradients are zero everywhere.
"""

from __future__ import annotations

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_etp.patches.peft.expert_lora import is_adapted


def share_adapters(model: nn.Module) -> None:
    """Gives all ranks what rank 0 has in the trainable weights of a model with adapters. Collective.

    For before AutoTP cuts them: a part then is one of the same whole. What `deepspeed.zero.Init` has partitioned comes
    from one rank already, and what is cut (`deepspeed.tp_model_init`) differs rightly.
    """
    if not is_adapted(model):
        return
    device = get_accelerator().current_device_name()  # the engine hasn't noted its own yet
    for parameter in model.parameters():
        parted = hasattr(parameter, "ds_id") or getattr(parameter, "tensor_model_parallel", False)
        if parameter.requires_grad and not parameter.is_meta and not parted:
            values = parameter.data.to(device).contiguous()
            dist.broadcast(values, src=0)
            parameter.data.copy_(values)
