"""The picture of a layout: every rank and every group is in it, nothing overlaps, and all of it is inside."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from ds_etp.cli.main import main
from ds_etp.cli.topology_svg import DENSE, EXPERT, draw_topology
from ds_etp.parallel.topology import Topology

SVG = "{http://www.w3.org/2000/svg}"
LAYOUTS = [
    (Topology(1), 8),
    (Topology(2, etp=2), 8),
    (Topology(8, tp=2, etp=4, ep=2), 2),
    (Topology(8, tp=8, etp=2), 8),
    (Topology(12, tp=3, etp=2, ep=2), 8),  # the second node is half full
    (Topology(16, tp=8, etp=2, ep=4), 8),
    (Topology(64, tp=4, cp=2, pp=2, etp=2, ep=4), 8),
    (Topology(512, tp=8, etp=4, ep=8), 8),
]
by_layout = pytest.mark.parametrize(("topology", "per_node"), LAYOUTS, ids=str)
Box = tuple[float, float, float, float]


def panels(topology: Topology, per_node: int) -> dict[str, ET.Element]:
    root = ET.fromstring(draw_topology(topology, per_node).encode())
    return {panel.attrib["data-path"]: panel for panel in root.iter(f"{SVG}g") if panel.get("class") == "panel"}


def parts(parent: ET.Element, kind: str) -> list[ET.Element]:
    return [element for element in parent.iter(f"{SVG}g") if element.get("class") == kind]


def box(rect: ET.Element) -> Box:
    x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def apart(a: Box, b: Box) -> bool:
    return a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def within(inner: Box, outer: Box) -> bool:
    return inner[0] >= outer[0] and inner[1] >= outer[1] and inner[2] <= outer[2] and inner[3] <= outer[3]


def text_box(text: ET.Element) -> Box:
    # Helvetica's letters are 0.6 of the font's size wide on average at most, bold ones included.
    size, x, y = float(text.attrib["font-size"]), float(text.attrib["x"]), float(text.attrib["y"])
    return x, y - size, x + 0.6 * size * len(text.text or ""), y


@by_layout
def test_every_rank_and_every_group_is_there(topology: Topology, per_node: int) -> None:
    drawn = panels(topology, per_node)
    for path, kinds in (("dense", DENSE), ("expert", EXPERT)):
        ranks = parts(drawn[path], "rank")
        assert [int(rank.attrib["data-rank"]) for rank in ranks] == list(range(topology.world))
        members: dict[str, dict[int, list[int]]] = {}
        for rank in ranks:
            for chip in parts(rank, "chip"):
                groups = members.setdefault(chip.attrib["data-kind"], {})
                groups.setdefault(int(chip.attrib["data-group"]), []).append(int(rank.attrib["data-rank"]))
        for kind in kinds:
            if kind in ("cp", "pp") and getattr(topology, kind) == 1:
                assert kind not in members
                continue
            assert members[kind] == {n: sorted(group) for n, group in enumerate(topology.groups(kind))}


@by_layout
def test_one_fill_is_one_set_of_weights(topology: Topology, per_node: int) -> None:
    drawn = panels(topology, per_node)
    for path, kinds in (("dense", ("tp", "pp")), ("expert", ("expt_tp", "ep", "pp"))):
        fills = {int(cell.attrib["data-rank"]): cell[0].attrib["fill"] for cell in parts(drawn[path], "rank")}
        places = {rank: tuple(topology.index_in(kind, rank) for kind in kinds) for rank in range(topology.world)}
        assert (
            len(set(fills.values()))
            == len(set(places.values()))
            == len({*zip(fills.values(), places.values(), strict=True)})
        )


@by_layout
def test_nothing_overlaps_and_all_is_inside(topology: Topology, per_node: int) -> None:
    root = ET.fromstring(draw_topology(topology, per_node).encode())
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for rect in root.iter(f"{SVG}rect"):
        assert within(box(rect), (0, 0, width, height))
    for text in root.iter(f"{SVG}text"):
        assert within(text_box(text), (0, 0, width, height)), text.text
    for panel in panels(topology, per_node).values():
        frames = [box(rect) for rect in panel.iter(f"{SVG}rect") if rect.get("class") == "node"]
        assert all(apart(a, b) for a, b in combinations(frames, 2))
        cells = [box(rank[0]) for rank in parts(panel, "rank")]
        assert all(apart(a, b) for a, b in combinations(cells[: 2 * per_node], 2))
        for rank, cell in enumerate(cells):
            assert within(cell, frames[rank // per_node])
        for rank in parts(panel, "rank"):
            chips = [box(chip[1]) for chip in parts(rank, "chip")]
            assert all(within(chip, box(rank[0])) for chip in chips)
            assert all(apart(a, b) for a, b in pairwise(chips))
            assert all(within(text_box(chip[2]), box(chip[1])) for chip in parts(rank, "chip"))
    assert max(b[2] for b in map(box, panels_rects(root, 0))) < min(b[0] for b in map(box, panels_rects(root, 1)))


def panels_rects(root: ET.Element, place: int) -> list[ET.Element]:
    return list(parts(root, "panel")[place].iter(f"{SVG}rect"))


def test_legend_and_title() -> None:
    topology = Topology(16, tp=8, etp=2, ep=4)
    root = ET.fromstring(draw_topology(topology).encode())
    title = root.find(f"{SVG}title")
    assert title is not None and title.text == "16 ranks: tp 8 x cp 1 x dp 2 x pp 1   =   etp 2 x ep 4 x edp 2 x pp 1"
    legend = [text.text or "" for text in parts(root, "legend")[0].iter(f"{SVG}text")]
    assert [line.partition(":")[0] for line in legend[1:]] == ["tp", "dp", "expt_tp", "ep", "expert_dp"]
    assert "expt_tp: 8 groups of 2 ranks, which each hold a part of the same experts" in legend


def test_topology_draws_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layout.svg"
    assert main(["topology", "--world", "8", "--etp", "2", "--ep", "2", "--svg", str(path), "--per-node", "4"]) == 0
    assert f"drawn: {path}" in capsys.readouterr().out.replace("\n", "")
    root = ET.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    assert len([rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "node"]) == 4


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--world", "2", "--svg", str(tmp_path / "none" / "layout.svg")]) == 2
    assert "layout.svg" in capsys.readouterr().err
