"""The host releases this package was run on. `setup.py` reads the same numbers."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version

from ds_etp.errors import config_error

DEEPSPEED_MIN = "0.19.5"
DEEPSPEED_MAX = "0.19.8"
TRANSFORMERS_MIN = "5.0"
TRANSFORMERS_MAX = "5.24"
# Only for models that PEFT has wrapped.
PEFT_MIN = "0.21"
PEFT_MAX = "0.21"

_TESTED = {
    "deepspeed": (DEEPSPEED_MIN, DEEPSPEED_MAX),
    "transformers": (TRANSFORMERS_MIN, TRANSFORMERS_MAX),
}
# ZeRO-3 with tensor parallelism takes a wrong gradient norm before this release, with or without us.
DEEPSPEED_ZERO3_WITH_TP = "0.19.8"
# The corrections of `patches.sequence` were tried on this release alone.
DEEPSPEED_SEQUENCES = "0.19.8"
# So were those of `patches.stages`.
DEEPSPEED_PIPELINES = "0.19.8"

# So were those of `patches.deepspeed.muon`.
DEEPSPEED_MUON = "0.19.8"


def check_host_versions(zero_stage: int, tp: int) -> None:
    """Refuses a DeepSpeed or transformers outside the tested range.

    Raises:
        ConfigError: names the release found and the range.
    """
    for package, (lowest, highest) in _TESTED.items():
        _check(package, lowest, highest)
    if zero_stage == 3 and tp > 1 and not _at_least("deepspeed", DEEPSPEED_ZERO3_WITH_TP):
        raise config_error(
            "zero_optimization.stage",
            zero_stage,
            f"with tensor_parallel.autotp_size={tp} takes a wrong gradient norm in DeepSpeed {version('deepspeed')}",
            works=f"0, 1, 2, or DeepSpeed {DEEPSPEED_ZERO3_WITH_TP}",
        )


def check_sequence_version(cp: int) -> None:
    """Refuses sequence parallelism with a DeepSpeed it was not tried on.

    Raises:
        ConfigError: names the release found and the one that works.
    """
    if cp > 1 and not _at_least("deepspeed", DEEPSPEED_SEQUENCES):
        raise config_error(
            "sequence parallel size",
            cp,
            f"was not tried with DeepSpeed {version('deepspeed')}, and scales of gradients differ between releases",
            works=f"1, or DeepSpeed {DEEPSPEED_SEQUENCES}",
        )


def check_pipeline_version() -> None:
    """Refuses pipelines with a DeepSpeed they were not tried on.

    Raises:
        ConfigError: names the release found and the one that works.
    """
    if not _at_least("deepspeed", DEEPSPEED_PIPELINES):
        raise config_error(
            "deepspeed",
            version("deepspeed"),
            "was not tried with PipelineModule and split experts",
            works=f"{DEEPSPEED_PIPELINES}, or a model without pipeline",
        )


def check_muon_version() -> None:
    """Refuses Muon on split matrices with a DeepSpeed it was not tried on.

    Raises:
        ConfigError: names the release found and the one that works.
    """
    if not _at_least("deepspeed", DEEPSPEED_MUON):
        raise config_error(
            "deepspeed",
            version("deepspeed"),
            "was not tried with the Muon optimizer and matrices that are split over ranks",
            works=f"{DEEPSPEED_MUON}, or another optimizer",
        )


def check_peft_version() -> None:
    """Refuses a PEFT outside the tested range, for a model that has adapters of it.

    Raises:
        ConfigError: names the release found and the range.
    """
    _check("peft", PEFT_MIN, PEFT_MAX)


def _check(package: str, lowest: str, highest: str) -> None:
    if not _at_least(package, lowest) or _above(package, highest):
        raise config_error(
            package,
            version(package),
            "is outside the range that ds_etp was tested on",
            works=f"{lowest} to {highest}",
            next_step=f'Run: pip install "{package}>={lowest},<={highest}"',
        )


def _at_least(package: str, bound: str) -> bool:
    return Version(Version(version(package)).base_version) >= Version(bound)


def _above(package: str, bound: str) -> bool:
    """Whether the installed release is above `bound`, of which a patch release (5.24.3 of 5.24) is not."""
    limit = Version(bound).release
    return Version(version(package)).release[: len(limit)] > limit
