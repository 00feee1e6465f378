"""README.md and docs/: their commands parse and print what is shown, their files, links and pictures are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ds_etp.cli.main import main, make_parser
from tests.docs.commands import PAGES, ROOT, Shown, shown_commands
from tests.docs.pictures import FOLDER, PICTURE, draw_dispatchers, drawing_commands, picture_of

COMMANDS = shown_commands()
OURS = [shown for shown in COMMANDS if shown.words[0] == "ds-etp"]
# What is run here too: what needs no checkpoint and no file of an earlier command. Charts take seconds: left out.
QUICK = [
    shown
    for shown in OURS
    if shown.output
    and shown.words[1] in ("plan", "topology", "check")
    and not shown.words[2].startswith("runs/")
    and all((ROOT / word).exists() for word in shown.words if word.startswith(("configs/", "tests/")))
]
_STORED = re.compile(r"^(configs|examples|tests|benchmarks|docs)/")


def test_there_are_commands() -> None:
    """The reader of pages sees what is there: whole commands, and what they print."""
    by_page = {page.name: [shown for shown in COMMANDS if shown.page == page.name] for page in PAGES}
    assert len(by_page["guide.md"]) >= 15 and len(by_page["README.md"]) >= 8
    assert any(shown.words[-2:] == ("--write", "runs/mixtral.json") for shown in by_page["guide.md"])
    assert len(QUICK) >= 12


@pytest.mark.parametrize("shown", OURS, ids=str)
def test_options_are_real(shown: Shown) -> None:
    make_parser().parse_args(shown.words[1:])


@pytest.mark.parametrize("shown", COMMANDS, ids=str)
def test_files_and_scripts_are_there(shown: Shown) -> None:
    words = [word for word in shown.words if not word.startswith("-")]
    for word in words:
        assert not _STORED.match(word) or (ROOT / word).exists(), word
    if shown.words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        targets = [word for word in words[1:] if "=" not in word]
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    script = next((word for word in words if word.startswith("examples/")), None)
    if script is None:
        return
    source = (ROOT / script).read_text() + (ROOT / "examples" / "common.py").read_text()
    own = shown.words[shown.words.index(script) + 1 :]
    for option in (word for word in own if word.startswith("--")):
        assert f'"{option}"' in source, f"{script} has no {option}"


@pytest.mark.parametrize("shown", QUICK, ids=str)
def test_what_is_shown_is_printed(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)
    main(without_files(shown.words[1:], tmp_path))
    out, err = capsys.readouterr()
    printed = [line.rstrip() for line in (out + err).splitlines()]
    for line in shown.output:
        assert line.rstrip() in printed or line.startswith(("drawn: ", "written: ")), line


def without_files(arguments: tuple[str, ...], folder: Path) -> list[str]:
    """Arguments that write into another folder, and draw no chart."""
    kept = list(arguments)
    for option in ("--chart", "--write", "--svg"):
        if option in kept:
            place = kept.index(option)
            name = Path(kept[place + 1]).name
            kept[place : place + 2] = [] if option == "--chart" else [option, str(folder / name)]
    return kept


def test_pictures_are_those_drawn_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`make docs` would change nothing. Charts differ with matplotlib's release: they need to be there."""
    assert (ROOT / PICTURE).read_text(encoding="utf-8") == draw_dispatchers()
    drawn = {PICTURE}
    for arguments in drawing_commands():
        picture = picture_of(arguments)
        assert picture is not None
        drawn.add(picture)
        if picture.suffix == ".svg":
            assert main(without_files(arguments, tmp_path)) == 0
            assert (tmp_path / picture.name).read_bytes() == (ROOT / picture).read_bytes(), f"{picture}: make docs"
    assert drawn == {path.relative_to(ROOT) for path in (ROOT / FOLDER).iterdir()}
    shown = {picture for page in PAGES for picture in re.findall(r"!\[[^\]]+\]\((pictures/[^)]+)\)", page.read_text())}
    assert {f"docs/{picture}" for picture in shown} == {str(picture) for picture in drawn}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {anchor_of(title) for title in titles}, f"{page.name}: {target}"


def anchor_of(title: str) -> str:
    """What GitHub makes of a title."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
