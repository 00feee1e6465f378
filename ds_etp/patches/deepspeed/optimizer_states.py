"""Master weights and optimizer states of DeepSpeed's optimizers, parameter by parameter (0.19.5 to 0.19.8).

DeepSpeed's own accessors are not enough to resume exactly: `safe_get_full_optimizer_state` finds nothing until
states are linked, raises only on ranks that own a fragment, and adds fragments up in floating point, which
loses the sign of zeros; `safe_set_full_*` fails on padded ZeRO-3 partitions. So fragments are read and
written where they are. What there is: whole tensors (stage 0), parts of a flat tensor (fused stage 0),
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
from ds_etp.checkpoint.states import EngineStates, OptimizerTensor, ParamState
from ds_etp.errors import CheckpointError
from ds_etp.patches.deepspeed.client_optimizer import follow_hyperparams, pass_on_hyperparams
from ds_etp.patches.deepspeed.loss_scale import loss_scale, set_loss_scale
from ds_etp.patches.deepspeed.optimizer_tensors import BaseOptimizerTensor

# From the tensor that the optimizer steps to this parameter's part of it, a view; None where the rank has none.
Narrow = Callable[[Tensor], Tensor | None]


class _LocalState:
    """`checkpoint.states.ParamState` of a parameter that the rank holds all of: alone, or in a flat tensor of many."""

    def __init__(
        self, parameter: Any, optimizer_tensor: BaseOptimizerTensor | None, narrow: Narrow, device: torch.device
    ) -> None:
        self.parameter, self.optimizer_tensor = parameter, optimizer_tensor
        self.narrow, self.device = narrow, device

    @property
    def is_local(self) -> bool:
        return self.local_part(WEIGHT) is not None

    def _stored_tensor(self, state_name: str) -> Tensor:
        if self.optimizer_tensor is None:
            whole: Tensor = self.parameter.data
            return whole
        return (
            self.optimizer_tensor.owner.detach() if state_name == WEIGHT else self.optimizer_tensor.states()[state_name]
        )

    def local_part(self, state_name: str) -> Tensor | None:
        return self.narrow(self._stored_tensor(state_name))

    def dtype(self, state_name: str) -> torch.dtype:
        return self._stored_tensor(state_name).dtype

    def read(self, state_name: str, reader: int) -> Tensor | None:
        part = self.local_part(state_name)
        return part.reshape(self.parameter.shape) if part is not None and dist.get_rank() == reader else None

    def write(self, state_name: str, shard: Tensor) -> None:
        part = self.local_part(state_name)
        if part is not None:
            part.copy_(shard.reshape(part.shape))
        if (
            state_name == WEIGHT
            and self.optimizer_tensor is not None
            and self.optimizer_tensor.owner is not self.parameter
        ):
            self.parameter.data.copy_(shard)


class _FragmentState(_LocalState):
    """A fragment of a flat partition (ZeRO-1/2, BF16_Optimizer); other ranks of `_dp_group` have the rest."""

    def read(self, state_name: str, reader: int) -> Tensor | None:
        group = self.parameter._dp_group
        if reader not in dist.get_process_group_ranks(group):
            return None
        part, dtype = self.local_part(state_name), self.dtype(state_name)
        whole = torch.zeros(self.parameter.numel(), dtype=dtype, device=self.device)
        mapping = self.parameter._hp_mapping
        if part is not None:
            address = mapping.lp_fragment_address
            whole.narrow(0, address.start, address.numel).copy_(part)
        # Bit patterns, of which all but one are zero: no rounding, no lost sign.
        bits = whole.view(torch.int32 if whole.element_size() == 4 else torch.uint8)
        if dist.get_world_size(group) > 1:
            dist.reduce(bits, dst=reader, group=group)
        return whole.view(self.parameter.shape) if dist.get_rank() == reader else None

    def write(self, state_name: str, shard: Tensor) -> None:
        part = self.local_part(state_name)
        if part is not None:
            address = self.parameter._hp_mapping.lp_fragment_address
            part.copy_(shard.reshape(-1).narrow(0, address.start, address.numel))


class _PartitionState(_LocalState):
    """ZeRO-3: every rank of the parameter's group has an equal part, the last ones padded."""

    @property
    def group(self) -> Any:
        return self.parameter.ds_process_group

    def _stored_tensor(self, state_name: str) -> Tensor:
        if self.optimizer_tensor is None:
            own: Tensor = self.parameter.ds_tensor.data
            return own
        return super()._stored_tensor(state_name)

    def read(self, state_name: str, reader: int) -> Tensor | None:
        if reader not in dist.get_process_group_ranks(self.group):
            return None
        part = self.local_part(state_name)
        assert part is not None
        part = part.reshape(-1).to(self.device).contiguous()
        size = dist.get_world_size(self.group)
        reads, whole = dist.get_rank() == reader, part
        if size > 1:
            # To the reader alone: the others need no room for the whole, and their link carries one part.
            whole = part.new_empty(size * part.numel() if reads else 0)
            dist.gather(part, list(whole.chunk(size)) if reads else None, dst=reader, group=self.group)
        parameter = self.parameter
        return whole[: parameter.ds_numel].view(parameter.ds_shape) if reads else None

    def write(self, state_name: str, shard: Tensor) -> None:
        part = self.local_part(state_name)
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
        self._optimizer_tensors: list[OptimizerTensor] = []
        self._param_states: dict[int, _LocalState] = {}
        self._base = base = getattr(self.optimizer, "optimizer", self.optimizer)
        self.optimizer_class = type(base).__name__ if hasattr(base, "param_groups") else None
        if self.optimizer is None or self.optimizer_class is None:
            return
        pass_on_hyperparams(base)
        optimizer = self.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            self._find_partitions(optimizer)
        elif isinstance(optimizer, DeepSpeedZeroOptimizer):
            if optimizer.round_robin_gradients:
                # Its own fragment addresses (0.19.8) are those of the order before it reordered parameters.
                raise CheckpointError(
                    "zero_optimization.round_robin_gradients: DeepSpeed does not say where it keeps each parameter's "
                    "states. Save with engine.save_checkpoint, and turn that into a checkpoint for any layout: "
                    "ds-etp import FOLDER OUT"
                )
            self._find_fragments(optimizer, optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups)
        elif isinstance(optimizer, BF16_Optimizer):
            self._find_fragments(optimizer, optimizer.bf16_groups, optimizer.fp32_groups_flat_partition)
        elif isinstance(optimizer, FP16_UnfusedOptimizer):
            self._find_whole_tensors(base, optimizer.fp16_groups, optimizer.fp32_groups)
        elif isinstance(optimizer, FP16_Optimizer):
            self._find_flat_groups(base, optimizer.fp16_groups, optimizer.fp32_groups_flat)
        elif isinstance(optimizer, torch.optim.Optimizer):
            groups = [group["params"] for group in optimizer.param_groups]
            self._find_whole_tensors(base, groups, groups)
        else:
            raise CheckpointError(f"ds_etp does not know where {type(optimizer).__name__} keeps its states")

    def _add_optimizer_tensor(self, base: Any, group_index: int, owner: Tensor) -> BaseOptimizerTensor:
        tensor = BaseOptimizerTensor(base, group_index, owner)
        self._optimizer_tensors.append(tensor)
        return tensor

    def _find_whole_tensors(self, base: Any, groups: Any, masters: Any) -> None:
        for group_index, (parameters, owners) in enumerate(zip(groups, masters, strict=True)):
            for parameter, owner in zip(parameters, owners, strict=True):
                stepped = self._add_optimizer_tensor(base, group_index, owner)
                self._param_states[id(parameter)] = _LocalState(
                    parameter, stepped, lambda tensor: tensor, self.engine.device
                )

    def _find_flat_groups(self, base: Any, groups: Any, masters: Any) -> None:
        for group_index, (parameters, owner) in enumerate(zip(groups, masters, strict=True)):
            stepped, offset = self._add_optimizer_tensor(base, group_index, owner), 0
            for parameter in parameters:
                narrow = _narrow(offset, parameter.numel())
                self._param_states[id(parameter)] = _LocalState(parameter, stepped, narrow, self.engine.device)
                offset += parameter.numel()

    def _find_fragments(self, optimizer: Any, groups: Any, partitions: Any) -> None:
        for group_index, (parameters, owner) in enumerate(zip(groups, partitions, strict=True)):
            stepped = self._add_optimizer_tensor(optimizer.optimizer, group_index, owner)
            for parameter in parameters:
                address = parameter._hp_mapping and parameter._hp_mapping.hp_fragment_address
                narrow = _narrow(address.start, address.numel) if address else _no_part
                self._param_states[id(parameter)] = _FragmentState(parameter, stepped, narrow, self.engine.device)

    def _find_partitions(self, optimizer: Any) -> None:
        if optimizer.swap_optimizer or optimizer.params_in_nvme_and_cpu:
            raise CheckpointError("ds_etp does not save or load weights and states that ZeRO-Infinity keeps on NVMe")
        for number, parameters in enumerate(optimizer.fp16_groups):
            base = optimizer.optimizer
            if optimizer.offload_optimizer and optimizer.subgroup_to_device[number] != "cpu":
                base = optimizer.backup_optimizer
            owner = optimizer.fp32_partitioned_groups_flat[number]
            stepped = self._add_optimizer_tensor(base, optimizer.sub_group_to_group_id[number], owner)
            for parameter in parameters:
                _, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
                self._param_states[id(parameter)] = _PartitionState(
                    parameter, stepped, _narrow(offset, numel), self.engine.device
                )

    def param_state(self, parameter: nn.Parameter) -> ParamState:
        """See `EngineStates`."""
        state = self._param_states.get(id(parameter))
        if state is None:
            state_class = _PartitionState if hasattr(parameter, "ds_id") else _LocalState
            state = self._param_states[id(parameter)] = state_class(
                parameter, None, lambda tensor: tensor, self.engine.device
            )
        return state

    def optimizer_tensors(self) -> list[OptimizerTensor]:
        """See `EngineStates`."""
        return self._optimizer_tensors

    def init_states(self, tensors: Iterable[OptimizerTensor]) -> None:
        """See `EngineStates`."""
        for tensor in tensors:
            assert isinstance(tensor, BaseOptimizerTensor)
            if not tensor.state:
                tensor.init_state()

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
            if all(tensor.state for tensor in self._optimizer_tensors):
                optimizer._lazy_init_hp_params_optimizer_state()
            optimizer.update_lp_params()
        elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            for number, master in enumerate(optimizer.fp32_partitioned_groups_flat):
                optimizer.fp16_partitioned_groups_flat[number].data.copy_(master.data)
                optimizer._unflatten_partitioned_parameters(number)
        if hasattr(optimizer, "checkpoint_event_epilogue"):
            optimizer.checkpoint_event_epilogue()
        if self.optimizer_class is not None:
            follow_hyperparams(self._base)

    def loss_scale(self) -> dict[str, Any]:
        """See `EngineStates`."""
        return loss_scale(self.optimizer)

    def set_loss_scale(self, values: Mapping[str, Any]) -> None:
        """See `EngineStates`."""
        set_loss_scale(self.optimizer, values)


def _narrow(start: int, size: int) -> Narrow:
    return lambda tensor: tensor.narrow(0, start, size)


def _no_part(_: Tensor) -> None:
    return None


def states_of(engine: Any) -> EngineStates:
    """An engine's states, as they are now: made anew for each save and load."""
    return DeepSpeedStates(engine)
