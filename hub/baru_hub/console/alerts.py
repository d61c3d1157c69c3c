"""What asks for a person, judged from what the page is told: the same conditions as the alert rules for Prometheus in
deploy/observability, as far as one hub can see them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_Alert = tuple[str, str, str]

_FULL = 0.95
_SLOW_S = 1.0
_LOW = 0.1
_MANY_CUTS = 5
_REFUSED = {
    "CAPACITY_EXHAUSTED": (
        "{} sessions were refused for lack of room",
        "Raise --max-sessions or --kv-cache-mb, or send nodes to another hub.",
    ),
    "PERMISSION_DENIED": (
        "somebody asked for what is not theirs ({} times)",
        "A session was claimed with a wrong key or identity: a node with a new certificate, or an attack. See the log.",
    ),
}
"""By reason; of others the log tells, and they are the node's business."""


def alerts(told: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return them, the worst first: `level` (critical, warning), `what`, `todo`."""
    found = sorted(_alerts(told), key=lambda alert: alert[0] != "critical")
    return [{"level": level, "what": what, "todo": todo} for level, what, todo in found]


def _alerts(told: Mapping[str, Any]) -> Iterator[_Alert]:
    if cut := [node["name"] for node in told["nodes"] if node["link"] == "cut"]:
        todo = "Nodes with a model of their own go on provisionally. Look at the link; run `baru-micro doctor` there."
        yield "warning", f"no link to {', '.join(cut)}", todo
    for node in told["nodes"]:
        yield from _of_node(node)
    yield from _of_hub(told["hub"])
    yield from _of_sessions(told)
    yield from _of_posture(told["posture"])


def _of_hub(hub: Mapping[str, Any]) -> Iterator[_Alert]:
    if hub["draining"]:
        todo = "Nodes go to other hubs if they can."
        yield "warning", "the hub is about to stop: it takes no new sessions", todo
    if hub["kv_cache_usage"] > _FULL:
        todo = "New sessions will be refused soon. Raise --kv-cache-mb, or bound max_tokens of requests."
        yield "warning", f"sessions hold {hub['kv_cache_usage']:.0%} of the pages", todo
    if hub["sessions"].get("unread"):
        yield "warning", "a node does not read its frames", "It is too slow, or its link is; its session is paused."


def _of_sessions(told: Mapping[str, Any]) -> Iterator[_Alert]:
    if told["slow_step_s"] > _SLOW_S:
        todo = (
            "Another program on the device, heat, or too large a batch. Compare with the device's published step time."
        )
        yield "warning", f"steps take {told['slow_step_s']:.1f} s", todo
    for reason, number in told["failed"].items():
        todo = "The target fails to take steps; the log says why. A restart loses no output: nodes resume by their ids."
        yield "critical", f"{number} sessions ended with {reason}", todo
    for reason, number in told["refused"].items():
        if reason in _REFUSED:
            what, todo = _REFUSED[reason]
            yield "warning", what.format(number), todo


def _of_posture(posture: Mapping[str, Any]) -> Iterator[_Alert]:
    if problem := posture["problem"]:
        yield "critical", f"the posture document on disk is not in force: {problem}", "See `baru-hub posture diff`."
    for record in posture["canary"]:
        if record["standing"] == "refused":
            yield "critical", record["reason"], "Drafts of it are not used; the output is the same, only slower."


def _of_node(node: Mapping[str, Any]) -> Iterator[_Alert]:
    if node["cuts_15min"] > _MANY_CUTS:
        todo = "A weak radio link, most often. Each cut costs about a second."
        yield "warning", f"the link to {node['name']} broke {node['cuts_15min']} times in 15 minutes", todo
    right = node["acceptance_5min"]
    if right is not None and right < _LOW:
        todo = (
            "The drafter does not fit the target, or the texts. Run the canary of this pair, or choose another drafter."
        )
        yield "warning", f"of what {node['name']} drafts with {node['drafter']}, {right:.0%} is right", todo
