"""Turns stored results into the tables and plots of docs/performance.md.

Reads docs/bench/*.jsonl (what was measured and committed), or with --fresh bench/out/*.jsonl, which it then copies
there. Writes the part of docs/performance.md between its markers, and docs/bench/*.png.

Usage: python -m bench.report [--fresh]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from .store import OUT, Store

DOCS = Path(__file__).parent.parent / "docs"
KEPT = DOCS / "bench"
PAGE = DOCS / "performance.md"
SAMPLING = DOCS / "sampling.md"
DRAFTERS = DOCS / "drafters.md"
LINK = DOCS / "link.md"
SECURITY = DOCS / "security.md"
TELEMETRY = DOCS / "telemetry.md"
ENDPOINT = DOCS / "endpoint.md"

Row = dict[str, Any]


def main() -> None:
    """Make tables and plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="take over the results in bench/out")
    if parser.parse_args().fresh:
        KEPT.mkdir(parents=True, exist_ok=True)
        for path in OUT.glob("*.jsonl"):
            shutil.copy(path, KEPT / path.name)
    simulated = list(Store(KEPT / "simulated.jsonl").rows().values())
    parts = [
        simulated_summary(simulated),
        *(simulated_table(simulated, sessions) for sessions in (1, 8, 32)),
        real_table(list(Store(KEPT / "real.jsonl").rows().values())),
        real_table(list(Store(KEPT / "real_small_drafter.jsonl").rows().values())),
        real_table(list(Store(KEPT / "real_head.jsonl").rows().values())),
        load_table(list(Store(KEPT / "load.jsonl").rows().values())),
        steps_table(Store(KEPT / "steps.jsonl").rows()),
    ]
    plot_simulated(simulated)
    fill(PAGE, "tables", "\n\n".join(part for part in parts if part))
    fill(SAMPLING, "acceptance", acceptance_table(list(Store(KEPT / "acceptance.jsonl").rows().values())))
    fill(DRAFTERS, "suffix", suffix_table(Store(KEPT / "suffix.jsonl").rows()))
    fill(SAMPLING, "structured", structured_table(list(Store(KEPT / "structured.jsonl").rows().values())))
    fill(SECURITY, "misbehaviour", misbehaviour_table(list(Store(KEPT / "misbehaviour.jsonl").rows().values())))
    fill(TELEMETRY, "telemetry", telemetry_table(Store(KEPT / "telemetry.jsonl").rows()))
    fill(ENDPOINT, "http", http_table(Store(KEPT / "http.jsonl").rows()))
    fill(LINK, "link", link_table(list(Store(KEPT / "link.jsonl").rows().values())))
    fill(SECURITY, "shape", shape_table(list(Store(KEPT / "shape.jsonl").rows().values())))


def telemetry_table(rows: dict[str, Row]) -> str:
    """What is measured with telemetry and without it, and what an observation takes."""
    if not rows:
        return ""
    lines = [(name, f"{row['median']:.4g} ({row['min']:.4g}-{row['max']:.4g})") for name, row in rows.items()]
    first = next(iter(rows.values()))
    return table(("", "median (range)"), lines) + f"\n\n{first['rounds']} rounds of each in turn; {first['machine']}."


def http_table(rows: dict[str, Row]) -> str:
    """The same request through the library and over HTTP."""
    if not rows:
        return ""
    lines = [(name, f"{row['median']:.3g} ({row['low']:.3g}-{row['high']:.3g})") for name, row in rows.items()]
    first = next(iter(rows.values()))
    return (
        table(("", "median (quartiles)"), lines)
        + f"\n\n{first['rounds']} requests each way in turn, {first['tokens']} tokens each, simulated target "
        f"{first['profile']}, drafter simulated:0.8, all programs on one core; {first['machine']}."
    )


def fill(page: Path, name: str, content: str) -> None:
    """Replace what stands between the markers of this name."""
    begin, end = f"<!-- {name}: made by `python -m bench.report` -->", f"<!-- end of {name} -->"
    text = page.read_text()
    page.write_text(text.split(begin)[0] + begin + "\n\n" + content + "\n\n" + end + text.split(end)[1])


def table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


# -- simulated devices


def simulated_summary(rows: Sequence[Row]) -> str:
    """The worst and the best cell."""
    if not rows:
        return ""
    worst, best = min(rows, key=lambda r: r["ratio"]), max(rows, key=lambda r: r["ratio"])
    return (
        f"### Simulated devices and links\n\n{len(rows)} cells. Worst ratio to drafting off: "
        f"**{worst['ratio']:.3f}** ({describe(worst)}); best: {best['ratio']:.2f} ({describe(best)})."
    )


def describe(row: Row) -> str:
    """One cell in words."""
    return (
        f"{row['profile']}, acceptance {row['acceptance']}, {row['token_ms']} ms a drafted token, "
        f"{row['round_trip_ms']} ms round trip, {row['num_sessions']} sessions"
    )


def simulated_table(rows: Sequence[Row], sessions: int) -> str:
    """Ratios by target, drafter and acceptance against round trip."""
    chosen = [row for row in rows if row["num_sessions"] == sessions and row["round_trip_ms"] > 0]
    round_trips = sorted({row["round_trip_ms"] for row in chosen})
    lines: dict[tuple[object, ...], dict[float, float]] = {}
    for row in chosen:
        key = (row["profile"], row["token_ms"], row["acceptance"])
        lines.setdefault(key, {})[row["round_trip_ms"]] = row["ratio"]
    body = [[*key, *(f"{ratios[r]:.2f}" if r in ratios else "" for r in round_trips)] for key, ratios in lines.items()]
    heading = ["target", "ms a drafted token", "acceptance", *(f"{r} ms" for r in round_trips)]
    title = (
        f"{sessions} session{'s' if sessions > 1 else ''}: tokens/s over the same hub with drafting off, by round trip"
    )
    return f"#### {title}\n\n{table(heading, body)}" if body else ""


def plot_simulated(rows: Sequence[Row]) -> None:
    """Ratio against round trip, one line a drafter and acceptance, one panel a target; one session."""
    chosen = [row for row in rows if row["num_sessions"] == 1]
    targets = list(dict.fromkeys(row["profile"] for row in chosen))
    if not targets:
        return
    figure, panels = plt.subplots(1, len(targets), figsize=(5 * len(targets), 4), sharey=True, squeeze=False)
    for panel, target in zip(panels[0], targets, strict=True):
        for token_ms, acceptance in sorted({(row["token_ms"], row["acceptance"]) for row in chosen}):
            if token_ms not in (0.1, 18.1):
                continue
            line = sorted(
                (row["round_trip_ms"], row["ratio"])
                for row in chosen
                if (row["profile"], row["token_ms"], row["acceptance"]) == (target, token_ms, acceptance)
            )
            style = "-" if token_ms == 0.1 else "--"
            color = {0.2: "tab:red", 0.6: "tab:orange", 0.8: "tab:green"}[acceptance]
            panel.plot(*zip(*line, strict=True), style, color=color, marker=".", label=f"{token_ms} ms, {acceptance}")
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(title=target, xlabel="round trip, ms", xscale="log")
    panels[0][0].set_ylabel("tokens/s over drafting off")
    panels[0][-1].legend(title="ms a drafted token, acceptance", bbox_to_anchor=(1.02, 1), loc="upper left")
    figure.tight_layout()
    figure.savefig(KEPT / "simulated.png", dpi=110)


# -- real models


def real_table(rows: Sequence[Row]) -> str:
    """Tokens per second by variant, repetitive and other prompts."""
    if not rows:
        return ""
    body = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        cells: list[str] = [variant]
        for repetitive in (True, False):
            part = [row for row in rows if row["repetitive"] is repetitive]
            rates, base = rates_of(part, variant), rates_of(part, "baru none")
            ratio = statistics.median(a / b for a, b in zip(rates, base, strict=False)) if rates and base else 0
            spread = f"{min(rates):.1f}-{max(rates):.1f}" if rates else ""
            cells += [f"{statistics.median(rates):.1f} ({spread})" if rates else "", f"{ratio:.2f}" if rates else ""]
        body.append(cells)
    heading = [
        "variant",
        "repetitive prompts, tokens/s (range)",
        "over off",
        "other prompts, tokens/s (range)",
        "over off",
    ]
    rounds = len({row["round"] for row in rows})
    prompts = len({row["prompt"] for row in rows})
    title = (
        f"### Real models on this machine, {len(body)} variants\n\n"
        f"{rows[0]['target']}, bf16, {prompts} prompts, {rounds} round(s), {rows[0]['machine']}."
    )
    return f"{title}\n\n{table(heading, body)}"


def rates_of(rows: Sequence[Row], variant: str) -> list[float]:
    """Tokens per second of a variant over its prompts, a figure a round."""
    rates = []
    for round_number in sorted({row["round"] for row in rows}):
        runs = [row for row in rows if row["variant"] == variant and row["round"] == round_number]
        if runs:
            rates.append(sum(r["num_tokens"] for r in runs) / sum(r["elapsed_s"] for r in runs))
    return rates


def load_table(rows: Sequence[Row]) -> str:
    """Ratio by sessions and round trip, real hub."""
    if not rows:
        return ""
    round_trips = sorted({row["round_trip_ms"] for row in rows})
    body = []
    for sessions in sorted({row["num_sessions"] for row in rows}):
        cells = {row["round_trip_ms"]: row for row in rows if row["num_sessions"] == sessions}
        body.append([sessions, *(f"{cells[r]['ratio']:.2f}" if r in cells else "" for r in round_trips)])
    heading = ["sessions", *(f"{r} ms" for r in round_trips)]
    return f"#### Sessions and round trips, n-gram drafter: tokens/s over drafting off\n\n{table(heading, body)}"


def steps_table(rows: dict[str, Row]) -> str:
    """What a step costs."""
    if not rows:
        return ""
    body = []
    for name, row in rows.items():
        value = row.get("median", row.get("mean", row.get("size")))
        spread = f"{row['min']:.2f}-{row['max']:.2f}" if "min" in row else ""
        body.append([name, f"{value:.2f}", spread])
    return f"### Cost of a step\n\n{table(['what', 'median', 'range'], body)}"


def acceptance_table(rows: list[Row]) -> str:
    """Coupled and rejection sampling on the opt-in pair, over the prompts that every cell was measured on."""
    temperatures, modes = sorted({row["temperature"] for row in rows}), {row["mode"] for row in rows}
    counts = Counter(row["prompt"] for row in rows)
    rows = [row for row in rows if counts[row["prompt"]] == len(temperatures) * len(modes)]
    if not rows:
        return ""
    coupled = [row for row in rows if "expected" in row]
    lines: list[list[object]] = []
    for rule in coupled[0]["expected"]:
        means = [_weighted(coupled, t, lambda row, rule=rule: row["expected"][rule]) for t in temperatures]  # type: ignore[misc]
        lines.append([f"expected acceptance of an id: {rule}", *(f"{mean:.3f}" for mean in means)])
    for mode in dict.fromkeys(row["mode"] for row in rows):
        runs = [[row["usage"] for row in rows if row["mode"] == mode and row["temperature"] == t] for t in temperatures]
        lines.append([f"{mode}, depth {rows[0]['depth']}: mean accepted length", *map(_mean_length, runs)])
    first = rows[0]
    num_ids = {t: sum(row["usage"]["num_emitted"] for row in coupled if row["temperature"] == t) for t in temperatures}
    return "\n".join(
        (
            f"Measured: target {first['target']}, drafter {first['drafter']}, bf16, {first['machine']};"
            f" {len({row['prompt'] for row in rows})} prompts; expectations over the same"
            f" {', '.join(map(str, num_ids.values()))} positions of coupled outputs. Mean accepted lengths are of each"
            " mode's own outputs, which differ, so they have the spread of so few ids; the expectations have not.",
            "",
            table(["", *(f"temperature {t}" for t in temperatures)], lines),
        )
    )


def _weighted(rows: list[Row], temperature: float, value: Callable[[Row], float]) -> float:
    """Mean over all positions of all outputs."""
    chosen: list[tuple[int, float]] = [
        (row["usage"]["num_emitted"], value(row)) for row in rows if row["temperature"] == temperature
    ]
    return sum(n * x for n, x in chosen) / sum(n for n, _ in chosen)


def _mean_length(usages: list[Row]) -> str:
    return f"{sum(u['num_emitted'] for u in usages) / max(sum(u['num_steps'] for u in usages), 1):.2f}"


def structured_table(rows: list[Row]) -> str:
    """JSON by schema, and the same requests without it."""
    if not rows:
        return ""
    lines = []
    for temperature in sorted({row["temperature"] for row in rows}):
        guided, free = (
            [r for r in rows if r["temperature"] == temperature and r["guided"] is g] for g in (True, False)
        )
        valid = f"{sum(row['valid'] for row in guided)} of {len(guided)}"
        lengths = (_mean_length([row["usage"] for row in group]) for group in (guided, free))
        lines.append([temperature, valid, *lengths])
    first = rows[0]
    heading = ["temperature", "valid", "mean accepted length", "without the schema"]
    return (
        f"Measured: {first['target']}, drafter {first['drafter']}, depth {first['depth']}, {first['machine']}.\n\n"
        + table(heading, lines)
    )


def suffix_table(stored: dict[str, Row]) -> str:
    """What repeating drafters earn, by class of prompt."""
    if not stored:
        return ""
    index = stored["index"]
    rows = [row for key, row in stored.items() if key != "index"]
    cells = [
        (name, depth)
        for depth in sorted({r["depth"] for r in rows})
        for name in dict.fromkeys(r["drafter"] for r in rows)
    ]
    lines: list[list[object]] = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind]
        chosen = ([r for r in of_kind if (r["drafter"], r["depth"]) == cell] for cell in cells)
        lines.append([kind, *map(_mean_length, chosen)])
    with_corpus = [row for row in rows if row["drafter"] == "suffix:reports"]
    micros = sorted(1e6 * row["cpu_s"] / row["num_proposals"] for row in with_corpus)
    return "\n\n".join(
        (
            f"Measured by `python -m bench.suffix`: the target's stored greedy answers replayed; {index['machine']}."
            f" Corpus: the {index['num_texts']} reports of examples/reports, {index['num_ids']} ids,"
            f" {index['num_bytes'] / index['num_ids']:.1f} bytes an id. CPU time a block: median answer"
            f" {statistics.median(micros):.0f} us, worst {micros[-1]:.0f} us. Mean accepted length by drafter, depth;"
            " `held out`: each report written from the folds that it is not in. On the situation-report prompts the"
            " session alone does as well: those answers mostly repeat their prompts.",
            table(["class", *(f"{name}, {depth}" for name, depth in cells)], lines),
        )
    )


_SHAPE_COLUMNS = {
    "tokens_per_s": ("tokens/s", 1),
    "first_token_ms": ("first token, ms", 1),
    "mean_accepted_length": ("mean accepted length", 1),
    "up_bytes_s": ("KB/s up", 1e3),
    "down_bytes_s": ("KB/s down", 1e3),
}


def shape_table(rows: Sequence[Row]) -> str:
    """What constant size and pace cost, by tick."""
    if not rows:
        return ""
    lines = []
    for tick_ms in dict.fromkeys(row["tick_ms"] for row in rows):
        of_tick = [row for row in rows if row["tick_ms"] == tick_ms]
        values = ([row[name] / unit for row in of_tick] for name, (_, unit) in _SHAPE_COLUMNS.items())
        lines.append(["off" if tick_ms is None else f"{tick_ms} ms", *map(_spread, values)])
    first, rounds = rows[0], len({row["round"] for row in rows})
    return (
        f"Measured by `python -m bench.shape`, {rounds} interleaved rounds: {first['profile']} simulated in real time,"
        f" a drafter of 2 ms an id and acceptance 0.8, cells of 512 bytes, plaintext, hub and node on one core;"
        f" {first['machine']}. Median (range).\n\n"
        + table(["tick", *(title for title, _ in _SHAPE_COLUMNS.values())], lines)
    )


_LINK_ROWS = {
    "noticed_s": "silent cut to outage noticed, s",
    "first_provisional_s": "silent cut to first provisional token, s",
    "reached_s": "link back to hub reached, s",
    "first_verified_s": "link back to first verified token, s",
    "death_to_close_s": "`kill -9` of the hub to its connections closed by the kernel, s",
    "close_to_noticed_s": "connections closed to outage noticed, s",
    "drafting": "50 ms round trip, drafting, tokens/s",
    "drafting, 1 % loss": "50 ms round trip, 1 % loss, drafting, tokens/s",
    "hub alone": "hub alone, no delay, tokens/s",
}


def link_table(rows: Sequence[Row]) -> str:
    """What an outage takes, and what a bad link costs: the last run of each lab."""
    if not rows:
        return ""
    labs: dict[str, Row] = {}
    for row in rows:  # the last of each figure: a run may have measured some only
        found = labs.get(row["lab"], {"found": {}})["found"] | row["found"]
        labs[row["lab"]] = row | {"found": found}
    lines = ["| median (range) | " + " | ".join(labs) + " |", "| --- |" + " --- |" * len(labs)]
    for name, title in _LINK_ROWS.items():
        cells = [_spread(row["found"].get(name)) for row in labs.values()]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    (last,) = [*labs.values()][-1:]
    runs = len(last["found"].get("noticed_s", []))
    return "\n".join(lines) + f"\n\n{runs} outages of 3 s a lab; {last['machine']}."


def misbehaviour_table(rows: Sequence[Row]) -> str:
    """What one bad node costs seven good ones."""
    if not rows:
        return ""
    lines = []
    for row in rows:
        ratios = [b / a for a, b in zip(row["without"], row["with"], strict=True)]
        rates = (f"{statistics.median(row[name]):.1f}" for name in ("without", "with"))
        lines.append([row["kind"], *rates, _spread(ratios)])
    first = rows[0]
    return (
        table(["offender", "tokens/s without", "with", "ratio, median (range)"], lines)
        + f"\n\n{len(first['with'])} rounds of {first['seconds']:g} s each way, interleaved; {first['machine']}, all on"
        f" one core that others use, too (load average up to {max(r['load'] for r in rows):.0f})."
    )


def _spread(values: Sequence[float] | None) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    main()
