"""Grammars compiled to token masks, by llguidance. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from baru_common.errors import ConfigError
from baru_common.tokens import TokenizerBundle, Vocabulary

from .grammar import Grammar, GrammarKind, wrong_grammar
from .grammar_limits import require_bounded

# One line, as models mostly write it. Free white space would let a small model go on with it for ever.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Guide:
    """A compiled grammar; `start` a cursor for each text that follows it."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @classmethod
    def compile(cls, grammar: Grammar, bundle: TokenizerBundle, eos_ids: tuple[int, ...]) -> Guide:
        """Compile for a tokenizer; InvalidRequest says what is wrong with the grammar. May take a second."""
        if not eos_ids:
            raise wrong_grammar("needs a target with an end-of-sequence id, this one has none")
        llguidance = _library()
        try:
            tokenizer = _tokenizer(bundle.digest, bundle.tokenizer_json, eos_ids)
            text = _translated(grammar, llguidance.LLMatcher)
            limits = llguidance.LLParserLimits(verbose_errors=False)
            matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        except ValueError as error:
            raise wrong_grammar(f"cannot be compiled: {_brief(error)}") from error
        if matcher.is_error():
            raise wrong_grammar(f"cannot be compiled: {_brief(matcher.get_error())}")
        guide = cls(matcher)
        # The first mask fails for a grammar that no text satisfies, or that is too large to follow.
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        if trial.is_error():
            raise wrong_grammar(f"allows no text, or is too large to follow: {_brief(trial.get_error())}")
        return guide

    def start(self) -> GuideCursor:
        """Return a cursor at the beginning."""
        return GuideCursor(self._matcher.deep_copy())


class GuideCursor:
    """A place in a text that follows a grammar. It moves by whole texts, and back as easily as on."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._ids: list[int] = []

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
        mask: bytes = self._matcher.compute_bitmask()
        self._require_no_error()
        return mask

    def _advance(self, ids: Sequence[int]) -> bool:
        num_taken: int = self._matcher.try_consume_tokens(list(ids))
        self._ids += ids[:num_taken]
        self._require_no_error()  # or an id that it allows would count as forbidden, because it grew too large there
        return num_taken == len(ids)

    def _require_no_error(self) -> None:
        if self._matcher.is_error():
            raise wrong_grammar(f"cannot be followed any further: {_brief(self._matcher.get_error())}")

    def _rewind(self, length: int) -> None:
        if length < len(self._ids):
            self._matcher.rollback(len(self._ids) - length)
            del self._ids[length:]


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
