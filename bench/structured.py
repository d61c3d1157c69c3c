"""JSON by schema on the default target: is every answer valid, and does drafting earn as much as without a grammar?

For each of 100 requests (20 reports x 5 questions about them), greedily and at temperature 1: one answer kept to a
schema, and for every fourth request one without it, by the n-gram drafter at depth 4.

Usage: python -m bench.structured [--requests N]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from typing import Any

import jsonschema
import torch
from rich.progress import Progress

from baru_common.drafters import NgramDrafter
from baru_common.model_files import DEFAULT_TARGET, load
from baru_common.sampling import Grammar, SamplingContext, SamplingParams
from baru_common.sampling.guide import Guide
from baru_common.tokens import Tokenizer
from baru_hub.engines.transformers import TransformersEngine

from .lockstep import DEPTH, write
from .store import OUT, Store, machine

STORE = Store(OUT / "structured.jsonl")
TEXT = {"type": "string", "maxLength": 40}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": TEXT,
        "kind": {"enum": ["flood", "fire", "road closed", "power cut", "medical"]},
        "severity": {"type": "integer", "minimum": 1, "maximum": 5},
        "team": {
            "type": "object",
            "properties": {"name": TEXT, "size": {"type": "integer", "minimum": 1, "maximum": 99}},
            "required": ["name", "size"],
            "additionalProperties": False,
        },
        "needs": {"type": "array", "items": {"enum": ["boats", "water", "blankets", "medics"]}, "maxItems": 3},
        "confirmed": {"type": "boolean"},
    },
    "required": ["place", "kind", "severity", "team", "needs", "confirmed"],
    "additionalProperties": False,
}
PLACES = ("Mill Lane", "the north bridge", "Harbour Road", "the school", "Castle Hill")
EVENTS = ("the river is over its banks", "a barn is burning", "a tree blocks the road", "there is no power")
ASKS = (
    "Fill in the report form.",
    "Extract the facts as JSON.",
    "Give me the JSON record of this.",
    "Turn this into a JSON report.",
    "What is the situation? Answer in JSON.",
)


def requests() -> list[str]:
    """100 different requests."""
    return [
        f"{ask} REPORT {i}: At {place} {event}. Team Heron, {3 + i % 7} people, asks for boats and water."
        for i, (ask, place, event) in enumerate(itertools.product(ASKS, PLACES, EVENTS))
    ]


async def measure(num_requests: int) -> None:
    """Run all requests that are not stored yet."""
    target = load(DEFAULT_TARGET)
    engine, tokenizer = TransformersEngine(target, kv_cache_mb=256), Tokenizer(target.bundle)
    grammar = Grammar.json_schema(SCHEMA)
    guide = Guide.compile(grammar, target.bundle, target.eos_ids)
    done = STORE.rows()
    asked = list(enumerate(requests()[:num_requests]))
    cells = [(request, t, guided) for guided in (True, False) for request in asked for t in (0.0, 1.0)]
    work = [cell for cell in cells if _key(*cell) not in done and (cell[2] or cell[0][0] % 4 == 0)]
    with Progress() as progress:
        for cell in progress.track(work, description="structured"):
            (index, text), temperature, guided = cell
            prompt_ids = tokenizer.encode_chat([{"role": "user", "content": text}])
            params = SamplingParams(temperature=temperature, seed=index, grammar=grammar if guided else None)
            sampling = SamplingContext(
                params, len(prompt_ids), target.vocabulary, target.eos_ids, guide if guided else None
            )
            output, usage = await write(engine, NgramDrafter(), sampling, prompt_ids, 256 if guided else 64)
            STORE.append(
                _key(*cell),
                {
                    "machine": machine(),
                    "target": target.files.name,
                    "drafter": "ngram",
                    "depth": DEPTH,
                    "temperature": temperature,
                    "guided": guided,
                    "valid": guided and _is_valid(tokenizer, output),
                    "usage": vars(usage),
                },
            )
    await engine.close()


def _key(numbered: tuple[int, str], temperature: float, guided: bool) -> str:
    return f"{numbered[0]} {temperature} {'guided' if guided else 'free'}"


def _is_valid(tokenizer: Tokenizer, output: list[int]) -> bool:
    text = b"".join(map(tokenizer.vocabulary.text_bytes, output)).decode()
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main() -> None:
    """Measure from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    torch.set_num_threads(1)
    asyncio.run(measure(parser.parse_args().requests))


if __name__ == "__main__":
    main()
