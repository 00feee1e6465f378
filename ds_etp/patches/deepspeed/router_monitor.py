"""Router numbers in DeepSpeed's monitor (0.19.5 to 0.19.8): counted by every rank, written by rank 0 every few steps.

DeepSpeed's engine tells nobody that a step is over. `_take_model_step` is where it counts steps, for a pipeline too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_etp.config.monitor import enabled_monitors, report_interval
from ds_etp.experts.sharded import sharded_modules
from ds_etp.log import logger
from ds_etp.monitor.metrics import LayerLoad, events
from ds_etp.monitor.router_load import RouterLoad
from ds_etp.parallel.consensus import all_gather_object
from ds_etp.parallel.topology import Topology
from ds_etp.patches.base import override
from ds_etp.patches.deepspeed.engine import raw_config
from ds_etp.patches.peft.expert_lora import plain_path


def monitor_router(engine: Any, model: nn.Module, topology: Topology, interval: int | str, which: bool | str) -> None:
    """Has an engine write its routers' numbers. Collective over the world where there are pipeline stages.

    Args:
        engine, model, topology: once experts are sharded.
        interval: the block's `monitor_interval`.
        which: the block's `monitor_router`; false does nothing.
    """
    if not which:
        return
    loads: dict[str, RouterLoad] = {
        plain_path(path).removesuffix(".experts"): module.ds_etp_shard.router_load
        for path, module in sharded_modules(model)
    }
    sizes = {layer: load.num_experts for layer, load in loads.items()}
    if topology.pp > 1:
        by_rank = all_gather_object(sizes)
        sizes = {layer: size for rank in topology.group_of("pp", 0) for layer, size in by_rank[rank].items()}
    steps = report_interval(interval, engine.steps_per_print())
    if dist.get_rank() == 0:
        monitors = ", ".join(enabled_monitors(raw_config(engine)))
        logger().info("numbers of %d routers every %d steps, in %s", len(sizes), steps, monitors)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def _take_model_step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if engine.global_steps % steps == 0:
                gathered = gather_loads(loads, sizes, topology, engine.device)
                if dist.get_rank() == 0:
                    step, samples = engine.global_steps, engine.global_samples
                    engine.monitor.write_events(list(events(gathered, step, samples, by_expert=which is True)))
            return result

        return _take_model_step

    override(engine, "_take_model_step", make)


def gather_loads(
    loads: dict[str, RouterLoad], sizes: dict[str, int], topology: Topology, device: torch.device
) -> list[LayerLoad]:
    """Every stage's layers, summed over all ranks, on rank 0; elsewhere nothing. Counting starts again from zero.

    One message, and one copy to the host. Tensor-parallel ranks hold the same tokens, so only the first of each group
    brings them.

    Args:
        loads: of this rank's layers.
        sizes: E of every stage's layers.
        topology: the parallel sizes.
        device: of the message.
    """
    counts_tokens = topology.index_in("tp", dist.get_rank()) == 0
    rows, numbers = [], []
    for layer, size in sizes.items():
        counts, tokens, sent = (
            loads[layer].take(device) if layer in loads else (torch.zeros(size, dtype=torch.int64, device=device), 0, 0)
        )
        rows.append(counts if counts_tokens else torch.zeros_like(counts))
        numbers += [tokens if counts_tokens else 0, sent]
    message = torch.cat([*rows, torch.tensor(numbers, dtype=torch.int64, device=device)])
    dist.reduce(message, dst=0)
    if dist.get_rank() != 0:
        return []
    values = message.tolist()
    found, start, end = [], 0, len(values) - len(numbers)
    for place, (layer, size) in enumerate(sizes.items()):
        tokens, sent = values[end + 2 * place : end + 2 * place + 2]
        found.append(LayerLoad(layer, values[start : start + size], tokens, sent))
        start += size
    return found
