"""Answers as they go over HTTP: one writer for each kind of request, from the node's events to JSON objects."""

from __future__ import annotations

import codecs
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baru_common.frames import FinishReason, TokenLogprobs
from baru_common.tokens import Vocabulary
from baru_micro import receipt_file
from baru_micro.events import Finish, Piece
from baru_micro.proof import Proof

from .tools import MARK, Call, calls_in

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "stop"}


@dataclass(frozen=True)
class Answer:
    """What is the same in all parts of one answer."""

    id: str
    created: int
    """Unix time, seconds."""
    model: str
    fingerprint: str
    vocabulary: Vocabulary

    def part(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return one object of this answer."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }


class Writer(Protocol):
    """Writes one kind of answer."""

    whole_kind: str
    chunk_kind: str

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice that opens a stream."""

    def delta(self, index: int, text: str, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return a choice with more of the answer."""

    def last(self, index: int, finish: Finish) -> list[dict[str, Any]]:
        """Return the choices that end it."""

    def whole(self, index: int, finish: Finish) -> dict[str, Any]:
        """Return a choice with all of the answer."""


@dataclass
class ChatWriter:
    """Writes chat completions."""

    vocabulary: Vocabulary
    logprobs: bool
    watches_calls: bool
    """The model may call tools: from the mark of a call on, text is held back to the end."""
    calls_only: bool
    whole_kind: str = "chat.completion"
    chunk_kind: str = "chat.completion.chunk"
    _texts: dict[int, str] = field(default_factory=dict)
    _num_shown: dict[int, int] = field(default_factory=dict)

    def first(self, index: int) -> dict[str, Any] | None:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, text: str, pieces: Sequence[Piece]) -> dict[str, Any]:
        shown = self._shown(index, text) if self.watches_calls else text
        entries = self._entries((piece.token_id, piece.logprobs) for piece in pieces) if self.logprobs else None
        return self._chunk(index, {"content": shown} if shown or entries else {}, entries)

    def last(self, index: int, finish: Finish) -> list[dict[str, Any]]:
        choices = []
        rest, calls, reason = self._ending(finish)
        if self.watches_calls and not calls and (unseen := rest[self._num_shown.get(index, 0) :]):
            choices.append(self._chunk(index, {"content": unseen}))
        if calls:
            choices.append(self._chunk(index, {"tool_calls": [{"index": i, **c} for i, c in enumerate(_calls(calls))]}))
        return [*choices, self._chunk(index, {}, finish_reason=reason)]

    def whole(self, index: int, finish: Finish) -> dict[str, Any]:
        text, calls, reason = self._ending(finish)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": _calls(calls)}
        entries = self._entries(zip(finish.ids, finish.logprobs, strict=True)) if self.logprobs else None
        return {"index": index, "message": message, "logprobs": entries, "finish_reason": reason}

    def _ending(self, finish: Finish) -> tuple[str, list[Call], str]:
        text, calls = finish.text, list[Call]()
        if self.watches_calls:
            text, calls = calls_in(finish.text, only=self.calls_only)
        return text, calls, "tool_calls" if calls else _REASONS[finish.reason]

    def _shown(self, index: int, text: str) -> str:
        """Text that cannot be part of a call."""
        whole = self._texts[index] = self._texts.get(index, "") + text
        at = self._num_shown.get(index, 0)
        end = at if self.calls_only else _before_mark(whole)
        self._num_shown[index] = max(at, end)
        return whole[at:end]

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _entries(self, ids: Iterable[tuple[int, TokenLogprobs | None]]) -> dict[str, Any]:
        return {"content": [self._entry(token_id, found) for token_id, found in ids], "refusal": None}

    def _entry(self, token_id: int, found: TokenLogprobs | None) -> dict[str, Any]:
        """A provisional id has no log-probability: it is null, never the drafter's own."""
        top = [self._token(i) | {"logprob": value} for i, value in found.top] if found else []
        return self._token(token_id) | {"logprob": found.logprob if found else None, "top_logprobs": top}

    def _token(self, token_id: int) -> dict[str, Any]:
        data = token_bytes(self.vocabulary, token_id)
        return {"token": data.decode(errors="replace"), "bytes": list(data)}


@dataclass
class TextWriter:
    """Writes completions."""

    vocabulary: Vocabulary
    logprobs: bool
    whole_kind: str = "text_completion"
    chunk_kind: str = "text_completion"
    _offsets: dict[int, _Offset] = field(default_factory=dict)

    def first(self, index: int) -> dict[str, Any] | None:  # noqa: ARG002
        return None

    def delta(self, index: int, text: str, pieces: Sequence[Piece]) -> dict[str, Any]:
        entries = None
        if self.logprobs:
            entries = self._entries(index, [(piece.token_id, piece.logprobs) for piece in pieces])
        return self._choice(index, text, entries)

    def last(self, index: int, finish: Finish) -> list[dict[str, Any]]:
        return [self._choice(index, "", finish_reason=_REASONS[finish.reason])]

    def whole(self, index: int, finish: Finish) -> dict[str, Any]:
        entries = None
        if self.logprobs:
            entries = self._entries(index, list(zip(finish.ids, finish.logprobs, strict=True)))
        return self._choice(index, finish.text, entries, _REASONS[finish.reason])

    def _choice(self, index: int, text: str, logprobs: Any = None, finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _entries(self, index: int, ids: Sequence[tuple[int, TokenLogprobs | None]]) -> dict[str, Any]:
        offset = self._offsets.setdefault(index, _Offset())
        return {
            "tokens": [self._name(token_id) for token_id, _ in ids],
            "token_logprobs": [found.logprob if found else None for _, found in ids],
            "top_logprobs": [found and {self._name(i): value for i, value in found.top} for _, found in ids],
            "text_offset": [offset.take(token_bytes(self.vocabulary, token_id)) for token_id, _ in ids],
        }

    def _name(self, token_id: int) -> str:
        """As OpenAI spells it: a part of a character by its bytes, so that no two ids have one name."""
        data = token_bytes(self.vocabulary, token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class _Offset:
    """Counts the characters of a text that comes in pieces."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def take(self, data: bytes) -> int:
        """Return where the piece begins."""
        start = self._num_characters
        self._num_characters += len(self._decoder.decode(data))
        return start


def token_bytes(vocabulary: Vocabulary, token_id: int) -> bytes:
    """Return what an id stands for, a control id's name included."""
    return vocabulary.pieces[token_id] or b""


def usage(finishes: Sequence[Finish], num_prompts: int, *, with_receipts: bool) -> dict[str, Any]:
    """Return what an answer took, all choices together; `num_prompts` different ones are counted once each.
    `with_receipts`: whole, as `baru-micro verify-receipt` reads them; else who has signed what."""
    each = len(finishes) // num_prompts
    num_prompt = sum(finish.usage.num_prompt for finish in finishes[::each])
    num_output = sum(len(finish.ids) for finish in finishes)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "baru": {"choices": [_own(finish, with_receipts) for finish in finishes]},
    }


def _own(finish: Finish, with_receipt: bool) -> dict[str, Any]:
    return {
        "provenance": [{"start": s.start, "end": s.end, "provenance": s.provenance.value} for s in finish.spans],
        "mean_accepted_length": round(finish.usage.mean_accepted_length, 3),
        "acceptance_rate": round(finish.usage.acceptance_rate, 3),
        "seed": finish.usage.seed,
        "receipt": _receipt(finish.proof, whole=with_receipt),
    }


def _receipt(proof: Proof, *, whole: bool) -> dict[str, Any]:
    """The id names it in the hub's audit log."""
    found: dict[str, Any] = {"verified": proof.verified, "trusted": proof.trusted, "reason": proof.reason or None}
    if proof.statement and proof.receipt:
        said = proof.statement
        found |= {"id": said.session_id, "hub": said.hub, "transcript_digest": said.transcript_digest}
        if whole:
            found["signed"] = receipt_file.values_of(proof.receipt, proof.content)
    return found


def _calls(calls: Sequence[Call]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]


def _before_mark(text: str) -> int:
    """Characters of `text` that are before a call, and cannot be the start of its mark."""
    if (at := text.find(MARK)) >= 0:
        return at
    return next((len(text) - n for n in range(len(MARK) - 1, 0, -1) if text.endswith(MARK[:n])), len(text))
