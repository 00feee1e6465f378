"""The host releases this package was run on. `setup.py` reads the same numbers.

A release outside them gets a warning, where its functions are the ones that `patches.signatures` knows; there it would
be refused. Refused here is what is known to be wrong.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

from packaging.version import Version

from ds_etp.errors import config_error
from ds_etp.log import logger

# `setup.py` asks for it; functions of torch's are looked at where they are used (`patches.torch.subgroups`).
TORCH_MIN = "2.9"
TORCH_MAX = "2.14"
DEEPSPEED_MIN = "0.18.6"
DEEPSPEED_MAX = "0.19.8"
TRANSFORMERS_MIN = "5.0"
TRANSFORMERS_MAX = "5.25"
# Only for models that PEFT has wrapped.
PEFT_MIN = "0.18"
PEFT_MAX = "0.21"
# Only for its trainers under tensor parallelism. docs/versions.md says which were run, and which read.
TRL_MIN = "0.24"
TRL_MAX = "1.16"
# Only for its weight sync with vLLM: earlier ones give us no place to put whole parameters in.
TRL_VLLM_MIN = "1.11"
# `Accelerator.get_state_dict`, `save_state` and `DeepSpeedPlugin.fill_match` only; `setup.py` asks for no release.
ACCELERATE_MIN = "1.11"
ACCELERATE_MAX = "1.16"
# Only where `ds_etp.integrations.openrlhf` is used.
OPENRLHF_MIN = "0.11"
OPENRLHF_MAX = "0.11"
# Only for its supervised trainer under tensor parallelism.
MS_SWIFT_MIN = "4.6"
MS_SWIFT_MAX = "4.6"

RANGES = {
    "deepspeed": (DEEPSPEED_MIN, DEEPSPEED_MAX),
    "transformers": (TRANSFORMERS_MIN, TRANSFORMERS_MAX),
    "peft": (PEFT_MIN, PEFT_MAX),
    "accelerate": (ACCELERATE_MIN, ACCELERATE_MAX),
    "trl": (TRL_MIN, TRL_MAX),
    "openrlhf": (OPENRLHF_MIN, OPENRLHF_MAX),
    "ms-swift": (MS_SWIFT_MIN, MS_SWIFT_MAX),
}
# Uses of a package, named `package.use`, that need other releases of it than the rest does.
USES = {"trl.vllm": (TRL_VLLM_MIN, TRL_MAX)}
# What to do where another package, such as a trainer, pins a release that doesn't do.
_OTHER_WAYS = {
    "peft": "train without adapters",
    "peft.experts": "put adapters on other layers than experts, by target_modules, which need less of PEFT",
    "trl": "tensor_parallel.autotp_size=1, at which TRL's trainers are used as they are",
    "trl.vllm": "use_vllm=false, at which the engine itself generates",
    "ms-swift": "tensor_parallel.autotp_size=1, at which its trainers are used as they are",
    "accelerate": "call deepspeed.initialize without accelerate",
}
# Their ZeRO 1 and 2 fail at the first step, with us or without: they gather partitions of the wrong sizes.
DEEPSPEED_BROKEN = ("0.18.8", "0.18.9")
# AutoTP doesn't say before this release which part of a weight a rank has, so nothing can put the whole together.
DEEPSPEED_TP = "0.19.0"
# ZeRO-3 has no process group of its own for a parameter before this release: experts come out wrong, in silence.
DEEPSPEED_ZERO3 = "0.19.5"
# ZeRO-3 with tensor parallelism takes a wrong gradient norm before this release, with or without us.
DEEPSPEED_ZERO3_WITH_TP = "0.19.8"
# The corrections of `patches.deepspeed.ulysses` are for this release on: earlier ones scale otherwise.
DEEPSPEED_SEQUENCES = "0.19.8"
# So are those of `patches.deepspeed.pipeline_*`.
DEEPSPEED_PIPELINES = "0.19.8"
# So is that of `patches.deepspeed.muon`.
DEEPSPEED_MUON = "0.19.8"
# PEFT has `ParamWrapper.get_delta_factors` from this release on; `patches.peft.delta_factors` does without it before.
PEFT_DELTA_FACTORS = "0.21"

# `patches.transformers.grouped_mm` calls `_grouped_linear` as it is from this release on.
TRANSFORMERS_GROUPED_LINEAR = "5.8"
# Trainer's loss of a shared sequence has the gradient of a rank's own part from this release on.
TRANSFORMERS_OWN_SHARE_LOSS = "5.25"


def check_host_versions(zero_stage: int, tp: int) -> None:
    """Refuses releases that are known to be wrong; warns, once, of those outside the tested range.

    Raises:
        ConfigError: names the release found and what works.
    """
    if zero_stage in (1, 2) and Version(version("deepspeed")).base_version in DEEPSPEED_BROKEN:
        raise config_error(
            "zero_optimization.stage",
            zero_stage,
            f"fails at its first step in DeepSpeed {version('deepspeed')}, without ds_etp too",
            works=f"0, or another DeepSpeed from {DEEPSPEED_MIN} to {DEEPSPEED_MAX}",
        )
    if tp > 1 and not _at_least("deepspeed", DEEPSPEED_TP):
        raise config_error(
            "tensor_parallel.autotp_size",
            tp,
            f"splits weights in DeepSpeed {version('deepspeed')} and leaves no note how: checkpoints and exports could "
            "not hold the whole ones",
            works=f"1, or DeepSpeed {DEEPSPEED_TP} to {DEEPSPEED_MAX}",
        )
    if zero_stage == 3 and not _at_least("deepspeed", DEEPSPEED_ZERO3):
        raise config_error(
            "zero_optimization.stage",
            zero_stage,
            f"partitions split experts over the wrong ranks in DeepSpeed {version('deepspeed')}",
            works=f"0, 1, 2, or DeepSpeed {DEEPSPEED_ZERO3} to {DEEPSPEED_MAX}",
        )
    if zero_stage == 3 and tp > 1 and not _at_least("deepspeed", DEEPSPEED_ZERO3_WITH_TP):
        raise config_error(
            "zero_optimization.stage",
            zero_stage,
            f"with tensor_parallel.autotp_size={tp} takes a wrong gradient norm in DeepSpeed {version('deepspeed')}",
            works=f"0, 1, 2, or DeepSpeed {DEEPSPEED_ZERO3_WITH_TP}",
        )
    for package in ("deepspeed", "transformers"):
        warn_if_untested(package)


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
    _refuse_before(DEEPSPEED_PIPELINES, "PipelineModule and split experts", "a model without pipeline")


def check_muon_version() -> None:
    """Refuses Muon on split matrices with a DeepSpeed it was not tried on.

    Raises:
        ConfigError: names the release found and the one that works.
    """
    _refuse_before(DEEPSPEED_MUON, "the Muon optimizer and matrices that are split over ranks", "another optimizer")


def has_own_share_loss() -> bool:
    """Whether `patches.transformers.sequence_loss` has something to correct."""
    return _at_least("transformers", TRANSFORMERS_OWN_SHARE_LOSS)


def check_swift_version(tp: int) -> None:
    """Refuses tensor parallelism with an ms-swift whose loss isn't known: its functions look alike, right or wrong.

    Raises:
        ConfigError: names the release found and what works.
    """
    if not _is_tested("ms-swift"):
        raise config_error(
            "tensor_parallel.autotp_size",
            tp,
            f"was not tried with ms-swift {version('ms-swift')}: {MS_SWIFT_MAX} multiplies losses by tensor-parallel "
            "ranks, which ds_etp corrects, and others may not",
            works=f"1, or ms-swift {MS_SWIFT_MAX}",
        )


def _refuse_before(release: str, tried_with: str, otherwise: str) -> None:
    if not _at_least("deepspeed", release):
        raise config_error(
            "deepspeed", version("deepspeed"), f"was not tried with {tried_with}", works=f"{release}, or {otherwise}"
        )


def warn_if_untested(host: str) -> None:
    """Warns of a release outside the tested range: once in a process, on rank 0.

    Args:
        host: a package, or a use of one.
    """
    package = host.partition(".")[0]
    if not _is_tested(host):
        _warn(package, version(package), tested_range(host), as_requirement(host))


@cache
def _warn(package: str, release: str, tested: str, requirement: str) -> None:
    import torch.distributed as dist  # setup.py and the planner's part of the command line do without torch

    if not dist.is_initialized() or dist.get_rank() == 0:
        logger().warning(
            "%s %s is outside the range that ds_etp was tested on, %s. The functions that ds_etp patches there are the "
            'ones it knows, so it goes on. To be on tested ground: pip install "%s"',
            *(package, release, tested, requirement),
        )


def tested_range(host: str) -> str:
    """The tested releases of a package, or of a use of one, in words."""
    return " to ".join(_bounds(host))


def as_requirement(host: str) -> str:
    """The tested range, as pip takes it."""
    lowest, highest = _bounds(host)
    return f"{host.partition('.')[0]}>={lowest},<={highest}"


def other_ways(host: str) -> str:
    """What to do about a release that doesn't do: install another, or, where that one is pinned, do without."""
    install = f'Run: pip install "{as_requirement(host)}"'
    other = _OTHER_WAYS.get(host)
    return install if other is None else f"{install}. Where another package pins {host.partition('.')[0]}: {other}."


def _bounds(host: str) -> tuple[str, str]:
    return USES.get(host) or RANGES[host.partition(".")[0]]


def _is_tested(host: str) -> bool:
    package = host.partition(".")[0]
    lowest, highest = _bounds(host)
    return _at_least(package, lowest) and not _above(package, highest)


def _at_least(package: str, bound: str) -> bool:
    return Version(Version(version(package)).base_version) >= Version(bound)


def _above(package: str, bound: str) -> bool:
    """Whether the installed release is above `bound`, of which a patch release (5.24.3 of 5.24) is not."""
    limit = Version(bound).release
    return Version(version(package)).release[: len(limit)] > limit
