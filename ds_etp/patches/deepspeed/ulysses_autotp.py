"""Ulysses and AutoTP in one engine (deepspeed 0.19.8).

Ulysses makes its groups of neighbouring ranks before the engine exists, and AutoTP does the same with its own, so
both would hold the same ranks. AutoTP then puts itself in the place of the sequence mpu, and leaves each rank a part
of the heads that Ulysses counts on. Here, once AutoTP is done,

- ranks that share a sequence are laid out anew, tensor-parallel peers first (`Topology`: tp, cp, dp);
- Ulysses' attention gets the new group and the heads that are left;
- the engine's mpu answers for both.

ProcessGroupInfo must then hold the same part of a sequence: scripts ask for `get_sequence_parallel_rank()` after
`initialize`. Can go when DeepSpeed lays the two out together.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.utils import groups as host_groups
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_etp.config.dense_rules import check_sequence_heads
from ds_etp.errors import config_error
from ds_etp.parallel.process_groups import make_group
from ds_etp.parallel.topology import Topology
from ds_etp.patches.deepspeed.signatures import SEQUENCE_GETTERS, TENSOR_GETTERS


def check_heads(model: nn.Module, topology: Topology) -> None:
    """Refuses head counts that the two can't share.

    Raises:
        ConfigError: see `axes.check_sequence_heads`; or the model's attention isn't Ulysses'.
    """
    attention = _attention(model)
    check_sequence_heads(topology, attention.attn_head_count, attention.global_kv_head_count)


def lay_out_sequences(engine: Any, model: nn.Module, topology: Topology) -> None:
    """Makes the sequence groups of `topology` DeepSpeed's, Ulysses' and the engine's. Collective over the world.

    They stay, as Ulysses' own do, until the process group is torn down.
    """
    rank = dist.get_rank()
    ranks = topology.group_of("cp", rank)
    if dist.get_process_group_ranks(parallel_state_sp.get_sequence_parallel_group()) != list(ranks):
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = make_group(topology, "cp")
        _divide_heads(_attention(model), topology.tp)
    # AutoTP's data-parallel group is that of all ranks with the same shard of the dense weights.
    parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = host_groups.get_data_parallel_group()
    calls = {name: getattr(host_groups, name) for name in TENSOR_GETTERS}
    # Without its `initialize_sequence_parallel`: where that is, DeepSpeed takes it that there is no tensor parallelism.
    calls |= {name: getattr(parallel_state_sp, name) for name in SEQUENCE_GETTERS}
    engine.mpu = SimpleNamespace(**calls)


def _divide_heads(attention: Any, tp: int) -> None:
    """Builds Ulysses' attention anew, in place: the model's attention function holds this object."""
    named = [name for name in inspect.signature(UlyssesSPAttentionHF.__init__).parameters if name != "self"]
    values = {name: getattr(attention, name) for name in named if hasattr(attention, name)}
    values["attn_head_count"] //= tp
    values["kv_head_count"] = attention.global_kv_head_count // tp
    values["process_group"] = parallel_state_sp.get_sequence_parallel_group()
    core = attention.core_attn_implementation
    attention.__init__(**values)
    attention.core_attn_implementation = core


def _attention(model: Any) -> Any:
    """The object that `register_with_transformers` has put in the place of the model's attention function."""
    name = model.config._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    held = inspect.getclosurevars(function).nonlocals.values() if inspect.isfunction(function) else ()
    found = next((value for value in held if isinstance(value, UlyssesSPAttentionHF)), None)
    if found is None:
        raise config_error(
            "sequence parallel size",
            parallel_state_sp.get_sequence_parallel_world_size(),
            f"with tensor parallelism: the model's attention {name!r} is not the one that Ulysses was registered for",
            works="UlyssesSPAttentionHF.register_with_transformers with the model's own attn_implementation",
        )
    return found
