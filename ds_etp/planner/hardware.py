"""The hardware: ranks, their memory, matrix product rate and link bandwidths. Every rate is stated."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from ds_etp.errors import ConfigError, config_error
from ds_etp.parallel.topology import GroupKind, Topology

_UNITS = {"": 1.0, "B": 1.0, **{f"{letter}B": 1000.0**power for power, letter in enumerate("KMGT", 1)}}
_UNITS |= {f"{letter}iB": 1024.0**power for power, letter in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class Hardware:
    """The machines. The defaults are what H100 SXM nodes with one 400 Gb/s network card a GPU reach.

    Attributes:
        gpus, per_node: ranks altogether, and in a node.
        memory: bytes a rank has.
        usable: the part of them a job can fill; the rest goes to the CUDA context, NCCL and fragmentation.
        intra, inter: bytes a second a rank sends inside its node, and out of it.
        flops: multiplications and additions a second in a large bf16 matrix product.
        hbm: bytes a second from a rank's own memory.
        latency: seconds a collective takes beside its bytes.
    """

    gpus: int
    per_node: int
    memory: float
    usable: float = 0.92
    intra: float = 450e9
    inter: float = 50e9
    flops: float = 600e12
    hbm: float = 3.35e12
    latency: float = 30e-6

    def rate(self, topology: Topology, kind: GroupKind) -> float:
        """Bytes a second over the groups of one kind: that of the network where any of them leaves a node."""
        return self.inter if self.leaves_node(topology, kind) else self.intra

    def leaves_node(self, topology: Topology, kind: GroupKind) -> bool:
        """Whether any group of a kind has ranks on two nodes."""
        # A group lies in an aligned run of ranks, its own axis times the faster ones.
        dense, expert_ranks = topology.tp * topology.cp, topology.expert_model_parallel
        size, span = {
            "tp": (topology.tp, topology.tp),
            "cp": (topology.cp, dense),
            "dp": (topology.dp, dense * topology.dp),
            "pp": (topology.pp, topology.world),
            "expt_tp": (topology.etp, topology.etp),
            "ep": (topology.ep, expert_ranks),
            "expert_dp": (topology.edp, expert_ranks * topology.edp),
            "expert_model_parallel": (expert_ranks, expert_ranks),
        }[kind]
        return size > 1 and self.per_node % span != 0


def parse_bytes(text: str, key: str) -> float:
    """`80GB`, `141e9`, `64GiB` as bytes.

    Raises:
        ConfigError: no amount above 0.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {name.lower(): factor for name, factor in _UNITS.items()}
    try:
        amount = float(found[1]) * units[found[2].lower()] if found else 0.0
    except (KeyError, ValueError):
        amount = 0.0
    if amount <= 0 or amount == float("inf"):
        raise config_error(key, text, "is not an amount of bytes", works="80GB, 64GiB, 1.5TB")
    return amount


def with_links(hardware: Hardware, text: str) -> Hardware:
    """The hardware with the rates of `intra=450GB,inter=50GB` (a second; a bare number is GB).

    Raises:
        ConfigError: a name that isn't one of a link, or no rate.
    """
    rates: dict[str, float] = {}
    for part in text.split(","):
        name, _, amount = (piece.strip() for piece in part.partition("="))
        if name not in ("intra", "inter"):
            raise config_error("--link", text, f"has no link {name!r}", works="intra=450GB,inter=50GB")
        amount = amount.removesuffix("/s")
        rates[name] = parse_bytes(f"{amount}GB" if re.fullmatch(r"[0-9.]+", amount) else amount, "--link")
    return replace(hardware, **rates)  # type: ignore[arg-type]  # all of them are floats


def check_hardware(hardware: Hardware) -> None:
    """Refuses machines that can't be.

    Raises:
        ConfigError: nodes that don't divide the ranks, or a rate that isn't above 0.
    """
    if hardware.gpus % hardware.per_node:
        raise ConfigError(
            f"{hardware.per_node} ranks a node do not divide {hardware.gpus} GPUs: give --nodes a divisor of them."
        )
    for field in fields(hardware):
        if getattr(hardware, field.name) <= 0:
            raise config_error(field.name, getattr(hardware, field.name), "is not above 0")
