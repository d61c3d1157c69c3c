"""Drafting on simulated devices and links, against the same hub with drafting off; on a virtual clock.

The figures are exact: the same on every machine, and the only thing they measure is the schedule.

Usage: python -m bench.simulated [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product

from rich.progress import track

from .store import OUT, Store
from .virtual import Cell, simulate

TARGETS = ("thor-qwen3-8b-nvfp4", "thor-qwen3-8b-int4", "thor-qwen3-27b-nvfp4")
DRAFTERS_MS = (0.1, 13.7, 18.1, 26.7)
ROUND_TRIPS_MS = (2, 5, 20, 50, 100, 200)
ACCEPTANCES = (0.2, 0.6, 0.8)
SESSIONS = (1, 8, 32)
STORE = Store(OUT / "simulated.jsonl")


def grid() -> Iterator[Cell]:
    """Every cell of the published table, and the eight-session case that the published figure is about."""
    for sessions, target, token_ms, acceptance, round_trip_ms in product(
        SESSIONS, TARGETS, DRAFTERS_MS, ACCEPTANCES, ROUND_TRIPS_MS
    ):
        num_tokens = {1: 400, 8: 200, 32: 120}[sessions]
        yield Cell(target, acceptance, token_ms, round_trip_ms, sessions, num_tokens)
    yield Cell("thor-qwen3-8b-int4", 0.7, 0, 0, 8, 400)


def quick() -> Iterator[Cell]:
    """A few cells that say most: near and far, good and bad, alone and in company."""
    yield from (Cell("thor-qwen3-27b-nvfp4", 0.8, 18.1, rtt, 1, 600) for rtt in (5, 50))
    yield from (Cell("thor-qwen3-27b-nvfp4", 0.8, 0.1, rtt, 1, 600) for rtt in (2, 20, 50))
    yield from (Cell("thor-qwen3-8b-int4", 0.2, 0.1, rtt, 8, 150) for rtt in (2, 100))
    yield Cell("thor-qwen3-8b-int4", 0.7, 0, 0, 8, 400)


def measure(cell: Cell) -> dict[str, object]:
    """Run a cell with drafting on and off."""
    on, off = simulate(cell), simulate(cell, drafting=False)
    return {
        **asdict(cell),
        "tokens_per_s": on.tokens_per_s,
        "tokens_per_s_off": off.tokens_per_s,
        "ratio": on.tokens_per_s / off.tokens_per_s,
        "mean_accepted_length": on.mean_accepted_length,
    }


def main() -> None:
    """Measure what is not in the store yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cells only")
    cells = list(quick() if parser.parse_args().quick else grid())
    done = STORE.rows()
    for cell in track([c for c in cells if repr(c) not in done], description="simulated cells"):
        STORE.append(repr(cell), measure(cell))
    worst = min((row for row in STORE.rows().values()), key=lambda row: row["ratio"])
    print(f"{len(STORE.rows())} cells; worst ratio {worst['ratio']:.3f}: {worst['key']}")


if __name__ == "__main__":
    main()
