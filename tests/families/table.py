"""docs/models.md: every family of the installed transformers, as ds_etp sees its experts. `make docs` writes it.

Nothing here is listed by hand but the notes: each family's tiny model is built on the meta device and its layout read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn
from transformers.integrations import moe

from ds_etp.experts.adapters import ExpertMajorRows, IdentityExperts
from ds_etp.experts.layout import ExpertsLayout, UnsupportedExperts
from ds_etp.experts.registry import find_experts, read_layout
from ds_etp.patches.deepspeed.autotp import dense_plan
from tests.families.discover import Family, families
from tests.families.tiny import make_tiny

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
# What one needs to know besides, by family.
NOTES = {
    "diffusion_gemma": "encoder and decoder share their experts' weights",
    "ernie4_5_vl_moe": "text and vision experts: each batch needs tokens of both kinds on every rank of an expert "
    "group, or of the same one kind on all",
    "inkling2_loop": "some layers run several times in one forward pass",
    "longcat_flash": "`ep_size` must divide `zero_expert_num` too",
}
_ADAPTERS = {ExpertMajorRows: "called with equally many rows an expert", IdentityExperts: "identity experts"}
_HEADER = """\
# Families of models

Every family of transformers {transformers} with routed experts, and whether ds_etp splits it. `make docs` writes this
page: it builds a small model of each family and reads the layout of its experts as `deepspeed.initialize` would. The
tests train each family marked "yes" with split experts and unsharded, with each of its implementations; of the others
they check that they are refused before anything is changed. For a model of yours: `ds-etp check --model`.

- experts: how the weights of all experts of a layer are laid out.
- implementations: of transformers' `experts_implementation`, those the tests train with.
- AutoTP: whether DeepSpeed {deepspeed} knows the styles of the family's `tp_plan`, its experts apart; if not, those it
  doesn't know. "no plan": AutoTP goes by rules of its own. Only `tensor_parallel.autotp_size` above 1 asks for it, and
  `tensor_parallel.partition_config` replaces it. A "yes" is about the styles alone.

{supported} of {all} families are split.

| family | class | experts | implementations | split | AutoTP | notes |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """One line of the table. `refusal` is empty where the family is supported."""

    family: Family
    layout: str
    refusal: str
    autotp: str

    def cells(self) -> tuple[str, ...]:
        """The line's cells."""
        return (
            self.family.folder,
            f"`{self.family.experts}`",
            self.layout or "-",
            "eager, grouped_mm" if self.family.decorated else "eager only",
            "refused" if self.refusal else "yes",
            self.autotp,
            self.refusal or NOTES.get(self.family.name, ""),
        )


@cache
def rows() -> tuple[Row, ...]:
    """One for each family, by name."""
    return tuple(_row(family) for family in families())


def _row(family: Family) -> Row:
    with torch.device("meta"):
        model = make_tiny(family)
    modules = find_experts(model)
    own = [path for path, module in modules.items() if type(module).__name__ == family.experts]
    assert own, f"{family.name}: ds_etp finds no {family.experts}"
    try:
        layouts = {path: read_layout(path, module) for path, module in modules.items()}
    except UnsupportedExperts as error:
        # "... cannot split PATH (CLASS): REASON. ADVICE"
        return Row(family, "", str(error).partition("): ")[2].split(". ")[0], "-")
    words = ", ".join(dict.fromkeys(", ".join(_words(modules[path], layouts[path])) for path in own))
    plan = dense_plan(model, layouts)
    autotp = "yes" if plan.entries else "no plan"
    return Row(family, words, "", f"no: {', '.join(plan.refused)}" if plan.refused else autotp)


def _words(module: nn.Module, layout: ExpertsLayout) -> Iterator[str]:
    """A layout in words, one phrase for each thing that can differ."""
    up = layout.parameters.get("gate_up_proj")
    columns = layout.parameters["up_proj" if up is None else "gate_up_proj"]
    if up is None:
        yield "no gate"
    else:
        yield "gate and up concatenated" if up.fused_chunks == 2 else "gate and up interleaved"
    if columns.dim == 2:
        yield "transposed"
    if any(name.endswith("_bias") for name in layout.parameters):
        yield "biases"
    gate = getattr(type(module), "_apply_gate", moe._default_apply_gate)
    if up is not None and gate is not moe._default_apply_gate:
        yield "own gate function"
    if layout.adapter is not None:
        yield _ADAPTERS[layout.adapter]


def document() -> str:
    """The whole page."""
    lines = [f"| {' | '.join(row.cells())} |" for row in rows()]
    header = _HEADER.format(
        transformers=version("transformers"),
        deepspeed=version("deepspeed"),
        supported=len({row.family.folder for row in rows()} - {row.family.folder for row in rows() if row.refusal}),
        all=len({row.family.folder for row in rows()}),
    )
    return header + "\n".join(lines) + "\n"


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.families.table", description="Write docs/models.md.")
    parser.add_argument("--out", type=Path, default=DOCUMENT, help="the file to write (default docs/models.md)")
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
