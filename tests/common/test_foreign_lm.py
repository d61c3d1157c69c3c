"""A drafter with another tokenizer: what it reads of the target's ids, what it makes of its own, and no trace of how
they came."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from baru_common.drafters import Proposal, TextDrafter, load_drafter
from baru_common.drafters.foreign_lm import BoundForeignLmDrafter, ForeignLmStream
from baru_common.drafters.retokenised import RetokenisedContext, Retokeniser
from baru_common.errors import ConfigError, ModelFileError, VocabularyMismatch
from baru_common.model_files import LoadedModel
from baru_common.tokens import Tokenizer, TokenizerBundle
from support.drafters import FunctionDrafter
from support.foreign import bound, renamed, shouting, spelled
from support.sampling import context
from support.tiny import byte_tokenizer, plain_greedy, save, tiny_bundle, tiny_target

from .test_vocabulary import sentencepiece_tokenizer

EOS = 2
TARGET = Tokenizer(tiny_bundle())


def bytewise() -> Tokenizer:
    """No merges, and other ids."""
    return Tokenizer(renamed(tiny_target(), longest=1).bundle)


@cache
def sentencepiece(scheme: str = "first") -> Tokenizer:
    return Tokenizer(TokenizerBundle(sentencepiece_tokenizer(scheme).to_str()))


def spacing() -> Tokenizer:
    """Puts a space before any text, wherever it stands: Llama 2's does."""
    return sentencepiece("always")


def read_back(own: Tokenizer, ids: Sequence[int]) -> bytes:
    return b"".join(own.vocabulary.pieces[i] or b"" for i in ids)


def saying(text: bytes, *, end: bytes = b"", target: LoadedModel | None = None) -> ForeignLmStream:
    """A session whose drafter says `text`, byte by byte, and then the control id that is spelled `end`, and on."""
    target = target or tiny_target()
    own = renamed(target, longest=1)
    script = [own.vocabulary.pieces.index(bytes([byte])) for byte in text]
    script += [own.vocabulary.pieces.index(piece) for piece in (end, b"Z")] if end else []
    drafter = bound(own, target)
    stream = drafter.start(context(vocabulary=target.vocabulary, eos_ids=(EOS,)))
    first: list[int] = []

    def propose(ids: Sequence[int], num_committed: int, max_tokens: int) -> list[int]:
        first[:] = first or [num_committed]
        return script[len(ids) - first[0] :][:max_tokens]

    stream.stream = FunctionDrafter(propose)
    return stream


# -- what it says of itself


def test_it_is_loaded_by_its_path_and_drafts_once_it_is_bound(tmp_path: Path) -> None:
    target = shouting()
    save(renamed(target, longest=1), tmp_path / "model")
    found = load_drafter(f"foreign_lm:{tmp_path / 'model'}")
    assert isinstance(found, TextDrafter)
    drafter = found.bound(Tokenizer(target.bundle))
    assert isinstance(drafter, BoundForeignLmDrafter)
    assert (drafter.family, drafter.vocabulary, drafter.blocking) == ("foreign_lm", None, True)
    prompt = spelled(target, "THE GAUGE")
    assert drafter.start().propose(prompt, len(prompt), 4).ids
    with pytest.raises(ModelFileError, match="nowhere"):
        load_drafter(f"foreign_lm:{tmp_path / 'nowhere'}")
    with pytest.raises(ConfigError):
        load_drafter("foreign_lm")


def test_one_of_another_vocabulary_is_pointed_to_it() -> None:
    own, target = renamed(tiny_target()), tiny_target()
    with pytest.raises(VocabularyMismatch) as caught:
        own.vocabulary.require_same(target.vocabulary, ours="the drafter", theirs="the target")
    assert "foreign_lm:PATH" in str(caught.value.hint)


# -- with the target's own weights, where both tokenizers split alike


def test_with_the_targets_weights_it_drafts_what_the_target_says() -> None:
    """Though not one id means the same to both, and the drafter lacks the target's merges."""
    target = shouting()
    own = renamed(target, longest=1)
    assert own.vocabulary.size < target.vocabulary.size
    prompt = spelled(target, "THE GAUGE AT")
    expected = plain_greedy(target, prompt, 24)
    assert bound(own, target).start().propose(prompt, len(prompt), 24).ids == expected
    stream, ids = bound(own, target).start(), list(prompt)
    for at in range(0, 24, 3):
        assert stream.propose(ids, len(prompt), 3).ids == expected[at : at + 3]
        ids += expected[at : at + 3]


@pytest.mark.parametrize("seed", range(6))
def test_it_equals_greedy_decoding_after_any_rewinds(seed: int) -> None:
    """A depth of zero, a bonus, a refusal or a resume: right in every phase, so its state is never stale."""
    chance = random.Random(seed)
    target = shouting()
    says = spelled(target, "THE GAUGE AT\n")
    stream, ids = bound(renamed(target, longest=1), target).start(), spelled(target, "A")
    for _ in range(20):
        kept = ids[: chance.choice([len(ids), len(ids), chance.randint(1, len(ids))])]
        ids = kept + chance.choices(says, k=chance.randint(0, 4))
        num_tokens = chance.randint(0, 4)
        proposed = stream.propose(ids, chance.randint(1, len(ids)), num_tokens).ids
        assert proposed == plain_greedy(target, ids, num_tokens)
        ids = [*ids, *proposed] if chance.random() < 0.5 else ids


# -- the result depends on the ids alone


@cache
def bound_once() -> BoundForeignLmDrafter:
    """A drafter that says letters which the target merges, and ends, too."""
    return bound(renamed(shouting(b"e", b"t", b"et", b"<|im_end|>"), seed=1), tiny_target())


PIECES = ("T", "H", " ", " A", "\n", "e", "t", "et", "te", "é", "水", "😀", "3")


@cache
def alphabet() -> tuple[int, ...]:
    """Ids of texts of all kinds, control ids, and bytes that are no text."""
    return tuple({i for piece in PIECES for i in spelled(tiny_target(), piece)} | {0, 1, 2, 200, 230})


histories = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(0, 99), max_size=8), st.integers(0, 4), st.booleans()),
    min_size=1,
    max_size=8,
)


@given(histories)
@settings(max_examples=60)
def test_a_long_used_stream_says_what_a_fresh_one_says(history: list[tuple[int, list[int], int, bool]]) -> None:
    """Whatever was cut off, put in its place, drafted and refused: nor is it ever a control id but the end."""
    target, drafter = tiny_target(), bound_once()
    ids = [1, *spelled(target, "TH")]
    sampling = context(vocabulary=target.vocabulary, eos_ids=(EOS,), ignore_eos=True)
    used = drafter.start(sampling)
    for kept, more, num_tokens, taken in history:
        ids = [*(ids[:kept] or ids[:1]), *(alphabet()[i % len(alphabet())] for i in more)]
        proposed = used.propose(ids, len(ids), num_tokens).ids
        assert proposed == drafter.start(sampling).propose(ids, len(ids), num_tokens).ids
        assert len(proposed) <= num_tokens
        assert all(0 <= i < target.vocabulary.size for i in proposed)
        assert EOS not in proposed[:-1]
        assert target.vocabulary.control_ids.isdisjoint({*proposed} - {EOS})
        ids = [*ids, *proposed] if taken else ids


def test_such_a_drafter_has_something_to_say() -> None:
    """After most texts; the test above would pass without a word."""
    chance, num_proposed = random.Random(0), 0
    for _ in range(40):
        ids = [1, *chance.choices(alphabet(), k=12)]
        num_proposed += bool(bound_once().start().propose(ids, len(ids), 3).ids)
    assert num_proposed > 20


@pytest.mark.parametrize("own", [bytewise, sentencepiece, spacing])
@given(history=histories)
@settings(max_examples=60)
def test_the_drafter_reads_the_targets_text(own: Any, history: list[tuple[int, list[int], int, bool]]) -> None:
    """All of it but what is held back; the same ids however they came."""
    retokeniser = Retokeniser(TARGET, own())
    used, ids = RetokenisedContext(retokeniser), [1]
    for kept, more, _, _ in history:
        ids = [*(ids[:kept] or ids[:1]), *(alphabet()[i % len(alphabet())] for i in more)]
        found = used.follow(ids)
        assert found == RetokenisedContext(retokeniser).follow(ids)
        text = b"".join(TARGET.vocabulary.pieces[i] or b"" for i in ids)
        text = text[: len(text) - len(found.held)]
        assert read_back(own(), found.own_ids).decode() == text.decode(errors="replace")


def test_only_what_is_new_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the open word, however long the session is."""
    context, encoded = RetokenisedContext(Retokeniser(TARGET, bytewise())), []
    texts = ("the gauge at the mill reads 3.2 m and ris", "ing now", "\nat")
    ids, more, line = (spelled(tiny_target(), text) for text in texts)
    context.follow(ids)
    encode = Tokenizer.encode_inside

    def counted(tokenizer: Tokenizer, text: str) -> list[int]:
        encoded.append(text)
        return encode(tokenizer, text)

    monkeypatch.setattr(Tokenizer, "encode_inside", counted)
    context.follow([*ids, *more])
    assert "".join(encoded) == " rising now"
    encoded.clear()
    context.follow([*ids, *more, *line])
    assert encoded == [" now\n", "at"]


@pytest.mark.parametrize("text", ["水" * 200, "x" * 500])
def test_a_text_without_spaces_is_cut_at_characters(text: str) -> None:
    """So that no call encodes it as a whole, again and again."""
    own = bytewise()
    context = RetokenisedContext(Retokeniser(TARGET, own))
    found = context.follow(spelled(tiny_target(), text))
    assert len(found.behind) < 100
    assert read_back(own, found.own_ids).decode() == text


# -- control ids


def other_family() -> Tokenizer:
    """`<s>` before every text, `</s>` at its end, `<|im_start|>` unknown."""
    made = byte_tokenizer(specials=("<unk>", "<s>", "</s>"))
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(TokenizerBundle(made.to_str(), None, {"bos_token": "<s>", "eos_token": "</s>"}))


def test_a_control_id_is_read_as_the_drafters_own_of_that_spelling() -> None:
    own = bytewise()
    ids = [1, *spelled(tiny_target(), "user\nhi"), EOS, *spelled(tiny_target(), "\n")]
    found = RetokenisedContext(Retokeniser(TARGET, own)).follow(ids).own_ids
    spelling = own.vocabulary.pieces.index
    assert found == own.encode_text("<|im_start|>user\nhi<|im_end|>\n")
    assert spelling(b"<|im_start|>") in found


def test_what_merely_spells_a_control_id_stays_text() -> None:
    own = bytewise()
    found = RetokenisedContext(Retokeniser(TARGET, own)).follow(spelled(tiny_target(), "a <|im_end|> b")).own_ids
    assert own.vocabulary.control_ids.isdisjoint(found)
    assert read_back(own, found) == b"a <|im_end|> b"


def test_else_as_the_one_of_that_role_and_else_as_its_text() -> None:
    """The target's beginning and end of a sequence; what the drafter's tokenizer begins with comes once."""
    own = other_family()
    read = RetokenisedContext(Retokeniser(TARGET, own)).follow
    word = own.encode_inside("hi")
    assert read([0, *TARGET.encode_inside("hi"), EOS]).own_ids == [1, *word, 2]  # <|endoftext|> begins, <|im_end|> ends
    assert read(TARGET.encode_inside("hi")).own_ids == [1, *word]
    assert read([1, *TARGET.encode_inside("hi")]).own_ids == [1, *own.encode_inside("<|im_start|>"), *word]


# -- what is drafted, in the target's ids


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_a_drafted_text_is_what_the_target_would_write(num_tokens: int) -> None:
    """Two drafted letters may be one id of the target; the last id is settled by what follows it."""
    behind, text = "THE ", "tea, there at ten"
    whole = spelled(tiny_target(), behind + text)
    prompt = spelled(tiny_target(), behind)
    assert len(whole) < len(behind + text)
    assert whole[: len(prompt)] == prompt
    proposed = saying(text.encode()).propose(prompt, len(prompt), num_tokens).ids
    assert proposed == whole[len(prompt) :][:num_tokens]


def test_where_the_target_would_merge_across_the_boundary_what_follows_stands_alone() -> None:
    """It has split there, so it goes on from there."""
    (split,) = spelled(tiny_target(), "e")
    assert spelled(tiny_target(), "et") != [split, *spelled(tiny_target(), "t")]
    proposed = saying(b"t A").propose([split], 1, 2).ids
    assert proposed == spelled(tiny_target(), "t A")[:2]


def test_a_character_that_is_not_complete_is_held_back() -> None:
    """In the context: the drafter reads what is before it, and its draft must go on with it. At the end: not said."""
    euro = spelled(tiny_target(), "€")
    assert len(euro) == 3
    prompt = [*spelled(tiny_target(), "A"), *euro[:1]]
    assert saying("€ B".encode()).propose(prompt, len(prompt), 4).ids == [*euro[1:], *spelled(tiny_target(), " B")]
    assert saying("é B".encode()).propose(prompt, len(prompt), 4).ids == []
    assert saying(b" B").propose(prompt, len(prompt), 4).ids == []
    assert saying(b"B \xe2\x82").propose(prompt[:1], 1, 4).ids == spelled(tiny_target(), "B ")


def test_a_draft_that_leads_nowhere_is_given_up() -> None:
    """At once where it contradicts what is held back; where it spells nothing, after some ids."""
    stream = saying("é B".encode())
    stream.propose([*spelled(tiny_target(), "A"), *spelled(tiny_target(), "€")[:1]], 2, 4)
    assert len(stream._known) == 2
    stream = saying(b"\xff" * 100)
    stream.propose(spelled(tiny_target(), "A"), 1, 2)
    assert len(stream._known) == 1 + 8


def test_where_nothing_can_be_read_nothing_is_said() -> None:
    """A session that begins within a character."""
    ids = spelled(tiny_target(), "€")[:1]
    assert bound(renamed(tiny_target(), longest=1), tiny_target()).start().propose(ids, 1, 4) == Proposal()


def test_broken_bytes_are_no_draft() -> None:
    """No text spells them, so no tokenizer writes them."""
    prompt = spelled(tiny_target(), "A")
    assert saying(b"B\xff\xffC").propose(prompt, 1, 4).ids == []


def test_a_byte_fallback_target_gets_its_bytes() -> None:
    """What its vocabulary lacks is spelled in bytes, and so is a draft, also from within a character."""
    target = sentencepiece()
    retokeniser = Retokeniser(target, bytewise())
    emoji = target.encode_inside("😀")
    assert len(emoji) == 4
    found = RetokenisedContext(retokeniser).follow(emoji[:2])
    assert (found.held, found.behind) == ("😀".encode()[:2],) * 2
    assert retokeniser.written(found.behind, "😀 a".encode()[2:]) == target.encode_inside("😀 a")[2:]
    assert (
        retokeniser.written(b" the", b" hat") == target.encode_inside(" the hat")[-len(target.encode_inside(" hat")) :]
    )


@pytest.mark.parametrize("target", [sentencepiece, spacing])
def test_a_target_that_spaces_every_text_gets_no_space_of_its_own(target: Any) -> None:
    """Neither in mid-word nor after a control id."""
    retokeniser = Retokeniser(target(), bytewise())
    for behind, text in ((b" h", b"ello"), (b"", b"he"), (b"", b" he"), (b"\n", b"he")):
        assert retokeniser.text_of(retokeniser.written(behind, text)) == text


def test_the_drafters_end_is_the_targets() -> None:
    prompt = spelled(tiny_target(), "A")
    text = spelled(tiny_target(), "B.")
    assert saying(b"B.", end=b"<|im_end|>").propose(prompt, 1, 8).ids == [*text, EOS]
    assert saying(b"", end=b"<|im_end|>").propose(prompt, 1, 8).ids == [EOS]
    assert saying(b"B.", end=b"<|im_start|>").propose(prompt, 1, 8).ids == text
    assert saying(b"B.", end=b"<|im_end|>").propose(prompt, 1, 2).ids == text
    assert saying(b"\xff", end=b"<|im_end|>").propose(prompt, 1, 8).ids == []


def test_an_end_of_another_spelling_is_the_targets_first() -> None:
    own = renamed(tiny_target(), longest=1)
    own.__dict__["eos_ids"] = (own.vocabulary.pieces.index(b"Z"),)
    stream = bound(own, tiny_target()).start(context(eos_ids=(0, EOS)))
    stream.stream = FunctionDrafter(lambda *_: list(own.eos_ids))
    assert stream.propose(spelled(tiny_target(), "A"), 1, 4).ids == [0]
    stream = bound(own, tiny_target()).start()  # nobody said what ends the output
    stream.stream = FunctionDrafter(lambda *_: list(own.eos_ids))
    assert stream.propose(spelled(tiny_target(), "A"), 1, 4).ids == []


def test_nothing_is_proposed_past_what_ends_the_output() -> None:
    """Where it is committed, it ended nothing."""
    target = shouting()
    drafter = bound(renamed(target), target)
    prompt = spelled(target, "THE GAUGE ")
    stops = context(stop_ids=(prompt[-1],))
    assert drafter.start(stops).propose(prompt, len(prompt) - 1, 4) == Proposal()
    assert drafter.start(stops).propose(prompt, len(prompt), 4).ids == plain_greedy(target, prompt, 4)


def test_it_stops_at_its_own_context_limit() -> None:
    """Which is reached in its own ids."""
    target = shouting()
    own = renamed(target, longest=1)
    own.model.config.max_position_embeddings = 12
    prompt = spelled(target, "THE GAUGE")
    assert len(bound(own, target).start().propose(prompt, len(prompt), 8).ids) == 3
    prompt = spelled(target, "THE GAUGE AT THE MILL")
    assert bound(own, target).start().propose(prompt, len(prompt), 8).ids == []


def test_with_rejection_sampling_ids_are_picked() -> None:
    """So they come without probabilities."""
    target = shouting()
    prompt = spelled(target, "THE GAUGE")
    sampling = context(vocabulary=target.vocabulary, temperature=1.0, seed=3, sampling_mode="rejection")
    proposal = bound(renamed(target), target).start(sampling).propose(prompt, len(prompt), 4)
    assert proposal.ids == plain_greedy(target, prompt, 4)
    assert not proposal.draft_probs
