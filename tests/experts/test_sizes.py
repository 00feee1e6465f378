"""Sizes that a module keeps beside its weights shrink with them, also where E, I, K and H are the same number."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_etp
from ds_etp.experts import registry
from ds_etp.experts.layout import UnsupportedExperts
from ds_etp.experts.registry import find_experts, read_layout
from ds_etp.experts.sharded import Shard, shard_in_place
from ds_etp.experts.sizes import KNOWN, sizes_of
from ds_etp.parallel.topology import Topology
from tests.families.discover import families, models_folder
from tests.models import make_model

SPLIT = Topology(4, etp=2, ep=2)
# What each family's config calls (E, I, K), and its attributes that hold E and I.
FAMILIES: dict[str, tuple[tuple[str, str, str], set[str], set[str]]] = {
    "mixtral": (
        ("num_local_experts", "intermediate_size", "num_experts_per_tok"),
        {"num_experts"},
        {"intermediate_dim"},
    ),
    "qwen3_moe": (
        ("num_experts", "moe_intermediate_size", "num_experts_per_tok"),
        {"num_experts"},
        {"intermediate_dim"},
    ),
    "gpt_oss": (
        ("num_local_experts", "intermediate_size", "num_experts_per_tok"),
        {"num_experts"},
        {"intermediate_size"},
    ),
    "aria_text": (("moe_num_experts", "intermediate_size", "moe_topk"), {"num_experts"}, {"intermediate_dim"}),
    "nemotron_h": (
        ("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok"),
        {"num_experts"},
        {"intermediate_dim"},
    ),
    "llama4_text": (
        ("num_local_experts", "intermediate_size", "num_experts_per_tok"),
        {"num_experts"},
        {"intermediate_size", "expert_dim"},
    ),
    "longcat_flash": (
        ("n_routed_experts", "expert_ffn_hidden_size", "moe_topk"),
        {"num_routed_experts"},
        {"intermediate_size"},
    ),
}
HIDDEN = 32
# (E, I, K): I == E, K == E, I == K, I == H, and all but H the same.
SIZES = [(8, 8, 2), (4, 16, 4), (8, 4, 4), (4, HIDDEN, 2), (8, 8, 8)]


def shards(module: nn.Module) -> Iterator[Any]:
    """A copy of a module for each rank of `SPLIT`, in rank order."""
    layout = read_layout("experts", module)
    for ep_index in range(SPLIT.ep):
        for etp_index in range(SPLIT.etp):
            own, none = copy.deepcopy(module), SimpleNamespace()
            shard_in_place(own, Shard("experts", layout, SPLIT, ep_index, etp_index, none))  # type: ignore[arg-type]
            yield own


def integers(module: nn.Module) -> dict[str, int]:
    """A module's sizes."""
    return {name: value for name, value in vars(module).items() if type(value) is int}


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "E{}-I{}-K{}".format(*sizes))
@pytest.mark.parametrize("family", FAMILIES)
def test_shards_know_their_sizes(family: str, sizes: tuple[int, int, int]) -> None:
    names, of_experts, of_columns = FAMILIES[family]
    experts, columns, _ = sizes
    model = make_model(family, **dict(zip(names, sizes, strict=True)))
    module: Any = next(iter(find_experts(model).values()))
    before = integers(module)
    assert {before[name] for name in of_experts} == {experts}
    assert {before[name] for name in of_columns} == {columns}
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    x = torch.randn(6, HIDDEN, generator=generator)
    index = torch.randint(experts, (6, 1), generator=generator)
    weights = torch.rand(6, 1, generator=generator)
    total = torch.zeros_like(x)
    with torch.no_grad():
        for rank, own in enumerate(shards(module)):
            local = experts // SPLIT.ep
            changed = dict.fromkeys(of_experts, local) | dict.fromkeys(of_columns, columns // SPLIT.etp)
            assert integers(own) == before | changed
            here = index[:, 0] // local == rank // SPLIT.etp
            total[here] += own.local_experts_forward(x[here], index[here] % local, weights[here])
        torch.testing.assert_close(total, reference(family, module, x, index, weights))


def reference(family: str, module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The unsharded module's output, called as its block calls it."""
    out: Tensor
    if family == "llama4_text":
        chosen = torch.arange(module.num_experts)[:, None] == index[:, 0]
        out = (module(x.repeat(module.num_experts, 1)).view(module.num_experts, *x.shape) * chosen[..., None]).sum(0)
        return out * weights
    if family == "longcat_flash":  # its own fails for one expert a token: a second one, of weight 0
        index = torch.cat([index, index], 1)
        weights = torch.cat([weights, torch.zeros_like(weights)], 1)
    out = module(x, index, weights)
    return out


class Counting(nn.Module):
    """Experts whose forward reads sizes, some under names of their own."""

    def __init__(self, slots: int = 4, chosen: int = 2, columns: int = 16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.slots, self.num_experts_per_tok, self.never_read_experts = slots, chosen, slots
        self.up_proj = nn.Parameter(torch.randn(slots, HIDDEN, columns, generator=generator) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(slots, columns, HIDDEN, generator=generator) * 0.2)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """`[T, H]`, `[T, K]` and `[T, K]` to `[T, H]`; the average over K, of which a shard must not lose count."""
        chosen = torch.nn.functional.one_hot(index, self.slots).to(x.dtype) * weights[..., None]
        inner = torch.einsum("th,ehi->tei", x, self.up_proj).relu()
        return torch.einsum("tei,eih,tke->th", inner, self.down_proj, chosen) / self.num_experts_per_tok


SPECS = {"up_proj": ds_etp.ShardSpec(dim=2), "down_proj": ds_etp.ShardSpec(dim=1)}


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ROWS", dict(registry._ROWS))


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("sizes", [(4, 2, 16), (4, 4, 16), (4, 4, 4), (4, 2, 4)], ids=str)
def test_named_sizes(sizes: tuple[int, int, int]) -> None:
    ds_etp.register_layout(Counting, SPECS, sizes={"slots": "experts"})
    module = Counting(*sizes)
    slots, chosen, _ = sizes
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    index, weights = torch.arange(6)[:, None] % slots, torch.ones(6, 1)
    total = torch.zeros_like(x)
    for rank, own in enumerate(shards(module)):
        assert (own.slots, own.num_experts_per_tok, own.never_read_experts) == (slots // 2, chosen, slots)
        here = index[:, 0] // own.slots == rank // SPLIT.etp
        total[here] += own.local_experts_forward(x[here], index[here] % own.slots, weights[here])
    torch.testing.assert_close(total, module(x, index, weights))


@pytest.mark.usefixtures("rows")
def test_unknown_sizes_are_refused() -> None:
    ds_etp.register_layout(Counting, SPECS)
    with pytest.raises(UnsupportedExperts, match=r"reads slots=4, .*sizes=\{'slots': \.\.\.\}.* 'experts' or,"):
        read_layout("model.experts", Counting())
    with pytest.raises(UnsupportedExperts, match=r"whether it is 'experts' or 'intermediate' or, as None, neither"):
        read_layout("model.experts", Counting(columns=4))
    ds_etp.register_layout(Counting, SPECS, sizes={"slots": "intermediate"})
    with pytest.raises(UnsupportedExperts, match=r"slots is said to be .*'intermediate', which is 16, and it is 4"):
        read_layout("model.experts", Counting())
    ds_etp.register_layout(Counting, SPECS, sizes={"slots": None})
    assert read_layout("model.experts", Counting()).sizes == {}
    with pytest.raises(ds_etp.ConfigError, match=r"sizes\['slots'\]='E' is no kind of size.*\"experts\", \"interm"):
        ds_etp.register_layout(Counting, SPECS, sizes={"slots": "E"})  # type: ignore[dict-item]


def test_every_familys_names_are_known() -> None:
    """Of the installed transformers: a name that a later release brings is looked at, and put into `sizes`."""
    unknown: list[str] = []
    seen: set[str] = set()
    for family in families():
        path = models_folder() / family.folder / f"{family.module.rpartition('.')[2]}.py"
        row = registry._ROWS.get(f"{family.module}.{family.experts}")
        if row is not None and row.refusal:
            continue
        own = {} if row is None else row.sizes
        # The class alone: parsing whole files takes seconds.
        source = re.search(rf"^class {family.experts}\b.*?(?=^\S|\Z)", path.read_text(encoding="utf-8"), re.M | re.S)
        assert source is not None
        stored, read = set(), set()
        for node in ast.walk(ast.parse(source[0])):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                (stored if isinstance(node.ctx, ast.Store) else read).add(node.attr)
        modules = {"act_fn", "post_expert_norm", "identity_expert", "gate_up_proj", "up_proj", "down_proj"}
        biases = {f"{name}_bias" for name in modules}
        seen |= stored & read
        unknown += [
            f"{family.name}: {name}" for name in sorted(stored & read - modules - biases) if name not in KNOWN | own
        ]
    assert not unknown
    assert {"num_experts", "num_routed_experts", "hidden_size", "limit"} <= seen


def test_a_known_name_of_something_else() -> None:
    """A block's dense layer beside its experts: another size than theirs."""
    module = nn.Module()
    module.intermediate_size, module.num_experts = 64, 8  # type: ignore[assignment]
    assert sizes_of(module, 8, 16, {}) == {"num_experts": "experts"}
