"""Receipts: every digest byte for byte, and nothing about them can be changed unnoticed."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from baru_common.errors import ReceiptInvalid
from baru_common.receipts import Statement, canonical_params, digests, verify
from baru_common.sampling import Grammar, SamplingMode, SamplingParams
from baru_common.signatures import SignedStatement, Trust, canonical, sign
from support.signers import FINGERPRINT, HUB, NOW, OUTPUT, PROMPT, Kit, bare, certified, der, hub_key, statement

_KIT, _OTHER = Kit.of("kit"), Kit.of("other")
_KEY = hub_key().public_key().public_bytes_raw()
_PARTS = ("statement", "signature", "certificate")


def problem(receipt: SignedStatement, trust: Trust) -> str:
    """The field that is at fault."""
    with pytest.raises(ReceiptInvalid) as caught:
        verify(receipt, trust)
    return caught.value.details["field"]


# -- digests


def test_digests_are_what_the_documentation_says() -> None:
    """Made again by hand."""
    params = SamplingParams(max_tokens=9, temperature=0.5, seed=7)
    named = digests(FINGERPRINT, PROMPT, params, OUTPUT)
    prompt = hashlib.sha256(b"baru.receipt.v1.prompt\0" + struct.pack(">QIII", 3, *PROMPT)).digest()
    output = hashlib.sha256(b"baru.receipt.v1.output\0" + struct.pack(">QII", 2, *OUTPUT)).digest()
    wanted = b'{"max_tokens":9,"seed":7,"temperature":0.5}'
    asked = hashlib.sha256(b"baru.receipt.v1.params\0" + wanted).digest()
    whole = hashlib.sha256(b"baru.receipt.v1.transcript\0" + FINGERPRINT + prompt + asked + output)
    assert list(named.values()) == [FINGERPRINT.hex(), prompt.hex(), asked.hex(), output.hex(), whole.hexdigest()]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SamplingParams(temperature=1, seed=3), SamplingParams(temperature=1.0, seed=3)),
        (SamplingParams(presence_penalty=-0.0), SamplingParams()),
        (SamplingParams(logit_bias={7: 1, 3: -0.0}), SamplingParams(logit_bias=((3, 0.0), (7, 1.0)))),
        (SamplingParams(stop_strings=["é"]), SamplingParams(stop_strings=("é",))),
    ],
)
def test_what_means_the_same_has_one_form(ours: SamplingParams, theirs: SamplingParams) -> None:
    """However it was written: the node's own, and what came over the wire."""
    assert canonical_params(ours) == canonical_params(theirs)


def test_the_form_of_parameters() -> None:
    params = SamplingParams(
        logit_bias={7: 1}, stop_strings=["é"], sampling_mode=SamplingMode.REJECTION, grammar=Grammar.regex("a")
    )
    assert canonical_params(params).decode() == (
        '{"grammar":{"kind":"regex","text":"a"},"logit_bias":[[7,1.0]],"sampling_mode":"rejection","stop_strings":["é"]}'
    )


# -- trust


def test_a_good_receipt() -> None:
    """By the kit's authority, by a key that is known, and by nobody: the statement is the same, the trust is not."""
    said, signer = verify(certified(_KIT), Trust(_OTHER.pem + _KIT.pem))
    assert (said, signer.identity, signer.trusted) == (statement(HUB), HUB, True)
    for trust in (Trust(), Trust(key=_KEY)):
        assert not verify(certified(_KIT), trust)[1].trusted
        said, signer = verify(bare(), trust)
        assert (said, signer.identity, signer.trusted) == (statement(), "loopback", False)


def test_whose_signature_does_not_count() -> None:
    trust = Trust(_KIT.pem)
    key = ec.generate_private_key(ec.SECP256R1())
    long_ago = _KIT.certify(hub_key(), ends=NOW - timedelta(hours=1))
    mine = _KIT.certify(hub_key())
    assert problem(bare(), trust) == "certificate"
    assert problem(bare(), Trust(key=b"k" * 32)) == "certificate"
    assert problem(certified(_OTHER), trust) == "certificate"
    assert problem(certified(_KIT, certificate=long_ago), trust) == "certificate"
    assert problem(certified(_KIT, certificate=_KIT.certify(key)), trust) == "certificate"
    assert problem(certified(_KIT, certificate=mine), replace(trust, revoked={mine.serial_number})) == "certificate"
    node = "spiffe://kit/node/one"
    assert problem(certified(_KIT, statement(node), _KIT.certify(hub_key(), node)), trust) == "certificate"
    assert problem(certified(_KIT, statement("spiffe://kit/hub/two")), trust) == "hub"


def test_a_signature_for_another_purpose_is_none() -> None:
    said = statement().to_bytes()
    assert problem(sign(hub_key(), _KEY, "baru.audit.head.v1", said), Trust()) == "signature"


# -- tampering


_NEGATIVE_SERIAL = pytest.mark.filterwarnings("ignore:Parsed a serial number which wasn't positive")


@_NEGATIVE_SERIAL
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(_PARTS), st.integers(0), st.integers(0, 7), st.booleans())
def test_no_bit_of_a_receipt_can_be_changed(part: str, place: int, bit: int, in_kit: bool) -> None:
    """Of statement, signature or certificate, with the authority or the key at hand."""
    receipt, trust = (_CERTIFIED, Trust(_KIT.pem)) if in_kit else (bare(), Trust(key=_KEY))
    changed = bytearray(getattr(receipt, part))
    changed[place % len(changed)] ^= 1 << bit
    assert problem(replace(receipt, **{part: bytes(changed)}), trust)


_CERTIFIED = certified(_KIT)


@_NEGATIVE_SERIAL
def test_no_bit_of_a_certificate_can_be_changed() -> None:
    """Each in turn: what the library makes of a damaged one is of many kinds. Its signature ends in a zero bit, which
    could be declared unused."""
    certificates = (_KIT.certify(hub_key()) for _ in range(64))
    whole = next(der(certificate) for certificate in certificates if not certificate.signature[-1] & 1)
    for place in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        assert problem(replace(_CERTIFIED, certificate=bytes(changed)), Trust(_KIT.pem)), place


@pytest.mark.parametrize("part", _PARTS)
def test_nothing_can_be_cut_off_or_added(part: str) -> None:
    value = getattr(_CERTIFIED, part)
    for changed in (b"", value[:-1], value + b"\0", value * 9):
        assert problem(replace(_CERTIFIED, **{part: changed}), Trust(_KIT.pem))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"version": 2}, "version"),
        ({"num_steps": -1}, "num_steps"),
        ({"num_steps": True}, "num_steps"),
        ({"num_steps": 1.0}, "num_steps"),
        ({"num_output": 3}, "num_output"),
        ({"node": 5}, "node"),
        ({"prompt_digest": "AB" * 32}, "prompt_digest"),
        ({"output_digest": "ab" * 32}, "transcript_digest"),
        ({"finished_at": "2026-11-30T12:00:00Z"}, "finished_at"),
        ({"more": 1}, "statement"),
    ],
)
def test_what_no_hub_would_say_is_refused_whoever_signs(changes: dict[str, object], field: str) -> None:
    said = canonical(asdict(statement()) | changes)
    assert problem(sign(hub_key(), _KEY, "baru.receipt.v1", said), Trust()) == field


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 4000, b'{"version":1}', b"1" * 4096, b" " * 5000])
def test_what_is_no_statement_is_refused(data: bytes) -> None:
    assert problem(sign(hub_key(), _KEY, "baru.receipt.v1", data), Trust()) in {"statement", "version"}


def test_a_statement_has_one_spelling() -> None:
    """White space, another order of keys, and keys that come twice are refused."""
    said = statement().to_bytes()
    assert Statement.from_bytes(said).to_bytes() == said
    values = json.loads(said)
    reordered = json.dumps(dict(reversed(values.items())), separators=(",", ":")).encode()
    for spelling in (json.dumps(values).encode(), reordered, said.replace(b"{", b'{"hub":"x",', 1)):
        assert problem(sign(hub_key(), _KEY, "baru.receipt.v1", spelling), Trust()) == "statement"
