"""The bits of every case of `tests.covering`, to prove that a refactoring changes none.

    python -m tests.record before.json              # on one commit
    python -m tests.record after.json               # on another
    python -m tests.record --compare before.json after.json

For a commit that doesn't have them yet, copy this file and tests/covering.py there. Both commits on one machine: sums
round differently on another one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from tests import conftest  # noqa: F401 - the environment that tests run in
from tests.covering import Case, covering
from tests.launcher import CaseFailed, Launcher
from tests.sharded import train

Record = dict[str, Any]


def _digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def record(launcher: Launcher, case: Case) -> Record:
    """Losses and norms in all digits, and a digest of each gradient and each updated weight."""
    try:
        run = launcher.run(case.layout.world, train, recipe=case.recipe, layout=case.layout)[0]
    except CaseFailed as error:
        return {"failed": str(error).strip().splitlines()[-1]}
    numbers = {"losses": [value.hex() for value in run.losses], "norms": [value.hex() for value in run.norms]}
    return {**numbers, "gradients": _digests(run.grads), "weights": _digests(run.weights)}


def differences(before: dict[str, Record], after: dict[str, Record]) -> list[str]:
    """What differs between two records, in words. A case that only one of them has is a difference."""
    found = [f"{case}: only in one of them" for case in sorted(before.keys() ^ after.keys())]
    for case in before.keys() & after.keys():
        one, other = before[case], after[case]
        for kind in sorted(one.keys() | other.keys()):
            a, b = one.get(kind), other.get(kind)
            if a == b:
                continue
            if isinstance(a, dict) and isinstance(b, dict):
                names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
                found.append(f"{case}: {len(names)} of {len(a)} {kind} differ, {names[0]} first")
            else:
                found.append(f"{case}: {kind} {a} and {b}")
    return sorted(found)


def main(arguments: list[str] | None = None) -> int:
    """Records, or compares two records. Exits with 1 where they differ or a case failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.record", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="the file to write, or two to compare")
    parser.add_argument("--compare", action="store_true", help="print the differences of two files")
    options = parser.parse_args(arguments)
    if len(options.files) != 1 + options.compare:
        parser.error("one file to write, or --compare and two files")
    if options.compare:
        before, after = (json.loads(file.read_text()) for file in options.files)
        found = differences(before, after)
        print("\n".join(found) or f"not a bit differs in {len(before)} cases")
        return bool(found)
    launcher, records = Launcher(), {}
    for number, case in enumerate(covering(), 1):
        records[str(case)] = record(launcher, case)
        print(f"{number}/{len(covering())} {case} {records[str(case)].get('failed', '')}", flush=True)
    launcher.close()
    options.files[0].write_text(json.dumps(records, indent=1) + "\n")
    return any("failed" in found for found in records.values())


if __name__ == "__main__":
    sys.exit(main())
