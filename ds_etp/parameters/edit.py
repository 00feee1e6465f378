"""Changing the whole parameters of a live engine: every shard and every fp32 master weight follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_etp.checkpoint.assembly import take_chunks
from ds_etp.checkpoint.export import LiveTensors
from ds_etp.checkpoint.format import WEIGHT
from ds_etp.errors import CheckpointError
from ds_etp.parallel.consensus import assert_same_on_all_ranks
from ds_etp.parameters.checks import check_expert_owners, check_names, check_rank
from ds_etp.patches.deepspeed.optimizer_states import states_of
from ds_etp.patches.deepspeed.pipeline import topology_of
from ds_etp.patches.peft.export import without_empty_wrapper

# What a rank is about to do.
_NEXT, _DONE, _FAILED = range(3)
_WORDS = {_NEXT: "went on to the next", _DONE: "left the loop", _FAILED: "raised"}


@contextmanager
def edit_parameters(
    engine: Any, names: Iterable[str] | None = None, *, modifier_rank: int = 0
) -> Iterator[Iterator[tuple[str, Tensor | None]]]:
    """Whole parameters of an engine's model, to be changed in place on one rank, one at a time.

        with ds_etp.edit_parameters(engine) as parameters:
            for name, tensor in parameters:
                if tensor is not None and name.endswith("norm.weight"):
                    tensor.mul_(2)

    A change reaches every shard when the loop goes on to the next parameter or ends, in fp32 masters where there are
    any, and at the end of the block the weights that the model computes with. The optimizer's moments stay. Every rank
    has to run the block, and the same iterations.

    Args:
        engine: a DeepSpeed engine, its experts split by ds_etp or not, at any ZeRO stage.
        names: which parameters, as `full_parameters` names them; all by default.
        modifier_rank: the rank that gets tensors, and whose changes count; the others get None in their place.

    Yields:
        An iterator of names, each with its tensor `[unsharded shape]` on the engine's device: the fp32 master weight
        where there is one. It has to be changed in place.

    Raises:
        ConfigError: an argument is wrong, or the model has experts that something else has split.
        CheckpointError: ranks gave different arguments or left the loop at different parameters, or one raised in it;
            on every rank alike. What was changed until then stays changed.
    """
    check_rank("modifier_rank", modifier_rank)
    check_expert_owners(engine)
    model, topology, states = without_empty_wrapper(engine.module), topology_of(engine), states_of(engine)
    states.before_load()
    edits: _Edits | None = None
    try:
        tensors = LiveTensors(engine, topology, states, model=model, root=modifier_rank, device=engine.device)
        known = [name for name, spec in tensors.specs.items() if spec.is_parameter]
        chosen = set(known) if names is None else check_names(names, known)
        assert_same_on_all_ranks("changing the parameters of an engine", f"{modifier_rank=}, {sorted(chosen)}")
        edits = _Edits(tensors, states, [name for name in known if name in chosen], modifier_rank)
        yield iter(edits)
    except BaseException:
        if edits is not None:
            edits.leave(_FAILED)
        raise
    else:
        edits.leave(_DONE)
    finally:
        # Every rank comes here: one that raised has told the others.
        states.after_load()


class _Edits:
    """The iterator, and what ranks tell each other between its items."""

    def __init__(self, tensors: LiveTensors, states: Any, names: list[str], modifier: int) -> None:
        self._tensors, self._states, self._names, self._modifier = tensors, states, names, modifier
        self._held: tuple[str, Tensor | None] | None = None
        self._over = False

    def __iter__(self) -> Iterator[tuple[str, Tensor | None]]:
        for name in self._names:
            self._agree(_NEXT)
            self._write()
            self._held = (name, self._tensors.full(name))
            yield self._held
        self.leave(_DONE)

    def leave(self, why: int) -> None:
        """Writes the last change, once; raises where ranks leave for different reasons."""
        if self._over:
            return
        self._over = True
        self._agree(why)
        if why == _DONE:
            self._write()

    def _agree(self, why: int) -> None:
        # Without this, a rank that raises or breaks off alone would leave the others in a collective.
        told = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=self._tensors.device)
        told[dist.get_rank()] = why
        dist.all_reduce(told)
        reasons = told.tolist()
        if len(set(reasons)) > 1:
            self._over = True
            said = "; ".join(f"rank {rank} {_WORDS[reason]}" for rank, reason in enumerate(reasons))
            after = f"after {self._held[0]}" if self._held else "before the first parameter"
            if why != _FAILED:
                raise CheckpointError(f"ds_etp.edit_parameters: ranks parted {after}: {said}")

    def _write(self) -> None:
        """Brings the tensor that was out to every rank, which keeps its part."""
        if self._held is None:
            return
        (name, tensor), self._held = self._held, None
        spec = self._tensors.specs[name]
        if tensor is None:
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self._tensors.device)
        with torch.no_grad():
            dist.broadcast(tensor, src=self._modifier)
            own = self._tensors.own(name)
            if own is not None:
                state = self._states.param_state(own.parameter)
                if state.is_local:
                    state.write(WEIGHT, take_chunks(tensor, own.local_shape, own.chunks))
