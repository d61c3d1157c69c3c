"""The hub's instruments: what `docs/telemetry.md` lists."""

from __future__ import annotations

from baru_common.instruments import Instrument, Kind

INSTRUMENTS: list[Instrument] = []
"""All of them."""
WHO = ("node", "drafter")
_STEP_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_ANSWER_S = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BATCH = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def _counter(
    name: str, description: str, labels: tuple[str, ...] = (), unit: str = "", mirrors: str = ""
) -> Instrument:
    return _made(Instrument(f"baru_hub_{name}", Kind.COUNTER, description, labels, unit, mirrors=mirrors))


def _gauge(name: str, description: str, labels: tuple[str, ...] = (), mirrors: str = "") -> Instrument:
    return _made(Instrument(f"baru_hub_{name}", Kind.GAUGE, description, labels, mirrors=mirrors))


def _histogram(
    name: str, description: str, buckets: tuple[float, ...], unit: str = "s", mirrors: str = ""
) -> Instrument:
    return _made(Instrument(f"baru_hub_{name}", Kind.HISTOGRAM, description, (), unit, buckets, mirrors))


def _made(instrument: Instrument) -> Instrument:
    INSTRUMENTS.append(instrument)
    return instrument


_TOKENS = "{token}"
EMITTED = _counter("emitted_tokens", "Ids that the target decided.", WHO, _TOKENS, "vllm:generation_tokens")
DRAFTED = _counter(
    "drafted_tokens", "Ids drafted by nodes whose fate is known: accepted, rejected or discarded.", WHO, _TOKENS
)
VERIFIED = _counter(
    "verified_tokens", "Drafted ids that a step checked.", WHO, _TOKENS, "vllm:spec_decode_num_draft_tokens"
)
ACCEPTED = _counter(
    "accepted_tokens",
    "Checked ids that equal what the target decided.",
    WHO,
    _TOKENS,
    "vllm:spec_decode_num_accepted_tokens",
)
REJECTED = _counter("rejected_tokens", "Checked ids that do not.", WHO, _TOKENS)
DISCARDED = _counter(
    "discarded_tokens", "Drafted ids that were never checked; known when a session ends.", WHO, _TOKENS
)
GUESSED = _counter("guessed_tokens", "Emitted ids that the hub's own drafter had guessed.", WHO, _TOKENS)
SESSION_STEPS = _counter(
    "session_steps", "Steps that decided ids, counted for each session in them: emitted per step is the mean accepted "
    "length.", WHO
)  # fmt: skip
CHECKED_DRAFTS = _counter(
    "checked_drafts", "Those of them that checked at least one drafted id.", WHO, mirrors="vllm:spec_decode_num_drafts"
)
VERIFIED_AT = _counter("verified_tokens_at", "Checked ids by position in the draft, from 0.", ("drafter", "position"))
ACCEPTED_AT = _counter(
    "accepted_tokens_at",
    "Accepted ids by position in the draft, from 0.",
    ("drafter", "position"),
    mirrors="vllm:spec_decode_num_accepted_tokens_per_pos",
)
DEPTH = _counter("depth_steps", "Sessions' steps by depth: the most draft ids that the plan would check.", ("depth",))
STEPS = _counter("steps", "Verification steps.")
WAITS = _counter("waits", "Times that a step was held back for a node's draft.", WHO)
WAITS_WON = _counter("waits_won", "Those of them in which the draft came in time.", WHO)
WAITED = _counter("waited", "Time that steps were held back for drafts.", unit="s")
PREFILLED = _counter(
    "prefilled_tokens", "Ids fed before a session's last one: prompts, and sessions made again.", WHO, _TOKENS
)
PROMPTED = _counter(
    "prompt_tokens", "Prompt ids of sessions that came to their first id.", WHO, _TOKENS, "vllm:prompt_tokens"
)
PREFIX_QUERIES = _counter(
    "prefix_queries", "Ids of new sessions that were looked for in the cache.", (), _TOKENS, "vllm:prefix_cache_queries"
)
PREFIX_HITS = _counter("prefix_hits", "Those of them that were there.", (), _TOKENS, "vllm:prefix_cache_hits")
CHANGES = _counter(
    "acceptance_changes",
    "Changes of acceptance that were found: of a session or of a node as a whole, and which way.",
    ("node", "scope", "direction"),
)
OPENED = _counter("streams_opened", "Streams that got a session: new, resumed or rebuilt.", ("begin",))
ORPHANED = _counter("streams_lost", "Streams that broke; their sessions ran on.", ("node",))
ENDED = _counter(
    "sessions_ended",
    "Sessions by how they ended: stop, length, cancelled, ABANDONED, or an error's reason.",
    ("reason",),
)
ERRORS = _counter("errors", "Errors by reason, and when: a session was refused, or failed.", ("at", "reason"))
STALE = _counter("stale_frames", "Draft frames that came late or twice; known when a session ends.", ("node",))

SESSIONS = _gauge(
    "sessions", "Sessions that hold memory: running, waiting for their node to read, orphaned, ending.", ("state",)
)
RUNNING = _gauge("running_sessions", "Sessions that the next step may have.", mirrors="vllm:num_requests_running")
PREFILLING = _gauge("prefilling_sessions", "Those of them whose ids are not all fed yet.")
MAX_SESSIONS = _gauge("max_sessions", "Most sessions at a time.")
OUTBOX = _gauge("outbox_frames", "Frames that wait for nodes to read them.")
PAGES = _gauge(
    "pages", "Pages of the KV cache: held, idle (published, may be shared or given away) or free.", ("state",)
)
KV_USAGE = _gauge(
    "kv_cache_usage", "Share of the pages that sessions hold, 0 to 1.", mirrors="vllm:kv_cache_usage_perc"
)
DRAINING = _gauge("draining", "1 while nobody is admitted any more.")

STEP_TIME = _histogram("step_time", "Time of a step's forward pass and decisions.", _STEP_S)
DRAFT_TIME = _histogram("draft_time", "Time of the hub's own drafter, in steps that use it.", _STEP_S)
BATCH = _histogram("batch_size", "Sessions in a step.", _BATCH, "{session}")
FIRST_TOKEN = _histogram(
    "time_to_first_token",
    "From a session's admission to its first id.",
    _ANSWER_S,
    mirrors="vllm:time_to_first_token_seconds",
)
INTER_TOKEN = _histogram(
    "inter_token_time",
    "Between the ids of one step and the next, of one session a step, in turn; each may bring several.",
    _STEP_S,
    mirrors="vllm:inter_token_latency_seconds",
)
COMPILE_TIME = _histogram("grammar_compile_time", "Time to compile a request's grammar.", _ANSWER_S)
