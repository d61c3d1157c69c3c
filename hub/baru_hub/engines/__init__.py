"""What runs the target. `base.Engine` is the seam; each module is one engine."""

from .base import Allocation, Engine, EngineSpec, Feed, Paged, Want

__all__ = ["Allocation", "Engine", "EngineSpec", "Feed", "Paged", "Want"]
