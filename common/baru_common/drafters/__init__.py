"""What proposes. A drafter is loaded once and shared; each session drafts through its own stream."""

from .base import Drafter, DraftStream, Proposal, TextDrafter, load_drafter
from .guided import GuidedStream
from .ngram import NgramDrafter

__all__ = ["DraftStream", "Drafter", "GuidedStream", "NgramDrafter", "Proposal", "TextDrafter", "load_drafter"]
