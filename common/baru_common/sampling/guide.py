"""Grammars compiled to token masks, by llguidance. Needs no torch."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from baru_common.errors import ConfigError
from baru_common.tokens import TokenizerBundle, Vocabulary

from .grammar import Grammar, GrammarKind, wrong_grammar
from .grammar_limits import require_bounded

# One line, as models mostly write it. Free white space would let a small model go on with it for ever.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


_MAX_STEP_ITEMS = 10_000
"""Most items of the parser's rows that one step may make; the library's own 50,000 take a third of a second."""
_FIRST_STEPS_S = 1.0
"""CPU time that a cursor has beyond what its steps may take on average: at first the lexer's states are built."""


class Guide:
    """A compiled grammar; `start` a cursor for each text that follows it."""

    def __init__(self, matcher: Any, step_s: float | None = None) -> None:
        self._matcher = matcher
        self._step_s = step_s

    @classmethod
    def compile(
        cls, grammar: Grammar, bundle: TokenizerBundle, eos_ids: tuple[int, ...], step_s: float | None = None
    ) -> Guide:
        """Compile for a tokenizer; InvalidRequest says what is wrong with the grammar. May take a second.

        `step_s`: most CPU time that following it may take, on average over the steps of a cursor; None: any.
        """
        if not eos_ids:
            raise wrong_grammar("needs a target with an end-of-sequence id, this one has none")
        llguidance = _library()
        try:
            tokenizer = _tokenizer(bundle.digest, bundle.tokenizer_json, eos_ids)
            text = _translated(grammar, llguidance.LLMatcher)
            limits = llguidance.LLParserLimits(verbose_errors=False, step_max_items=_MAX_STEP_ITEMS)
            matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        except ValueError as error:
            raise wrong_grammar(f"cannot be compiled: {_brief(error)}") from error
        if matcher.is_error():
            raise wrong_grammar(f"cannot be compiled: {_brief(matcher.get_error())}")
        guide = cls(matcher, step_s)
        # The first mask fails for a grammar that no text satisfies, or that is too large to follow.
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        if trial.is_error():
            raise wrong_grammar(f"allows no text, or is too large to follow: {_brief(trial.get_error())}")
        return guide

    def start(self) -> GuideCursor:
        """Return a cursor at the beginning."""
        return GuideCursor(self._matcher.deep_copy(), self._step_s)

    def walk(self, num_steps: int, eos_ids: Sequence[int]) -> None:
        """Follow a text of this grammar, ids at random but always the same; InvalidRequest where that fails."""
        cursor, choose = self.start(), random.Random(0)  # noqa: S311
        for _ in range(num_steps):
            allowed = _some(_without(cursor.masks(())[0], eos_ids), choose)
            if allowed is None or not cursor.seek([*cursor.ids, allowed]):
                return  # it has ended


class GuideCursor:
    """A place in a text that follows a grammar. It moves by whole texts, and back as easily as on."""

    def __init__(self, matcher: Any, step_s: float | None = None) -> None:
        self._matcher = matcher
        self._ids: list[int] = []
        self._step_s = step_s
        self._num_steps = 0
        self._spent_s = 0.0

    @property
    def ids(self) -> Sequence[int]:
        """The text so far."""
        return self._ids

    def seek(self, ids: Sequence[int]) -> bool:
        """Go to the end of the text `ids`; False, and as far as possible, if the grammar forbids it."""
        common = next((i for i, (a, b) in enumerate(zip(self._ids, ids, strict=False)) if a != b), None)
        common = min(len(self._ids), len(ids)) if common is None else common
        self._rewind(common)
        return self._advance(ids[common:])

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        """Return what may come here, and after each id of `draft` up to the first that the grammar forbids.

        A mask has one bit per id, lowest first. The cursor stays where it is.
        """
        here = len(self._ids)
        masks = [self._mask()]
        for token in draft:
            if not self._advance([token]):
                break
            masks.append(self._mask())
        self._rewind(here)
        return masks

    def allowed(self, ids: Sequence[int]) -> list[int]:
        """Return the leading part of `ids` that may follow here."""
        return list(ids[: self._matcher.validate_tokens(list(ids))])

    def forced(self) -> list[int]:
        """Return the ids that must follow here, as far as they are certain."""
        return list(self._matcher.compute_ff_tokens())

    def _mask(self) -> bytes:
        start_s = time.thread_time()
        mask: bytes = self._matcher.compute_bitmask()
        self._require_no_error()
        self._num_steps += 1
        self._require_quick(time.thread_time() - start_s)
        return mask

    def _advance(self, ids: Sequence[int]) -> bool:
        start_s = time.thread_time()
        num_taken: int = self._matcher.try_consume_tokens(list(ids))
        self._ids += ids[:num_taken]
        self._require_no_error()  # or an id that it allows would count as forbidden, because it grew too large there
        self._require_quick(time.thread_time() - start_s)
        return num_taken == len(ids)

    def _require_quick(self, took_s: float) -> None:
        self._spent_s += took_s
        if self._step_s is not None and self._spent_s > _FIRST_STEPS_S + self._num_steps * self._step_s:
            raise wrong_grammar(f"takes more than {1e3 * self._step_s:.0f} ms a step to follow; make it less ambiguous")

    def _require_no_error(self) -> None:
        if self._matcher.is_error():
            raise wrong_grammar(f"cannot be followed any further: {_brief(self._matcher.get_error())}")

    def _rewind(self, length: int) -> None:
        if length < len(self._ids):
            self._matcher.rollback(len(self._ids) - length)
            del self._ids[length:]


def _without(mask: bytes, ids: Sequence[int]) -> bytes:
    cleared = bytearray(mask)
    for token in ids:
        cleared[token // 8] &= ~(1 << token % 8)
    return bytes(cleared)


def _some(mask: bytes, choose: random.Random) -> int | None:
    """Return an id that `mask` allows; None when there is none."""
    start = choose.randrange(len(mask))
    place = next((i % len(mask) for i in range(start, start + len(mask)) if mask[i % len(mask)]), None)
    if place is None:
        return None
    return 8 * place + choose.choice([bit for bit in range(8) if mask[place] >> bit & 1])


def prepare(bundle: TokenizerBundle, eos_ids: tuple[int, ...]) -> None:
    """Make what all grammars of a tokenizer share. Takes seconds for a large one."""
    _tokenizer(bundle.digest, bundle.tokenizer_json, eos_ids)


def _translated(grammar: Grammar, library: Any) -> str:
    """Return the grammar in the library's own language."""
    text: str
    require_bounded(grammar)
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        text = library.grammar_from_json_schema(grammar.text, defaults=_JSON_OPTIONS)
    elif grammar.kind is GrammarKind.REGEX:
        text = library.grammar_from_regex(grammar.text)
    else:
        text = library.grammar_from_lark(grammar.text)
    return text


@lru_cache(maxsize=4)
def _tokenizer(digest: bytes, tokenizer_json: str, eos_ids: tuple[int, ...]) -> Any:  # noqa: ARG001
    # The library counts words; with holes that is less than the ids, and the masks would be too short.
    num_ids = Vocabulary.from_tokenizer_json(tokenizer_json).size
    return _library().LLTokenizer(tokenizer_json, n_vocab=num_ids, eos_token=list(eos_ids))


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(f"grammars need llguidance: {error}", hint="pip install llguidance") from error
    return llguidance


def _brief(error: object) -> str:
    """What the library says, short enough for a gRPC status: it likes to repeat the whole grammar."""
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:250]} ... {text[-140:]}"
