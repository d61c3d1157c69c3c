"""Receipts: what a hub says, signed, of a session that has ended, and how it is checked.

Digests are SHA-256, in lower-case hexadecimal, of a tag and what follows it. Integers are unsigned and big-endian.

    prompt_digest      "baru.receipt.v1.prompt\\0"      u64 number of ids, then each id as u32
    output_digest      "baru.receipt.v1.output\\0"      the same
    params_digest      "baru.receipt.v1.params\\0"      canonical JSON of the parameters, see `canonical_params`
    transcript_digest  "baru.receipt.v1.transcript\\0"  fingerprint, prompt, params and output digest, 32 bytes each

So the transcript digest depends on what was asked, of which target, and what it answered: not on how that came about.

A statement is canonical JSON (UTF-8, keys sorted, no white space) of the fields of `Statement`. The bytes that are
signed are the bytes that travel: nobody encodes them again. What is signed is "baru.receipt.v1\\0", then these bytes.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

from .errors import ReceiptInvalid
from .sampling import SamplingParams
from .signatures import (
    MAX_STATEMENT_BYTES,
    SignedStatement,
    Signer,
    Trust,
    canonical,
    check_signature,
    read_time,
    wrong,
)

VERSION = 1
PURPOSE = "baru.receipt.v1"
_TIMES = ("started_at", "finished_at")
_DIGEST_CHARACTERS = 64
_MAX_INT = 1 << 63


@dataclass(frozen=True)
class Statement:
    """What a hub stands for. Counts are of this session at this hub; they mean what `Usage` says of them."""

    hub: str
    """Identity of the signer; "loopback" where connections carry none."""
    node: str
    """Identity whose session it was."""
    session_id: str
    target_fingerprint: str
    """Of the target that decided, hexadecimal."""
    prompt_digest: str
    params_digest: str
    output_digest: str
    transcript_digest: str
    num_prompt: int
    num_output: int
    num_given: int
    """Output ids that the node brought along at a resume, the first ones: this hub continued from them, and has not
    decided them."""
    num_decided: int
    """Output ids after those, each of them decided by the target."""
    num_steps: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    num_guessed: int
    finish_reason: str
    started_at: str
    """When the session was admitted, by the hub's wall clock, RFC 3339 in UTC. Later than `finished_at` if that clock
    was put back."""
    finished_at: str
    """When the hub closed it."""
    elapsed_ns: int
    """From one to the other, by a clock that nobody sets."""
    version: int = VERSION

    def to_bytes(self) -> bytes:
        """Return the bytes to sign."""
        return canonical(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Statement:
        """Read what was signed; ReceiptInvalid when it is no statement, or spelled in another way."""
        values = _read_json(data)
        expected = {field.name: str if field.type == "str" else int for field in fields(cls)}
        if isinstance(values, dict) and values.get("version") != VERSION:
            raise wrong(
                ReceiptInvalid, "version", f"the receipt is of version {values.get('version')}, known is {VERSION}"
            )
        if not isinstance(values, dict) or values.keys() != expected.keys():
            raise wrong(ReceiptInvalid, "statement", "the statement has not the fields of a receipt")
        for name, kind in expected.items():
            _check_value(name, values[name], kind)
        if canonical(values) != data:
            raise wrong(ReceiptInvalid, "statement", "the statement is not in canonical form")
        return cls(**values)

    @property
    def finished(self) -> datetime:
        return read_time(self.finished_at)

    @property
    def is_whole(self) -> bool:
        """The target decided all of the output in this session."""
        return self.num_given == 0


def digests(
    fingerprint: bytes, prompt_ids: Sequence[int], params: SamplingParams, output_ids: Sequence[int]
) -> dict[str, Any]:
    """Return the four digests and the fingerprint by the names that a statement gives them.

    The seed of `params` is the one that was used.
    """
    return digests_of_parts(
        fingerprint,
        ids_digest("prompt", prompt_ids),
        params_digest(canonical_params(params)),
        ids_digest("output", output_ids),
    )


def digests_of_parts(fingerprint: bytes, prompt: bytes, params: bytes, output: bytes) -> dict[str, Any]:
    """As `digests`, from the parts' own."""
    return {
        "target_fingerprint": fingerprint.hex(),
        "prompt_digest": prompt.hex(),
        "params_digest": params.hex(),
        "output_digest": output.hex(),
        "transcript_digest": _digest("transcript", fingerprint, prompt, params, output).hex(),
    }


def ids_digest(what: str, ids: Sequence[int]) -> bytes:
    """Digest of "prompt" or "output" ids."""
    return _digest(what, struct.pack(f">Q{len(ids)}I", len(ids), *ids))


def params_digest(canonical_form: bytes) -> bytes:
    """Digest of parameters in their canonical form."""
    return _digest("params", canonical_form)


def canonical_params(params: SamplingParams) -> bytes:
    """Return parameters as canonical JSON, by the names of `SamplingParams`.

    What has its default value is left out, so that a later parameter changes no digest. Fractions are written as Python
    writes a float (the shortest that reads back as the same double) and never as -0.0; `logit_bias` is a list of
    [id, bias] in order of id, a mode its name, a grammar {"kind", "text"}.
    """
    plain = SamplingParams()
    named = {field.name: getattr(params, field.name) for field in fields(params)}
    return canonical(
        {name: _plain(value, plain, name) for name, value in named.items() if value != getattr(plain, name)}
    )


def _plain(value: Any, defaults: SamplingParams, name: str) -> Any:
    if name == "logit_bias":
        return [[token, float(bias) + 0.0] for token, bias in value]
    if name == "grammar":
        return {"kind": value.kind.value, "text": value.text}
    if name == "sampling_mode":
        return value.value
    if isinstance(getattr(defaults, name), float):
        return float(value) + 0.0
    return list(value) if isinstance(value, tuple) else value


def verify(receipt: SignedStatement, trust: Trust) -> tuple[Statement, Signer]:
    """Return what the receipt says, and who says so. ReceiptInvalid names what is wrong with it."""
    if len(receipt.statement) > MAX_STATEMENT_BYTES:
        raise wrong(ReceiptInvalid, "statement", f"the statement has {len(receipt.statement)} bytes")
    statement = Statement.from_bytes(receipt.statement)
    signer = check_signature(receipt, PURPOSE, statement.finished, trust, ReceiptInvalid)
    require(statement, {"hub": signer.identity})
    _check_sense(statement)
    return statement, signer


def require(statement: Statement, expected: Mapping[str, object]) -> None:
    """Raise ReceiptInvalid for the first field that is not as expected."""
    for name, value in expected.items():
        if (said := getattr(statement, name)) != value:
            raise wrong(ReceiptInvalid, name, f"the receipt says {name} is {said}, and it is {value}")


def _check_sense(statement: Statement) -> None:
    """What a hub that works never signs."""
    parts = (statement.target_fingerprint, statement.prompt_digest, statement.params_digest, statement.output_digest)
    require(statement, {"transcript_digest": _digest("transcript", *map(bytes.fromhex, parts)).hex()})
    require(statement, {"num_output": statement.num_given + statement.num_decided})


def _check_value(name: str, value: object, kind: type) -> None:
    ok = type(value) is kind and (not isinstance(value, int) or 0 <= value < _MAX_INT)
    if ok and isinstance(value, str) and (name.endswith("_digest") or name == "target_fingerprint"):
        ok = len(value) == _DIGEST_CHARACTERS and not set(value) - set("0123456789abcdef")
    if ok and isinstance(value, str) and name in _TIMES:
        try:
            read_time(value)
        except ValueError:
            ok = False
    if not ok:
        raise wrong(ReceiptInvalid, name, f"the receipt says {name} is {value!r}, which it cannot be")


def _read_json(data: bytes) -> Any:
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise wrong(ReceiptInvalid, "statement", "the statement is no JSON") from error


def _digest(what: str, *parts: bytes) -> bytes:
    return hashlib.sha256(f"{PURPOSE}.{what}\0".encode() + b"".join(parts)).digest()
