"""Patching a host and taking it back, and which releases of the hosts are let in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_etp.errors import ConfigError
from ds_etp.log import logger
from ds_etp.patches import versions
from ds_etp.patches.base import MethodPatch, override, swapped
from ds_etp.patches.versions import DEEPSPEED_BROKEN, check_host_versions

# MethodPatch


class Base:
    """A host's base class."""

    def inherited(self) -> str:
        return "inherited"


def make_host() -> Any:
    """A fresh host class."""

    class Host(Base):
        def method(self, value: int = 1) -> str:
            """The host's own words."""
            return f"host {value}"

    return Host


def ours(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of these tests."""

    def method(self: Any, value: int = 1) -> str:
        return f"ours over {original(self, value)}"

    return method


def test_apply_and_revert() -> None:
    host = make_host()
    original = vars(host)["method"]
    patch = MethodPatch(host, "method", ours)
    assert not patch.applied
    patch.apply()
    assert patch.applied
    assert host().method(3) == "ours over host 3"
    patch.revert()
    assert not patch.applied
    assert vars(host)["method"] is original


def test_swaps_nest_and_end_with_an_error() -> None:
    host = make_host()
    original = vars(host)["method"]
    with pytest.raises(ZeroDivisionError), swapped(host, "method", ours):
        with swapped(host, "method", ours):
            assert host().method() == "ours over ours over host 1"
        assert host().method() == "ours over host 1"
        1 / 0  # noqa: B018 - any error
    assert vars(host)["method"] is original
    with pytest.raises(RuntimeError, match="has no method inherited"), swapped(host, "inherited", ours):
        pass


def test_apply_twice_patches_once() -> None:
    host = make_host()
    patch = MethodPatch(host, "method", ours)
    patch.apply()
    first = vars(host)["method"]
    patch.apply()
    assert vars(host)["method"] is first
    assert host().method() == "ours over host 1"


def test_a_second_patch_of_the_same_method_patches_once() -> None:
    """Two copies of the package in one process (an editable one and another) don't stack."""
    host = make_host()
    original = vars(host)["method"]
    first, second = MethodPatch(host, "method", ours), MethodPatch(host, "method", ours)
    first.apply()
    second.apply()
    assert host().method() == "ours over host 1"
    second.revert()
    assert vars(host)["method"] is original


def test_revert_without_apply_changes_nothing() -> None:
    host = make_host()
    original = vars(host)["method"]
    patch = MethodPatch(host, "method", ours)
    patch.revert()
    patch.apply()
    patch.revert()
    patch.revert()
    assert vars(host)["method"] is original


def test_apply_again_after_revert() -> None:
    host = make_host()
    patch = MethodPatch(host, "method", ours)
    patch.apply()
    patch.revert()
    patch.apply()
    assert host().method() == "ours over host 1"


@pytest.mark.parametrize("name", ["no_such_method", "inherited"])
def test_a_method_the_host_does_not_define(name: str) -> None:
    host = make_host()
    with pytest.raises(RuntimeError, match=f"Host has no method {name}: its release is not one ds_etp knows"):
        MethodPatch(host, name, ours).apply()
    assert name not in vars(host)
    assert Base().inherited() == "inherited"


def wrapped_by_another(below: Callable[..., Any], *, says_so: bool) -> Callable[..., Any]:
    """Another library's wrapper; `functools.wraps` copies what is on the function below it, ours included."""

    def theirs(self: Any, value: int = 1) -> str:
        return f"theirs over {below(self, value)}"

    return functools.wraps(below)(theirs) if says_so else theirs


@pytest.mark.parametrize("says_so", [True, False], ids=["functools.wraps", "plain"])
def test_someone_else_patched_over_ours(says_so: bool) -> None:
    """Theirs is left as it is, ours below does nothing; and it acts once, however often it is applied again."""
    host = make_host()
    patch = MethodPatch(host, "method", ours)
    patch.apply()
    below = vars(host)["method"]
    theirs = host.method = wrapped_by_another(below, says_so=says_so)
    patch.revert()
    assert vars(host)["method"] is theirs
    assert not patch.applied
    assert host().method() == "theirs over host 1"
    for _ in range(2):
        patch.apply()
        assert patch.applied
        assert sorted(host().method().split(" over ")) == ["host 1", "ours", "theirs"]
    patch.revert()
    assert vars(host)["method"] is theirs
    assert host().method() == "theirs over host 1"
    host.method = below  # they leave
    assert host().method() == "host 1"
    patch.apply()
    assert host().method() == "ours over host 1"


def test_applied_again_below_someone_elses() -> None:
    host = make_host()
    patch = MethodPatch(host, "method", ours)
    patch.apply()
    theirs = host.method = wrapped_by_another(vars(host)["method"], says_so=True)
    patch.apply()
    assert vars(host)["method"] is theirs
    assert host().method() == "theirs over ours over host 1"


def test_ours_over_someone_elses() -> None:
    host = make_host()

    def theirs(self: Any, value: int = 1) -> str:
        return f"theirs {value}"

    host.method = theirs
    patch = MethodPatch(host, "method", ours)
    patch.apply()
    assert host().method() == "ours over theirs 1"
    patch.revert()
    assert vars(host)["method"] is theirs


# override


def test_override_is_for_one_object() -> None:
    host = make_host()
    changed, sibling = host(), host()
    override(changed, "method", lambda original: lambda value=1: f"changed {original(value)}")
    assert changed.method(2) == "changed host 2"
    assert sibling.method(2) == "host 2"
    assert "method" not in vars(sibling)


def test_override_shows_the_hosts_signature_and_words() -> None:
    target = make_host()()
    before = inspect.signature(target.method)
    override(target, "method", lambda _: lambda *args, **kwargs: None)
    assert inspect.signature(target.method) == before
    assert target.method.__doc__ == "The host's own words."


def test_overrides_stack() -> None:
    target = make_host()()
    override(target, "method", lambda original: lambda value=1: f"one {original(value)}")
    override(target, "method", lambda original: lambda value=1: f"two {original(value)}")
    assert target.method() == "two one host 1"


# Host releases


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that given releases are installed: the check is arithmetic on their numbers."""

    def pretend(deepspeed: str = "0.19.8", transformers: str = "5.24.0") -> None:
        releases = {"deepspeed": deepspeed, "transformers": transformers}
        monkeypatch.setattr(versions, "version", releases.__getitem__)

    return pretend


def message(zero_stage: int = 1, tp: int = 1) -> str:
    """What the check raises."""
    with pytest.raises(ConfigError) as info:
        check_host_versions(zero_stage, tp)
    return str(info.value)


def test_the_installed_releases_pass() -> None:
    check_host_versions(zero_stage=1, tp=1)


@pytest.mark.parametrize(
    "release", ["0.19.0", "0.19.4", "0.19.5", "0.19.6", "0.19.7", "0.19.8", "0.19.8+cu128", "0.19.8.post1"]
)
def test_deepspeed_in_range(installed: Callable[..., None], release: str) -> None:
    installed(deepspeed=release)
    check_host_versions(zero_stage=2, tp=2)


@pytest.mark.parametrize("release", ["5.0.0", "5.15.1", "5.25.0", "5.25.3", "5.25.0.dev0"])
def test_transformers_in_range(installed: Callable[..., None], release: str) -> None:
    installed(transformers=release)
    check_host_versions(zero_stage=2, tp=2)


def test_sequences_want_the_release_they_were_tried_on(installed: Callable[..., None]) -> None:
    installed(deepspeed="0.19.7")
    versions.check_sequence_version(1)
    with pytest.raises(ConfigError, match=r"sequence parallel size=2 was not tried with DeepSpeed 0\.19\.7"):
        versions.check_sequence_version(2)
    installed()
    versions.check_sequence_version(2)


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What the package has warned of; its logger passes nothing on to the root."""
    logger().addHandler(caplog.handler)
    versions._warn.cache_clear()
    yield lambda: [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    logger().removeHandler(caplog.handler)


OUTSIDE = [("deepspeed", release) for release in ("0.19.9", "0.20.0", "1.0")]
OUTSIDE += [("transformers", release) for release in ("4.57.3", "5.26.0", "5.26.0.dev0", "6.0.0")]


@pytest.mark.parametrize(("package", "release"), OUTSIDE)
def test_a_release_out_of_range_is_warned_of_once(
    installed: Callable[..., None], warnings_of: Callable[[], list[str]], package: str, release: str
) -> None:
    installed(**{package: release})
    for _ in range(2):
        check_host_versions(zero_stage=2, tp=2)
    (text,) = warnings_of()
    tested = {"deepspeed": "0.18.6 to 0.19.8", "transformers": "5.0 to 5.25"}[package]
    assert text.startswith(f"{package} {release} is outside the range that ds_etp was tested on, {tested}.")
    assert f'pip install "{versions.as_requirement(package)}"' in text


def test_releases_in_range_are_not_warned_of(
    installed: Callable[..., None], warnings_of: Callable[[], list[str]]
) -> None:
    installed()
    check_host_versions(zero_stage=3, tp=2)
    assert warnings_of() == []


def test_zero3_is_refused_where_it_is_known_to_be_wrong(installed: Callable[..., None]) -> None:
    installed(deepspeed="0.19.4")
    assert message(zero_stage=3) == (
        "zero_optimization.stage=3 partitions split experts over the wrong ranks in DeepSpeed 0.19.4. "
        "Values that work: 0, 1, 2, or DeepSpeed 0.19.5 to 0.19.8."
    )


def test_newer_releases_have_sequences_and_pipelines(installed: Callable[..., None]) -> None:
    installed(deepspeed="0.19.9")
    versions.check_sequence_version(2)
    versions.check_pipeline_version()


def test_the_command_in_the_message_gives_a_release_in_range() -> None:
    """What pip would take for the bound printed in the message must pass the check."""
    from packaging.specifiers import SpecifierSet

    for package, (_, highest) in versions.RANGES.items():
        assert SpecifierSet(versions.as_requirement(package).removeprefix(package)).contains(highest), package


@pytest.mark.parametrize("release", ["0.18.6", "0.18.7"])
def test_before_0_19_without_tensor_parallelism(
    installed: Callable[..., None], warnings_of: Callable[[], list[str]], release: str
) -> None:
    installed(deepspeed=release)
    for stage in (0, 1, 2):
        check_host_versions(stage, tp=1)
    assert warnings_of() == []
    assert message(zero_stage=1, tp=2) == (
        f"tensor_parallel.autotp_size=2 splits weights in DeepSpeed {release} and leaves no note how: checkpoints and "
        "exports could not hold the whole ones. Values that work: 1, or DeepSpeed 0.19.0 to 0.19.8."
    )
    assert "zero_optimization.stage=3" in message(zero_stage=3)


def test_an_older_release_still_is_warned_of(
    installed: Callable[..., None], warnings_of: Callable[[], list[str]]
) -> None:
    installed(deepspeed="0.18.5")
    check_host_versions(zero_stage=2, tp=1)
    assert warnings_of()[0].startswith("deepspeed 0.18.5 is outside the range")


@pytest.mark.parametrize("release", DEEPSPEED_BROKEN)
def test_releases_that_fail_by_themselves(installed: Callable[..., None], release: str) -> None:
    installed(deepspeed=release)
    for stage in (1, 2):
        assert message(zero_stage=stage) == (
            f"zero_optimization.stage={stage} fails at its first step in DeepSpeed {release}, without ds_etp too. "
            "Values that work: 0, or another DeepSpeed from 0.18.6 to 0.19.8."
        )
    check_host_versions(zero_stage=0, tp=1)


def test_setup_leaves_out_releases_that_fail() -> None:
    setup = (Path(versions.__file__).parents[2] / "setup.py").read_text(encoding="utf-8")
    assert all(f"!={release}," in setup for release in DEEPSPEED_BROKEN)


def test_zero3_with_tp_needs_the_newest(installed: Callable[..., None]) -> None:
    installed(deepspeed="0.19.7")
    assert message(zero_stage=3, tp=2) == (
        "zero_optimization.stage=3 with tensor_parallel.autotp_size=2 takes a wrong gradient norm in DeepSpeed 0.19.7. "
        "Values that work: 0, 1, 2, or DeepSpeed 0.19.8."
    )
    check_host_versions(zero_stage=3, tp=1)
    check_host_versions(zero_stage=2, tp=2)
    installed(deepspeed="0.19.8")
    check_host_versions(zero_stage=3, tp=2)
