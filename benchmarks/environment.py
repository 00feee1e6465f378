"""The environment of its own that DeepSpeed's AutoEP needs, built once from the package registries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.pool import ROOT

# The newest that AutoEP of DeepSpeed 0.19.8 works with. From 5.20.2 on transformers keeps what its models can
# record in a registry whose `get` takes no default, and AutoEP's `_CanRecordRegistry.get` call is a TypeError.
TRANSFORMERS = "5.20.1"
_NEEDED = ("torch", "deepspeed", "accelerate", "numpy", "safetensors", "pydantic", "packaging", "rich", "ninja")


def autoep_python(folder: Path) -> str:
    """The interpreter of the environment in `folder`, which is made where it is missing."""
    base = folder / f"transformers-{TRANSFORMERS}"
    python, done = base / "bin" / "python", base / ".installed"
    if not done.exists():
        lines = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
        pins = [line for line in lines if line.split("==")[0] in _NEEDED]
        torch = next(line for line in pins if line.startswith("torch=="))
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(base)], check=True)
        subprocess.run([*install, torch], check=True)  # first: whichever build this machine has is then kept
        subprocess.run([*install, *pins, f"transformers=={TRANSFORMERS}"], check=True)
        done.touch()
    return str(python)
