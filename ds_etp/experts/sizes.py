"""Which attributes of an experts module hold E or I: where its weights are shards, these are to be the shards' sizes.

They are known by name. Values alone can't tell: E may equal I, K (experts per token) or H. An attribute that the
class's own code reads, that equals E or I, and that nobody has named is refused: cut or left whole, either might be
wrong, and a wrong size may compute something else in silence.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from torch import nn

from ds_etp.experts.layout import SizeKind

# Names in transformers (5.0 to 5.24), and what the field's code on the hub calls the same.
_NAMES: dict[SizeKind | None, tuple[str, ...]] = {
    "experts": (
        *("num_experts", "num_local_experts", "num_routed_experts", "moe_num_experts"),
        *("n_experts", "n_local_experts", "n_routed_experts"),
    ),
    "intermediate": (
        *("intermediate_dim", "intermediate_size", "moe_intermediate_size", "expert_intermediate_size"),
        *("expert_dim", "inter_dim", "ffn_dim", "ffn_hidden_size", "expert_ffn_hidden_size"),
    ),
    None: (
        *("hidden_dim", "hidden_size", "moe_hidden_size", "embed_dim", "d_model", "input_size", "output_size"),
        *("top_k", "topk", "moe_topk", "moe_top_k", "num_experts_per_tok", "num_experts_per_token"),
        *("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "layer_idx"),
        *("alpha", "limit", "swiglu_alpha", "swiglu_limit"),
    ),
}
KNOWN: dict[str, SizeKind | None] = {name: kind for kind, names in _NAMES.items() for name in names}


def sizes_of(
    module: nn.Module, num_experts: int, intermediate_size: int, named: Mapping[str, SizeKind | None]
) -> dict[str, SizeKind] | str:
    """The attributes of an unsharded experts module that hold E or I; or, in a phrase, why that can't be told.

    Args:
        module: the module.
        num_experts, intermediate_size: E and I, from its weights.
        named: what is known of this class in particular, before `KNOWN`.
    """
    whole: dict[SizeKind, int] = {"experts": num_experts, "intermediate": intermediate_size}
    attributes = {name: value for name, value in vars(module).items() if type(value) is int}
    family: Any = type(module)
    sizes: dict[str, SizeKind] = {}
    for name, kind in named.items():
        if kind is not None and attributes.get(name) != whole[kind]:
            found = getattr(module, name, "missing")
            return f"{name} is said to be its size of kind {kind!r}, which is {whole[kind]}, and it is {found!r}"
    for name, value in attributes.items():
        if name in named or name in KNOWN:
            kind = named.get(name, KNOWN.get(name))
            # Another value under such a name is a size of something else: a dense layer's, of a block with both.
            if kind is not None and value == whole[kind]:
                sizes[name] = kind
        elif value in whole.values() and name in names_read(family):
            fitting = " or ".join(f"{kind!r}" for kind, size in whole.items() if size == value)
            return (
                f"its code reads {name}={value}, which may have to shrink with its weights or not: "
                f"register_layout(..., sizes={{{name!r}: ...}}) says whether it is {fitting} or, as None, neither"
            )
    return sizes


@cache
def names_read(family: type) -> frozenset[str]:
    """Names that a class's own methods use, `__init__` and nn.Module's apart."""
    found: set[str] = set()
    for base in family.__mro__:
        if base is nn.Module or base is object:
            continue
        for name, value in vars(base).items():
            if name != "__init__":
                for code in _codes(value):
                    found.update(code.co_names)
    return frozenset(found)


def _codes(value: Any) -> Iterator[types.CodeType]:
    """The code of a function, a method or a property, of what it wraps, and of functions inside."""
    if isinstance(value, property):
        for part in (value.fget, value.fset):
            yield from _codes(part)
    elif isinstance(value, types.CodeType):
        yield value
        for constant in value.co_consts:
            if isinstance(constant, types.CodeType):
                yield from _codes(constant)
    elif (code := getattr(getattr(value, "__func__", value), "__code__", None)) is not None:
        yield from _codes(code)
        yield from _codes(getattr(value, "__wrapped__", None))
