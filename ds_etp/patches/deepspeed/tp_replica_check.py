"""One look at the first gradients: what tensor-parallel ranks hold alike must have the same gradient on each.

Where it hasn't, their copies drift apart from the first step on, and nothing else would tell. It happens

- where AutoTP leaves a weight whole that works on split activations, and doesn't sum its gradient: Qwen3's
  q_norm and k_norm with deepspeed before 0.19.8, or with a transformers whose tp_plan doesn't name them (5.0);
- where the ranks built the model from different seeds: DeepSpeed broadcasts over data-parallel ranks only;
- where they draw different noise in the forward: dropout, or the jitter on what a router sees.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor

from ds_etp.errors import config_error
from ds_etp.parallel.collectives import all_gather_single
from ds_etp.parallel.process_groups import ProcessGroupInfo
from ds_etp.patches.base import override

# ProcessGroupInfo compute the same thing on the same numbers; kernels that add in any order make the last bits differ.
# Partial sums over different heads differ in the first.
_TOLERANCE = 1e-3


def check_first_gradients(engine: Any, tp: ProcessGroupInfo) -> None:
    """Compares the norms of replicated parameters' gradients over the tensor-parallel group, once.

    At the first `step()`, before the update, and on every rank alike it raises `ConfigError`.
    """
    if tp.size == 1:
        return
    norms: dict[str, Tensor] = {}
    names, handles = [], []
    for name, parameter in engine.module.named_parameters():
        split = is_model_parallel_parameter(parameter) or is_moe_param(parameter)
        if parameter.requires_grad and not split:
            names.append(name)
            handles.append(parameter.register_hook(_recorder(norms, name)))

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if handles:
                for handle in handles:
                    handle.remove()
                handles.clear()
                _compare(names, norms, tp, engine.device)
            return original(*args, **kwargs)

        return step

    # A pipeline's engine has no `step()` of its own.
    override(engine, "_take_model_step" if engine.pipeline_parallelism else "step", make)


def _recorder(norms: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
    def record(grad: Tensor) -> None:
        norms[name] = torch.linalg.vector_norm(grad.detach(), dtype=torch.float32)

    return record


def _compare(names: list[str], norms: dict[str, Tensor], tp: ProcessGroupInfo, device: torch.device) -> None:
    if not names:
        return
    own = torch.stack([norms.get(name, torch.zeros((), device=device)).to(device) for name in names])
    gathered = own.new_empty(tp.size * len(names))
    all_gather_single(gathered, own, group=tp.group)
    by_rank = gathered.view(tp.size, len(names))
    largest, smallest = by_rank.amax(0), by_rank.amin(0)
    wrong = ((largest - smallest) > _TOLERANCE * largest).tolist()
    found = [name for name, is_wrong in zip(names, wrong, strict=True) if is_wrong]
    if found:
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise config_error(
            "tensor_parallel.autotp_size",
            tp.size,
            f"leaves the ranks of a tensor-parallel group with different gradients of {found[0]}{others}, which each "
            f"of them holds whole. Either AutoTP of DeepSpeed {version('deepspeed')}, with the tp_plan of transformers "
            f"{version('transformers')}, doesn't sum them, or the ranks built the model or draw noise (dropout, router "
            "jitter) from different seeds",
            works="1; or the same seed on all ranks and releases that sum them (deepspeed 0.19.8, transformers 5.24)",
        )
