"""What runs the target. `base.Engine` is the seam; each module is one engine."""

from .base import Engine, EngineSpec, Feed

__all__ = ["Engine", "EngineSpec", "Feed"]
