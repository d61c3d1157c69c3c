"""Whatever bytes a peer sends: a frame that comes back the same when it is sent on, or one of our own errors.

The first byte of a case says what reads the rest. `python -m fuzz.decoding FOLDER -runs=N` lets atheris look for
bytes; `mutants` makes them where there is no atheris.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from baru.drafting.v1 import drafting_pb2 as pb
from baru_common import wire
from baru_common.errors import BaruError
from baru_common.frames import (
    Cancel,
    Draft,
    DrafterInfo,
    Drain,
    Finished,
    FinishReason,
    Heartbeat,
    Open,
    Opened,
    Resume,
    TokenLogprobs,
    Usage,
    Verdict,
)
from baru_common.sampling import Grammar, SamplingParams, SparseProbs
from baru_common.tokens import Tokenizer, TokenizerBundle
from baru_hub.engines.simulated import DeviceProfile, SimulatedEngine
from baru_micro.transport import description_from_bytes, description_to_bytes

MAX_BYTES = 4096
Reader = Callable[[bytes], None]


def check(data: bytes) -> None:
    """Read one case. Anything but BaruError and protobuf's own DecodeError, which gRPC turns into a status, is a
    fault."""
    if data:
        with suppress(BaruError, DecodeError):
            READERS[data[0] % len(READERS)](data[1:])


def _read_request(data: bytes) -> None:
    _comes_back(pb.DecodeRequest.FromString(data), wire.decode_request, wire.encode_request)


def _read_response(data: bytes) -> None:
    _comes_back(pb.DecodeResponse.FromString(data), wire.decode_response, wire.encode_response)


def _comes_back(message: Any, decode: Callable[[Any], Any], encode: Callable[[Any], Message]) -> None:
    frame = decode(message)
    sent = encode(frame)
    again = decode(type(message).FromString(sent.SerializeToString()))
    assert again == frame
    assert encode(again) == sent
    assert sent.ByteSize() <= 4 * message.ByteSize() + 64


def _read_description(data: bytes) -> None:
    hub = description_from_bytes(data)
    assert description_from_bytes(description_to_bytes(hub)) == hub


def _read_bundle(data: bytes) -> None:
    bundle = TokenizerBundle.from_bytes(data, hashlib.sha256(data).digest())
    assert TokenizerBundle.from_bytes(bundle.data, bundle.digest) == bundle
    tokenizer = Tokenizer(bundle)
    size = tokenizer.vocabulary.size
    assert all(i >= 0 for i in tokenizer.encode_text("Hello <|end|>\n"))
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hello <|end|>"}])
    tokenizer.decode(ids)
    b"".join(map(tokenizer.vocabulary.text_bytes, range(size)))


def _read_status(data: bytes) -> None:
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", data))
    error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), metadata, details="it failed")
    wire.to_status(wire.from_rpc_error(error))


READERS: tuple[Reader, ...] = (_read_request, _read_response, _read_description, _read_bundle, _read_status)


def seeds() -> list[bytes]:
    """Return cases of every kind, all of which can be read."""
    drawn = SparseProbs.of([(5, 0.75), (9, 0.25)])
    params = SamplingParams(
        max_tokens=9, temperature=0.7, seed=3, stop_ids=(4,), top_k=5, top_p=0.9, min_p=0.1, logit_bias={7: 1.5},
        banned_ids=(8,), allowed_ids=(1, 2), stop_strings=("end",), logprobs=2, sampling_mode="rejection",  # type: ignore[arg-type]
    )  # fmt: skip
    structured = SamplingParams(grammar=Grammar.regex("a*b"), repetition_penalty=1.1)
    digest = b"d" * 32
    up = [
        Open((1, 2, 300), params, digest, digest, DrafterInfo("ngram", digest)),
        Open((1,), structured, digest, digest, None, Resume("s" * 22, b"k" * 32, 2, (5, 6), (7,))),
        Draft(1, 2, 3, 4, (5, 9)),
        Draft(1, 2, 3, 0, (5,), (drawn,)),
        Heartbeat(1, 1 << 60),
        Cancel(),
    ]
    logprobs = (TokenLogprobs(-0.5, ((5, -0.5), (6, -1.5))),)
    usage = Usage(1, 2, 3, 4, 5, 6, 7, 8, 9, seed=1)
    down = [
        Opened("s" * 22, 1, 3, 8, b"k" * 32, continued=True),
        Verdict(1, 3, 4, 2, (5, 6, 7), chain_id=1, depth_hint=8),
        Verdict(1, 3, 0, 0, (5,), logprobs=logprobs),
        Finished(FinishReason.STOP, usage),
        Drain(1.5),
        Heartbeat(1, 2),
    ]
    spec = SimulatedEngine(DeviceProfile("fuzz", (0.0, 0.0), 0.0)).spec
    described = pb.DescribeResponse(protocol_revision=1, vocabulary_size=258, limits=pb.Limits(max_sessions=4))
    failed: dict[str, Any] = dict(wire.to_status(BaruError("it failed", hint="mend it")).trailing_metadata or ())
    return [
        *(b"\0" + wire.encode_request(frame).SerializeToString() for frame in up),  # type: ignore[arg-type]
        *(b"\1" + wire.encode_response(frame).SerializeToString() for frame in down),  # type: ignore[arg-type]
        b"\2" + described.SerializeToString(),
        b"\3" + spec.bundle.data,
        b"\3" + _small_bundle(),
        b"\4" + failed["grpc-status-details-bin"],
    ]


def _small_bundle() -> bytes:
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": "<|end|>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False}
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {"H": 1, "e": 2, "l": 3, "o": 4, "lo": 5}, "merges": [["l", "o"]]},
    }  # fmt: skip
    template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    return TokenizerBundle(json.dumps(tokenizer), template, {"eos_token": "<|end|>"}).data


def mutants(seed: int) -> Iterator[bytes]:
    """Yield cases without end: seeds with bytes changed, taken out, doubled, or joined with another's."""
    chance = random.Random(seed)
    known = seeds()
    while True:
        data = bytearray(chance.choice(known))
        for _ in range(chance.randrange(1, 6)):
            _mutate(data, known, chance)
        yield bytes(data[:MAX_BYTES]) if chance.random() < 0.9 else chance.randbytes(chance.randrange(1, 64))


def _mutate(data: bytearray, known: list[bytes], chance: random.Random) -> None:
    at = chance.randrange(1, len(data) + 1)
    kind = chance.randrange(5)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 1:
        data[at : at + chance.randrange(1, 9)] = b""
    elif kind == 2:
        data[at:at] = chance.randbytes(chance.randrange(1, 5))
    elif kind == 3:
        other = chance.choice(known)
        start = chance.randrange(1, len(other) + 1)
        data[at:at] = other[start : start + chance.randrange(1, 40)]
    else:
        data[at : at + 1] = chance.choice((b"\xff" * 9 + b"\x01", b"\x80", b"\0", b"\xff\xff\xff\xff\x0f", b"\x7f"))


def main() -> None:
    """Let atheris look for bytes; its own options say how long, and where to keep what it finds."""
    import atheris

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds()):
        (folder / f"seed-{number:02}").write_bytes(data)
    for module in (wire, sys.modules["baru_common.tokens.tokenizer"], sys.modules["baru_common.tokens.bundle"]):
        _instrument(module, atheris)
    limits = [f"-max_len={MAX_BYTES}", "-timeout=5", "-rss_limit_mb=2048"]
    atheris.Setup([sys.argv[0], *limits, *sys.argv[2:], str(folder)], check)
    atheris.Fuzz()


def _instrument(module: Any, atheris: Any) -> None:
    """Let atheris see which branches of our own code were taken."""
    for value in list(vars(module).values()):
        if callable(value) and getattr(value, "__module__", "") == module.__name__ and hasattr(value, "__code__"):
            atheris.instrument_func(value)


if __name__ == "__main__":
    main()
