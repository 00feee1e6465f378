"""The same bits twice: what runs adds nothing up in any order, and loses no more digits than the unsharded module."""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_etp.config.block import ExpertTensorParallelConfig
from ds_etp.dispatch import pairs
from ds_etp.dispatch.cost import tokens_are_replicated
from ds_etp.dispatch.registry import DISPATCHERS
from ds_etp.experts.build import make_shard
from ds_etp.experts.registry import read_layout
from ds_etp.experts.sharded import shard_in_place
from ds_etp.parallel.topology import Topology
from tests.dispatch.layers import Tokens, data_rank, expert_groups, make_tokens
from tests.launcher import Launcher
from tests.models import make_model

_ATOMIC = ("aten::index_add", "aten::scatter_add", "aten::scatter_reduce", "aten::index_reduce")


class NoAtomics(TorchDispatchMode):
    """Raises where rows would be added up by atomics on CUDA, in forward and in what autograd makes of it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        adds = name.startswith(("aten::index_put", "aten::_index_put", "aten::put")) and (
            (kwargs or {}).get("accumulate") or (len(args) > 3 and args[3])
        )
        assert not name.startswith(_ATOMIC) and not adds, f"{name} adds rows up in any order"
        return func(*args, **(kwargs or {}))


def run_module(module: Any, tokens: Tokens) -> list[Tensor]:
    """The output, and the gradients of tokens, weights and parameters."""
    module.zero_grad()
    x, weights = tokens.leaves()
    y = module(x, tokens.index, weights)
    y.backward(tokens.grad)
    return [y.detach(), x.grad, weights.grad, *(parameter.grad for parameter in module.parameters())]


def sharded(whole: Any, groups: Any, dispatcher: str, **options: Any) -> Any:
    """An experts module as `deepspeed.initialize` shards it."""
    module, layout = deepcopy(whole), read_layout("experts", whole)
    block = ExpertTensorParallelConfig(**options)
    shard_in_place(module, make_shard("experts", module, layout, groups, dispatcher, block))
    return module


def dispatchers_of(topology: Topology) -> list[str]:
    return [name for name in DISPATCHERS if name != "replicated" or tokens_are_replicated(topology)]


def make_rows(count: int, seed: int, dtype: torch.dtype) -> Tokens:
    tokens = make_tokens(count, 4, 8, seed, hidden=32)
    values = vars(tokens)
    return Tokens(**{name: value.to(dtype) if value.is_floating_point() else value for name, value in values.items()})


def run_twice(sizes: tuple[int, int, int]) -> None:
    tp, ep, etp = sizes
    topology = Topology(dist.get_world_size(), tp=tp, ep=ep, etp=etp)
    whole = make_model("qwen3_moe", implementation="grouped_mm").get_submodule("model.layers.0.mlp.experts").bfloat16()
    tokens = make_rows(33 + data_rank(topology), data_rank(topology), torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        with expert_groups(topology) as groups:
            for dispatcher in dispatchers_of(topology):
                for few in (pairs.FEW_BYTES, 0):
                    with mock.patch.object(pairs, "FEW_BYTES", few), NoAtomics():
                        results = [run_module(sharded(whole, groups, dispatcher), tokens) for _ in range(2)]
                    for once, again in zip(*results, strict=True):
                        assert torch.equal(once, again), dispatcher
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.sample("(1, 2, 2)", "(4, 2, 2)")
@pytest.mark.parametrize("sizes", [(1, 2, 2), (4, 2, 2), (4, 4, 1), (2, 2, 2)], ids=str)
def test_the_same_bits_without_atomics(launcher: Launcher, sizes: tuple[int, int, int]) -> None:
    launcher.run(4, run_twice, sizes=sizes)


def errors(sizes: tuple[int, int, int]) -> dict[str, dict[str, tuple[float, float]]]:
    """By dispatcher and kind: mean error in bf16 of the sharded module, and of the unsharded one, against fp32."""
    tp, ep, etp = sizes
    topology = Topology(dist.get_world_size(), tp=tp, ep=ep, etp=etp)
    found: dict[str, dict[str, tuple[float, float]]] = {}
    with expert_groups(topology) as groups:
        for implementation in ("eager", "grouped_mm"):
            model = make_model("qwen3_moe", implementation=implementation)
            whole = model.get_submodule("model.layers.0.mlp.experts").bfloat16()
            tokens = make_rows(256, data_rank(topology), torch.bfloat16)
            exact = Tokens(**{k: v.float() if v.is_floating_point() else v for k, v in vars(tokens).items()})
            right, own = run_module(deepcopy(whole).float(), exact), run_module(whole, tokens)
            for dispatcher in dispatchers_of(topology):
                # In fp32 on the way beside a forward that adds up in fp32 too.
                dtype = "fp32" if implementation == "grouped_mm" else "auto"
                got = run_module(sharded(whole, groups, dispatcher, reduce_dtype=dtype), tokens)
                found[f"{dispatcher}, {implementation}"] = {
                    kind: tuple((value.float() - right[i]).abs().mean().item() for value in (got[i], own[i]))
                    for i, kind in enumerate(("output", "token grad"))
                }
    return found


@pytest.mark.sample("(1, 4, 1)", "(4, 4, 1)")
@pytest.mark.parametrize("sizes", [(1, 4, 1), (4, 4, 1), (2, 4, 1)], ids=str)
def test_no_more_error_than_the_unsharded_module(launcher: Launcher, sizes: tuple[int, int, int]) -> None:
    """Four experts a token, on up to four ranks. Means over 8,192 entries: 2% is for chance."""
    for by_case in launcher.run(4, errors, sizes=sizes):
        for case, kinds in by_case.items():
            for kind, (got, own) in kinds.items():
                assert got <= 1.02 * own, f"{case}: {kind} {got:.3e}, unsharded {own:.3e}"
