"""What users wrote under an old name works for one release, says so, and means the same."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import ds_etp
from ds_etp.config.block import parse_block
from ds_etp.errors import ConfigError
from ds_etp.experts import registry


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"plan": "allgather"}, {"dispatcher": "allgather"}),
        ({"plan": "alltoall_gather_first"}, {"dispatcher": "alltoall_etp_first"}),
        ({"dispatcher": "alltoall_gather_first"}, {"dispatcher": "alltoall_etp_first"}),
        ({"node_weight": 3.0}, {"inter_node_cost": 3.0}),
    ],
    ids=str,
)
def test_keys_of_the_block(old: dict[str, Any], new: dict[str, Any]) -> None:
    with pytest.warns(FutureWarning, match="is now called"):
        block = parse_block({"expert_tensor_parallel": old})
    assert block == parse_block({"expert_tensor_parallel": new})


@pytest.mark.parametrize("key", ["equal_batches", "static_shapes"])
def test_keys_without_effect(key: str) -> None:
    with pytest.warns(FutureWarning, match=rf"expert_tensor_parallel\.{key} has no effect any more"):
        block = parse_block({"expert_tensor_parallel": {key: True, "ep_size": 2}})
    assert block == parse_block({"expert_tensor_parallel": {"ep_size": 2}})


def test_both_names_of_a_key() -> None:
    block = {"plan": "allgather", "dispatcher": "alltoall"}
    with pytest.raises(ConfigError, match=r"plan='allgather' is the old name of 'dispatcher', which is there too"):
        parse_block({"expert_tensor_parallel": block})


def test_shard_specs() -> None:
    with pytest.warns(FutureWarning) as warned:
        spec = ds_etp.Cut(dim=1, parts=2, spare=True)
    assert spec == ds_etp.ShardSpec(dim=1, fused_chunks=2, has_zero_compute_rows=True)
    said = " ".join(str(entry.message) for entry in warned)
    assert all(name in said for name in ("ds_etp.ShardSpec", "fused_chunks", "has_zero_compute_rows"))


class Experts(nn.Module):
    pass


def test_arguments_of_register_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ROWS", {})
    specs = {"up": ds_etp.ShardSpec(dim=1)}
    with pytest.warns(FutureWarning, match="cuts is now called specs"):
        ds_etp.register_layout(Experts, cuts=specs)
    assert next(iter(registry._ROWS.values())).specs == specs
    for wrong in ({}, {"specs": specs, "cuts": specs}, {"other": specs}):
        with pytest.raises(TypeError):
            ds_etp.register_layout(Experts, **wrong)


def test_methods_of_adapters() -> None:
    with pytest.warns(FutureWarning, match=r"Adapter\.on_local_rows is now called local_experts_forward"):

        class Adapter(ds_etp.ShardedExperts):
            def on_local_rows(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
                return 2 * super().on_local_rows(x, index, weights)  # type: ignore[misc]

    assert Adapter.local_experts_forward is Adapter.on_local_rows


def test_the_base_class_of_adapters() -> None:
    import ds_etp.experts

    with pytest.warns(FutureWarning, match=r"ds_etp\.experts\.ShardedExperts is now called ds_etp\.ShardedExperts"):
        assert ds_etp.experts.ShardedExperts is ds_etp.ShardedExperts
