"""Group H of the public bug reports: the HTTP endpoint, with the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import openai
import pytest

from baru_common.sampling import SamplingParams
from baru_micro.endpoint.app import EndpointConfig
from support.endpoint import Endpoint, endpoint_of
from support.tiny import tiny_target, with_eos

MESSAGES: Any = [{"role": "user", "content": "Report."}]
OPTIONS: dict[str, Any] = {"messages": MESSAGES, "temperature": 0.8, "seed": 3, "max_tokens": 40}


def rare_eos() -> Any:
    """A target whose answers end at different lengths."""
    return with_eos(tiny_target(), 2, *range(100, 106))


async def raw_events(here: Endpoint, **body: Any) -> list[str]:
    """What follows each `data:` of a stream, as it went over the wire."""
    body = {"model": here.model, "stream": True, **OPTIONS, **body}
    async with here.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        text = (await response.aread()).decode()
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_h01_the_shape_of_a_stream(n: int, include_usage: bool) -> None:
    """One role at the start and one reason at the end of each choice, usage last if asked for, [DONE] once."""
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    async with endpoint_of(rare_eos()) as here:
        *lines, done = await raw_events(here, n=n, **options)
        whole = await here.openai.chat.completions.create(model=here.model, n=n, **OPTIONS)
    assert done == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    if include_usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert {k: v for k, v in last["usage"].items() if k != "baru"} == {
            k: getattr(whole.usage, k) for k in ("prompt_tokens", "completion_tokens", "total_tokens")
        }
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    assert len({len(choice.message.content or "") for choice in whole.choices}) == n, "they should differ in length"
    for index, choice in enumerate(whole.choices):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [c for c in mine[1:] if "role" in c["delta"]] == []
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
        assert "".join(c["delta"].get("content", "") for c in mine) == choice.message.content
    assert {choice.finish_reason for choice in whole.choices} <= {"stop", "length"}


def plain(usage: openai.types.CompletionUsage) -> dict[str, Any]:
    """Without what differs from one answer to the next: who has signed what."""
    return usage.model_dump(exclude={"baru": True})


async def test_h01_the_official_client_reads_it() -> None:
    """Its accumulated stream is the whole answer; usage counts tokens, not deltas; the library gives the same ids."""
    async with endpoint_of(tiny_target()) as here:
        whole = await here.openai.chat.completions.create(model=here.model, logprobs=True, **OPTIONS)
        stream = await here.openai.chat.completions.create(
            model=here.model, stream=True, stream_options={"include_usage": True}, **OPTIONS
        )
        chunks = [chunk async for chunk in stream]
        finish = await here.by_library(MESSAGES, SamplingParams(temperature=0.8, seed=3, max_tokens=40, logprobs=0))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert whole.choices[0].message.content == finish.text
    assert whole.usage
    assert chunks[-1].usage
    assert plain(whole.usage) == plain(chunks[-1].usage)
    assert whole.usage.completion_tokens == len(finish.ids)
    entries = whole.choices[0].logprobs
    assert entries
    assert entries.content
    pieces = here.node.tokenizer.vocabulary.pieces
    assert [bytes(entry.bytes or ()) for entry in entries.content] == [pieces[i] for i in finish.ids]
    assert [entry.logprob for entry in entries.content] == [found and found.logprob for found in finish.logprobs]


Ask = Callable[[Endpoint], Awaitable[None]]


def gone_while(stream: bool, wait_s: float) -> Ask:
    """A client that closes its connection in the middle."""

    async def ask(here: Endpoint) -> None:
        body = {"model": here.model, "stream": stream, "messages": MESSAGES, "max_tokens": 400, "ignore_eos": True}
        async with httpx2.AsyncClient(base_url=here.url) as http:
            if stream:
                async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                    num_lines = 0
                    async for line in response.aiter_lines():
                        num_lines += line.startswith("data: ")
                        if num_lines == 5:
                            return
            else:
                with pytest.raises(httpx2.ReadTimeout):
                    await http.post("/v1/chat/completions", json=body, timeout=httpx2.Timeout(30.0, read=wait_s))

    return ask


async def is_quiet(here: Endpoint) -> None:
    """No session left at the hub, none waiting at the node."""
    for _ in range(400):
        if not here.hub.verifier.num_sessions:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("a session is left")


@pytest.mark.parametrize(
    "repeats", [10, pytest.param(500, id="full", marks=(pytest.mark.full, pytest.mark.timeout(600)))]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_h02_a_client_that_goes_away_ends_its_generation(stream: bool, repeats: int) -> None:
    """At the hub, too, and for good: again and again, and the next one is served at once."""
    async with endpoint_of(tiny_target(), config=EndpointConfig(max_running=2)) as here:
        for _ in range(repeats):
            await gone_while(stream, 0.05)(here)
            await is_quiet(here)
        await asyncio.gather(*(gone_while(stream, 0.1)(here) for _ in range(6)))  # most of them wait
        await is_quiet(here)
        answer = await here.openai.chat.completions.create(model=here.model, timeout=2.0, **OPTIONS)
        assert answer.choices[0].message.content
        assert here.hub.verifier.num_orphans == 0
        assert not here.node._hubs.current.streams


CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 4}
BAD: list[tuple[Any, str | None]] = [
    ({"messages": []}, None),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, "prompt_ids"),
    ({"messages": [{"role": "martian", "content": "x"}]}, "messages.0.role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content",
    ),
    ({"messages": "hello"}, "messages"),
    (CHAT | {"top_p": -1}, "top_p"),
    (CHAT | {"top_p": 0}, "top_p"),
    (CHAT | {"repetition_penalty": 0}, "repetition_penalty"),
    (CHAT | {"temperature": 999999}, "temperature"),
    (CHAT | {"temperature": "hot"}, "temperature"),
    (CHAT | {"stop": [""]}, "stop"),
    (CHAT | {"stop": ["x"] * 99}, "stop"),
    (CHAT | {"n": 0}, "n"),
    (CHAT | {"n": 999}, "n"),
    (CHAT | {"max_tokens": "abc"}, "max_tokens"),
    (CHAT | {"max_tokens": 0}, "max_tokens"),
    (CHAT | {"max_tokens": -5}, "max_tokens"),
    (CHAT | {"max_tokens": 1.5}, "max_tokens"),
    (CHAT | {"max_completion_tokens": 4}, "max_tokens"),
    (CHAT | {"logit_bias": {"999999": 1}}, "logit_bias"),
    (CHAT | {"logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT | {"logit_bias": {"5": 1000}}, "logit_bias"),
    (CHAT | {"logprobs": True, "top_logprobs": 100}, "logprobs"),
    (CHAT | {"top_logprobs": 3}, "top_logprobs"),
    (CHAT | {"frequency_penalty": 3}, "frequency_penalty"),
    (CHAT | {"seed": 2**70}, "seed"),
    (CHAT | {"response_format": {"type": "xml"}}, "response_format"),
    (
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 7}}}},
        "response_format",
    ),
    (CHAT | {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (CHAT | {"tool_choice": "required"}, "tool_choice"),
    (CHAT | {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT | {"reconcile": "perhaps"}, "reconcile"),
    (CHAT | {"best_of": 4}, "best_of"),
    (b'{"model": "M", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature"),
    (b'{"model": "M", "messages": [{"role": "user", "content": "x"}], "temperature": Infinity}', "temperature"),
    (b'{"model": "M", "messages": [{"role": "user", "content": "\\ud800"}]}', None),
    (b'{"model": "M", "messages": [{"role": "user", "content": "\xff"}]}', None),
    (b'{"model": "M", "messages": [', None),
    (b"[]", None),
    (b"", None),
]


@pytest.mark.parametrize("hub_is_up", [True, False])
async def test_h03_bad_input_is_refused_by_name(hub_is_up: bool) -> None:
    """400 that names the parameter, with nothing internal in it, with the hub or without; then all is well."""
    async with endpoint_of(tiny_target()) as here:
        if not hub_is_up:
            await here.hub.server.stop(0)
        for body, param in BAD:
            if isinstance(body, bytes):
                content = body.replace(b'"M"', json.dumps(here.model).encode())
            else:
                content = json.dumps({"model": here.model, **body}).encode()
            response = await here.http.post("/v1/chat/completions", content=content, timeout=5.0)
            assert response.status_code == 400, (body, response.text)
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert error["code"]
            assert param is None or (error["param"] or "").startswith(param), (body, error)
            assert not any(word in error["message"] for word in ("Traceback", "pydantic", "File ", "grpc"))
        if hub_is_up:
            answer = await here.openai.chat.completions.create(model=here.model, **OPTIONS)
            assert answer.choices[0].finish_reason in ("stop", "length")


async def test_h03_what_is_not_there_is_404_and_who_has_no_key_401() -> None:
    """As the official client tells them apart."""
    async with endpoint_of(tiny_target(), config=EndpointConfig(api_keys=("good", "other"))) as here:
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
            await here.openai.chat.completions.create(model="gpt-4", messages=MESSAGES)
        assert (await here.http.get("/v1/nothing", headers={"Authorization": "Bearer good"})).status_code == 404
        for header in ({}, {"Authorization": "Bearer bad"}, {"Authorization": "good"}):
            response = await here.http.get("/v1/models", headers=header)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        stranger = here.openai.with_options(api_key="no")
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(model=here.model, messages=MESSAGES)
        assert [model.id async for model in await here.openai.models.list()] == [here.model]
