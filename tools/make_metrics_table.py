"""Write the tables of docs/telemetry.md from the instruments themselves.

Usage: python -m tools.make_metrics_table
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baru_common.board_state import INSTRUMENTS as BOARD
from baru_common.instruments import Instrument
from baru_hub.instruments import INSTRUMENTS as HUB
from baru_micro.instruments import INSTRUMENTS as NODE

PAGE = Path(__file__).parent.parent / "docs" / "telemetry.md"
TABLES = {"hub": HUB, "node": NODE, "board": BOARD}


def table(instruments: Sequence[Instrument]) -> str:
    """Return the Markdown table of some instruments."""
    rows = [
        f"| `{i.exported_name}` | {i.kind.value} | {', '.join(i.labels)} | {i.description} |"
        + (f" `{i.mirrored_name}` |" if i.mirrors else " |")
        for i in instruments
    ]
    return "\n".join(
        ["| metric | kind | labels | what it is | vLLM's name |", "| --- | --- | --- | --- | --- |", *rows]
    )


def filled(page: str) -> str:
    """Return the page with its tables as they should be."""
    for name, instruments in TABLES.items():
        begin, end = f"<!-- {name}: made by `python -m tools.make_metrics_table` -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n\n{table(instruments)}\n\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
