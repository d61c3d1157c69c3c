"""The hub: one target model that verifies what many nodes draft.

In process, for notebooks and tests:

>>> engine = load_engine("smollm2-135m-instruct")
>>> async with Verifier(engine) as verifier:
...     await verifier.check([(context_ids, draft_ids)])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .acceptance import Acceptance
    from .engines import Engine
    from .verifier import Verifier

__all__ = ["Acceptance", "Engine", "Verifier", "load_engine"]


def load_engine(
    target: str,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
    kv_cache_mb: int = 1024,
    drafter: str | None = None,
) -> Engine:
    """Load a target into the embedded engine, and the hub's own drafter if one is named.

    ModelFileError when the target cannot be served or the drafter does not fit it.
    """
    from baru_common.model_files import load

    from .engines.transformers import TransformersEngine

    return TransformersEngine(load(target, dtype=dtype, device=device), kv_cache_mb=kv_cache_mb, drafter=drafter)


def __getattr__(name: str) -> Any:
    """What needs numpy is loaded when it is asked for: a machine without a target has commands of ours to run, too."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import acceptance, engines, verifier

    return {"Acceptance": acceptance.Acceptance, "Engine": engines.Engine, "Verifier": verifier.Verifier}[name]
