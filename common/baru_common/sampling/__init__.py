"""What a request may ask for, and how the target's ids are chosen; the same code on hub and node.

Importing this package needs no torch; `sampler` and `noise` do.
"""

from .grammar import Grammar, GrammarKind
from .params import NO_ID, SamplingContext, SamplingMode, SamplingParams
from .sparse import SparseProbs

__all__ = ["NO_ID", "Grammar", "GrammarKind", "SamplingContext", "SamplingMode", "SamplingParams", "SparseProbs"]
