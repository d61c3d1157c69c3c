"""What proposes. A drafter is loaded once and shared; each session drafts through its own stream."""

from .base import DRAFTERS, Drafter, DraftStream, Proposal, TextDrafter, load_drafter
from .cascade import CascadeDrafter
from .guided import GuidedStream, started
from .identity import DrafterIdentity, identity_of
from .ngram import NgramDrafter

__all__ = [
    "DRAFTERS",
    "CascadeDrafter",
    "DraftStream",
    "Drafter",
    "DrafterIdentity",
    "GuidedStream",
    "NgramDrafter",
    "Proposal",
    "TextDrafter",
    "identity_of",
    "load_drafter",
    "started",
]
