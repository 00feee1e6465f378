"""One look at the first losses and gradients: tensor-parallel ranks must have the same of what they hold alike.

Where they haven't, their copies of the weights drift apart from the first step on, and nothing else would tell. It
happens

- where a loss reads the weight of a layer that AutoTP has split, its output layer most of all, instead of calling it;
- where AutoTP leaves a weight whole that works on split activations, and doesn't sum its gradient: Qwen3's
  q_norm and k_norm with deepspeed before 0.19.8, or with a transformers whose tp_plan doesn't name them (5.0);
- where the ranks built the model from different seeds: DeepSpeed broadcasts over data-parallel ranks only;
- where they draw different noise in the forward: dropout, or the jitter on what a router sees;
- where they are given different batches. DeepSpeed looks at the first forward's only.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor

from ds_etp.errors import config_error
from ds_etp.parallel.collectives import all_gather_single
from ds_etp.parallel.process_groups import ProcessGroupInfo
from ds_etp.patches.base import override
from ds_etp.patches.deepspeed.autotp_output_layer import output_layers

# Peers compute the same thing on the same numbers; kernels that add in any order make the last bits differ.
# Partial sums over different heads differ in the first.
_TOLERANCE = 1e-3


# So are losses, from numbers that are bit-identical: only a kernel that adds up in any order changes their last bits.
_LOSS_TOLERANCE = 1e-5
_NOT_SUMMED = (
    f"AutoTP of DeepSpeed {version('deepspeed')}, with the tp_plan of transformers {version('transformers')}, doesn't "
    "sum them"
)
_LOSSES = 3  # some first losses say nothing: DPO's is log 2 and GRPO's zero, whatever the model


def check_first_losses(engine: Any, tp: ProcessGroupInfo) -> None:
    """Compares the first losses over tensor-parallel groups, before their backward: a message of 4 bytes each.

    On every rank alike it raises `ConfigError`. A pipeline computes its losses itself, on the last stage
    and from the outputs of layers; there the first gradients are compared only.
    """
    if tp.size == 1 or engine.pipeline_parallelism:
        return
    left = _LOSSES

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left and isinstance(loss, Tensor):
                left -= 1
                _compare_losses(engine, loss.detach().float().mean(), tp.size)
            return original(loss, *args, **kwargs)

        return backward

    override(engine, "backward", make)


def _compare_losses(engine: Any, loss: Tensor, tp: int) -> None:
    # Over the world, so that no group goes on alone into its gradients' messages.
    gathered = loss.new_empty(dist.get_world_size())
    all_gather_single(gathered, loss.view(1))
    by_group = [gathered[list(ranks)] for ranks in engine.ds_etp.topology.groups("tp")]
    # Not a number on all of them is nothing that tensor parallelism has done.
    wrong = [
        group
        for group in by_group
        if not torch.allclose(group, group[:1], rtol=_LOSS_TOLERANCE, atol=1e-6, equal_nan=True)
    ]
    if wrong:
        values = ", ".join(f"{value:.6g}" for value in wrong[0].tolist())
        raise config_error(
            "tensor_parallel.autotp_size",
            tp,
            f"leaves the ranks of a tensor-parallel group with different losses of one batch: {values}. "
            f"{_causes(engine, 'they were given different batches')}",
            works=_remedies(engine),
        )


def _head_is_split(engine: Any) -> bool:
    parameters = (p for layer in output_layers(engine.module).values() for p in layer.parameters())
    return any(is_model_parallel_parameter(parameter) for parameter in parameters)


def _causes(engine: Any, last: str) -> str:
    """What may be wrong, the likeliest first."""
    reader = "the loss is computed from the weight of a layer that AutoTP has split instead of from its outputs"
    if _head_is_split(engine):
        reader += ", as a fused linear cross entropy does that reads lm_head.weight outside of the model's forward"
    return (
        f"Either {reader}; or the ranks built the model or draw noise (dropout, router jitter, sampling) from "
        f"different seeds; or {last}"
    )


def _remedies(engine: Any) -> str:
    whole = "expert_tensor_parallel.replicate_lm_head=true for a loss that reads lm_head.weight; "
    return f"{whole if _head_is_split(engine) else ''}the same seed and the same batches on these ranks; 1"


def check_first_gradients(engine: Any, tp: ProcessGroupInfo) -> None:
    """Compares the norms of replicated parameters' gradients over the tensor-parallel group, once.

    At the first `step()`, before the update, and on every rank alike it raises `ConfigError`.
    """
    if tp.size == 1:
        return
    norms: dict[str, Tensor] = {}
    names, handles, compared = [], [], False
    for name, parameter in engine.module.named_parameters():
        split = is_model_parallel_parameter(parameter) or is_moe_param(parameter)
        if parameter.requires_grad and not split:
            names.append(name)
            handles.append(parameter.register_hook(_recorder(norms, name)))

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal compared
            if not compared:
                compared = True
                for handle in handles:
                    handle.remove()
                handles.clear()
                _compare(engine, names, norms, tp)
            return original(*args, **kwargs)

        return step

    # A pipeline's engine has no `step()` of its own.
    override(engine, "_take_model_step" if engine.pipeline_parallelism else "step", make)


def _recorder(norms: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
    def record(grad: Tensor) -> None:
        norms[name] = torch.linalg.vector_norm(grad.detach(), dtype=torch.float32)

    return record


def _compare(engine: Any, names: list[str], norms: dict[str, Tensor], tp: ProcessGroupInfo) -> None:
    device, found = engine.device, []
    if names:
        own = torch.stack([norms.get(name, torch.zeros((), device=device)).to(device) for name in names])
        gathered = own.new_empty(tp.size * len(names))
        all_gather_single(gathered, own, group=tp.group)
        by_rank = gathered.view(tp.size, len(names))
        largest, smallest = by_rank.amax(0), by_rank.amin(0)
        wrong = ((largest - smallest) > _TOLERANCE * largest).tolist()
        found = [name for name, is_wrong in zip(names, wrong, strict=True) if is_wrong]
    # Over the world, pipeline stages without such weights included: all go on, or none.
    anywhere = torch.tensor(bool(found), dtype=torch.uint8, device=device)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    if anywhere:
        found = found or ["what other ranks hold"]
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise config_error(
            "tensor_parallel.autotp_size",
            tp.size,
            f"leaves the ranks of a tensor-parallel group with different gradients of {found[0]}{others}, which each "
            f"of them holds whole. {_causes(engine, _NOT_SUMMED)}",
            works=f"{_remedies(engine)}; releases that sum them (deepspeed 0.19.8, transformers 5.24)",
        )
