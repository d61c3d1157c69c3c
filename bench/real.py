"""Drafting on real models on this machine: a hub on one core, a node on another, everything in one interleaved run.

Compares tokens per second with drafting off and on, for each drafter, and with transformers' own greedy, assisted
and prompt-lookup generation of the same models on the hub's core.

Usage: python -m bench.real [--prompts N] [--rounds N] [--tokens N]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rich.progress import Progress

from baru_common.model_files import DEFAULT_TARGET
from baru_common.sampling import SamplingParams
from baru_micro import Finish, MicroNode

from .programs import program
from .store import OUT, Store, machine

PROMPTS = Path(__file__).parent.parent / "tests" / "data" / "prompts.jsonl"
STORE = Store(OUT / "real.jsonl")
HUB_CORE, NODE_CORE = 0, 1


@dataclass(frozen=True)
class Prompt:
    """One prompt of the set."""

    name: str
    kind: str
    repetitive: bool
    messages: list[dict[str, str]]


def prompts() -> list[Prompt]:
    """The prompt set."""
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    return [Prompt(row["id"], row["class"], row["repetitive"], row["messages"]) for row in rows]


@asynccontextmanager
async def hub_process(*options: str) -> AsyncIterator[str]:
    """Run a hub on its own core; yield its address."""
    words = ("serve", "--listen", "127.0.0.1:0", "--threads", "1")
    async with program("baru_hub.cli", *words, *options, core=HUB_CORE) as told:
        yield told["address"]


@dataclass(frozen=True)
class Run:
    """One generation."""

    ids: tuple[int, ...]
    elapsed_s: float
    mean_accepted_length: float


async def through_hub(node: MicroNode, prompt: Prompt, num_tokens: int) -> Run:
    """Generate once through the hub."""
    params = SamplingParams(max_tokens=num_tokens)
    finish = [event async for event in node.generate(prompt.messages, params)][-1]
    if not isinstance(finish, Finish):
        raise RuntimeError("no Finish came")
    return Run(finish.ids, finish.elapsed_s, finish.usage.mean_accepted_length)


Variant = Callable[[Prompt, int], Awaitable[Run]]


class Reference:
    """Transformers' own generation, in a process of its own on the hub's core."""

    def __init__(self, target: str, assistant: str | None) -> None:
        command = ["taskset", "-c", str(HUB_CORE), sys.executable, "-m", "bench.reference", target, assistant or ""]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._read()

    def run(self, mode: str, prompt_ids: list[int], num_tokens: int) -> Run:
        """Generate once; `mode` is greedy, lookup or assisted."""
        if self._process.stdin is None:
            raise RuntimeError("the reference has no input")
        self._process.stdin.write(json.dumps({"mode": mode, "ids": prompt_ids, "num_tokens": num_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return Run(tuple(answer["ids"]), answer["elapsed_s"], 0.0)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        if self._process.stdout is None:
            raise RuntimeError("the reference has no output")
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


async def through_reference(reference: Reference, mode: str, node: MicroNode, prompt: Prompt, num_tokens: int) -> Run:
    """Generate once with transformers; the node only makes the ids."""
    return await asyncio.to_thread(reference.run, mode, node.prompt_ids(prompt.messages), num_tokens)


async def measure(arguments: argparse.Namespace) -> None:
    """Run every variant on every prompt in turn, round by round, and store each result."""
    chosen = [p for p in prompts() if p.repetitive or not arguments.repetitive][:: arguments.stride]
    drafters = ["none", "ngram", *([f"causal_lm:{arguments.assistant}"] if arguments.assistant else [])]
    modes = ["greedy", "lookup", *(["assisted"] if arguments.assistant else [])]
    reference = Reference(arguments.target, arguments.assistant)
    try:
        async with hub_process("--target", arguments.target) as address, AsyncExitStack() as stack:
            variants: dict[str, Variant] = {}
            for own in arguments.own:  # a hub that drafts by itself; it is idle while another variant runs
                with_own = await stack.enter_async_context(hub_process("--target", arguments.target, "--drafter", own))
                node = await stack.enter_async_context(MicroNode.connect(with_own, drafter=None))
                variants[f"baru hub {own}"] = partial(through_hub, node)
            for name in drafters:
                node = await stack.enter_async_context(MicroNode.connect(address, drafter=name))
                variants[f"baru {name}"] = partial(through_hub, node)
            for mode in modes:
                variants[f"transformers {mode}"] = partial(through_reference, reference, mode, node)
            with Progress() as progress:
                task = progress.add_task("generations", total=len(chosen) * arguments.rounds)
                for round_number, prompt in product(range(arguments.rounds), chosen):
                    for name, variant in variants.items():
                        await measure_one(arguments, name, variant, prompt, round_number)
                    progress.advance(task)
    finally:
        reference.close()


async def measure_one(
    arguments: argparse.Namespace, name: str, variant: Variant, prompt: Prompt, round_number: int
) -> None:
    """Run one variant on one prompt once, unless it is in the store."""
    key = f"{arguments.target}|{arguments.tokens}|{prompt.name}|{name}|{round_number}"
    if key in STORE.rows():
        return
    run = await variant(prompt, arguments.tokens)
    STORE.append(
        key,
        {
            "target": arguments.target,
            "prompt": prompt.name,
            "class": prompt.kind,
            "repetitive": prompt.repetitive,
            "variant": name,
            "round": round_number,
            "num_tokens": len(run.ids),
            "elapsed_s": run.elapsed_s,
            "mean_accepted_length": run.mean_accepted_length,
            "ids_digest": hashlib.sha256(repr(run.ids).encode()).hexdigest()[:16],
            "machine": machine(),
        },
    )


def report() -> None:
    """Print tokens per second by variant: median over rounds of the whole prompt set's rate, and its range."""
    rows = list(STORE.rows().values())
    for repetitive in (True, False):
        part = [row for row in rows if row["repetitive"] is repetitive]
        print("repetitive prompts" if repetitive else "other prompts")
        for variant in dict.fromkeys(row["variant"] for row in part):
            rates = []
            for round_number in sorted({row["round"] for row in part}):
                runs = [r for r in part if r["variant"] == variant and r["round"] == round_number]
                rates.append(sum(r["num_tokens"] for r in runs) / sum(r["elapsed_s"] for r in runs))
            print(f"  {variant:28} {statistics.median(rates):7.2f} tokens/s   {min(rates):.2f} - {max(rates):.2f}")


def check_identical() -> None:
    """RuntimeError unless every prompt's ids through the hub are the same whatever drafted, in every round."""
    digests: dict[str, set[str]] = {}
    for row in STORE.rows().values():
        if row["variant"].startswith("baru"):
            digests.setdefault(f"{row['target']} {row['prompt']}", set()).add(row["ids_digest"])
    different = [prompt for prompt, found in digests.items() if len(found) > 1]
    if different:
        raise RuntimeError(f"drafting changed the output of {different}")
    print(f"{len(digests)} prompts: ids the same with drafting off and on, in every round")


def main() -> None:
    """Measure, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--assistant", default=None, help="small model for causal_lm and assisted generation")
    parser.add_argument(
        "--own", nargs="*", default=None, help="hub drafters, too; default: eagle3, where one is shipped"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--stride", type=int, default=1, help="use every n-th prompt")
    parser.add_argument("--repetitive", action="store_true", help="the repetitive prompts only")
    arguments = parser.parse_args()
    if arguments.own is None:
        arguments.own = ["eagle3"] if arguments.target == DEFAULT_TARGET else []
    os.sched_setaffinity(0, {NODE_CORE})
    asyncio.run(measure(arguments))
    check_identical()
    report()


if __name__ == "__main__":
    main()
