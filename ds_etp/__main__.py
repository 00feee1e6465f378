"""Registers the extension, then runs a training script as it is.

deepspeed --module ds_etp train.py --deepspeed config.json
torchrun --nproc_per_node 4 -m ds_etp train.py --deepspeed config.json
python -m ds_etp -m package.train ...
"""

from __future__ import annotations

import os
import runpy
import sys

USAGE = "usage: python -m ds_etp (SCRIPT.py | -m MODULE) [script arguments]"


def main() -> None:
    """Takes the script from the command line and runs it under the name `__main__`."""
    arguments = sys.argv[1:]
    # The deepspeed launcher puts --local_rank before the script; it belongs to the script.
    launcher = []
    while arguments and arguments[0].startswith("--local_rank"):
        launcher.append(arguments.pop(0))
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        sys.exit(USAGE)

    from ds_etp.activation import request
    from ds_etp.engine import register

    request()  # launchers that the script starts run other processes
    register()
    if arguments[0] == "-m":
        sys.argv = [arguments[1], *launcher, *arguments[2:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [arguments[0], *launcher, *arguments[1:]]
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
