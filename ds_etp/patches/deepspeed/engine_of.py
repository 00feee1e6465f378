"""From an engine's module back to the engine, for hosts that keep only the module (TRL's weight sync)."""

from __future__ import annotations

import weakref
from typing import Any

_REF = "ds_etp_engine"


class _EngineRef:
    """A weak reference that a copied or pickled module leaves behind."""

    def __init__(self, engine: Any = None) -> None:
        self.get = (lambda: None) if engine is None else weakref.ref(engine)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _EngineRef, ()


def remember_engine(engine: Any, model: Any) -> None:
    """Lets `engine_of` find the engine of this module."""
    setattr(model, _REF, _EngineRef(engine))


def engine_of(model: Any) -> Any:
    """The live engine whose module a model is, its experts split by ds_etp; None for any other."""
    ref = vars(model).get(_REF)
    engine = None if ref is None else ref.get()
    return engine if engine is not None and engine.module is model else None
