from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baru_common.errors import BaruError, InvalidRequest
from baru_common.sampling import Grammar
from baru_common.sampling.guide import Guide, GuideCursor
from baru_common.tokens import Tokenizer, TokenizerBundle
from support.tiny import tiny_bundle

from .test_vocabulary import sentencepiece_tokenizer

EOS = (1, 2)
NUM_IDS = 300


@cache
def tiny() -> Tokenizer:
    return Tokenizer(tiny_bundle())


@cache
def guide(grammar: Grammar) -> Guide:
    return Guide.compile(grammar, tiny().bundle, EOS)


def ids_of(text: str) -> list[int]:
    """Ids of a text as a model writes it: what looks like a control string is none."""
    return [i for part in re.split("(?<=<)", text) if part for i in tiny().encode_text(part)]


def allowed(mask: bytes) -> set[int]:
    return {i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1}


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the text may come, id by id, and then the end; both end ids or none."""
    cursor, ids = guide(grammar).start(), ids_of(text)
    masks = [allowed(mask) for mask in cursor.masks(ids)]
    possible = len(masks) == len(ids) + 1
    assert possible or ids[len(masks) - 1] not in masks[-1]
    assert all(len(mask & set(EOS)) in (0, 2) for mask in masks)
    assert cursor.seek(ids) == possible
    return possible and all(token in mask for token, mask in zip([*ids, EOS[0]], masks, strict=True))


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", 'q"', 1]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
# Grammar, what it accepts, and what it does not.
LANGUAGES: dict[str, tuple[Grammar, list[str], list[str]]] = {
    "schema": (
        Grammar.json_schema(PERSON),
        [
            '{"name": "Ann", "age": 3}',
            '{"name": "", "age": 150, "tags": []}',
            '{"name": "🦉é\\n\\"", "age": 0, "tags": ["é", 1]}',
            '{"name": "a\\\\", "age": 10, "tags": ["q\\""]}',
        ],
        [
            "",
            "{}",
            '{"name":"Ann","age":3}',
            '{ "name": "Ann", "age": 3}',
            '{"age": 3, "name": "Ann"}',
            '{"name": "Ann", "age": 3} ',
            '{"name": "Ann", "age": 151}',
            '{"name": "Ann", "age": -1}',
            '{"name": "Ann", "age": 3.0}',
            '{"name": "Ann", "age": 3, "x": 1}',
            '{"name": "A\nn", "age": 3}',
            '{"name": "123456789", "age": 3}',
            '{"name": "Ann", "age": 3, "tags": ["b"]}',
            '{"name": "Ann", "age": 3, "tags": ["a", "a", "a"]}',
        ],
    ),
    "any json": (
        Grammar.json_schema("{}"),
        ["null", "[1, 2.5e3]", '{"a": {"b": [true, ""]}}'],
        ["[1,2]", "nul", "{'a': 1}", "[1, ]", "[\n1]", "01", ""],
    ),
    "regex": (
        Grammar.regex(r"(?:[a-c]+|\d{3})-?é*"),
        ["a", "abcabc", "123", "b-", "999-éé", "aé"],
        ["", "d", "12", "1234", "a--", "A", "ae", "-", "a ", "é"],
    ),
    "regex with dots": (
        Grammar.regex(r"t.\."),
        ["ta.", "te.", "t🦉.", "t\\.", 't".'],
        ["t.", "t\n.", "tab.", "ta", "ta.."],
    ),
    "empty or not": (Grammar.regex("(ab)*"), ["", "ab", "abab"], ["a", "aba", "b"]),
    "lark": (
        Grammar.lark('start: sum\nsum: item ("+" item)*\nitem: /[0-9]+/ | "(" sum ")"'),
        ["1", "12+3", "(1)+((2+33))", "((((7))))"],
        ["", "+", "1+", "(1", "1)", "()", "1 + 2", "a"],
    ),
}


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_grammar_accepts_exactly_what_it_should(name: str) -> None:
    grammar, good, bad = LANGUAGES[name]
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


ODD_TEXTS = [
    *(
        "yes",
        'say "yes"',
        "it's",
        "no\\n",
        "no\n",
        "\\",
        "\\\\",
        '\\"',
        "/",
        "a/b",
        "tab\t.",
        "\r\n",
        "\x00",
        "\x01\x1f\x7f",
    ),
    *(
        "é",
        "e\u0301",
        "日本",
        "🦉",
        "\u2028",
        "\x85",
        "\ufeff",
        "\uffff",
        '"i',
        "a|b",
        "[a]",
        "a+",
        "(?i)x",
        "%json",
        "// x",
    ),
    *("# x", "<|im_end|>", "start: x", "{}", " ", "  x "),
]


def test_choices_are_taken_literally() -> None:
    """Quotes, backslashes, line ends, control characters, what is syntax elsewhere: each of them, and nothing else."""
    grammar = Grammar.choices(ODD_TEXTS)
    assert [text for text in ODD_TEXTS if not accepts(grammar, text)] == []
    wrong = {"", "yesyes", "YES", "x", "aa", "A/B", "\\n", "\n", "a", "b", "\\u00e9", "I", '"', "\t"}
    wrong |= {text + "x" for text in ODD_TEXTS} | {text[:-1] for text in ODD_TEXTS} | {text[1:] for text in ODD_TEXTS}
    assert [text for text in wrong - set(ODD_TEXTS) if accepts(grammar, text)] == []


texts = st.text(st.characters(codec="utf-8", exclude_characters="\ufdd0<"), min_size=1, max_size=6)


@settings(max_examples=40)
@given(st.lists(texts, min_size=1, max_size=5), texts)
def test_any_texts_may_be_choices(choices: list[str], other: str) -> None:
    grammar = Grammar.choices(choices)
    for text in [*choices, other, choices[0] + other, choices[0][:-1]]:
        assert accepts(grammar, text) == (text in choices)
    guide.cache_clear()


def test_there_may_be_thousands_of_choices() -> None:
    grammar = Grammar.choices([f"{n:04d}" for n in range(0, 10_000, 2)])
    assert all(accepts(grammar, f"{n:04d}") for n in range(0, 10_000, 998))
    assert not any(accepts(grammar, f"{n:04d}") for n in range(1, 10_000, 998))


@pytest.mark.parametrize("bundle", [tiny_bundle(), TokenizerBundle(sentencepiece_tokenizer().to_str())])
@pytest.mark.parametrize("text", ["hello hello", " he", "é\n🦉", "<0x41>_"])
def test_a_mask_is_made_of_the_same_bytes_as_the_text(bundle: TokenizerBundle, text: str) -> None:
    """Whatever allowed ids are followed, their pieces are the text, then the end comes; for both kinds of tokenizer."""
    vocabulary, data, rng = Tokenizer(bundle).vocabulary, text.encode(), random.Random(0)
    compiled = Guide.compile(Grammar.choices([text, "~"]), bundle, (2,))
    for _ in range(5):
        ids: list[int] = []
        done, cursor = b"", compiled.start()
        while done != data:
            fitting = sorted(allowed(cursor.masks([])[0]) - {2})
            if not ids:
                fitting = [token for token in fitting if vocabulary.text_bytes(token) != b"~"]
            ids.append(rng.choice(fitting))
            done += vocabulary.text_bytes(ids[-1])
            assert data.startswith(done)
            assert cursor.seek(ids)
        assert allowed(cursor.masks([])[0]) == {2}


def test_half_a_character_is_followed_by_its_other_half() -> None:
    """No mask lets through bytes that are not UTF-8."""
    cursor = guide(Grammar.regex("(?s:.)*")).start()
    byte = {piece[0]: i for i, piece in enumerate(tiny().vocabulary.pieces) if piece and len(piece) == 1}
    assert allowed(cursor.masks([])[0]) >= {byte[0xE2], byte[0x41], *EOS}
    assert not allowed(cursor.masks([])[0]) & {byte[0x80], byte[0xFF], byte[0xC0]}
    assert cursor.seek([byte[0xE2], byte[0x82]])
    assert allowed(cursor.masks([])[0]) == {byte[b] for b in range(0x80, 0xC0)}


# -- the end


def test_the_text_ends_where_the_grammar_allows_it_and_by_any_of_the_end_ids() -> None:
    cursor = guide(Grammar.choices(["a", "ab"])).start()
    masks = [allowed(mask) for mask in cursor.masks(ids_of("ab"))]
    assert [mask & {0, 1, 2} for mask in masks] == [set(), {1, 2}, {1, 2}]
    assert masks[2] == {1, 2}
    for end in EOS:
        assert cursor.allowed([*ids_of("a"), end, *ids_of("b")]) == [*ids_of("a"), end]
        assert cursor.allowed([*ids_of("ab"), end, end]) == [*ids_of("ab"), end]
        assert cursor.allowed([end]) == []


def test_only_given_end_ids_are_ends() -> None:
    """An ordinary id may be one, too; the control ids that are not stay forbidden."""
    (b,) = ids_of("b")
    for ends in ((2,), (1,), (b,), (0, b)):
        cursor = Guide.compile(Grammar.regex("a*"), tiny().bundle, ends).start()
        assert allowed(cursor.masks([])[0]) & {0, 1, 2, b} == set(ends)


@pytest.mark.parametrize(("ends", "words"), [((), "this one has none"), ((5000,), "5000"), ((2, 5000), "5000")])
def test_a_target_without_a_usable_end_id_takes_no_grammar(ends: tuple[int, ...], words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^grammar .*{words}") as caught:
        Guide.compile(Grammar.regex("a"), tiny().bundle, ends)
    assert caught.value.details == {"param": "grammar"}


# -- cursors


WALKED = [(grammar, good) for grammar, good, _ in LANGUAGES.values()]
WALKED.append((Grammar.choices(["a", "ab", "eta", "eth"]), ["a", "ab", "eta", "eth"]))


@st.composite
def some_ids(draw: st.DrawFn, which: int) -> list[int]:
    """Often a text of the grammar or the beginning of one, sometimes something else behind it."""
    ids = ids_of(draw(st.sampled_from(WALKED[which][1])) or "a")
    cut = ids[: draw(st.integers(0, len(ids)))]
    behind = st.lists(st.sampled_from([1, 2, *ids_of("aeb1")]) | st.integers(0, NUM_IDS - 1), max_size=3)
    return cut + draw(st.just([]) | behind)


def fresh(which: int, ids: Sequence[int]) -> tuple[GuideCursor, bool]:
    cursor = guide(WALKED[which][0]).start()
    return cursor, cursor.seek(ids)


@given(st.data(), st.integers(0, len(WALKED) - 1))
def test_seeking_back_and_forth_equals_a_fresh_start(data: st.DataObject, which: int) -> None:
    """Whatever was asked before, in whatever order: refused ids, ends, drafts and forced ids leave no trace."""
    cursor = guide(WALKED[which][0]).start()
    for _ in range(data.draw(st.integers(1, 5))):
        ids = data.draw(some_ids(which))
        other, possible = fresh(which, ids)
        assert cursor.seek(ids) == possible
        for _ in range(2):
            question = data.draw(st.sampled_from(["masks", "allowed", "forced"]))
            if question == "masks":
                draft = data.draw(some_ids(which))
                assert cursor.masks(draft) == other.masks(draft)
            elif question == "allowed":
                following = data.draw(some_ids(which))
                assert cursor.allowed(following) == other.allowed(following)
            else:
                assert cursor.forced() == other.forced()
        assert cursor.masks([]) == fresh(which, ids)[0].masks([])


@given(st.data(), st.integers(0, len(WALKED) - 1))
def test_masks_after_drafts_are_those_of_the_places(data: st.DataObject, which: int) -> None:
    """One more than ids that may come; the cursor stays."""
    ids, draft = data.draw(some_ids(which)), data.draw(some_ids(which))
    cursor, possible = fresh(which, ids)
    if not possible:
        return
    masks = cursor.masks(draft)
    for length, mask in enumerate(masks):
        place, reached = fresh(which, [*ids, *draft[:length]])
        assert reached
        assert place.masks([]) == [mask]
    if len(masks) <= len(draft):
        ended = any(token in EOS for token in draft[: len(masks)])
        assert ended or draft[len(masks) - 1] not in allowed(masks[-1])
    assert cursor.masks(draft) == masks


@given(st.data(), st.integers(0, len(WALKED) - 1))
def test_allowed_ids_are_those_that_the_masks_allow(data: st.DataObject, which: int) -> None:
    """Up to and with the id that ends the text; what is forced is the only thing that may come."""
    ids, following = data.draw(some_ids(which)), data.draw(some_ids(which))
    cursor, possible = fresh(which, ids)
    if not possible or set(ids) & set(EOS):
        return
    taken = cursor.allowed(following)
    assert following[: len(taken)] == taken
    place: list[int] = list(ids)
    for token in taken:
        mask = allowed(fresh(which, place)[0].masks([])[0])
        assert token in mask
        place.append(token)
    rest = following[len(taken) :]
    if rest and not {*taken, rest[0]} & set(EOS):
        assert rest[0] not in allowed(fresh(which, place)[0].masks([])[0])
    forced = cursor.forced()
    assert cursor.allowed(forced) == forced
    for length, token in enumerate(forced):
        assert allowed(fresh(which, [*ids, *forced[:length]])[0].masks([])[0]) == {token}


def test_a_refused_text_leaves_the_cursor_where_it_was_right() -> None:
    cursor = guide(Grammar.choices(["abc", "abd"])).start()
    assert not cursor.seek(ids_of("abx"))
    assert allowed(cursor.masks([])[0]) == {*ids_of("c"), *ids_of("d")}
    assert cursor.seek(ids_of("abc"))
    assert cursor.seek([])
    assert allowed(cursor.masks([])[0]) == {*ids_of("a")}


def test_cursors_of_one_guide_are_independent() -> None:
    compiled = guide(Grammar.choices(["ab", "cd"]))
    one, two = compiled.start(), compiled.start()
    assert one.seek(ids_of("a"))
    assert two.seek(ids_of("c"))
    assert allowed(one.masks([])[0]) == {*ids_of("b")}
    assert allowed(two.masks([])[0]) == {*ids_of("d")}
    assert allowed(compiled.start().masks([])[0]) == {*ids_of("a"), *ids_of("c")}


# -- vocabularies


def with_word(token_id: int) -> TokenizerBundle:
    """The tiny tokenizer and one more word, with holes between."""
    spec = json.loads(tiny().bundle.tokenizer_json)
    spec["model"]["vocab"]["zz"] = token_id
    return TokenizerBundle(json.dumps(spec))


@pytest.mark.parametrize("token_id", [NUM_IDS, NUM_IDS + 1, 319, 320, 1000])
def test_a_mask_covers_a_vocabulary_with_holes(token_id: int) -> None:
    """The library counts words, and takes no notice of holes; control ids and holes never come."""
    bundle = with_word(token_id)
    vocabulary = Tokenizer(bundle).vocabulary
    assert vocabulary.size == token_id + 1
    cursor = Guide.compile(Grammar.regex("[a-z]*"), bundle, EOS).start()
    masks = cursor.masks([token_id, *ids_of("a")])
    assert all(8 * len(mask) >= vocabulary.size for mask in masks)
    small = allowed(guide(Grammar.regex("[a-z]*")).start().masks([])[0])
    assert allowed(masks[0]) - {token_id} == small
    assert cursor.masks([]) == masks[:1]


def test_any_id_of_the_vocabulary_may_be_drafted() -> None:
    """Control ids, holes and words that the library has missed: refused, and the cursor goes on."""
    cursor = Guide.compile(Grammar.regex("[a-c]{1,9}"), with_word(400), EOS).start()
    (mask,) = cursor.masks([])
    good = allowed(mask)
    for token in range(401):
        assert cursor.allowed([token]) == [token] * (token in good)
        assert len(cursor.masks([token])) == 1 + (token in good)
        assert cursor.seek([token]) == (token in good)
        assert cursor.seek([])
    assert cursor.masks([]) == [mask]


def test_an_added_token_that_is_plain_text_counts_as_text() -> None:
    spec = json.loads(tiny().bundle.tokenizer_json)
    spec["added_tokens"].append(spec["added_tokens"][0] | {"id": NUM_IDS, "content": "cabs", "special": False})
    cursor = Guide.compile(Grammar.regex("cab(s|le)"), TokenizerBundle(json.dumps(spec)), EOS).start()
    assert NUM_IDS in allowed(cursor.masks([])[0])
    assert cursor.seek([NUM_IDS])
    assert allowed(cursor.masks([])[0]) == set(EOS)


# -- what is refused


BAD: dict[str, Grammar] = {
    "schema of an unknown type": Grammar.json_schema('{"type": "text"}'),
    "schema that contradicts itself": Grammar.json_schema('{"type": "integer", "minimum": 3, "maximum": 2}'),
    "schema that allows nothing": Grammar.json_schema('{"enum": []}'),
    "schema that never ends": Grammar.json_schema('{"$ref": "#"}'),
    "schema elsewhere": Grammar.json_schema('{"$ref": "https://example.com/schema.json"}'),
    "schema with a bad pattern": Grammar.json_schema('{"type": "string", "pattern": "("}'),
    "schema with NaN": Grammar.json_schema('{"const": NaN}'),
    "schema with half a character": Grammar.json_schema({"const": "\ud800"}),
    "schema too deep": Grammar.json_schema('{"items":' * 900 + "{}" + "}" * 900),
    "schema with a number past all numbers": Grammar.json_schema('{"multipleOf": 1' + "0" * 400 + "}"),
    "schema with infinity": Grammar.json_schema('{"multipleOf": 1e999}'),
    "schema with what is not supported": Grammar.json_schema('{"not": {"type": "object"}}'),
    "regex without an end": Grammar.regex("(" + "ab" * 20_000),
    "regex with look-ahead": Grammar.regex("(?=a)b"),
    "regex that nothing matches": Grammar.regex(r"[^\x00-\x{10FFFF}]"),
    "regex too deep": Grammar.regex("(" * 30_000 + "a" + ")" * 30_000),
    "lark without a start": Grammar.lark('begin: "a"'),
    "lark with an unknown name": Grammar.lark("start: nothing"),
    "lark that never ends": Grammar.lark("start: start"),
    "lark too deep": Grammar.lark("start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "lark that is none": Grammar.lark("\x00\x01 not a grammar"),
    "lark that is the library's own format": Grammar.lark('\n{"grammars": [{"json_schema": {}}]}'),
    "lark with a huge count": Grammar.lark('start: "a"{99999999999999999999}'),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_grammar_is_refused_where_it_is_compiled(name: str) -> None:
    """By name, and with a text short enough for a status: not with the whole grammar and the library's state."""
    with pytest.raises(InvalidRequest, match=r"^grammar ") as caught:
        Guide.compile(BAD[name], tiny().bundle, EOS)
    assert caught.value.details == {"param": "grammar"}
    assert len(str(caught.value)) < 600


def refusal(function: Callable[[], object]) -> BaruError | None:
    """What `function` was refused with, if it was; any other error is one."""
    try:
        function()
    except BaruError as error:
        return error
    return None


@pytest.mark.parametrize("text", ["start: " + " | ".join(f'"{n:04d}"' for n in range(5000)), 'start: "a"{1000000}'])
def test_a_grammar_too_large_to_follow_is_no_refused_draft(text: str) -> None:
    """What the mask allows is taken, or it is said that it cannot be: rows after it would go unmasked."""
    cursor = guide(Grammar.lark(text)).start()
    draft = [min(allowed(cursor.masks([])[0]))]
    taken: list[bytes] = []
    error = refusal(lambda: taken.extend(cursor.masks(draft)))
    assert error or len(taken) == 2
    if error:
        assert error.details == {"param": "grammar"}
        assert len(str(error)) < 600


HUGE = {
    "regex": ["a{1000000}", "(.*a.{200}){90}", "(a*)*" * 2000, "(a|b)*a(a|b){5000}", "[a-z]{1,60000}x?" * 30],
    "lark": [
        'start: "a"{1000000}',
        "start: " + '"a"? ' * 9000,
        'start: ((((b){0,1000}){0,1000}){0,1000}){0,1000}\nb: "x" | "y"',
        "start: e\ne: e e | e e e | /a/ | ",
        "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "a"\nstart: r0',
        'start: %json {"multipleOf": 982451653}',
        '{"grammars": [{"json_schema": {"multipleOf": 982451653}}]}',
    ],
    "json_schema": [
        '{"type": "string", "minLength": 100000000}',
        '{"type": "array", "minItems": 1000000000, "items": {"type": "integer"}}',
        '{"multipleOf": 982451653}',
        '{"items": {"multiple\\u004ff": 1000000.7}}',
        '{"allOf": [{"multipleOf": 1009}, {"multipleOf": 1013}]}',
        json.dumps(
            {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrstuvwx"]}
        ),
    ],
}
_FOLLOW = """
import json, resource, sys
from baru_common.errors import InvalidRequest
from baru_common.sampling import Grammar, GrammarKind
from baru_common.sampling.guide import Guide
from baru_common.tokens import TokenizerBundle

tokenizer_json, huge = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
bundle, told = TokenizerBundle(tokenizer_json), []
for kind, texts in huge.items():
    for text in texts:
        try:
            ids, cursor = [], Guide.compile(Grammar(GrammarKind(kind), text), bundle, (2,)).start()
            for _ in range(30):
                mask = cursor.masks([])[0]
                ids += [i for i in range(3, 300) if mask[i // 8] >> i % 8 & 1][:1]
                if not cursor.seek(ids):
                    break
            told.append("followed")
        except InvalidRequest:
            told.append("refused")
# Not ru_maxrss: a child begins with its parent's.
peak_kb = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(json.dumps([told, peak_kb // 1024]))
"""


@pytest.mark.timeout(100)
def test_huge_grammars_take_bounded_time_and_memory() -> None:
    """A few hundred bytes that ask for the world are followed or refused; the process lives, below 2 GiB and 60 s."""
    run = subprocess.run(
        [sys.executable, "-c", _FOLLOW],
        input=json.dumps([tiny().bundle.tokenizer_json, HUGE]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-1000:]
    told, peak_mb = json.loads(run.stdout)
    assert len(told) == sum(map(len, HUGE.values()))
    assert "refused" in told
    assert peak_mb < 1000


def test_the_errors_are_ours() -> None:
    """Whatever the text, in whatever language: a guide or a BaruError, never an error of the library's."""
    rng = random.Random(0)
    alphabet = [
        "start",
        ":",
        '"a"',
        "/b/",
        "|",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "*",
        "\\",
        "\n",
        "%json",
        "<",
        "0",
        "€",
        "\x00",
    ]
    for _ in range(150):
        text = rng.choice(["start: ", "{", "", '{"type": "object", ']) + "".join(
            rng.choices(alphabet, k=rng.randint(1, 9))
        )
        for make in (Grammar.lark, Grammar.regex, Grammar.json_schema):
            error = refusal(partial(follow, make, text))
            assert error is None or error.details == {"param": "grammar"}


def follow(make: Callable[[str], Grammar], text: str) -> None:
    Guide.compile(make(text), tiny().bundle, EOS).start().masks(ids_of("a"))


MULTIPLES = [
    ('{"multipleOf": 9999}', True),
    ('{"multipleOf": 10001}', False),
    ('{"multipleOf": 5e6}', True),
    ('{"multipleOf": 0.0009999}', True),
    ('{"multipleOf": 1000.1}', False),
    ('{"items": {"multipleOf": 999}, "prefixItems": [{"multipleOf": 0.2}, {"multipleOf": 999}]}', True),
    ('{"items": {"multipleOf": 101}, "prefixItems": [{"multipleOf": 0.99}, {"multipleOf": 2}]}', False),
]


@pytest.mark.parametrize(("schema", "served"), MULTIPLES)
def test_multiples_are_bounded_in_their_product(schema: str, served: bool) -> None:
    """Each once, and without zeros at the end, which cost nothing; in Lark, too."""
    for grammar in (Grammar.json_schema(schema), Grammar.lark(f'start: "%json" %json{schema}\n')):
        error = refusal(partial(Guide.compile, grammar, tiny().bundle, EOS))
        assert (error is None) == served
        assert served or "multipleOf" in str(error)


def nested(depth: int, **schema: Any) -> dict[str, Any]:
    """A schema within a schema: each holds along with what is in it."""
    inner = nested(depth - 1, **schema) if depth else {"type": "string"}
    return {"pattern": f"a{depth}"} | {key: [inner] if value == [] else value for key, value in schema.items()}


def both(least: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "string"}], "oneOf": [{"minLength": least}]}


TOGETHER: dict[str, tuple[dict[str, Any], bool]] = {
    "13 that all hold": ({"allOf": [{"type": "integer", "maximum": i} for i in range(13)]}, True),
    "14 that all hold": ({"allOf": [{"type": "integer", "maximum": i} for i in range(14)]}, False),
    "a few in each of some": ({"properties": {f"{i}": {"allOf": [{"maximum": 1}] * 3} for i in range(7)}}, False),
    "one and its pattern": (nested(11, allOf=[]), True),
    "one and its pattern, often": (nested(12, allOf=[]), False),
    "any of one and its pattern": (nested(12, anyOf=[]), False),
    "one of one and its pattern": (nested(12, oneOf=[]), False),
    "both at once": ({"properties": {f"{i}": both(i) for i in range(12)}}, True),
    "both at once, often": ({"properties": {f"{i}": both(i) for i in range(13)}}, False),
    "references with patterns": (
        {"$defs": {"x": {"type": "string"}}, "items": [{"$ref": "#/$defs/x", "pattern": f"{i}"} for i in range(13)]},
        False,
    ),
    "references alone": (
        {
            "$defs": {"x": {"type": "string", "format": "date"}},
            "type": "object",
            "properties": {f"{i}": {"allOf": [{"$ref": "#/$defs/x"}], "description": "a date"} for i in range(50)},
        },
        True,
    ),
    "patterns alone": ({"properties": {f"{i}": {"type": "string", "pattern": f"a{i}"} for i in range(50)}}, True),
    "this or null": ({"properties": {f"{i}": {"anyOf": [{"type": "null"}, {"minimum": i}]} for i in range(50)}}, True),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_schemas_that_hold_together_are_bounded(name: str) -> None:
    """Two to their number is what their patterns cost the library."""
    schema, served = TOGETHER[name]
    error = refusal(lambda: Guide.compile(Grammar.json_schema(schema), tiny().bundle, EOS))
    assert (error is None or "hold along with" not in str(error)) == served


def test_multiples_are_what_they_should_be() -> None:
    assert accepts(Grammar.json_schema('{"type": "integer", "multipleOf": 125}'), "1125")
    assert not accepts(Grammar.json_schema('{"type": "integer", "multipleOf": 125}'), "1120")
