"""Prompts: text and chat messages to the target's ids, the same on hub, node and in local mode."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import tokenizers

from baru_common.errors import BaruError, EmptyPrompt, InvalidRequest, TokenizerMismatch

from .bundle import TokenizerBundle
from .rendering import RENDERER
from .vocabulary import Vocabulary

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and what else the template reads."""

# Put inside a control string that user text spells, so that it is not one: a noncharacter, which no
# valid text holds (Unicode, section 23.7).
_BREAK = "\ufdd0"
_USE_ANOTHER = "use a target whose tokenizer.json Hugging Face tokenizers can read"


class Tokenizer:
    """A tokenizer with its chat template. Needs neither torch nor transformers."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        """TokenizerMismatch when the bundle holds no tokenizer."""
        self.bundle = bundle
        self._tokenizer = _opened(bundle.tokenizer_json)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The id -> bytes map."""
        return Vocabulary.from_tokenizer_json(self.bundle.tokenizer_json)

    def encode_text(self, text: str) -> list[int]:
        """Ids of a raw prompt, with what the tokenizer itself adds (BOS, for some).

        Control strings in `text` become control ids: a raw prompt is the developer's own.
        EmptyPrompt when nothing is left to encode.
        """
        with _library():
            ids = self._tokenizer.encode(_valid(text)).ids
        return _not_empty(ids)

    def encode_inside(self, text: str) -> list[int]:
        """Ids of `text` as it stands within an answer: no control ids, and nothing added. None for no text."""
        return self._encode_plain(_valid(text), first=False)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Ids of a chat prompt: those of transformers' `apply_chat_template(tokenize=True)`, but that
        control strings spelled inside a message or a tool stay plain text and forge no turn.

        EmptyPrompt without messages; InvalidRequest when there is no template, it refuses them, or knows no tools.
        """
        if not messages:
            raise EmptyPrompt("the prompt has no messages", hint="send at least one message")
        guarded = [self._guard(message) for message in messages]
        rendered = self._render(guarded, self._guard(tools) if tools else None, add_generation_prompt)
        if _BREAK not in rendered:
            with _library():
                ids = self._tokenizer.encode(rendered, add_special_tokens=False).ids
            return _not_empty(ids)
        ids = []
        pieces = self._split_at_control(rendered)
        for before, piece, after in zip(["", *pieces], pieces, [*pieces[1:], ""], strict=False):
            if token := self._control.get(piece):
                ids.append(token["id"])
                continue
            # A control token may take the white space beside it, as the tokenizer itself would.
            text = piece.lstrip() if self._control.get(before, {}).get("rstrip") else piece
            text = text.rstrip() if self._control.get(after, {}).get("lstrip") else text
            ids += self._encode_plain(text.replace(_BREAK, ""), first=not before)
        return _not_empty(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control ids left out."""
        with _library():
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    # -- chat templates

    def _render(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool) -> str:
        if self.bundle.chat_template is None:
            raise InvalidRequest("this target has no chat template", hint="send a text prompt instead of messages")
        if tools and not re.search(r"\btools\b", self.bundle.chat_template):
            raise InvalidRequest("this target's chat template knows no tools", details={"param": "tools"})
        variables = {
            **self.bundle.special_tokens,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return RENDERER.render(self.bundle.chat_template, variables)

    # -- control strings

    @cached_property
    def _added(self) -> list[dict[str, Any]]:
        added: list[dict[str, Any]] = json.loads(self.bundle.tokenizer_json).get("added_tokens", [])
        return added

    @cached_property
    def _special(self) -> dict[str, dict[str, Any]]:
        return {t["content"]: t for t in self._added if t["special"]}

    @cached_property
    def _control(self) -> dict[str, dict[str, Any]]:
        # Added tokens that are not special may be mere runs of spaces (GPT-NeoX): those forge nothing.
        return {t["content"]: t for t in self._added if t["special"] or len(t["content"].strip()) > 2}

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        return _any_of(self._control)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same tokenizer without its control tokens: no text can produce a control id."""
        spec = json.loads(self.bundle.tokenizer_json)
        spec["added_tokens"] = [t for t in self._added if t["content"] not in self._control]
        return _opened(json.dumps(spec))

    @cached_property
    def _plain_inside(self) -> tokenizers.Tokenizer:
        """`_plain` for text that is not the first: what is put before a first word is not put before it."""
        spec = json.loads(self._plain.to_str())
        steps = [spec["pre_tokenizer"] or {}, *(spec["pre_tokenizer"] or {}).get("pretokenizers", [])]
        for step in steps:
            if step.get("prepend_scheme") == "first":
                step["prepend_scheme"] = "never"
        return _opened(json.dumps(spec))

    def _guard(self, value: Any, *, keep_reserved: bool = False) -> Any:
        """Copy a message with every control string in it broken.

        The model's own earlier turns may hold reserved, not special, strings such as `<think>`: those
        stay, because templates look for them there.
        """
        if isinstance(value, str):
            strings = self._special if keep_reserved else self._control
            broken = _any_of(strings).sub(lambda m: m[0][:1] + _BREAK + m[0][1:], _valid(value))
            return _break_tail(broken, strings)
        if isinstance(value, Mapping):
            keep = keep_reserved or value.get("role") == "assistant"
            # Keys too: templates print whole mappings, such as the arguments of a tool call.
            return {
                self._guard(key, keep_reserved=keep): self._guard(item, keep_reserved=keep)
                for key, item in value.items()
            }
        if isinstance(value, Sequence):
            return [self._guard(item, keep_reserved=keep_reserved) for item in value]
        return value

    def _split_at_control(self, rendered: str) -> list[str]:
        """Pieces of `rendered`: the template's own control strings, and the text between them."""
        return [piece for piece in re.split(f"({self._control_pattern.pattern})", rendered) if piece]

    def _encode_plain(self, text: str, *, first: bool) -> list[int]:
        tokenizer = self._plain if first else self._plain_inside
        with _library():
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if not {t["id"] for t in self._control.values()}.isdisjoint(ids):  # the model's own vocabulary spells one
                ids = [i for character in text for i in tokenizer.encode(character, add_special_tokens=False).ids]
        return list(ids)


def _opened(tokenizer_json: str) -> tokenizers.Tokenizer:
    with _library():
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        # A prompt is neither cut nor filled up, whatever the file says: as transformers has it, too.
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


@contextmanager
def _library() -> Iterator[None]:
    """Whatever the library trips over is the tokenizer's fault. Its panics are no `Exception`."""
    try:
        yield
    except (BaruError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise TokenizerMismatch(f"the tokenizer cannot be used: {error}", hint=_USE_ANOTHER) from error


def _any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """A pattern of literal strings, longest first because one may start with another; none: matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(strings, key=len, reverse=True))) or r"(?!)")


def _break_tail(text: str, strings: Iterable[str]) -> str:
    """Break what `text` ends with if a control string starts like that: a template may put its rest right after it."""
    starts = {string[:n] for string in strings for n in range(1, len(string))}
    longest = max(map(len, starts), default=0)
    for at in range(len(text) - 1, max(len(text) - longest, 0) - 1, -1):
        if text[at:].replace(_BREAK, "") in starts and text[at] != _BREAK:
            text = text[: at + 1] + _BREAK + text[at + 1 :]
    return text


def _valid(text: str) -> str:
    """Return `text`; InvalidRequest for what is not valid Unicode text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text holds a lone surrogate at index {error.start}", hint="send valid Unicode"
        ) from error
    return text.replace(_BREAK, "\ufffd")


def _not_empty(ids: Sequence[int]) -> list[int]:
    if not ids:
        raise EmptyPrompt("the prompt is empty", hint="send at least one token")
    return list(ids)
