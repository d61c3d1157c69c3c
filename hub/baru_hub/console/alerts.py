"""What asks for a person, judged from what the page is told: the same conditions as the alert rules for Prometheus in
deploy/observability, as far as one hub can see them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_FULL = 0.95


def alerts(told: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return them, the worst first: `level` (critical, warning), `what`, `todo`."""
    found = sorted(_alerts(told), key=lambda alert: alert[0] != "critical")
    return [{"level": level, "what": what, "todo": todo} for level, what, todo in found]


def _alerts(told: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    hub, posture = told["hub"], told["posture"]
    if cut := [node["name"] for node in told["nodes"] if node["link"] == "cut"]:
        todo = "Nodes with a model of their own go on provisionally. Look at the link; run `baru-micro doctor` there."
        yield "warning", f"no link to {', '.join(cut)}", todo
    if hub["draining"]:
        yield (
            "warning",
            "the hub is about to stop: it takes no new sessions",
            "Nodes go to other hubs if they can.",
        )
    if hub["kv_cache_usage"] > _FULL:
        todo = "New sessions will be refused soon. Raise --kv-cache-mb, or bound max_tokens of requests."
        yield "warning", f"sessions hold {hub['kv_cache_usage']:.0%} of the pages", todo
    if hub["sessions"].get("unread"):
        yield "warning", "a node does not read its frames", "It is too slow, or its link is; its session is paused."
    if told["refused"]:
        todo = "The log says why. For lack of room: raise --max-sessions or --kv-cache-mb."
        yield "warning", f"{told['refused']} sessions were refused within a minute", todo
    if problem := posture["problem"]:
        yield "critical", f"the posture document on disk is not in force: {problem}", "See `baru-hub posture diff`."
    for record in posture["canary"]:
        if record["standing"] == "refused":
            yield "critical", record["reason"], "Drafts of it are not used; the output is the same, only slower."
