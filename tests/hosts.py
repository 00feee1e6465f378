"""What the installed releases of the hosts are refused for: `make compat` runs the same cases with older ones."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

from ds_etp.patches.versions import DEEPSPEED_SEQUENCES, DEEPSPEED_TP, DEEPSPEED_ZERO3, DEEPSPEED_ZERO3_WITH_TP
from tests.sharded import Layout


def deepspeed_at_least(release: str) -> bool:
    """Whether the installed DeepSpeed is this one or newer."""
    return Version(version("deepspeed")) >= Version(release)


def refused_key(stage: int, tp: int) -> str | None:
    """The key that the installed DeepSpeed is refused for, as a pattern; None where it trains."""
    if tp > 1 and not deepspeed_at_least(DEEPSPEED_TP):
        return rf"tensor_parallel\.autotp_size={tp}"
    if stage == 3 and not deepspeed_at_least(DEEPSPEED_ZERO3_WITH_TP if tp > 1 else DEEPSPEED_ZERO3):
        return r"zero_optimization\.stage=3"
    return None


def skip_if_refused(*layouts: Layout) -> None:
    """Skips a case that the installed DeepSpeed is refused for; `test_matrix` shows that it is."""
    keys = [refused_key(layout.stage, layout.tp) for layout in layouts if layout.with_block]
    if any(keys):
        pytest.skip(f"DeepSpeed {version('deepspeed')} is refused")


needs_sequences = pytest.mark.skipif(
    not deepspeed_at_least(DEEPSPEED_SEQUENCES), reason="sequence parallelism is refused with this DeepSpeed"
)
