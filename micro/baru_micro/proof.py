"""What a node makes of a receipt: it counts only if it says what the node itself has asked for and seen.

    output     [0, num_given)                 the session began with these: another hub decided them, or this node
               [num_given, num_output)        decided by the target of the hub that signs

`verified` is said of a whole output or not at all: num_given is 0, nothing in it is provisional, the receipt is good.
After a fail-over the last hub's receipt covers what it decided itself; the spans still say that a target decided the
ids before those, but nobody has signed for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baru_common.errors import ReceiptInvalid
from baru_common.frames import Finished, Open, Opened
from baru_common.receipts import Statement, canonical_params, digests, ids_digest, params_digest, require, verify
from baru_common.sampling import SamplingParams
from baru_common.signatures import SignedStatement, Signer, Trust, wrong


@dataclass(frozen=True)
class Content:
    """What the digests of a receipt are of."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    params: str
    """In canonical form."""

    @classmethod
    def of(cls, prompt_ids: Sequence[int], params: SamplingParams, output_ids: Sequence[int]) -> Content:
        """`params`: with the seed that was used."""
        return cls(tuple(prompt_ids), tuple(output_ids), canonical_params(params).decode())

    def require_same(self, statement: Statement) -> None:
        """ReceiptInvalid when the statement is of something else."""
        expected = {
            "prompt_digest": ids_digest("prompt", self.prompt_ids),
            "params_digest": params_digest(self.params.encode()),
            "output_digest": ids_digest("output", self.output_ids),
        }
        require(statement, {name: digest.hex() for name, digest in expected.items()})


@dataclass(frozen=True)
class Proof:
    """What a generation's receipt proves; without one, why there is none."""

    receipt: SignedStatement | None = None
    statement: Statement | None = None
    """What it says."""
    signer: Signer | None = None
    verified: bool = False
    reason: str = "there is no receipt"
    """Why it is not; empty if it is."""
    content: Content | None = None
    """What it is a receipt of."""

    @property
    def trusted(self) -> bool:
        """The kit's authority vouches for the hub. If not, the receipt proves only that the hub at the other end of a
        loopback connection signed what it had said."""
        return self.signer is not None and self.signer.trusted


@dataclass(frozen=True)
class Seen:
    """What the node itself knows of a session that has ended."""

    node: str
    request: Open
    opened: Opened
    ids: Sequence[int]
    num_given: int
    """Of those, how many the hub's session began with."""
    num_own: int
    """How many stand as the node's own model decoded them."""


def prove(frame: Finished, seen: Seen, trust: Trust) -> Proof:
    """Return what the closing frame proves. ReceiptInvalid names what is wrong with its receipt."""
    if frame.receipt is None:
        if seen.opened.receipt_key:
            raise wrong(ReceiptInvalid, "receipt", "the hub said that it would sign a receipt, and gave none")
        return Proof(reason="the hub signs no receipts")
    if trust.authority is None:
        trust = replace(trust, key=seen.opened.receipt_key)
    statement, signer = verify(frame.receipt, trust)
    require(statement, _expected(frame, seen))
    content = Content.of(seen.request.prompt_ids, seen.request.params, seen.ids)
    reason = _doubt(seen)
    return Proof(frame.receipt, statement, signer, verified=not reason, reason=reason, content=content)


def _expected(frame: Finished, seen: Seen) -> dict[str, object]:
    request, usage = seen.request, frame.usage
    return {
        "node": seen.node,
        "session_id": seen.opened.session_id,
        **digests(request.target_fingerprint, request.prompt_ids, request.params, seen.ids),
        "num_prompt": len(request.prompt_ids),
        "num_output": len(seen.ids),
        "num_given": seen.num_given,
        "num_decided": len(seen.ids) - seen.num_given,
        "num_steps": usage.num_steps,
        "num_drafted": usage.num_drafted,
        "num_verified": usage.num_verified,
        "num_accepted": usage.num_accepted,
        "num_guessed": usage.num_guessed,
        "finish_reason": frame.reason.value,
    }


def _doubt(seen: Seen) -> str:
    """Say why the output as a whole is not proven; empty if it is."""
    num_ids = len(seen.ids)
    if seen.num_own:
        return f"{seen.num_own} of {num_ids} ids were decoded by this node"
    if seen.num_given:
        return f"{seen.num_given} of {num_ids} ids are of a session that was lost: this hub decided the others only"
    return ""
