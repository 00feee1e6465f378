"""Draws docs/pictures/ anew: `make docs`. What a page's own `ds-etp` commands draw, and the four dispatchers."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from ds_etp.cli.main import main
from ds_etp.cli.topology_svg import COLOURS
from ds_etp.parallel.topology import GroupKind, Topology
from tests.docs.commands import ROOT, shown_commands

FOLDER = Path("docs/pictures")
PICTURE = FOLDER / "dispatchers.svg"
# One node of 4 ranks, experts in two halves and two parts; for "replicated" attention is split over all four.
_APART, _TOGETHER = Topology(4, etp=2, ep=2), Topology(4, tp=4, etp=2, ep=2)
_WHERE: dict[GroupKind, str] = {"ep": "ep", "expt_tp": "expt_tp", "expert_model_parallel": "ep x expt_tp"}
_PAINT: dict[GroupKind, str] = {
    "ep": COLOURS["ep"][0],
    "expt_tp": COLOURS["expt_tp"][0],
    "expert_model_parallel": COLOURS["dp"][0],
}
_WIDTH, _LEFT, _STEP, _TOP = 430, 118, 82, 78
_FONT = "Helvetica, Arial, sans-serif"

Way = Literal["out", "back"]
Message = tuple[Way, GroupKind, str]
# dispatcher -> the messages that bring a token of rank 0 to its experts and the result back, in order
MESSAGES: dict[str, tuple[Message, ...]] = {
    "replicated": (("back", "expert_model_parallel", "sums, over all"),),
    "allgather": (("out", "expert_model_parallel", "every token to all"), ("back", "expert_model_parallel", "sums")),
    "alltoall": (
        ("out", "ep", "where it has experts"),
        ("out", "expt_tp", "to the other part"),
        ("back", "expt_tp", "parts are summed"),
        ("back", "ep", "one row back"),
    ),
    "alltoall_etp_first": (
        ("out", "expt_tp", "to the other part"),
        ("out", "ep", "where it has experts"),
        ("back", "ep", "one row back"),
        ("back", "expt_tp", "parts are summed"),
    ),
}


def topology_of(dispatcher: str) -> Topology:
    """The sizes a dispatcher is drawn with."""
    return _TOGETHER if dispatcher == "replicated" else _APART


def hops(dispatcher: str) -> Iterator[tuple[Message, list[tuple[int, int]]]]:
    """Each message of a dispatcher and its arrows, from rank to rank. Rank 0's token has experts on both parts."""
    topology, messages = topology_of(dispatcher), MESSAGES[dispatcher]
    held = set(topology.group_of("tp", 0))  # ranks that have the token, before any message
    rounds: list[list[tuple[int, int]]] = []
    for way, kind, _ in messages:
        if way == "out":
            arrows = [(a, b) for a in sorted(held) for b in topology.group_of(kind, a) if b not in held]
            held |= {b for _, b in arrows}
            rounds.append(arrows)
    # Back is the way out, turned round and in reverse; what came without a message goes back over the block at once.
    returns = [[(b, a) for a, b in arrows] for arrows in reversed(rounds)] or [
        [(rank, 0) for rank in sorted(held - {0})]
    ]
    yield from zip(messages, [*rounds, *returns], strict=True)


def draw_dispatchers() -> str:
    """All dispatchers side by side, as the text of an SVG file."""
    rows = max(len(messages) for messages in MESSAGES.values())
    width, height = 2 * _WIDTH, 2 * (_TOP + (rows + 1) * 34 + 30)
    svg = ET.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}", width=str(width),
        height=str(height), role="img",
    )  # fmt: skip
    ET.SubElement(svg, "title").text = "How a token of rank 0 reaches its experts and comes back, by dispatcher"
    ET.SubElement(svg, "rect", width=str(width), height=str(height), fill="#ffffff")
    for place, dispatcher in enumerate(MESSAGES):
        _panel(svg, dispatcher, place % 2 * _WIDTH, place // 2 * height // 2)
    ET.indent(svg)
    return ET.tostring(svg, encoding="unicode", xml_declaration=True) + "\n"


def _panel(svg: ET.Element, dispatcher: str, left: int, top: int) -> None:
    topology = topology_of(dispatcher)
    _text(svg, left + 14, top + 24, dispatcher, 16, weight="bold")
    _text(svg, left + 14, top + 42, f"tp {topology.tp}, etp {topology.etp}, ep {topology.ep}", 12)
    messages = list(hops(dispatcher))
    end = top + _TOP + (len(messages) + 1) * 34 + 14
    for rank in range(4):
        x = left + _LEFT + rank * _STEP
        _text(svg, x - 24, top + 56, f"rank {rank}", 12, weight="bold")
        part = topology.index_in("ep", rank), topology.index_in("expt_tp", rank)
        _text(svg, x - 34, top + 70, f"experts {'AB'[part[0]]}, half {part[1] + 1}", 10)
        _line(svg, x, top + _TOP, x, end, "#cccccc")
    y = top + _TOP
    held = set(topology.group_of("tp", 0))
    for rank in held:
        _dot(svg, left + _LEFT + rank * _STEP, y + 4)
    turned = False
    for (way, kind, says), arrows in messages:
        if way == "back" and not turned:
            y += 34
            turned = True
            _text(svg, left + 14, y + 4, "experts run", 11, weight="bold")
            for rank in range(4):
                _box(svg, left + _LEFT + rank * _STEP, y)
        y += 34
        _text(svg, left + 14, y - 2, _WHERE[kind], 11, fill=_PAINT[kind], weight="bold")
        _text(svg, left + 14, y + 11, says, 9)
        for shift, (a, b) in enumerate(arrows):
            _arrow(svg, left + _LEFT + a * _STEP, left + _LEFT + b * _STEP, y - 6 + 7 * shift, _PAINT[kind], way)


def _arrow(svg: ET.Element, start: int, end: int, y: int, colour: str, way: Way) -> None:
    back = 6 if start < end else -6
    _line(svg, start, y, end - back, y, colour, "4 3" if way == "back" else "")
    points = f"{end},{y} {end - back},{y - 3} {end - back},{y + 3}"
    ET.SubElement(svg, "polygon", points=points, fill=colour)


def _line(svg: ET.Element, x1: int, y1: int, x2: int, y2: int, colour: str, dashes: str = "") -> None:
    numbers = {"x1": str(x1), "y1": str(y1), "x2": str(x2), "y2": str(y2), "stroke": colour, "stroke-width": "2"}
    ET.SubElement(svg, "line", numbers | ({"stroke-dasharray": dashes} if dashes else {}))


def _dot(svg: ET.Element, x: int, y: int) -> None:
    ET.SubElement(svg, "circle", cx=str(x), cy=str(y), r="5", fill="#111111")


def _box(svg: ET.Element, x: int, y: int) -> None:
    ET.SubElement(svg, "rect", x=str(x - 22), y=str(y - 9), width="44", height="18", rx="4", fill="#444444")


def _text(
    svg: ET.Element, x: int, y: int, text: str, size: int, *, fill: str = "#111111", weight: str = "normal"
) -> None:
    attributes = {"x": str(x), "y": str(y), "fill": fill, "font-family": _FONT, "font-size": str(size)}
    ET.SubElement(svg, "text", attributes | {"font-weight": weight}).text = text


def drawing_commands() -> list[tuple[str, ...]]:
    """Arguments of `ds-etp` in commands of the pages that write a picture there."""
    found: dict[tuple[str, ...], None] = {}
    for shown in shown_commands():
        if shown.words[0] == "ds-etp" and picture_of(shown.words) is not None:
            found[shown.words[1:]] = None
    return list(found)


def picture_of(words: Sequence[str]) -> Path | None:
    """The picture in the folder that a command writes."""
    return next((path for word in words if (path := Path(word)).parent == FOLDER), None)


def draw_all() -> None:
    """Writes every picture."""
    os.chdir(ROOT)
    PICTURE.write_text(draw_dispatchers(), encoding="utf-8")
    for arguments in drawing_commands():
        main(arguments)


if __name__ == "__main__":
    draw_all()
