"""One process group a rank, of groups that tile the world, in one call however many they are (torch 2.9 to 2.14).

`dist.new_group` is to be called by every rank for every group: thousands of calls for one kind of group in a large
world. Of what torch has for fewer calls, nothing makes groups again and again in one process:

- `new_group(use_local_synchronization=True)` is called by members only, and `split_group` once for all groups, but both
  name a group by its ranks and by how many groups the process knows at the moment. A name comes back after
  `destroy_process_group`, when gloo finds the addresses of the group before in the store, or while its first owner
  lives, which torch refuses; and members that know different numbers of groups have different names, and wait.
- `init_device_mesh` calls one of the two.

So here a rank makes its own group as `new_group` does for a member, and under the name that `new_group` would take from
its counter, which every rank moves on alike. With gloo only members meet. Where the default group is bound to a device,
the backend splits its communicator, once for all groups together. Where torch's own functions for it have other
parameters, every rank makes every group. Can go when `new_group` takes a name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

Partition = Sequence[Sequence[int]]

_POSITIONAL = ["group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"]
_BY_NAME = {"timeout", "device_id", "group_desc"}
# A type of its own in newer releases (2.13), for type checkers only.
_GroupName: Callable[[str], Any] = getattr(c10d, "GroupName", str)


def makes_one_group(helper: Callable[..., Any]) -> bool:
    """Whether torch's helper takes what `new_subgroup` gives it, and needs nothing else."""
    parameters = list(inspect.signature(helper).parameters.values())
    rest = parameters[len(_POSITIONAL) :]
    return (
        [parameter.name for parameter in parameters[: len(_POSITIONAL)]] == _POSITIONAL
        and {parameter.name for parameter in rest} >= _BY_NAME
        and all(parameter.default is not inspect.Parameter.empty for parameter in rest)
    )


# Of the torch that is installed, which is the same on all ranks.
_MAKES_ONE_GROUP = makes_one_group(c10d._new_process_group_helper)


def new_subgroup(own: Sequence[int], partition: Callable[[], Partition], desc: str) -> dist.ProcessGroup:
    """Makes this rank's group, with the timeout of the default group. Every rank calls it, in the same order.

    Args:
        own: the ranks of the group, ascending.
        partition: gives all groups, of which each rank is in one; asked only where they matter.
        desc: the group's `group_desc`.
    """
    world: Any = dist.group.WORLD
    backend, store = c10d._world.pg_map[world]
    # MPI makes its groups together, and a default group that is a Python class by a method of its own.
    together = backend == dist.Backend.MPI or hasattr(world, "new_group")
    if together or not _MAKES_ONE_GROUP or not _have_colors(world, partition):
        return new_subgroup_of_all(partition(), desc)
    name = f"{c10d._process_group_name(own, use_hashed_name=False)}:{own[0]}"  # the others of the call start elsewhere
    group: Any
    group, _ = c10d._new_process_group_helper(
        len(own),
        own.index(dist.get_rank()),
        list(own),
        backend,
        store,
        _GroupName(name),
        timeout=default_timeout(),
        device_id=world.bound_device_id,
        group_desc=desc,
    )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(own)}
    made: dist.ProcessGroup = group
    return made


def new_subgroup_of_all(partition: Partition, desc: str) -> dist.ProcessGroup:
    """The same by `new_group`: every rank makes every group."""
    rank, timeout = dist.get_rank(), default_timeout()
    made: dict[bool, dist.ProcessGroup] = {}
    for ranks in partition:
        made[rank in ranks] = dist.new_group(list(ranks), timeout=timeout, group_desc=desc)
    return made[True]


def default_timeout() -> timedelta:
    """What `init_process_group` was called with. `new_group` would take torch's own default for it."""
    world: Any = dist.group.WORLD
    for device in world._device_types:
        backend = world._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
        timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
        if timeout is not None:
            return timeout
    return c10d._get_default_timeout(dist.Backend(dist.get_backend()))


def _have_colors(world: Any, partition: Callable[[], Partition]) -> bool:
    """Whether a communicator that is split keeps all groups apart: it does so by a hash of their ranks."""
    if world.bound_device_id is None:
        return True
    groups = partition()
    return len({c10d._process_group_color(list(ranks)) for ranks in groups}) == len(groups)
