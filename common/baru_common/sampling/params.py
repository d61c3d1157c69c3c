"""What a request may ask for. Checked once, where it enters; the same object on hub and node."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, TypeGuard

from baru_common.errors import InvalidRequest

from .grammar import Grammar

if TYPE_CHECKING:
    from baru_common.tokens import Vocabulary

    from .guide import Guide

MAX_STOP_IDS = 64
MAX_STOP_STRINGS, MAX_STOP_BYTES = 16, 256
MAX_IDS = 4096
"""Most entries of logit_bias, banned_ids, allowed_ids and forced_ids, each."""
MAX_TOP_LOGPROBS = 20
MIN_TEMPERATURE = 0.01
NO_ID = -1
"""In the place of an id where the request leaves none to choose."""
_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**32 - 1),
    "min_tokens": (0, 2**32 - 1),
    "temperature": (0, 100),
    "top_k": (0, 2**32 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (0, 2**64 - 1),
    "logprobs": (0, MAX_TOP_LOGPROBS),
}
_ADJUSTMENTS = (
    "logit_bias",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "banned_ids",
    "allowed_ids",
    "forced_ids",
    "min_tokens",
    "grammar",
)
_ABOVE_ZERO = ("top_p", "repetition_penalty")


class SamplingMode(str, Enum):
    """How a draft is checked when the temperature is above 0; both are exact."""

    COUPLED = "coupled"
    """The target draws with noise that is a function of seed, position and id; drafts that equal its draw are
    accepted. The output does not depend on drafting at all."""
    REJECTION = "rejection"
    """Rejection sampling against the drafter's own distribution (Leviathan et al. 2023; Chen et al. 2023). The
    output follows the target's distribution; which output it is depends on what was drafted."""


@dataclass(frozen=True)
class SamplingParams:
    """How the target's ids are chosen, and when to stop. InvalidRequest names a value that is wrong.

    The order is: logit_bias; repetition, presence and frequency penalty; banned, allowed and forced ids,
    min_tokens and grammar; then, with a temperature above 0: temperature, top_k, top_p, min_p, and the draw.
    """

    max_tokens: int | None = None
    """Most ids to emit, 1 or more; None: as many as the context takes."""
    temperature: float = 0.0
    """Logits are divided by it, 0.01 to 100; 0: greedy, the lowest of the most likely ids."""
    seed: int | None = None
    """Seed of the noise; None: drawn once for the request, and reported in usage."""
    ignore_eos: bool = False
    """End-of-sequence ids do not stop the generation."""
    stop_ids: tuple[int, ...] = ()
    """Further ids that stop the generation, at most 64."""
    top_k: int = 0
    """Only the k most likely ids, and those tied with the last; 0: all."""
    top_p: float = 1.0
    """Only the fewest most likely ids whose probabilities sum to this, and those tied with the last; above 0."""
    min_p: float = 0.0
    """Only ids with at least this share of the most likely id's probability."""
    repetition_penalty: float = 1.0
    """Logits of ids in prompt or output are divided by it where positive and multiplied where negative; above 0
    (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Taken from the logit of every id of the output, -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from the logit of every id of the output as often as it is there, -2 to 2."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    """Added to the logits of these ids, -100 to 100 each."""
    banned_ids: tuple[int, ...] = ()
    """Ids that are never emitted."""
    allowed_ids: tuple[int, ...] = ()
    """Nothing but these ids is emitted; none given: everything."""
    forced_ids: tuple[int, ...] = ()
    """The output begins with these ids."""
    min_tokens: int = 0
    """No stop id, end-of-sequence id or stop string ends the output before it has so many ids."""
    stop_strings: Sequence[str] = ()
    """Texts that end the output; they are cut off. At most 16, of 1 to 256 bytes each."""
    logprobs: int | None = None
    """Report the target's log-probability of each id, and of so many likeliest ones, 0 to 20. They are those of
    the plain logits, whatever else is asked for. None: do not."""
    sampling_mode: SamplingMode = SamplingMode.COUPLED
    """A `SamplingMode`, or its name."""
    verify_blocks: bool = False
    """Check a block of drafts as a whole (Sun et al., ICLR 2025): accepts at least as many as one by one.
    With `sampling_mode = "rejection"` only."""
    grammar: Grammar | None = None
    """What the output must look like."""

    def __post_init__(self) -> None:
        self._normalise()
        for name, (low, high) in _RANGES.items():
            _check_range(name, getattr(self, name), low, high)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise _wrong("temperature", f"is {self.temperature}, must be 0 (greedy) or at least {MIN_TEMPERATURE}")
        for name in _ABOVE_ZERO:
            if not getattr(self, name) > 0:
                raise _wrong(name, "is 0, must be above 0")
        self._check_ids()
        self._check_stop_strings()
        self._check_contradictions()

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs, by id."""
        return self.logit_bias  # type: ignore[return-value]  # normalised

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def by_rejection(self) -> bool:
        """Drafts are checked by rejection sampling; greedy decoding has nothing to reject by."""
        return self.sampling_mode is SamplingMode.REJECTION and not self.is_greedy

    @property
    def adjustments(self) -> tuple[str, ...]:
        """Names of the parameters that change logits before anything is drawn; none: the likeliest id stays that."""
        return tuple(name for name in _ADJUSTMENTS if getattr(self, name) != getattr(SamplingParams, name))

    def with_seed(self, draw: int) -> SamplingParams:
        """Return these parameters with `draw` for a seed, if they need one and have none."""
        return self if self.is_greedy or self.seed is not None else replace(self, seed=draw)

    def _normalise(self) -> None:
        bias = self.logit_bias
        try:
            pairs = dict(bias)
            if len(pairs) != len(bias):
                raise _wrong("logit_bias", "holds an id twice")
            object.__setattr__(self, "logit_bias", tuple(sorted(pairs.items())))
        except (TypeError, ValueError):
            raise _wrong("logit_bias", "must map ids to numbers") from None
        for name in ("stop_ids", "banned_ids", "allowed_ids", "forced_ids", "stop_strings"):
            value = getattr(self, name)
            # A text is a sequence of texts, too, but not the one that was meant.
            if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
                raise _wrong(name, f"is {value!r}, must be a list")
            object.__setattr__(self, name, tuple(value))
        for name in ("ignore_eos", "verify_blocks"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, f"is {getattr(self, name)!r}, must be true or false")
        if not isinstance(self.grammar, (Grammar, type(None))):
            raise _wrong("grammar", "must be a Grammar")
        try:
            object.__setattr__(self, "sampling_mode", SamplingMode(self.sampling_mode))
        except ValueError:
            raise _wrong(
                "sampling_mode", f"is {self.sampling_mode!r}, must be one of {', '.join(m.value for m in SamplingMode)}"
            ) from None

    def _check_ids(self) -> None:
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise _wrong("stop_ids", f"has {len(self.stop_ids)} entries, at most {MAX_STOP_IDS} are allowed")
        for name in ("logit_bias", "banned_ids", "allowed_ids", "forced_ids"):
            if len(getattr(self, name)) > MAX_IDS:
                raise _wrong(name, f"has {len(getattr(self, name))} entries, at most {MAX_IDS} are allowed")
        for name, ids in self.ids_by_name().items():
            if not all(_is_id(i) for i in ids):
                raise _wrong(name, "holds an id outside 0 .. 2^32 - 1")
        for token, bias in self.biases:
            if not _is_number(bias) or not -100 <= bias <= 100:  # NaN is not, either
                raise _wrong("logit_bias", f"of id {token} is {bias!r}, must be a number in -100 .. 100")

    def ids_by_name(self) -> dict[str, Collection[int]]:
        """Every parameter that holds ids, for checks against a vocabulary."""
        return {
            "stop_ids": self.stop_ids,
            "logit_bias": [token for token, _ in self.biases],
            "banned_ids": self.banned_ids,
            "allowed_ids": self.allowed_ids,
            "forced_ids": self.forced_ids,
        }

    def require_ids_below(self, size: int) -> None:
        """Raise InvalidRequest when an id is outside a vocabulary of `size`."""
        for name, ids in self.ids_by_name().items():
            if max(ids, default=0) >= size:
                raise _wrong(name, f"holds {max(ids)}, which is outside the vocabulary of {size}")

    def _check_stop_strings(self) -> None:
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise _wrong(
                "stop_strings", f"has {len(self.stop_strings)} entries, at most {MAX_STOP_STRINGS} are allowed"
            )
        for text in self.stop_strings:
            try:
                size = len(text.encode())
            except (AttributeError, UnicodeEncodeError):
                raise _wrong("stop_strings", f"holds {text!r}, which is no valid text") from None
            if not 1 <= size <= MAX_STOP_BYTES:
                raise _wrong("stop_strings", f"holds a text of {size} bytes, must have 1 to {MAX_STOP_BYTES}")

    def _check_contradictions(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", f"is {self.min_tokens}, more than max_tokens ({self.max_tokens})")
        if self.verify_blocks and self.sampling_mode is not SamplingMode.REJECTION:
            raise _wrong("verify_blocks", 'goes with sampling_mode "rejection" only')
        banned, allowed = set(self.banned_ids), set(self.allowed_ids)
        if allowed and allowed <= banned:
            raise _wrong("allowed_ids", "holds banned ids only, so nothing could be emitted")
        for token in self.forced_ids:
            if token in banned or (allowed and token not in allowed):
                raise _wrong("forced_ids", f"holds {token}, which banned_ids or allowed_ids forbid")
        if self.grammar is not None:
            for name in ("forced_ids", "min_tokens", "ignore_eos"):
                if getattr(self, name):
                    raise _wrong(name, "contradicts grammar, which alone says what comes and when it ends")


@dataclass(frozen=True)
class SamplingContext:
    """All that choosing a session's ids depends on, besides logits and the ids so far."""

    params: SamplingParams
    """Whose seed is set, unless it is greedy."""
    num_prompt: int
    """Ids that are not output: penalties, min_tokens, forced_ids and the grammar start after them."""
    vocabulary: Vocabulary
    eos_ids: tuple[int, ...]
    guide: Guide | None = None
    """The request's grammar, compiled."""

    def __post_init__(self) -> None:
        if self.params.seed is None and not self.params.is_greedy:
            raise ValueError("a request that draws needs its seed set where it enters: SamplingParams.with_seed")
        if holes := set(self.params.forced_ids).intersection(self.vocabulary.holes):
            raise _wrong("forced_ids", f"holds {min(holes)}, which stands for nothing in the target's vocabulary")
        if ends := self.stop_ids.intersection(self.params.forced_ids[: self.params.min_tokens]):
            raise _wrong("forced_ids", f"holds {min(ends)}, which ends the output before min_tokens")

    @property
    def seed(self) -> int:
        """Seed of the noise; 0 for greedy decoding, which has no use for it."""
        return self.params.seed or 0

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end the output."""
        return frozenset(self.params.stop_ids) | frozenset(() if self.params.ignore_eos else self.eos_ids)


def _check_range(name: str, value: object, low: float, high: float) -> None:
    if value is None and name in ("max_tokens", "seed", "logprobs"):
        return
    whole = isinstance(low, int) and name not in _FRACTIONS
    if not _is_number(value) or (whole and not isinstance(value, int)):
        raise _wrong(name, f"is {value!r}, must be a {'whole ' if whole else ''}number")
    if not low <= value <= high:  # NaN is neither
        raise _wrong(name, f"is {value}, must be in {low} .. {high}")


_FRACTIONS = frozenset(("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32


def _wrong(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {what}", details={"param": name})
