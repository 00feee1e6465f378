"""Config files: one reader, which takes what DeepSpeed takes, for the command line and for `from_pretrained`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import hjson  # type: ignore[import-untyped]
import pytest

import ds_etp
from ds_etp.cli.main import main
from ds_etp.config.file import read_config_file
from ds_etp.errors import ConfigError

HJSON = """{
  # a comment
  "zero_optimization": {"stage": 1},  // and another
  "expert_tensor_parallel": {"ep_sise": 2,},
}"""


def by_check(path: Path) -> None:
    """The command, whose message is what it prints on stderr."""
    assert main(["check", str(path), "--gpus", "2"]) == 2


def by_from_pretrained(path: Path) -> None:
    """The function, whose message is what it raises."""
    with pytest.raises(ConfigError) as raised:
        ds_etp.from_pretrained("nowhere", path)
    print(raised.value, file=sys.stderr)


@pytest.mark.parametrize("read", [by_check, by_from_pretrained])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HJSON, "expert_tensor_parallel.ep_sise=2 is not a key of this block"),  # so the rest of it was read
        ('{"a": ', "is not JSON"),
        ('{"a": {"b": 1, "b": 2}}', "key 'b' is given twice"),
        ("[1]", "does not hold a JSON object"),
        (None, "can't be read: No such file"),
    ],
)
def test_both_readers_say_the_same(
    read: Callable[[Path], None],
    text: str | None,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    read(path)
    assert says in capsys.readouterr().err


def test_values_are_those_of_deepspeeds_reader(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(HJSON)
    assert read_config_file(path) == hjson.load(path.open())
