"""The node's instruments: what `docs/telemetry.md` lists."""

from __future__ import annotations

from baru_common.instruments import Instrument, Kind

INSTRUMENTS: list[Instrument] = []
"""All of them."""
DRAFTER = ("drafter",)

_DRAFT_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_TRIP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_STEP_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_ANSWER_S = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)


def _made(
    kind: Kind,
    name: str,
    description: str,
    labels: tuple[str, ...] = (),
    unit: str = "",
    buckets: tuple[float, ...] = (),
) -> Instrument:
    INSTRUMENTS.append(Instrument(f"baru_node_{name}", kind, description, labels, unit, buckets))
    return INSTRUMENTS[-1]


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_TOKENS = "{token}"
SHOWN = _made(
    _C,
    "tokens",
    "Ids by who stands behind them: verified (the target decided it before it was shown), provisional (decoded here "
    "while no hub answered); and what became of provisional ones: confirmed, retracted.",
    ("provenance",),
    _TOKENS,
)
STEPS = _made(_C, "steps", "Verification steps that the hub took for this node.", DRAFTER)
VERIFIED = _made(_C, "verified_tokens", "Drafted ids that the hub checked.", DRAFTER, _TOKENS)
ACCEPTED = _made(_C, "accepted_tokens", "Checked ids that equal what the target decided.", DRAFTER, _TOKENS)
PROPOSED = _made(_C, "proposed_tokens", "Ids that the drafter proposed.", DRAFTER, _TOKENS)
BEGUN = _made(_C, "generations", "Generations that began.", DRAFTER)
ENDED = _made(
    _C, "generations_ended", "Generations by how they ended: stop, length, left, or an error's reason.", ("reason",)
)
ATTEMPTS = _made(
    _C, "attempts", "Times that a hub was asked to take a session, and what came: ok or an error's reason.",
    ("hub", "result"),
)  # fmt: skip
OUTAGES = _made(_C, "link_outages", "Times that the link to a hub went down.", ("hub",))
LINK_STATE = _made(
    _G,
    "link_state",
    "State of the link to a hub: 0 down, 1 connecting, 2 suspect, 3 draining, 4 up.",
    ("hub",),
)
ROUND_TRIP_NOW = _made(_G, "link_round_trip", "Latest round trip to a hub.", ("hub",), "s")
RUNNING = _made(_G, "running_generations", "Generations that run.")
ROUND_TRIP = _made(_H, "round_trip", "Round trips of heartbeats.", ("hub",), "s", _TRIP_S)
DRAFT_TIME = _made(_H, "draft_time", "Time of a drafter's proposal.", DRAFTER, "s", _DRAFT_S)
FIRST_TOKEN = _made(
    _H, "time_to_first_token", "From a request to its first id, whoever decided it.", (), "s", _ANSWER_S
)
INTER_TOKEN = _made(
    _H, "inter_token_time", "Between ids that were shown and the next; a step may bring several.", (), "s", _STEP_S
)
