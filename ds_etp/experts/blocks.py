"""What the decoder block around routed experts tells: whether it calls shared experts after them, and K."""

from __future__ import annotations

import ast
import inspect
import textwrap

from torch import nn


def find_shared_experts(block: nn.Module, experts: str) -> str:
    """The child of a block that holds its shared experts, which may as well run before the routed ones are done.

    Its name says "shared", and wherever the block calls it, it does so after `experts`, with nothing but its own first
    argument. Only what is written so is taken: whoever calls them early checks that it is so.

    Args:
        block: the module around the routed experts.
        experts: their name in it.

    Returns:
        The name of the child; "" where there is none.
    """
    names = [
        name for name, child in block.named_children() if "shared" in name and any(True for _ in child.parameters())
    ]
    fitting = [name for name in names if _called_after_experts(block, experts, name)]
    return fitting[0] if len(fitting) == 1 else ""


def top_k_of(block: nn.Module) -> int | None:
    """How many experts a token chooses, where the block around them says so."""
    top_k = getattr(block, "top_k", None)
    return top_k if type(top_k) is int and top_k > 0 else None


def _called_after_experts(block: nn.Module, experts: str, shared: str) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(block).forward)))
    except (OSError, TypeError, SyntaxError):
        return False  # no source
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) < 2:
        return False
    own = {function.args.args[1].arg}  # names of the first argument
    experts_called, fitting = False, False
    for node in sorted(_calls_and_assignments(function), key=_position):
        if isinstance(node, ast.Call):
            if _is_child(node, experts):
                experts_called = True
            elif _is_child(node, shared):
                fitting = experts_called and _given(node, own)
                if not fitting:
                    return False
        else:
            value = node.value if isinstance(node, ast.Assign) else None
            again = isinstance(value, ast.Name) and value.id in own
            names = {
                name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            }
            own = own | names if again else own - names
    return fitting


def _calls_and_assignments(function: ast.FunctionDef) -> list[ast.Call | ast.Assign | ast.AugAssign | ast.AnnAssign]:
    kinds = (ast.Call, ast.Assign, ast.AugAssign, ast.AnnAssign)
    return [node for node in ast.walk(function) if isinstance(node, kinds)]


def _position(node: ast.Call | ast.Assign | ast.AugAssign | ast.AnnAssign) -> tuple[int, int, int]:
    """Calls where they start, assignments where they end: after the calls in them."""
    if isinstance(node, ast.Call):
        return node.lineno, node.col_offset, 0
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset, 1


def _is_child(call: ast.Call, name: str) -> bool:
    target = call.func
    is_self = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    return is_self and isinstance(target, ast.Attribute) and target.attr == name


def _given(call: ast.Call, own: set[str]) -> bool:
    only = call.args[0] if len(call.args) == 1 and not call.keywords else None
    return isinstance(only, ast.Name) and only.id in own
