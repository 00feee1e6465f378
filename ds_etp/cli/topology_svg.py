"""SVG of a topology: every rank with its groups, once for the dense path and once for experts. No torch.

A cell is a rank, a frame a node. Every rank has a chip for each group it is in, coloured by the kind of group and
numbered as in `Topology.groups`. Cells of one fill hold the same weights.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass

from ds_etp.parallel.topology import GroupKind, Topology

DENSE: tuple[GroupKind, ...] = ("tp", "cp", "dp", "pp")
EXPERT: tuple[GroupKind, ...] = ("expt_tp", "ep", "expert_dp", "pp")
_SPLITTING = ("tp", "expt_tp", "ep", "pp")  # ranks of one such group hold different weights
_OPTIONAL = ("cp", "pp")  # left out where they are 1

# Two tones of each, for neighbouring groups; white text is legible on all.
COLOURS: dict[GroupKind, tuple[str, str]] = {
    "tp": ("#1f5fa8", "#3d7cc4"),
    "cp": ("#0b7285", "#158a9c"),
    "dp": ("#b34a00", "#c75f14"),
    "pp": ("#4a4a4a", "#6a6a6a"),
    "expt_tp": ("#1e7a34", "#2f8d45"),
    "ep": ("#6b3fa0", "#8258b8"),
    "expert_dp": ("#b02330", "#c43f4b"),
}
_MEANINGS: dict[GroupKind, str] = {
    "tp": "split attention, and hold the same batch",
    "cp": "hold parts of the same sequences",
    "dp": "hold the same dense weights",
    "pp": "hold different layers",
    "expt_tp": "each hold a part of the same experts",
    "ep": "each hold other experts",
    "expert_dp": "hold the same expert weights",
}
_CELL, _GAP, _FRAME, _PANEL, _MARGIN = 100, 6, 12, 40, 24  # widths: of a cell, between cells, of frames and margins
_CHIP, _HEAD = 16, 22  # heights: of a chip, of a cell's or a frame's heading
_PER_ROW = 4
_FONT = "Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class _Grid:
    """Where frames and cells go in a panel."""

    per_node: int
    nodes: int
    chips: int

    @property
    def columns(self) -> int:
        """Frames side by side: one up to 4 nodes, then about as wide as high."""
        return next(count for count in range(1, self.nodes + 1) if count * count * 4 >= self.nodes)

    @property
    def cells(self) -> int:
        """Cells side by side in a frame."""
        return min(self.per_node, _PER_ROW)

    @property
    def cell_height(self) -> int:
        return _HEAD + self.chips * (_CHIP + 2) + 4

    @property
    def frame(self) -> tuple[int, int]:
        """Width and height of a frame."""
        rows = -(-self.per_node // self.cells)
        return (
            self.cells * (_CELL + _GAP) - _GAP + 2 * _FRAME,
            rows * (self.cell_height + _GAP) - _GAP + _HEAD + _FRAME,
        )

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of a panel."""
        width, height = self.frame
        rows = -(-self.nodes // self.columns)
        return self.columns * (width + _FRAME) - _FRAME, rows * (height + _FRAME) - _FRAME

    def frame_at(self, node: int) -> tuple[int, int]:
        """A node's corner, in its panel."""
        width, height = self.frame
        return node % self.columns * (width + _FRAME), node // self.columns * (height + _FRAME)

    def cell_at(self, rank: int) -> tuple[int, int]:
        """A rank's corner, in its panel."""
        x, y = self.frame_at(rank // self.per_node)
        place = rank % self.per_node
        return (
            x + _FRAME + place % self.cells * (_CELL + _GAP),
            y + _HEAD + place // self.cells * (self.cell_height + _GAP),
        )


def draw_topology(topology: Topology, per_node: int = 8) -> str:
    """The picture as the text of an SVG file.

    Args:
        topology: the sizes.
        per_node: ranks in a node; the last one may have fewer.
    """
    per_node = min(per_node, topology.world)
    paths = [[kind for kind in kinds if _shown(topology, kind)] for kinds in (DENSE, EXPERT)]
    grid = _Grid(per_node, -(-topology.world // per_node), max(map(len, paths)))
    width, height = grid.size
    legend = list(dict.fromkeys([*paths[0], *paths[1]]))
    # Titles are as long as they are, whatever few ranks there are.
    panel = max(width, 430)
    top = _MARGIN + 56
    total = 2 * _MARGIN + 2 * panel + _PANEL, top + 30 + height + 34 + (len(legend) + 1) * 20 + _MARGIN
    svg = ET.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {total[0]} {total[1]}", width=str(total[0]),
        height=str(total[1]), role="img",
    )  # fmt: skip
    ET.SubElement(svg, "title").text = f"{topology.world} ranks: {_sizes(topology)}"
    _rect(svg, 0, 0, *total, fill="#ffffff")
    _text(svg, _MARGIN, _MARGIN + 18, f"{topology.world} ranks, seen by attention and by experts", 20, weight="bold")
    _text(svg, _MARGIN, _MARGIN + 40, _sizes(topology), 13)
    titles = ("Dense path, fastest first: tp, cp, dp, pp", "Expert path, fastest first: etp, ep, edp, pp")
    for place, (kinds, title) in enumerate(zip(paths, titles, strict=True)):
        x = _MARGIN + place * (panel + _PANEL)
        group = ET.SubElement(svg, "g", {"class": "panel", "data-path": ("dense", "expert")[place]})
        _text(group, x, top + 16, title, 14, weight="bold")
        _panel(group, topology, grid, kinds, x, top + 30)
    _legend(svg, topology, legend, top + 30 + height + 34)
    ET.indent(svg)
    return ET.tostring(svg, encoding="unicode", xml_declaration=True) + "\n"


def _shown(topology: Topology, kind: GroupKind) -> bool:
    return kind not in _OPTIONAL or len(topology.groups(kind)) < topology.world


def _sizes(topology: Topology) -> str:
    dense = " x ".join(f"{name} {getattr(topology, name)}" for name in ("tp", "cp", "dp", "pp"))
    expert = " x ".join(f"{name} {getattr(topology, name)}" for name in ("etp", "ep", "edp", "pp"))
    return f"{dense}   =   {expert}"


def _panel(
    parent: ET.Element, topology: Topology, grid: _Grid, kinds: Sequence[GroupKind], left: int, top: int
) -> None:
    groups = {kind: topology.groups(kind) for kind in kinds}
    number = {kind: {rank: n for n, group in enumerate(groups[kind]) for rank in group} for kind in kinds}
    fills = _fills(topology, [kind for kind in kinds if kind in _SPLITTING])
    for node in range(grid.nodes):
        x, y = grid.frame_at(node)
        _rect(parent, left + x, top + y, *grid.frame, fill="#f4f4f4", stroke="#999999", rx="6", cls="node")
        _text(parent, left + x + _FRAME, top + y + 15, f"node {node}", 11, fill="#555555")
    for rank in range(topology.world):
        x, y = (offset + start for offset, start in zip(grid.cell_at(rank), (left, top), strict=True))
        cell = ET.SubElement(parent, "g", {"class": "rank", "data-rank": str(rank)})
        _rect(cell, x, y, _CELL, grid.cell_height, fill=fills[rank], stroke="#444444", rx="4", cls="cell")
        _text(cell, x + 8, y + 16, str(rank), 14, weight="bold")
        for place, kind in enumerate(kinds):
            group = number[kind][rank]
            _chip(cell, kind, group, groups[kind][group], x + 6, y + _HEAD + place * (_CHIP + 2))


def _chip(parent: ET.Element, kind: GroupKind, number: int, ranks: Sequence[int], x: int, y: int) -> None:
    chip = ET.SubElement(parent, "g", {"class": "chip", "data-kind": kind, "data-group": str(number)})
    ET.SubElement(chip, "title").text = f"{kind} group {number}: ranks {', '.join(map(str, ranks))}"
    alone = len(ranks) == 1
    colour = COLOURS[kind][number % 2]
    _rect(chip, x, y, _CELL - 12, _CHIP, fill="#ffffff" if alone else colour, stroke=colour, rx="3")
    _text(chip, x + 5, y + 12, f"{kind} {number}", 11, fill=colour if alone else "#ffffff")


def _legend(svg: ET.Element, topology: Topology, kinds: Sequence[GroupKind], top: int) -> None:
    legend = ET.SubElement(svg, "g", {"class": "legend"})
    note = "A chip is a group the rank is in, white where it is alone in it. Cells of one fill hold the same weights."
    _text(legend, _MARGIN, top + 12, note, 12)
    for place, kind in enumerate(kinds, 1):
        y = top + place * 20
        groups = topology.groups(kind)
        _rect(legend, _MARGIN, y, 24, 14, fill=COLOURS[kind][0], rx="3")
        count = "1 group" if len(groups) == 1 else f"{len(groups)} groups"
        ranks = "1 rank" if len(groups[0]) == 1 else f"{len(groups[0])} ranks"
        _text(legend, _MARGIN + 32, y + 12, f"{kind}: {count} of {ranks}, which {_MEANINGS[kind]}", 12)


def _fills(topology: Topology, kinds: Sequence[GroupKind]) -> list[str]:
    """A pale colour for each rank, the same for ranks with the same place in their groups of all these kinds."""
    places: list[tuple[int, ...]] = [() for _ in range(topology.world)]
    for kind in kinds:
        for group in topology.groups(kind):
            for place, rank in enumerate(group):
                places[rank] += (place,)
    number = {key: n for n, key in enumerate(dict.fromkeys(places))}
    # Neighbours are far apart on the wheel.
    stride = next((step for step in range(max(len(number) * 2 // 5, 1), len(number)) if _coprime(step, len(number))), 1)
    return [f"hsl({number[key] * stride % len(number) * 360 / len(number):.1f}, 70%, 88%)" for key in places]


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1


def _rect(
    parent: ET.Element, x: float, y: float, width: float, height: float, *, fill: str, stroke: str = "none",
    rx: str = "0", cls: str = "",
) -> None:  # fmt: skip
    numbers = {"x": x, "y": y, "width": width, "height": height}
    attributes = {name: f"{value:g}" for name, value in numbers.items()} | {"fill": fill, "stroke": stroke, "rx": rx}
    ET.SubElement(parent, "rect", attributes | ({"class": cls} if cls else {}))


def _text(
    parent: ET.Element, x: float, y: float, text: str, size: int, *, fill: str = "#111111", weight: str = "normal"
) -> None:
    attributes = {"x": f"{x:g}", "y": f"{y:g}", "fill": fill, "font-family": _FONT, "font-size": str(size)}
    ET.SubElement(parent, "text", attributes | {"font-weight": weight}).text = text
