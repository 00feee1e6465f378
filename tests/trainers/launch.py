"""One command of a trainer, as its user would type it: with a time limit, and with an end of all that it started."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from pathlib import Path

import psutil

from tests.trainers.cases import ROOT, Case, Trainer
from tests.trainers.environments import variables

# Seconds. A command takes 20 to 60 on two idle cores, most of them imports.
LIMIT = 600


class CommandFailed(RuntimeError):
    """A command ended with another code than 0, or not in time. The message has the end of its log."""


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def log_of(case: Case) -> Path:
    """Where what a case printed is kept: beside its output, which trainers may empty."""
    return ROOT / case.output.parent / f"{case.output.name}.log"


def run(trainer: Trainer, case: Case) -> str:
    """Runs a case's command to its end. Returns what it and its ranks printed.

    Raises:
        CommandFailed: it did not end well, or not in time.
    """
    shutil.rmtree(ROOT / case.output, ignore_errors=True)
    log = log_of(case)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**variables(trainer), "MASTER_PORT": str(free_port())}
    with log.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", case.command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            code = f"not within {LIMIT} s"
        finally:
            _end(process)
    text = log.read_text(errors="replace")
    if code != 0:
        raise CommandFailed(f"{case.command}\nexit code {code}; {log}:\n{text[-3000:]}")
    return text


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher and its ranks, which are in sessions of their own."""
    if process.poll() is not None:
        return
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs(family, timeout=10)
    for member in left:
        member.kill()
    process.wait()
