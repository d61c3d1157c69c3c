"""From how many rows on a linear layer computes each row alike, whatever its company.

The kernels behind one row and a few rows differ, and so do the last bits of what they compute. A row of
a verified block must not depend on how many rows are in the pass, so passes are padded to the number of
rows from which on all are computed alike. It depends on machine, library and numeric type, so it is
measured, on the model's own layers.
"""

from __future__ import annotations

import logging

import torch
from transformers.pytorch_utils import Conv1D

# Not from one row: that is a matrix-vector product, and differs so seldom that a probe may miss it (seen
# in bf16: one row in eighty).
_FLOORS = (2, 4, 8, 16, 32)
_COUNTS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 100, 128, 200, 256)

_log = logging.getLogger(__name__)


@torch.inference_mode()
def row_floor(model: torch.nn.Module) -> int:
    """Return the fewest rows from which on every linear layer of `model` gives a row the same bits.

    The most that is tried is returned, with a warning, when even that does not do.
    """
    layers = {m.weight.shape: m for m in model.modules() if isinstance(m, torch.nn.Linear | Conv1D)}
    generator = torch.Generator().manual_seed(0)
    floor = _FLOORS[0]
    for layer in layers.values():
        weight = layer.weight
        width = weight.shape[0 if isinstance(layer, Conv1D) else 1]  # GPT-2's layers are written the other way round
        rows = torch.randn(max(_COUNTS), width, generator=generator).to(weight.device, weight.dtype)
        expected = layer(rows)
        alike = [n for n in _COUNTS if _alike(layer, rows, expected, n)]
        while not all(n in alike for n in _COUNTS if n >= floor):
            if floor == _FLOORS[-1]:
                _log.warning("rows of %s are not computed alike even in passes of %d rows", tuple(weight.shape), floor)
                return floor
            floor = _FLOORS[_FLOORS.index(floor) + 1]
    return floor


def _alike(layer: torch.nn.Module, rows: torch.Tensor, expected: torch.Tensor, count: int) -> bool:
    """True when passes of `count` rows give the bits of one large pass; some 64 rows are tried."""
    starts = range(0, max(64, count) - count + 1, count)
    return all(torch.equal(layer(rows[i : i + count]), expected[i : i + count]) for i in starts)
