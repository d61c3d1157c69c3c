"""How much of the stored greedy answers do the drafters that look ids up get accepted, and what does looking up cost?

No model runs: each block is proposed from what the answer says so far and compared with how it goes on, which is what
greedy verification does. The first id of an answer comes with the prompt and is no step. The corpus is
`examples/reports`, read with the default target's tokenizer.

The answers mostly repeat their prompts, which the session alone finds. What texts are worth beyond that, the reports
themselves show ("held out"): each is written without a prompt, from all texts but the five that it is filed with. They
are by one hand: a real corpus gives less.

Usage: python -m bench.suffix [--missed]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baru_common.drafters import Drafter, NgramDrafter
from baru_common.drafters.suffix import SuffixDrafter
from baru_common.drafters.suffix_index import SuffixIndex
from baru_common.model_files import DEFAULT_TARGET, load
from baru_common.tokens import Tokenizer

from .real import PROMPTS, prompts
from .store import OUT, Store, machine

STORE = Store(OUT / "suffix.jsonl")
ANSWERS = PROMPTS.parent / "greedy_smollm2_fp32.json"
REPORTS = Path(__file__).parent.parent / "examples" / "reports"
DRAFTERS = ("ngram", "suffix", "suffix:reports")
DEPTHS = (4, 8, 16)
CLASSES = ("sitrep", "chat", "list", "summary", "json", "code")
HELD_OUT = "held out"
_FOLD, _NUM_PROMPT = 5, 8


@dataclass(frozen=True)
class Answer:
    """A prompt and what the target greedily answers."""

    name: str
    kind: str
    prompt_ids: Sequence[int]
    ids: Sequence[int]


@dataclass(frozen=True)
class Replay:
    """An answer, written by steps."""

    drafter: str
    depth: int
    name: str
    kind: str
    num_emitted: int
    """Ids after the first."""
    num_steps: int
    num_proposals: int
    cpu_s: float
    """Of all proposals."""
    missed: tuple[int, ...]
    """Where a step accepted nothing, though there was room: ids of the answer before it."""


def answers() -> list[Answer]:
    """The stored answers to the prompt set."""
    stored = json.loads(ANSWERS.read_text(encoding="utf-8"))["answers"]
    return [Answer(p.name, p.kind, stored[p.name]["prompt_ids"], stored[p.name]["ids"]) for p in prompts()]


def drafters(index: SuffixIndex) -> dict[str, Drafter]:
    """`DRAFTERS`, the last with this index."""
    return dict(zip(DRAFTERS, (NgramDrafter(), SuffixDrafter(), SuffixDrafter(index)), strict=True))


def held_out(texts: Sequence[Sequence[int]]) -> Iterator[tuple[Answer, SuffixIndex]]:
    """Each text as an answer, its first ids the prompt, and an index over the texts of all other folds."""
    for first in range(0, len(texts), _FOLD):
        fold = slice(first, first + _FOLD)
        index = SuffixIndex([*texts[:first], *texts[first + _FOLD :]])
        for number, text in enumerate(texts[fold], start=first + 1):
            yield Answer(f"report-{number:02}", HELD_OUT, text[:_NUM_PROMPT], text[_NUM_PROMPT:]), index


def replay(name: str, drafter: Drafter, answer: Answer, depth: int) -> Replay:
    """Write `answer` by steps of at most `depth` drafted ids and the target's own one, each block in lockstep."""
    whole = [*answer.prompt_ids, *answer.ids]
    first = num_committed = len(answer.prompt_ids) + 1
    stream, num_steps, num_proposals, cpu_s, missed = drafter.start(), 0, 0, 0.0, []
    while num_committed < len(whole):
        ids, room = whole[:num_committed], min(depth, len(whole) - num_committed - 1)
        while (wanted := num_committed + room - len(ids)) > 0:
            start_s = time.process_time()
            proposal = stream.propose(ids, num_committed, wanted)
            cpu_s += time.process_time() - start_s
            num_proposals += 1
            if not proposal.ids:
                break
            ids.extend(proposal.ids)
        agreed = num_committed
        while agreed < len(ids) and ids[agreed] == whole[agreed]:
            agreed += 1
        if room and agreed == num_committed:
            missed.append(agreed - len(answer.prompt_ids))
        num_committed = agreed + 1
        num_steps += 1
    num_emitted = len(whole) - first
    return Replay(name, depth, answer.name, answer.kind, num_emitted, num_steps, num_proposals, cpu_s, tuple(missed))


def mean_accepted_length(runs: Sequence[Replay]) -> float:
    """Ids a step, the target's own included, over all steps of `runs`."""
    return sum(run.num_emitted for run in runs) / sum(run.num_steps for run in runs)


def table_of(runs: Sequence[Replay], depth: int) -> Table:
    """Mean accepted lengths by class and of each situation report, and the time of a block, at one depth."""
    table = Table("mean accepted length", *DRAFTERS, title=f"depth {depth}", box=None)
    of_depth = [run for run in runs if run.depth == depth]
    rows = {kind: [run for run in of_depth if run.kind == kind] for kind in (*CLASSES, HELD_OUT)}
    rows["all prompts"] = [run for run in of_depth if run.kind != HELD_OUT]
    for run in rows["sitrep"]:
        rows[run.name] = [other for other in of_depth if other.name == run.name]
    for label, row in rows.items():
        by_drafter = ([run for run in row if run.drafter == drafter] for drafter in DRAFTERS)
        table.add_row(label, *(f"{mean_accepted_length(part):.2f}" for part in by_drafter))
    times_us = [[run.cpu_s / run.num_proposals * 1e6 for run in of_depth if run.drafter == d] for d in DRAFTERS]
    table.add_row("us a block: median answer", *(f"{statistics.median(part):.0f}" for part in times_us))
    table.add_row("us a block: worst answer", *(f"{max(part):.0f}" for part in times_us))
    return table


def show_missed(console: Console, tokenizer: Tokenizer, runs: Sequence[Replay]) -> None:
    """Print the situation reports as steps at the least depth, a bar where one accepted nothing."""
    by_name = {answer.name: answer for answer in answers()}
    for run in runs:
        if run.kind == "sitrep" and run.depth == min(DEPTHS):
            ids, places = by_name[run.name].ids, [0, *run.missed, run.num_emitted + 1]
            parts = (tokenizer.decode(ids[a:b]) for a, b in itertools.pairwise(places))
            console.print(f"-- {run.name}, {run.drafter}", "|".join(parts), sep="\n", markup=False)


def measure(*, missed: bool) -> None:
    """Replay every answer with every drafter at every depth; store it and show it."""
    tokenizer = Tokenizer(load(DEFAULT_TARGET).bundle)
    texts = [tokenizer.encode_inside(path.read_text(encoding="utf-8")) for path in sorted(REPORTS.glob("*.txt"))]
    start_s = time.process_time()
    index = SuffixIndex(texts)
    built_s = time.process_time() - start_s
    cases = [*((answer, index) for answer in answers()), *held_out(texts)]
    runs = [
        replay(name, drafter, answer, depth)
        for depth in DEPTHS
        for answer, others in cases
        for name, drafter in drafters(others).items()
    ]
    STORE.path.unlink(missing_ok=True)  # a replay is done in seconds: nothing to go on with
    size = {"num_texts": len(texts), "num_ids": index.num_ids, "num_bytes": index.num_bytes, "built_s": built_s}
    STORE.append("index", {"machine": machine(), **size})
    for run in runs:
        row = {name: value for name, value in asdict(run).items() if name != "missed"}
        STORE.append(f"{run.drafter} {run.depth} {run.name}", {"machine": machine(), **row})
    console = Console(highlight=False)
    bytes_per_id = index.num_bytes / max(index.num_ids, 1)
    console.print(
        machine(), f"{len(texts)} texts, {index.num_ids} ids in {built_s:.2f} s, {bytes_per_id:.2f} bytes an id"
    )
    for depth in DEPTHS:
        console.print(table_of(runs, depth))
    if missed:
        show_missed(console, tokenizer, [run for run in runs if run.drafter == DRAFTERS[-1]])


def main() -> None:
    """Measure from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missed", action="store_true", help="show where nothing was accepted")
    measure(missed=parser.parse_args().missed)


if __name__ == "__main__":
    main()
