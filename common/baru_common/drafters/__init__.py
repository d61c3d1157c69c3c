"""What proposes. A drafter is loaded once and shared; each session drafts through its own stream."""

from .base import Drafter, DraftStream, load_drafter
from .ngram import NgramDrafter

__all__ = ["DraftStream", "Drafter", "NgramDrafter", "load_drafter"]
