"""fp16 on CPUs: torch and gloo compute in it, but DeepSpeed's accelerator asks for an instruction set that few have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.accelerator import get_accelerator


@contextmanager
def fp16_supported() -> Iterator[None]:
    """DeepSpeed takes fp16 on whatever CPU this is. As a context or a decorator of what runs in workers."""
    accelerator = get_accelerator()
    before = accelerator.is_fp16_supported
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        accelerator.is_fp16_supported = before
