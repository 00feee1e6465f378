"""Whether the hosts' functions are the ones this package was written against: their parameters, in order.

A release number says little: a nightly, a fork or the next release may have all of them, or one with another argument,
which would end in wrong numbers or in a TypeError an hour later. The tables are data, one a host; an entry maps a
function of a module, or of a class `module:Class`, to what it may look like (where releases differ, several):

    "self, model"       these parameters and no others
    "self, model, ..."  these first; what follows doesn't matter
    "="                 a name that exists
    "-"                 or doesn't

Only modules that are loaded already are looked at. `python -m ds_etp.patches.signatures` loads all, and prints the
state of the installed hosts.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ds_etp.errors import ConfigError, config_error
from ds_etp.patches.accelerate.signatures import TABLE as ACCELERATE
from ds_etp.patches.deepspeed.signatures import TABLE as DEEPSPEED
from ds_etp.patches.openrlhf.signatures import TABLE as OPENRLHF
from ds_etp.patches.peft.signatures import EXPERTS as PEFT_EXPERTS
from ds_etp.patches.peft.signatures import TABLE as PEFT
from ds_etp.patches.swift.signatures import TABLE as MS_SWIFT
from ds_etp.patches.transformers.signatures import TABLE as TRANSFORMERS
from ds_etp.patches.trl.signatures import TABLE as TRL
from ds_etp.patches.trl.signatures import VLLM as TRL_VLLM
from ds_etp.patches.versions import other_ways, tested_range

Table = Mapping[str, Mapping[str, str | tuple[str, ...]]]

# By host, or by `host.use` where a use needs more of the host than its others.
TABLES: dict[str, Table] = {
    "deepspeed": DEEPSPEED,
    "transformers": TRANSFORMERS,
    "peft": PEFT,
    "peft.experts": PEFT_EXPERTS,
    "trl": TRL,
    "trl.vllm": TRL_VLLM,
    "accelerate": ACCELERATE,
    "openrlhf": OPENRLHF,
    "ms-swift": MS_SWIFT,
}
# What every engine depends on. The others are looked at where they are used.
ALWAYS = ("deepspeed", "transformers")
EXISTS, ABSENT = "=", "-"
_USES = {"experts": "adapters on experts", "vllm": "the weight sync with vLLM"}
# What passes every argument on, as another library's wrapper does that hides the function below it.
_PASSES_ON = ["*args", "**kwargs"]


@dataclass(frozen=True)
class Finding:
    """One entry of a table, beside the host as it is.

    Attributes:
        name: dotted name of the function.
        known: what it may look like.
        found: its parameters, `=` for what has none, `-` where the host has no such name.
    """

    name: str
    known: tuple[str, ...]
    found: str

    @property
    def fits(self) -> bool:
        """Whether the host is as the table knows it."""
        return any(_fits(known, self.found) for known in self.known)

    def __str__(self) -> str:
        shown = {EXISTS: "no function", ABSENT: "missing"}
        return f"{self.name} is {shown.get(self.found, f'({self.found})')}, known: " + " or ".join(
            {EXISTS: "any", ABSENT: "missing"}.get(known, f"({known})") for known in self.known
        )


def _fits(known: str, found: str) -> bool:
    if known in (EXISTS, ABSENT) or found == ABSENT:
        return (known == ABSENT) == (found == ABSENT)
    names = _names(found)
    if [name for name in names if name not in ("self", "cls")] == _PASSES_ON:
        return True
    expected = _names(known)
    if expected[-1:] == ["..."]:
        return names[: len(expected) - 1] == expected[:-1]
    return names == expected


def _names(text: str) -> list[str]:
    return text.split(", ") if text else []


def _described(owner: Any, name: str) -> str:
    if not hasattr(owner, name):
        return ABSENT
    try:
        # Through wrappers that name the function below them: ours, and those of other libraries.
        parameters = inspect.signature(getattr(owner, name)).parameters.values()
    except (TypeError, ValueError):
        return EXISTS
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return ", ".join(stars.get(parameter.kind, "") + parameter.name for parameter in parameters)


def findings(host: str) -> Iterator[Finding]:
    """Compares one host's loaded modules with its table."""
    for place, functions in TABLES[host].items():
        module, _, class_name = place.partition(":")
        owner: Any = sys.modules.get(module)
        if owner is None:
            continue
        if class_name:
            owner = getattr(owner, class_name, None)
        for name, known in functions.items():
            dotted = f"{place.replace(':', '.')}.{name}"
            yield Finding(dotted, _known(known), _described(owner, name))


def _known(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry


def check_signatures(*hosts: str) -> None:
    """Refuses hosts whose functions are not those of the tables; `ALWAYS` where none are named.

    Raises:
        ConfigError: one, that names every function that differs.
    """
    errors = []
    for host in hosts or ALWAYS:
        different = [str(finding) for finding in findings(host) if not finding.fits]
        if different:
            package, _, use = host.partition(".")
            purpose = f" for {_USES[use]}" if use else ""
            errors.append(
                config_error(
                    package,
                    _version(package),
                    f"has functions that ds_etp patches or calls{purpose}, and knows otherwise: {'; '.join(different)}",
                    works=f"{tested_range(host)}, not patched by others",
                    next_step=other_ways(host),
                )
            )
    if errors:
        raise ConfigError("\n".join(map(str, errors)))


def _version(host: str) -> str:
    try:
        return version(host)
    except PackageNotFoundError:
        return "unknown"


def report() -> tuple[str, bool]:
    """The state of every installed host, a line for each function, and whether all fit. Loads the hosts."""
    lines, good = [], True
    for host, table in TABLES.items():
        try:
            import_module(next(iter(table)).partition(".")[0])  # a distribution may have another name
        except ImportError as error:
            lines.append(f"{host}: {error}")
            continue
        for place in table:
            module = place.partition(":")[0]
            try:
                import_module(module)
            except ImportError as error:
                may_lack = all(ABSENT in _known(entry) for entry in table[place].values())
                good = good and may_lack
                lines.append(f"  {'fits   ' if may_lack else 'DIFFERS'} {module}: {error}")
        found = list(findings(host))
        different = sum(not finding.fits for finding in found)
        good = good and not different
        release = _version(host.partition(".")[0])
        fit = f"{len(found) - different} of {len(found)} fit"
        lines.append(f"{host} {release} (tested: {tested_range(host)}): {fit}")
        lines.extend(f"  {'fits   ' if finding.fits else 'DIFFERS'} {finding}" for finding in found)
    return "\n".join(lines), good


if __name__ == "__main__":
    text, all_fit = report()
    sys.stdout.write(f"{text}\n")
    sys.exit(not all_fit)
