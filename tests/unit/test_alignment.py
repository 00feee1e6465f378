"""Shards that grouped_mm can't multiply are refused with what works, before anything is made."""

from __future__ import annotations

import pytest

from ds_etp import ConfigError, Topology
from ds_etp.families import read_layout
from ds_etp.patches.experts_interface import check_alignment
from tests.models import make_model


@pytest.mark.parametrize(("itemsize", "etp", "fits"), [(4, 4, True), (2, 4, False), (2, 2, True), (4, 8, False)])
def test_grouped_mm(itemsize: int, etp: int, fits: bool) -> None:
    """I is 16: a row of a quarter has 16 bytes in fp32, 8 in bf16."""
    model = make_model("mixtral", implementation="grouped_mm")
    path = "model.layers.0.mlp.experts"
    module = model.get_submodule(path)
    layout = read_layout(path, module)
    if fits:
        check_alignment(path, module, layout, Topology(8, etp=etp), itemsize)
        return
    with pytest.raises(ConfigError, match=r"etp_size=.*grouped_mm.*Values that work: 1, 2.*eager"):
        check_alignment(path, module, layout, Topology(8, etp=etp), itemsize)


def test_eager_has_no_such_limit() -> None:
    """Nor has it any other."""
    model = make_model("mixtral")
    module = model.get_submodule("model.layers.0.mlp.experts")
    layout = read_layout("experts", module)
    check_alignment("experts", module, layout, Topology(16, etp=16), 2)
