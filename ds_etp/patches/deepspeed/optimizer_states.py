"""Where DeepSpeed's optimizers keep a parameter's master weight and optimizer state (0.19.5 to 0.19.8).

DeepSpeed's own accessors are not enough to resume exactly: `safe_get_full_optimizer_state` finds nothing until
states are linked, raises only on ranks that own a fragment, and adds fragments up in floating point, which
loses the sign of zeros; `safe_set_full_*` fails on padded ZeRO-3 partitions. So fragments are read and
written where they are. Layouts of them: whole tensors (stage 0), parts of a flat tensor (fused stage 0),
fragments of flat partitions (ZeRO-1/2, BF16_Optimizer), one padded part of each parameter (ZeRO-3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from ds_etp.checkpoint.format import WEIGHT
from ds_etp.checkpoint.states import EngineStates, OptimizerTensor, Place
from ds_etp.errors import CheckpointError
from ds_etp.parallel.collectives import all_gather_single
from ds_etp.patches.deepspeed.optimizer_slots import OptimizerSlot

ShardSpec = Callable[[Tensor], Tensor | None]


class ParamState:
    """`checkpoint.states.Place`, for a tensor that is kept whole, or as a part of a flat one."""

    def __init__(self, parameter: Any, slot: OptimizerSlot | None, cut: ShardSpec, device: torch.device) -> None:
        self.parameter, self.slot, self.cut, self.device = parameter, slot, cut, device

    @property
    def held(self) -> bool:
        return self.part(WEIGHT) is not None

    def source(self, kind: str) -> Tensor:
        if self.slot is None:
            whole: Tensor = self.parameter.data
            return whole
        return self.slot.owner.detach() if kind == WEIGHT else self.slot.tensors()[kind]

    def part(self, kind: str) -> Tensor | None:
        return self.cut(self.source(kind))

    def dtype(self, kind: str) -> torch.dtype:
        return self.source(kind).dtype

    def read(self, kind: str, reader: int) -> Tensor | None:
        part = self.part(kind)
        return part.reshape(self.parameter.shape) if part is not None and dist.get_rank() == reader else None

    def write(self, kind: str, shard: Tensor) -> None:
        part = self.part(kind)
        if part is not None:
            part.copy_(shard.reshape(part.shape))
        if kind == WEIGHT and self.slot is not None and self.slot.owner is not self.parameter:
            self.parameter.data.copy_(shard)


class _Fragment(ParamState):
    """A fragment of a flat partition (ZeRO-1/2, BF16_Optimizer); other ranks of `_dp_group` have the rest."""

    def read(self, kind: str, reader: int) -> Tensor | None:
        group = self.parameter._dp_group
        if reader not in dist.get_process_group_ranks(group):
            return None
        part, source = self.part(kind), self.source(kind)
        whole = torch.zeros(self.parameter.numel(), dtype=source.dtype, device=self.device)
        mapping = self.parameter._hp_mapping
        if part is not None:
            address = mapping.lp_fragment_address
            whole.narrow(0, address.start, address.numel).copy_(part)
        # Bit patterns, of which all but one are zero: no rounding, no lost sign.
        bits = whole.view(torch.int32 if whole.element_size() == 4 else torch.uint8)
        if dist.get_world_size(group) > 1:
            dist.reduce(bits, dst=reader, group=group)
        return whole.view(self.parameter.shape) if dist.get_rank() == reader else None

    def write(self, kind: str, shard: Tensor) -> None:
        part = self.part(kind)
        if part is not None:
            address = self.parameter._hp_mapping.lp_fragment_address
            part.copy_(shard.reshape(-1).narrow(0, address.start, address.numel))


class _Partition(ParamState):
    """ZeRO-3: every rank of the parameter's group has an equal part, the last ones padded."""

    @property
    def group(self) -> Any:
        return self.parameter.ds_process_group

    def source(self, kind: str) -> Tensor:
        if self.slot is None:
            own: Tensor = self.parameter.ds_tensor.data
            return own
        return super().source(kind)

    def read(self, kind: str, reader: int) -> Tensor | None:
        if reader not in dist.get_process_group_ranks(self.group):
            return None
        part = self.part(kind)
        assert part is not None
        part = part.reshape(-1).to(self.device).contiguous()
        size = dist.get_world_size(self.group)
        whole = part if size == 1 else part.new_empty(size * part.numel())
        if size > 1:
            all_gather_single(whole, part, group=self.group)
        parameter = self.parameter
        return whole[: parameter.ds_numel].view(parameter.ds_shape) if dist.get_rank() == reader else None

    def write(self, kind: str, shard: Tensor) -> None:
        part = self.part(kind)
        assert part is not None
        size, flat = part.numel(), shard.reshape(-1)
        start = dist.get_rank(self.group) * size
        filled = max(min(size, flat.numel() - start), 0)
        part = part.view(-1)
        if filled:
            part[:filled].copy_(flat[start : start + filled])
        part[filled:].zero_()


class DeepSpeedStates:
    """`checkpoint.states.EngineStates` of a DeepSpeed engine.

    Raises:
        CheckpointError: the optimizer is of a kind whose states it doesn't know.
    """

    def __init__(self, engine: Any) -> None:
        self.engine, self.optimizer = engine, engine.optimizer
        self._slots: list[OptimizerTensor] = []
        self._places: dict[int, ParamState] = {}
        base = getattr(self.optimizer, "optimizer", self.optimizer)
        self.optimizer_class = type(base).__name__ if hasattr(base, "param_groups") else None
        if self.optimizer is None or self.optimizer_class is None:
            return
        optimizer = self.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            self._find_partitions(optimizer)
        elif isinstance(optimizer, DeepSpeedZeroOptimizer):
            self._find_fragments(optimizer, optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups)
        elif isinstance(optimizer, BF16_Optimizer):
            self._find_fragments(optimizer, optimizer.bf16_groups, optimizer.fp32_groups_flat_partition)
        elif isinstance(optimizer, FP16_UnfusedOptimizer):
            self._find_wholes(base, optimizer.fp16_groups, optimizer.fp32_groups)
        elif isinstance(optimizer, FP16_Optimizer):
            self._find_flats(base, optimizer.fp16_groups, optimizer.fp32_groups_flat)
        elif isinstance(optimizer, torch.optim.Optimizer):
            groups = [group["params"] for group in optimizer.param_groups]
            self._find_wholes(base, groups, groups)
        else:
            raise CheckpointError(f"ds_etp does not know where {type(optimizer).__name__} keeps its states")

    def _slot(self, base: Any, place: int, owner: Tensor) -> OptimizerSlot:
        slot = OptimizerSlot(base, place, owner)
        self._slots.append(slot)
        return slot

    def _find_wholes(self, base: Any, groups: Any, masters: Any) -> None:
        for place, (parameters, owners) in enumerate(zip(groups, masters, strict=True)):
            for parameter, owner in zip(parameters, owners, strict=True):
                slot = self._slot(base, place, owner)
                self._places[id(parameter)] = ParamState(parameter, slot, lambda tensor: tensor, self.engine.device)

    def _find_flats(self, base: Any, groups: Any, masters: Any) -> None:
        for place, (parameters, owner) in enumerate(zip(groups, masters, strict=True)):
            slot, offset = self._slot(base, place, owner), 0
            for parameter in parameters:
                cut = _narrow(offset, parameter.numel())
                self._places[id(parameter)] = ParamState(parameter, slot, cut, self.engine.device)
                offset += parameter.numel()

    def _find_fragments(self, optimizer: Any, groups: Any, partitions: Any) -> None:
        for place, (parameters, owner) in enumerate(zip(groups, partitions, strict=True)):
            slot = self._slot(optimizer.optimizer, place, owner)
            for parameter in parameters:
                address = parameter._hp_mapping and parameter._hp_mapping.hp_fragment_address
                cut = _narrow(address.start, address.numel) if address else _nothing
                self._places[id(parameter)] = _Fragment(parameter, slot, cut, self.engine.device)

    def _find_partitions(self, optimizer: Any) -> None:
        if optimizer.swap_optimizer or optimizer.params_in_nvme_and_cpu:
            raise CheckpointError("ds_etp does not save or load weights and states that ZeRO-Infinity keeps on NVMe")
        for number, parameters in enumerate(optimizer.fp16_groups):
            base = optimizer.optimizer
            if optimizer.offload_optimizer and optimizer.subgroup_to_device[number] != "cpu":
                base = optimizer.backup_optimizer
            owner = optimizer.fp32_partitioned_groups_flat[number]
            slot = self._slot(base, optimizer.sub_group_to_group_id[number], owner)
            for parameter in parameters:
                _, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
                self._places[id(parameter)] = _Partition(parameter, slot, _narrow(offset, numel), self.engine.device)

    def place(self, parameter: nn.Parameter) -> Place:
        """See `EngineStates`."""
        place = self._places.get(id(parameter))
        if place is None:
            kind = _Partition if hasattr(parameter, "ds_id") else ParamState
            place = self._places[id(parameter)] = kind(parameter, None, lambda tensor: tensor, self.engine.device)
        return place

    def slots(self) -> list[OptimizerTensor]:
        """See `EngineStates`."""
        return self._slots

    def prepare(self, slots: Iterable[OptimizerTensor]) -> None:
        """See `EngineStates`."""
        for slot in slots:
            assert isinstance(slot, OptimizerSlot)
            if not slot.state:
                slot.make()

    def before_load(self) -> None:
        """See `EngineStates`. ZeRO-3 keeps small parameters whole, beside their partitions."""
        if hasattr(self.optimizer, "checkpoint_event_prologue"):
            self.optimizer.checkpoint_event_prologue()

    def after_load(self) -> None:
        """See `EngineStates`."""
        optimizer = self.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer):
            # ZeRO-1/2 link states once; these may be new.
            optimizer._hp_optimizer_states_linked = False
            if all(slot.state for slot in self._slots):
                optimizer._lazy_init_hp_params_optimizer_state()
            optimizer.update_lp_params()
        elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            for number, master in enumerate(optimizer.fp32_partitioned_groups_flat):
                optimizer.fp16_partitioned_groups_flat[number].data.copy_(master.data)
                optimizer._unflatten_partitioned_parameters(number)
        if hasattr(optimizer, "checkpoint_event_epilogue"):
            optimizer.checkpoint_event_epilogue()

    def _scaler(self) -> Any:
        for name in ("loss_scaler", "loss_scale_config"):
            if hasattr(self.optimizer, name):
                return getattr(self.optimizer, name)
        return None

    def loss_scale(self) -> dict[str, Any]:
        """See `EngineStates`."""
        scaler = self._scaler()
        if scaler is None:
            return {}
        return {key: value for key, value in vars(scaler).items() if isinstance(value, bool | int | float)}

    def set_loss_scale(self, values: Mapping[str, Any]) -> None:
        """See `EngineStates`."""
        scaler = self._scaler()
        for key, value in values.items():
            if scaler is not None and isinstance(vars(scaler).get(key), bool | int | float):
                setattr(scaler, key, value)


def _narrow(start: int, size: int) -> ShardSpec:
    return lambda tensor: tensor.narrow(0, start, size)


def _nothing(_: Tensor) -> None:
    return None


def states_of(engine: Any) -> EngineStates:
    """An engine's states, as they are now: made anew for each save and load."""
    return DeepSpeedStates(engine)
