"""Which optimizers give a part of a tensor the step that it has in the whole one: those that go entry by entry.

A rank holds parts of the experts' tensors. An optimizer that takes a norm, a factorization or a rotation of a tensor
(LAMB, Adafactor, Shampoo, SOAP, ...) takes that of the part, in silence. So optimizers are listed that are known not
to, by the package and the name of their class. No torch here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ds_etp.config.block import ExpertTensorParallelConfig
from ds_etp.config.deepspeed import BLOCK, lookup
from ds_etp.errors import ConfigError, config_error
from ds_etp.parallel.topology import Topology

_BITS = ("", "8bit", "32bit")
_TORCH = frozenset(
    ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
_DEEPSPEED = ("FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedLion")

# By package, the classes whose step goes entry by entry.
ELEMENTWISE: Mapping[str, frozenset[str]] = {
    "torch": _TORCH,
    # Muon doesn't, but patches/deepspeed/muon.py brings whole matrices together for it.
    "deepspeed": frozenset((*_DEEPSPEED, "MuonWithAuxAdam")),
    "apex": frozenset(("FusedAdam", "FusedSGD", "FusedAdagrad")),
    # In 8 bits states are rounded by blocks of a few hundred entries, which lie elsewhere in a part than in the whole:
    # the same optimizer, with other rounding errors.
    "bitsandbytes": frozenset(
        [f"{name}{bits}" for name in ("Adagrad", "RMSprop", "SGD") for bits in _BITS]
        + [f"{paged}{name}{bits}" for paged in ("", "Paged") for name in ("Adam", "AdamW", "Lion") for bits in _BITS]
        + [f"{paged}AdEMAMix{bits}" for paged in ("", "Paged") for bits in _BITS]
    ),
    "torchao": frozenset(f"{name}{kind}" for name in ("Adam", "AdamW") for kind in ("8bit", "4bit", "Fp8")),
    "schedulefree": frozenset(
        f"{name}ScheduleFree{kind}"
        for name in ("AdamW", "RAdam", "SGD")
        for kind in ("", "Closure", "Paper", "Reference")
    ),
    "lion_pytorch": frozenset(("Lion",)),
}
# By package, the classes that step another optimizer, and the attribute that has it.
WRAPPERS: Mapping[str, Mapping[str, str]] = {
    "accelerate": {"AcceleratedOptimizer": "optimizer", "DeepSpeedOptimizerWrapper": "optimizer"},
    "schedulefree": {"ScheduleFreeWrapper": "base", "ScheduleFreeWrapperReference": "base"},
}
# `optimizer.type` in DeepSpeed's config: its own names, in any case, torch's, and what a trainer fills in.
CONFIG_NAMES = frozenset(("adam", "adamw", "adagrad", "lion", "muon", "auto", *(name.lower() for name in _TORCH)))


def is_elementwise(optimizer: Any) -> bool:
    """Whether an optimizer is known to go entry by entry, or to be put right where it doesn't."""
    for wrapper in type(optimizer).__mro__:
        attribute = WRAPPERS.get(_package(wrapper), {}).get(wrapper.__name__)
        if attribute is not None and hasattr(optimizer, attribute):
            return is_elementwise(getattr(optimizer, attribute))
    for known in type(optimizer).__mro__:
        if known.__name__ in ELEMENTWISE.get(_package(known), ()):
            # A subclass with a step of its own may do anything. torch and schedulers wrap steps.
            own, listed = (inspect.unwrap(getattr(kind, "step")) for kind in (type(optimizer), known))  # noqa: B009
            return own is listed and not _looks_at_tensors(optimizer)
    return False


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _looks_at_tensors(optimizer: Any) -> bool:
    """bitsandbytes' options that need a norm of each tensor, or round it as one block."""
    options = getattr(optimizer, "args", None)
    return (
        getattr(options, "percentile_clipping", 100) != 100
        or (getattr(options, "max_unorm", 0.0) or 0.0) > 0
        or not getattr(options, "block_wise", True)
    )


def check_optimizer_name(
    ds_config: Mapping[str, object], block: ExpertTensorParallelConfig, topology: Topology
) -> None:
    """Refuses an optimizer named in DeepSpeed's config that doesn't fit split experts.

    Args:
        ds_config: the raw DeepSpeed config.
        block: our block of it.
        topology: the sizes it came to.

    Raises:
        ConfigError: names the optimizer and the key that lets it pass.
    """
    name = lookup(ds_config, "optimizer.type")
    if not isinstance(name, str) or block.allow_optimizer or not _splits(topology):
        return
    if name.lower() not in CONFIG_NAMES:
        raise _refusal("optimizer.type", name, topology)


def check_optimizer(optimizer: Any, block: ExpertTensorParallelConfig, topology: Topology) -> None:
    """Refuses an optimizer object that doesn't fit split experts. The same on all ranks.

    Raises:
        ConfigError: names its class and the key that lets it pass.
    """
    if not block.allow_optimizer and _splits(topology) and not is_elementwise(optimizer):
        kind = type(optimizer)
        raise _refusal("optimizer", f"{kind.__module__}.{kind.__qualname__}", topology)


def check_client_optimizer(
    client: Any, ds_config: Mapping[str, object], block: ExpertTensorParallelConfig, topology: Topology
) -> None:
    """`check_optimizer_name` or `check_optimizer`, by what `initialize` was given; a callable tells nothing yet."""
    if client is None:
        check_optimizer_name(ds_config, block, topology)
    elif hasattr(client, "param_groups"):
        check_optimizer(client, block, topology)


def _splits(topology: Topology) -> bool:
    """Whether a rank holds parts of the experts' tensors: rows and columns of matrices, or some of the E matrices."""
    return topology.etp * topology.ep > 1


def _refusal(key: str, name: str, topology: Topology) -> ConfigError:
    return config_error(
        key,
        name,
        f"is not known to update each entry of a tensor by itself: etp {topology.etp} x ep {topology.ep} splits the "
        "experts' tensors, and what an optimizer takes of a whole (a norm, a factorization) it would take of a shard",
        works="AdamW, Adam, SGD, Lion, Adagrad, RMSprop and their kin in torch, DeepSpeed, apex, bitsandbytes, torchao "
        "and schedulefree; DeepSpeed's Muon; or etp_size and ep_size 1",
        next_step=f'If it does update each entry by itself, set "allow_optimizer": true in {BLOCK}.',
    )
