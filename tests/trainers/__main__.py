"""Runs trainers' commands and compares what comes out: `python -m tests.trainers [--only NAME] [--case TEXT]`.

A run of all cases that ends well writes tests/trainers/results/ and docs/trainers.md anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from tests.trainers import data, environments
from tests.trainers.cases import MODEL, Case, Trainer, cases
from tests.trainers.compare import Differs, check_log, compare, moved
from tests.trainers.launch import CommandFailed, log_of, run
from tests.trainers.registry import TRAINERS
from tests.trainers.report import RESULTS, write_page


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.trainers", description=__doc__)
    parser.add_argument("--only", action="append", choices=[trainer.name for trainer in TRAINERS], help="this trainer")
    parser.add_argument("--case", default="", help="cases whose id has this text; what they need has to be there")
    parser.add_argument("--data", action="store_true", help="make the model and the data sets, and no more")
    parser.add_argument("--list", action="store_true", help="print the commands")
    args = parser.parse_args()
    chosen = [trainer for trainer in TRAINERS if not args.only or trainer.name in args.only]
    if args.list:
        for trainer in chosen:
            for case in cases(trainer):
                print(f"{case.id}: {case.command}")
        return 0
    data.make()
    if args.data:
        return 0
    good = [_run_trainer(trainer, args.case) for trainer in chosen]
    if not args.case:
        write_page()
    return 0 if all(good) else 1


def _run_trainer(trainer: Trainer, text: str) -> bool:
    environments.make(trainer)
    releases = environments.installed(trainer)
    print(f"== {trainer.title}: {', '.join(f'{name} {release}' for name, release in releases.items())}", flush=True)
    known = {case.id: case for case in cases(trainer)}
    results: dict[str, Any] = {}
    for case in known.values():
        if text not in case.id:
            continue
        start = time.monotonic()
        try:
            results[case.id] = _run_case(trainer, case, known)
            print(f"ok   {case.id}: {results[case.id]} ({time.monotonic() - start:.0f} s)", flush=True)
        except (CommandFailed, Differs, OSError, LookupError) as error:
            print(f"FAIL {case.id}: {error}", flush=True)
    done = len(results) == len(known)
    if done:
        RESULTS.mkdir(exist_ok=True)
        content = {"releases": releases, "cases": results}
        (RESULTS / f"{trainer.name}.json").write_text(json.dumps(content, indent=2) + "\n")
    return done or bool(text) and len(results) == sum(text in id for id in known)


def _run_case(trainer: Trainer, case: Case, known: dict[str, Case]) -> dict[str, Any]:
    """What the page says of a case.

    Raises:
        CommandFailed, Differs: with the reason.
    """
    printed = run(trainer, case)
    check_log(case, printed)
    result: dict[str, Any] = {"command": case.command}
    if case.reference:
        difference = compare(case, known[case.reference])
        result |= {"losses": difference.losses, "weights": difference.weights}
    elif case.id.startswith("plain full") and moved(case, MODEL) < 1e-3:
        raise Differs(f"{case.id}: training has not moved the experts; see {log_of(case)}")
    return result


if __name__ == "__main__":
    sys.exit(main())
