"""An environment for each trainer, with the releases that it pins: `.trainers/<name>`, made where there is none.

torch comes first and is never replaced: requirements files name every other distribution exactly, and are installed
without dependencies, so that no CUDA build is drawn in.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.trainers.cases import ENVIRONMENTS, ROOT, Script, Trainer

FOLDER = ROOT / ENVIRONMENTS
REQUIREMENTS = Path(__file__).parent / "requirements"
_LIMIT = 1800  # seconds, for the downloads


def _torch() -> str:
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def variables(trainer: Trainer) -> dict[str, str]:
    """The environment variables that a trainer's commands run with: its programs first, no hub, the CPU."""
    env = FOLDER / trainer.name
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    cache = str(FOLDER / "cache")
    return {
        **kept,
        "PATH": f"{env / 'bin'}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(env),
        "TORCH_EXTENSIONS_DIR": str(env / "torch_extensions"),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": cache,
        "MODELSCOPE_CACHE": cache,
        "WANDB_DISABLED": "true",
        "TORCHDYNAMO_DISABLE": "1",  # DeepSpeed's Muon is decorated with torch.compile: seconds in every process
    }


# What a launcher would take for its own, what chooses other packages, and what would switch ds_etp on.
_NOT_PASSED_ON = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTHONPATH", "PYTHONHOME", "DS_ETP"),
}


def make(trainer: Trainer) -> None:
    """Makes the environment, or makes it anew where its requirements have changed."""
    env, requirements = FOLDER / trainer.name, REQUIREMENTS / f"{trainer.name}.txt"
    stamp, wanted = env / ".installed", hashlib.sha256(requirements.read_bytes() + _torch().encode()).hexdigest()
    if not (stamp.exists() and stamp.read_text() == wanted):
        _install(trainer, requirements)
        stamp.write_text(wanted)
    if trainer.script is not None:
        _download(trainer.script, env / trainer.script.name)


def _install(trainer: Trainer, requirements: Path) -> None:
    env = FOLDER / trainer.name
    shutil.rmtree(env, ignore_errors=True)
    print(f"== {env.relative_to(ROOT)}: installing", flush=True)
    _run([sys.executable, "-m", "venv", str(env)], trainer)
    pip = [str(env / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    _run([*pip, _torch()], trainer)
    _run([*pip, "--no-deps", "-r", str(requirements)], trainer)
    _run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], trainer)
    _fit_torchaudio(env, trainer)
    # DeepSpeed's CPU collectives, in one process: see the Makefile.
    build = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
    _run([str(env / "bin" / "python"), "-c", build], trainer)


def _download(script: Script, target: Path) -> None:
    """Brings a script, unless it is there.

    Raises:
        OSError: it can't be had, or is another file than the one that is meant.
    """
    if not target.exists():
        with urllib.request.urlopen(script.url, timeout=60) as answer:
            target.write_bytes(answer.read())
    if hashlib.sha256(target.read_bytes()).hexdigest() != script.sha256:
        raise OSError(f"{target} is not the file that was compared: {script.url}, sha256 {script.sha256}")


def _fit_torchaudio(env: Path, trainer: Trainer) -> None:
    """Takes the compiled part out of torchaudio where it is of a CUDA build and torch isn't.

    LLaMA-Factory imports torchaudio at its start, without using it for text. PyPI has CUDA builds only, whose compiled
    part needs torch's; torchaudio does without it where the file isn't there.
    """
    for folder in env.glob("lib/python*/site-packages/torchaudio"):
        tried = [str(env / "bin" / "python"), "-c", "import torchaudio"]
        if subprocess.run(tried, capture_output=True, check=False).returncode:
            for library in folder.glob("lib/*.so"):
                library.unlink()
            _run(tried, trainer)


def _run(command: list[str], trainer: Trainer) -> None:
    subprocess.run(command, check=True, timeout=_LIMIT, cwd=ROOT, env=variables(trainer))


def installed(trainer: Trainer) -> dict[str, str]:
    """The releases of a trainer's packages, torch and DeepSpeed, as they are in its environment."""
    names = [*trainer.packages, "deepspeed", "torch"]
    code = f"from importlib.metadata import version\nfor name in {names!r}: print(version(name))"
    python = str(FOLDER / trainer.name / "bin" / "python")
    said = subprocess.run(
        [python, "-c", code], check=True, timeout=60, cwd=ROOT, env=variables(trainer), capture_output=True, text=True
    )
    return {name: release.partition("+")[0] for name, release in zip(names, said.stdout.split(), strict=True)}
