"""Write deploy/observability/dashboards/*.json from the panels below.

Usage: python -m tools.make_dashboards
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent.parent / "deploy" / "observability" / "dashboards"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_NUM_COLUMNS, _HEIGHT = 3, 8
_SELF = 'instance=~"$instance"'


@dataclass(frozen=True)
class Panel:
    """One graph."""

    title: str
    unit: str
    queries: Mapping[str, str]
    """Legend -> expression."""
    kind: str = "timeseries"
    help: str = ""


def _quantile(q: float, name: str, by: str = "") -> str:
    labels = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({q}, sum by ({labels}) (rate({name}_bucket{{{_SELF}}}[$__rate_interval])))"


def _rate(name: str, by: str = "", more: str = "") -> str:
    total = f"rate({name}{{{_SELF}{more}}}[$__rate_interval])"
    return f"sum by ({by}) ({total})" if by else f"sum({total})"


HUB = (
    Panel("Tokens per second", "none", {"{{model}}": f"baru_hub:tokens:rate1m{{{_SELF}}}"}),
    Panel(
        "Mean accepted length",
        "none",
        {"{{node}} {{drafter}}": f"baru_hub:mean_accepted_length:rate5m{{{_SELF}}}"},
        help="Ids per verification step; 1 is plain decoding.",
    ),
    Panel("Acceptance", "percentunit", {"{{node}} {{drafter}}": f"baru_hub:acceptance:rate5m{{{_SELF}}}"}),
    Panel(
        "Acceptance by position",
        "percentunit",
        {"{{drafter}} {{position}}": f"baru_hub:acceptance_at:rate5m{{{_SELF}}}"},
        "bargauge",
    ),
    Panel(
        "What becomes of drafts",
        "none",
        {
            "accepted": _rate("baru_hub_accepted_tokens_total"),
            "rejected": _rate("baru_hub_rejected_tokens_total"),
            "discarded": _rate("baru_hub_discarded_tokens_total"),
            "guessed by the hub": _rate("baru_hub_guessed_tokens_total"),
        },
        help="Ids per second. Discarded ones are known when their session ends.",
    ),
    Panel("Share of drafts wasted", "percentunit", {"{{node}}": f"baru_hub:wasted_drafts:rate5m{{{_SELF}}}"}),
    Panel(
        "Depth", "none", {"{{depth}}": _rate("baru_hub_depth_steps_total", "depth")}, help="Steps per second by depth."
    ),
    Panel(
        "Step time",
        "s",
        {"median": _quantile(0.5, "baru_hub_step_time_seconds"), "95 %": f"baru_hub:step_time:p95_5m{{{_SELF}}}"},
    ),
    Panel(
        "Batch",
        "none",
        {
            "median": _quantile(0.5, "baru_hub_batch_size"),
            "steps per second": _rate("baru_hub_steps_total"),
        },
    ),
    Panel(
        "Patience",
        "percentunit",
        {
            "waits won": f"baru_hub:waits_won:rate5m{{{_SELF}}}",
            "time waited": _rate("baru_hub_waited_seconds_total"),
        },
        help="Share of waits that were right, and share of the time that steps were held back.",
    ),
    Panel(
        "Time to first token",
        "s",
        {
            "median": _quantile(0.5, "baru_hub_time_to_first_token_seconds"),
            "95 %": f"baru_hub:time_to_first_token:p95_5m{{{_SELF}}}",
        },
    ),
    Panel(
        "Inter-token time",
        "s",
        {
            "median": _quantile(0.5, "baru_hub_inter_token_time_seconds"),
            "99 %": _quantile(0.99, "baru_hub_inter_token_time_seconds"),
        },
    ),
    Panel(
        "Sessions",
        "none",
        {
            "{{state}}": f"sum by (state) (baru_hub_sessions{{{_SELF}}})",
            "prefilling": f"sum(baru_hub_prefilling_sessions{{{_SELF}}})",
            "most": f"sum(baru_hub_max_sessions{{{_SELF}}})",
        },
    ),
    Panel(
        "Pages of the KV cache",
        "none",
        {"{{state}}": f"sum by (state) (baru_hub_pages{{{_SELF}}})"},
    ),
    Panel(
        "Prompts",
        "none",
        {
            "prompt ids": _rate("baru_hub_prompt_tokens_total"),
            "fed": _rate("baru_hub_prefilled_tokens_total"),
            "found in the cache": _rate("baru_hub_prefix_hits_total"),
        },
        help="Ids per second.",
    ),
    Panel(
        "Streams",
        "none",
        {
            "{{begin}}": _rate("baru_hub_streams_opened_total", "begin"),
            "lost": _rate("baru_hub_streams_lost_total"),
        },
        help="Per second.",
    ),
    Panel(
        "Sessions by end", "none", {"{{reason}}": _rate("baru_hub_sessions_ended_total", "reason")}, help="Per second."
    ),
    Panel(
        "Errors",
        "none",
        {"{{at}} {{reason}}": _rate("baru_hub_errors_total", "at, reason")},
        help="Per second.",
    ),
    Panel(
        "Frames",
        "none",
        {
            "unread": f"sum(baru_hub_outbox_frames{{{_SELF}}})",
            "stale per second": _rate("baru_hub_stale_frames_total"),
        },
    ),
    Panel(
        "Changes of acceptance",
        "none",
        {"{{node}} {{scope}} {{direction}}": _rate("baru_hub_acceptance_changes_total", "node, scope, direction")},
        help="Per second. What is asked or answered has become another, or the drafter has.",
    ),
    Panel(
        "Process",
        "none",
        {
            "cores": f'rate(process_cpu_seconds_total{{{_SELF},job="baru-hub"}}[$__rate_interval])',
            "memory, GB": f'process_resident_memory_bytes{{{_SELF},job="baru-hub"}} / 1e9',
        },
    ),
)

NODE = (
    Panel("Tokens", "none", {"{{provenance}}": _rate("baru_node_tokens_total", "provenance")}, help="Ids per second."),
    Panel("Acceptance", "percentunit", {"{{drafter}}": f"baru_node:acceptance:rate5m{{{_SELF}}}"}),
    Panel(
        "Drafting",
        "none",
        {
            "proposed": _rate("baru_node_proposed_tokens_total"),
            "checked": _rate("baru_node_verified_tokens_total"),
            "accepted": _rate("baru_node_accepted_tokens_total"),
        },
        help="Ids per second.",
    ),
    Panel("Time of a proposal", "s", {"{{drafter}}": _quantile(0.95, "baru_node_draft_time_seconds", "drafter")}),
    Panel(
        "Links",
        "none",
        {"{{hub}}": f"baru_node_link_state{{{_SELF}}}"},
        "state-timeline",
        "0 down, 1 connecting, 2 suspect, 3 draining, 4 up.",
    ),
    Panel(
        "Round trip",
        "s",
        {
            "{{hub}} now": f"baru_node_link_round_trip_seconds{{{_SELF}}}",
            "{{hub}} 95 %": f"baru_node:round_trip:p95_5m{{{_SELF}}}",
        },
    ),
    Panel("Outages", "none", {"{{hub}}": f"sum by (hub) (increase(baru_node_link_outages_total{{{_SELF}}}[1h]))"}),
    Panel("Hubs asked", "none", {"{{hub}} {{result}}": _rate("baru_node_attempts_total", "hub, result")}),
    Panel("Share provisional", "percentunit", {"{{instance}}": f"baru_node:provisional:rate5m{{{_SELF}}}"}),
    Panel(
        "Time to first token",
        "s",
        {
            "median": _quantile(0.5, "baru_node_time_to_first_token_seconds"),
            "95 %": _quantile(0.95, "baru_node_time_to_first_token_seconds"),
        },
    ),
    Panel(
        "Inter-token time",
        "s",
        {
            "median": _quantile(0.5, "baru_node_inter_token_time_seconds"),
            "99 %": _quantile(0.99, "baru_node_inter_token_time_seconds"),
        },
    ),
    Panel(
        "Generations",
        "none",
        {
            "running": f"sum(baru_node_running_generations{{{_SELF}}})",
            "begun per second": _rate("baru_node_generations_total"),
            "{{reason}}": _rate("baru_node_generations_ended_total", "reason"),
        },
    ),
    Panel(
        "Steps",
        "none",
        {"{{drafter}}": _rate("baru_node_steps_total", "drafter")},
        help="Per second.",
    ),
)

FLEET = (
    Panel("Hubs and nodes that answer", "none", {"{{job}}": "sum by (job) (up)"}, "stat"),
    Panel("Tokens per second", "none", {"{{instance}}": "sum by (instance) (baru_hub:tokens:rate1m)"}),
    Panel("Sessions", "none", {"{{instance}}": "sum by (instance) (baru_hub_sessions)"}),
    Panel(
        "Acceptance by node",
        "percentunit",
        {"{{node}} {{drafter}}": "avg by (node, drafter) (baru_hub:acceptance:rate5m)"},
        "bargauge",
    ),
    Panel(
        "Mean accepted length by node",
        "none",
        {"{{node}} {{drafter}}": "avg by (node, drafter) (baru_hub:mean_accepted_length:rate5m)"},
        "bargauge",
    ),
    Panel("Links", "none", {"{{instance}} {{hub}}": "baru_node_link_state"}, "state-timeline"),
    Panel("Round trips", "s", {"{{instance}} {{hub}}": "baru_node_link_round_trip_seconds"}),
    Panel("Share provisional", "percentunit", {"{{instance}}": "baru_node:provisional:rate5m"}),
    Panel("Pages in use", "percentunit", {"{{instance}}": "baru_hub_kv_cache_usage"}),
    Panel(
        "Errors",
        "none",
        {"{{instance}} {{reason}}": "sum by (instance, reason) (increase(baru_hub_errors_total[5m]))"},
        help="In five minutes.",
    ),
)

DASHBOARDS = {
    "hub": ("Baru hub", HUB, "baru_hub_steps_total"),
    "node": ("Baru node", NODE, "baru_node_running_generations"),
    "fleet": ("Baru fleet", FLEET, ""),
}


def dashboard(name: str) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
    title, panels, instances = DASHBOARDS[name]
    variables: list[dict[str, Any]] = [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
    if instances:
        query = f"label_values({instances}, instance)"
        variables.append(
            {
                "name": "instance",
                "type": "query",
                "datasource": _SOURCE,
                "query": {"query": query, "refId": "instance"},
                "multi": True,
                "includeAll": True,
                "allValue": ".+",
                "current": {"text": "All", "value": "$__all"},
                "refresh": 2,
            }
        )
    return {
        "uid": f"baru-{name}",
        "title": title,
        "tags": ["baru"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables},
        "panels": _laid_out(panels),
    }


def _laid_out(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    width = 24 // _NUM_COLUMNS
    return [
        {
            "id": number + 1,
            "type": panel.kind,
            "title": panel.title,
            "description": panel.help,
            "datasource": _SOURCE,
            "gridPos": {
                "x": number % _NUM_COLUMNS * width,
                "y": number // _NUM_COLUMNS * _HEIGHT,
                "w": width,
                "h": _HEIGHT,
            },
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(65 + i), "datasource": _SOURCE, "expr": expr, "legendFormat": legend}
                for i, (legend, expr) in enumerate(panel.queries.items())
            ],
        }
        for number, panel in enumerate(panels)
    ]


def main() -> None:
    """Write them."""
    for name in DASHBOARDS:
        (OUT / f"{name}.json").write_text(json.dumps(dashboard(name), indent=1) + "\n")


if __name__ == "__main__":
    main()
