"""Reads an engine's shards of deferred experts from their files: cast, moved, and at ZeRO-3 partitioned.

One parameter at a time, so that neither the host nor a device holds more than its share and one shard.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed import zero
from torch import nn

from ds_etp.experts.sharded import Shard
from ds_etp.loading.deferred import read_shard
from ds_etp.parallel.consensus import raise_if_any_failed


class ShardReader:
    """Reads the experts of one engine's model. Every rank makes the same calls.

    Args:
        engine: a DeepSpeed engine in the making; its dense weights are split by AutoTP, if at all.
        expert_dp: the ranks that hold the same shards; at ZeRO-3 they partition them.
    """

    def __init__(self, engine: Any, expert_dp: dist.ProcessGroup) -> None:
        self._engine, self._expert_dp = engine, expert_dp
        self._zero3 = int(engine.zero_optimization_stage()) == 3
        self._device = torch.device("cpu") if engine.dont_change_device else engine.device
        self._half = torch.float16 if engine.fp16_enabled() else torch.bfloat16 if engine.bfloat16_enabled() else None
        self._first: Any = None
        self._failure: Exception | None = None
        self._used = False

    def read(self, module: nn.Module, shard: Shard) -> None:
        """Reads this rank's shard of a module. What goes wrong is kept for `finish`: peers are in collectives here."""
        self._used = True
        on_param = self._partition_param if self._zero3 else lambda _: None
        failure = read_shard(module, shard, self._device, self._half, on_param)
        self._failure = self._failure or failure

    def _partition_param(self, parameter: Any) -> None:
        if hasattr(parameter, "ds_id"):
            return
        parameter.ds_zero_partition_process_group = self._expert_dp
        if self._first is None:
            # As ZeRO-3 does when it finds no parameter that is partitioned. It goes on with this one's settings.
            self._first = parameter
            offload = self._engine.zero_offload_param()
            away = offload is not None and offload.device != "none"
            zero.Init(
                module=nn.ParameterList([parameter]),
                dtype=parameter.dtype,
                config_dict_or_path=self._engine.config,
                remote_device=offload.device if away else None,
                pin_memory=bool(away and offload.pin_memory),
                mpu=self._engine.mpu,
            )
        else:
            self._first.convert_to_zero_parameters(param_list=[parameter])

    def finish(self, model: nn.Module) -> None:
        """Once all are read.

        Raises:
            CheckpointError: on every rank, where one of them couldn't read its part.
        """
        if not self._used:
            return
        raise_if_any_failed("reading experts", self._failure)
        if not self._zero3:
            return
        # Where ZeRO-3 finds partitioned parameters it takes the model for one of zero.Init, of which all is of the
        # engine's type and on its device. The other parameters are moved when they are partitioned, one by one.
        for parameter in model.parameters():
            if self._half is not None and parameter.is_floating_point() and not hasattr(parameter, "ds_id"):
                parameter.data = parameter.data.to(self._half)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self._device)
