"""Words that were given up are not in the package: one word means one thing, and it is the field's.

What users wrote with them still works by `ds_etp/aliases.py`, which is left out, with its sentences.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ds_etp"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "aliases.py")

# What no identifier of the package is, or has as a part of its name between underscores.
GONE = (
    # asynchronous collectives
    *(
        "Flight",
        "Trip",
        "fly",
        "land",
        "landed",
        "abandon",
        "take_off",
        "touch_down",
        "arrive",
        "meanwhile",
        "Meanwhile",
    ),
    # collectives of rows
    *("unsplit", "unshare", "spread_grads", "Sums", "pack_rows", "view_rows", "even_sizes"),
    # token dispatchers
    *("Plan", "BasePlan", "PLANS", "gather_first", "dispatch_first", "DispatchFirst", "GatherFirst"),
    *("Places", "near", "near_ep", "all_near", "far", "Lanes", "lanes", "lane", "Room", "arriving", "stayed"),
    *("Pick", "Put", "pick", "put_rows", "touched"),
    # prices
    *("Traffic", "Choice", "near_indices", "merges", "wire", "node_weight"),
    # experts
    *(
        "takes_marks",
        "allow_marks",
        "adopt",
        "added_once",
        "on_local_rows",
        "Beside",
        "beside",
        "lay_beside",
        "on_waste",
    ),
    *(
        "shared_experts_of",
        "called_last",
        "lay_shared_beside",
        "without_effect",
        "unaligned_shards",
        "Cut",
        "own_experts",
    ),
    # groups, optimizers and patches
    *(
        "Peers",
        "claim_host_entry",
        "follow_as_one",
        "Following",
        "give_experts_their_groups",
        "give_true_norm_at_stage_0",
    ),
    *("correct_optimizer", "count_every_stage", "bring_every_kind", "sum_stages_last", "average_over_all_ranks"),
    *("registered_size", "keep_stages", "plan_of_layers", "StagedGroups", "forget_grid", "checked_stages", "OneInput"),
    *("SharingLinearLayer", "share_inputs", "give_inputs_gradients", "frozen_left_alone", "without_experts", "Slot"),
    "around_tensor_parallel",
    # checkpoints and loading
    *("agreed", "everyone", "raise_together", "same_everywhere", "Box", "boxes", "Piece", "strips"),
    *("tiling_fault", "Item", "Fact", "StageFacts", "walk", "Leaf", "Joined", "Permuted", "leave_unread", "Unread"),
    "left_in_files",
)
# Identifiers that are one of those words, and another library's or a plain English one in this place.
OTHERS = {"walk": "ast.walk, os.walk"}
# What no sentence says: pictures of our own for what has a name.
PICTURES = re.compile(
    r"\b((?<!in )fl(y|ies|ew|ights?)|takes? off|touch(es)? down|lands?|landed|meanwhile|lanes?|far ranks?|near ranks?|"
    r"gather first|dispatch first|lay beside|laid beside)\b",
    re.IGNORECASE,
)


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and spelling of each name that a file defines or uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.alias):
            yield 0, node.name
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.value.lineno, node.arg


def gone(name: str) -> list[str]:
    """The old words in an identifier: the whole of it without leading underscores, or whole parts of it."""
    bare = name.strip("_").rpartition(".")[2]
    return [word for word in GONE if f"_{word}_" in f"_{bare}_" and OTHERS.get(word) is None]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_old_word(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    found = [f"line {line}: {name}" for line, name in identifiers(ast.parse(source)) if gone(name)]
    found += [
        f"line {number}: {match.group()!r}"
        for number, line in enumerate(source.splitlines(), 1)
        for match in PICTURES.finditer(line)
    ]
    assert not found


@pytest.mark.parametrize("name", ["fly", "_take_off", "near_ep", "ep_lane_sizes", "ds_etp.plans.Lanes", "Beside"])
def test_old_words_are_found(name: str) -> None:
    assert gone(name)


@pytest.mark.parametrize("name", ["plan", "nearest", "planner", "tp_plan", "RoutingPlan", "lane0", "put", "island"])
def test_the_fields_words_are_not(name: str) -> None:
    assert not gone(name)
