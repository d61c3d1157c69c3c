"""`baru-micro` as a user and as a script sees it: a process, its two streams, its exit code."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from baru_common import __version__
from baru_common.errors import ConfigError, ReceiptInvalid
from baru_common.frames import HubDescription
from baru_common.tokens import TextStream, Tokenizer
from baru_hub.verifier import Verifier
from baru_micro import Kind, Piece, Provenance, Step, StepStats
from baru_micro.cli import app
from baru_micro.reader import Reader
from support.hubs import hub_of
from support.tiny import plain_greedy, tiny_target

_WAIT_S = 60.0
_TARGET = tiny_target()
_TOKENIZER = Tokenizer(_TARGET.bundle)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_TEXT = "tell me, tell me"
_RAW = ("--raw", "--ignore-eos", "--max-tokens", "40")


def answer(text: str, num_tokens: int) -> tuple[list[int], str]:
    """The target's own continuation of a raw text, by the slow reference."""
    ids = plain_greedy(_TARGET, _TOKENIZER.encode_text(text), num_tokens)
    stream = TextStream(_TARGET.vocabulary)
    return ids, "".join(map(stream.push, ids)) + stream.finish()


async def cli(*arguments: str, stdin: bytes = b"", **environment: str) -> tuple[int, str, str]:
    """Run it without a terminal; return exit code, output and errors, as they came."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baru_micro.cli", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"COLUMNS": "300"} | environment,
    )
    out, err = await asyncio.wait_for(process.communicate(stdin), _WAIT_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


# -- generate


async def test_without_a_terminal_the_output_is_the_text() -> None:
    """And a line end: no colours, no figures; those are on the other stream."""
    async with hub_of(_TARGET) as hub:
        code, out, err = await cli("generate", _TEXT, "--hub", hub.address, *_RAW)
    assert (code, out) == (0, answer(_TEXT, 40)[1] + "\n")
    assert err.startswith("40 tokens (length), ")
    assert "all verified by the target" in err
    assert "\x1b" not in err


async def test_on_a_terminal_the_text_drives_nothing() -> None:
    """The answer holds control characters: none of them arrives, only our own colours do."""
    _, text = answer(_TEXT, 40)
    assert _CONTROLS.search(text), "this target was chosen for saying such things"
    async with hub_of(_TARGET) as hub:
        code, out, _ = await cli("generate", _TEXT, "--hub", hub.address, *_RAW, FORCE_COLOR="1", TERM="xterm")
    shown = _COLOURS.sub("", out)
    assert code == 0
    assert not _CONTROLS.search(shown)
    assert shown.replace("\n", "").replace("\t", "").replace(" ", "") == _CONTROLS.sub("\ufffd", text).replace(
        "\n", ""
    ).replace("\t", "").replace(" ", "")


@pytest.mark.parametrize(
    ("kind", "colour"),
    [(Kind.ACCEPTED, "\x1b[32m"), (Kind.CORRECTION, "\x1b[1;33m"), (Kind.BONUS, "\x1b[36m"), (Kind.PLAIN, "\x1b[39m")],
)
def test_each_kind_has_its_colour(kind: Kind, colour: str) -> None:
    """And escape sequences within the text lose their power."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system="standard", highlight=False, soft_wrap=True)
    piece = Piece(5, "a\x1b[2Jb\r[red]\x9b1m\n", kind)
    Reader(keeps=False, out=console).take(Step(0, (piece,), Provenance.VERIFIED, StepStats(0, 0, None)))
    before, found, after = shown.getvalue().partition("a\ufffd[2Jb\ufffd[red]\ufffd1m")
    assert found
    assert _COLOURS.findall(before) == [colour]
    assert not _CONTROLS.search(_COLOURS.sub("", before + after))


async def test_json_holds_everything() -> None:
    """One object: ids and text exactly, figures with units, provenance that covers the ids."""
    async with hub_of(_TARGET) as hub:
        code, out, err = await cli("generate", _TEXT, "--hub", hub.address, "--json", *_RAW)
    ids, text = answer(_TEXT, 40)
    told = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert (told["ids"], told["text"], told["finish_reason"]) == (ids, text, "length")
    assert told["provenance"] == [{"start": 0, "end": 40, "provenance": "verified"}]
    usage = told["usage"]
    assert (usage["num_emitted"], usage["num_prompt"]) == (40, len(_TOKENIZER.encode_text(_TEXT)))
    assert usage["num_drafted"] == usage["num_accepted"] + usage["num_rejected"] + usage["num_discarded"]
    assert told["mean_accepted_length"] == pytest.approx(40 / usage["num_steps"], abs=1e-3)
    assert told["tokens_per_s"] > 0
    assert {"round_trip_ms", "time_to_first_token_s", "elapsed_s", "acceptance_rate"} <= set(told)


async def test_the_prompt_may_come_from_standard_input() -> None:
    """As it is, line ends and all; with the chat template unless raw."""
    text = "zwei\nZeilen \u2013 ja\n"
    async with hub_of(_TARGET) as hub:
        _, out, _ = await cli("generate", "-", "--hub", hub.address, "--json", *_RAW, stdin=text.encode())
        chat = ("generate", "-", "--hub", hub.address, "--json", "--max-tokens", "4", "--system", "s")
        _, in_chat, _ = await cli(*chat, stdin=text.encode())
    assert json.loads(out)["ids"] == answer(text, 40)[0]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": text}]
    assert json.loads(in_chat)["usage"]["num_prompt"] == len(_TOKENIZER.encode_chat(messages))


# -- mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("x", "--drafter", "telepathy"), ("there is no drafter 'telepathy'", "ngram")),
        (("x", "--drafter", "[/red]"), ("there is no drafter '[/red]'", "ngram")),
        (("x", "--drafter", "causal_lm:/no/such"), ("/no/such", "what to do")),
        (("",), ("the prompt is empty", "what to do")),
        ((" \n ",), ("the prompt is empty", "what to do")),
        (("", "--raw"), ("the prompt is empty", "what to do")),
        (("x", "--raw", "--system", "s"), ("--raw and --system contradict", "leave one of them out")),
        (("x", "--max-tokens", "0"), ("max_tokens is 0", "1 .. 4294967295")),
        (("x" * 600, "--raw"), ("at most 511", "shorten")),
    ],
)
async def test_a_mistake_is_said_in_two_lines(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    """On the error stream, with exit code 1 and nothing on the other; never a traceback."""
    async with hub_of(_TARGET) as hub:
        code, out, err = await cli("generate", *arguments, "--hub", hub.address)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) <= 2
    assert all(word in err for word in words)


async def test_a_settings_file_is_followed_and_options_go_before_it(tmp_path: Path) -> None:
    """The table [node] of the kit's file, named by an option or by the environment, for every command."""
    file = tmp_path / "baru.toml"
    async with hub_of(_TARGET) as hub:
        file.write_text(f'[hub]\nmax_sessions = 3\n[node]\nhub = ["{hub.address}"]\ndrafter = "telepathy"\n')
        code, out, _ = await cli("doctor", "--json", "--config", str(file))
        last = json.loads(out)["checks"][-1]
        assert (code, last["name"], "telepathy" in last["found"]) == (1, "drafter", True)
        code, out, err = await cli("generate", _TEXT, *_RAW, "--drafter", "suffix", BARU_CONFIG=str(file))
        assert (code, out.rstrip("\n")) == (0, answer(_TEXT, 40)[1].rstrip("\n")), err


@pytest.mark.parametrize("command", [("generate", "x"), ("serve",), ("doctor",), ("canary", "run")])
@pytest.mark.parametrize(
    ("says", "words"),
    [
        ('drafters = "suffix"', ("node.drafters is no setting", "did you mean drafter")),
        ("max_running = 0", ("max_running is 0, must be at least 1",)),
        ("hub = []", ("hub is empty", "HOST:PORT")),
        ('fallback = "pray"', ("node.fallback is wrong", "'local'")),
    ],
)
def test_a_wrong_settings_file_is_named(tmp_path: Path, command: tuple[str, ...], says: str, words: tuple[str]) -> None:
    file = tmp_path / "baru.toml"
    file.write_text(f"[node]\n{says}\n")
    refused = CliRunner().invoke(app, [*command, "--config", str(file)]).exception
    assert isinstance(refused, ConfigError)
    assert all(word in f"{refused.message} {refused.hint}" for word in words)


async def test_numbers_beyond_the_wire_are_no_crash() -> None:
    """More tokens than any field holds: as many as the context takes, or a plain refusal."""
    async with hub_of(tiny_target(context_limit=64)) as hub:
        code, _, err = await cli("generate", "x", "--hub", hub.address, "--max-tokens", "5000000000")
    assert code in {0, 1}
    assert "Traceback" not in err


@pytest.mark.parametrize("command", [("generate", "x"), ("doctor",)])
async def test_a_hub_that_is_down_is_said(command: tuple[str, ...]) -> None:
    """With its address, and what to look at; the address may come from the environment."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        code, out, err = await cli(*command, BARU_HUB=address)
    assert code == 1
    assert f"no hub answers at {address}" in out + err
    assert "baru-hub serve" in out + err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [("generate",), ("generate", "x", "--no-such"), ("no-such",)])
async def test_a_wrong_call_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    """Exit code 2, as everywhere."""
    code, out, _ = await cli(*arguments)
    assert (code, out) == (2, "")


async def test_the_version_is_the_packages() -> None:
    """Alone on its line."""
    assert await cli("version") == (0, f"{__version__}\n", "")


# -- doctor


async def test_the_doctor_tells_people_and_scripts() -> None:
    """A table, or one object; exit code 0 when all is well and 1 when not."""
    async with hub_of(_TARGET) as hub:
        code, table, _ = await cli("doctor", "--hub", hub.address)
        assert (code, table.count(" ok ") + table.count("\nok ")) == (0, 8)
        code, out, _ = await cli("doctor", "--hub", hub.address, "--json", "--drafter", "telepathy")
    told = json.loads(out)
    assert (code, told["ok"], [check["ok"] for check in told["checks"]]) == (1, False, [*[True] * 4, False])
    assert told["checks"][-1]["name"] == "drafter"


@pytest.mark.parametrize("command", [("doctor",), ("doctor", "--json"), ("generate", "x")])
async def test_what_a_hub_says_drives_no_terminal(monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    """A name with escape sequences, in what is shown of a hub and in its errors."""
    describe = Verifier.describe

    def described(self: Verifier) -> HubDescription:
        return replace(describe(self), target_name="a\x1b[2Jb\r[/red]", target_fingerprint=b"\x1b]0;x\x07" * 4)

    monkeypatch.setattr(Verifier, "describe", described)
    monkeypatch.setattr("baru_hub.admission.TargetMismatch", lambda *_, **__: _escaping())
    async with hub_of(_TARGET) as hub:
        _, out, err = await cli(*command, "--hub", hub.address, FORCE_COLOR="1", TERM="xterm")
    assert "Traceback" not in err
    assert not _CONTROLS.search(_COLOURS.sub("", out + err))


def _escaping() -> Exception:
    from baru_common.errors import TargetMismatch

    return TargetMismatch("not\x1b[2J mine", hint="\x1b]0;owned\x07 [/nothing]")


# -- receipts


async def test_a_receipt_can_be_kept_and_checked_offline(tmp_path: Path) -> None:
    """0: good; 1: not good, and which field; 3: whole, but nobody vouches for the key. Ids only if asked for."""
    kept, slim = tmp_path / "kept.json", tmp_path / "slim.json"
    async with hub_of(_TARGET) as hub:
        key = hub.verifier._checkpoint.receipt_key.hex()
        arguments = ("generate", _TEXT, "--hub", hub.address, "--json", *_RAW)
        _, out, _ = await cli(*arguments, "--receipt", str(kept), "--receipt-ids")
        await cli(*arguments, "--receipt", str(slim))
    assert json.loads(out)["verified"] is True
    assert "content" not in json.loads(slim.read_text())
    run = CliRunner().invoke
    assert run(app, ["verify-receipt", str(slim)]).exit_code == 3
    good = run(app, ["verify-receipt", str(kept), "--key", key, "--json"])
    told = json.loads(good.stdout)
    assert (good.exit_code, told["vouched"], told["trusted"]) == (0, True, False)
    assert told["statement"]["transcript_digest"] == json.loads(out)["proof"]["transcript_digest"]
    table = run(app, ["verify-receipt", str(slim), "--key", key], env={"COLUMNS": "200"}).stdout
    assert "40 of 40 ids" in table
    assert "not proven  ids in this file" in table
    values = json.loads(kept.read_text())
    values["content"]["output_ids"][3] += 1
    kept.write_text(json.dumps(values))
    bad = run(app, ["verify-receipt", str(kept), "--key", key, "--json"])
    assert (bad.exit_code, json.loads(bad.stdout)["field"]) == (1, "output_digest")
    for content in ("", "{}", "[]", slim.read_text().replace('"version": 1', '"version": 2')):
        kept.write_text(content)
        assert isinstance(run(app, ["verify-receipt", str(kept)]).exception, ReceiptInvalid)
