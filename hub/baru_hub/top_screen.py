"""How `baru-hub top` looks: readable from 60 columns on. Pure.

With rich, which is here anyway: nothing can be steered, so there is nothing that textual would add.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from baru_common.cli_support import harmless

from .top import HubRow, LinkRow, NodeRow, View

_LINK_STYLES = {"up": "green", "suspect": "yellow", "connecting": "yellow", "draining": "yellow", "down": "bold red"}
_GAP = "   "


def drawn(shown: View, missing: Mapping[str, str]) -> RenderableType:
    """Return who is missing, then each hub with its nodes, then the links."""
    parts: list[RenderableType] = [Text(harmless(why), style="bold red") for why in missing.values()]
    for hub in shown.hubs:
        nodes = [node for node in shown.nodes if node.hub == hub.address]
        parts += [*_hub(hub), _node_table(nodes) if nodes else Text("no session yet", style="dim"), ""]
    if shown.links:
        parts.append(_link_table(shown.links))
    return Group(*parts)


@dataclass(frozen=True)
class Cropped:
    """As many lines of it as the terminal has, the last one telling how many there are not."""

    whole: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Give the lines."""
        height = options.height or console.height
        lines = console.render_lines(self.whole, options.update(height=None))
        if len(lines) > height:
            more = f"and {len(lines) - height + 1} more lines: a taller terminal, or --once, shows them"
            lines[height - 1 :] = console.render_lines(
                Text(more, style="dim", no_wrap=True), options.update(height=None)
            )
        for line in lines:
            yield from line
            yield Segment.line()


def _hub(hub: HubRow) -> Iterable[RenderableType]:
    heading = Text.assemble((harmless(hub.address), "bold"), _GAP, harmless(hub.target))
    yield heading.append(f"{_GAP}draining", style="yellow") if hub.draining else heading
    won = "" if hub.waits_won is None else f", {_share(hub.waits_won)} won"
    others = _counts({state: number for state, number in hub.sessions.items() if state != "attached" and number})
    held = f"sessions {sum(hub.sessions.values())}/{hub.max_sessions}"
    for facts in (
        (f"{_number(hub.tokens_per_s)} tokens/s", f"{_number(hub.steps_per_s)} steps/s of {_number(hub.step_ms)} ms"),
        (f"batch {_number(hub.batch)}", f"depth {_number(hub.depth)}", f"{_number(hub.waits_per_s)} waits/s{won}"),
        (f"{held} ({others})" if others else held, f"{hub.prefilling_sessions} prefilling", f"{hub.refused} refused"),
        (f"pages {_counts(hub.pages)}" if hub.pages else "no pages",),
        (f"{hub.waiting_frames} unread frames", f"{hub.changes} changes of acceptance"),
    ):
        yield Padding(Text(_GAP.join(facts)), (0, 0, 0, 2))


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{num} {harmless(what)}" for what, num in counts.items())


def _node_table(nodes: Sequence[NodeRow]) -> Table:
    table = _table(("node", "drafter"), ("tokens/s", "accepted", "length", "tokens", "lost"))
    for node in nodes:
        table.add_row(
            _name(node.node),
            _name(node.drafter),
            _number(node.tokens_per_s),
            _share(node.acceptance),
            _number(node.mean_accepted_length, 2),
            str(node.tokens),
            Text(str(node.streams_lost), style="yellow" if node.streams_lost else ""),
        )
    return table


def _link_table(links: Sequence[LinkRow]) -> Table:
    table = _table(("scraped at", "hub", "link"), ("RTT ms", "outages"))
    for link in links:
        state = Text(link.state, style=_LINK_STYLES.get(link.state, ""))
        table.add_row(_name(link.node), _name(link.hub), state, _number(link.round_trip_ms), str(link.outages))
    return table


def _table(words: Sequence[str], numbers: Sequence[str]) -> Table:
    """A number is never broken; a name may be."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading in words:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _name(name: str) -> Text:
    """A name that is neither markup nor an emoji, whatever is in it."""
    return Text(harmless(name))


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
