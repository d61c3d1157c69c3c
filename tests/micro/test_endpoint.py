"""The endpoint beyond what other servers have: provenance, receipts, links that break; and what it must bear."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from baru_common.drafters.simulated import SimulatedDrafter
from baru_common.errors import ConfigError
from baru_common.model_files import LoadedModel
from baru_common.receipts import verify
from baru_common.sampling import SamplingContext, SamplingParams
from baru_common.scripted import scripted_id
from baru_common.signatures import Trust
from baru_micro import Finish, LinkOptions, receipt_file
from baru_micro.decoding import Fallback
from baru_micro.endpoint.answers import ChatWriter
from baru_micro.endpoint.app import EndpointConfig
from baru_micro.endpoint.server import Listen
from baru_micro.endpoint.tools import Call, calls_in
from baru_micro.link import LinkState, Timers
from support.drafters import FunctionDrafter, oracle
from support.endpoint import Endpoint, endpoint_of
from support.faults import Fault
from support.link import Local, scripted_engine, until
from support.tiny import byte_tokenizer, plain_greedy, tiny_target

_MESSAGES: Any = [{"role": "user", "content": "Report."}]
_TIMERS = Timers(heartbeat_s=0.05, suspect_s=0.15, down_s=0.3)


def chunks_of(text: str) -> Iterator[dict[str, Any]]:
    for line in text.split("\n\n"):
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


async def posted(here: Endpoint, path: str = "completions", **body: Any) -> dict[str, Any]:
    response = await here.http.post(f"/v1/{path}", json={"model": here.model, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def scripted_text(here: Endpoint, num_tokens: int) -> str:
    """What a simulated target says to "go"."""
    start = len(here.node.tokenizer.encode_text("go"))
    ids = [scripted_id(position) for position in range(start, start + num_tokens)]
    return b"".join(here.node.tokenizer.vocabulary.pieces[i] or b"" for i in ids).decode()


def own(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["usage"]["baru"]["choices"][0]
    return found


# -- what an answer says of itself


async def test_an_answer_names_its_receipt(tmp_path: Any) -> None:
    """Its id by default; whole where asked for, as the command that checks one reads it."""
    async with endpoint_of(tiny_target()) as here:
        short = own(await posted(here, prompt="go", max_tokens=9))
        whole = own(await posted(here, prompt="go", max_tokens=9, receipt=True))
    assert short["provenance"] == [{"start": 0, "end": 9, "provenance": "verified"}]
    assert short["receipt"] | {"id": ""} == {
        "verified": True,
        "trusted": False,
        "reason": None,
        "id": "",
        "hub": "loopback",
        "transcript_digest": whole["receipt"]["transcript_digest"],
    }
    (tmp_path / "receipt").write_text(json.dumps(whole["receipt"]["signed"]))
    signed, content = receipt_file.read(tmp_path / "receipt")
    statement, _ = verify(signed, Trust())
    assert content
    content.require_same(statement)
    assert statement.session_id == whole["receipt"]["id"] != short["receipt"]["id"]


@pytest.mark.parametrize(
    "params",
    [
        {
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.8,
            "presence_penalty": 0.5,
            "logit_bias": {"40": 3, "41": -9},
        },
        {"temperature": 0.5, "seed": 8, "repetition_penalty": 1.2},
        {"temperature": 1.2, "seed": -1, "top_k": 20, "min_p": 0.05, "stop": "e", "min_tokens": 3},
    ],
)
async def test_parameters_mean_what_they_mean_in_the_library(params: dict[str, Any]) -> None:
    """A05 and E03 over HTTP, with drafts that are all right: text and log-probabilities, each with its three best."""
    target = tiny_target()
    answer = plain_greedy(target, [5, 6, 7], 40)
    async with endpoint_of(target, drafter=oracle([5, 6, 7], answer, depth=6)) as here:
        found = await posted(here, prompt=[5, 6, 7], max_tokens=40, logprobs=3, **params)
        stop = {"stop_strings": (params["stop"],)} if "stop" in params else {}
        given = {name: value for name, value in params.items() if name != "stop"} | stop
        given["seed"] = params.get("seed", 0) % 2**64
        bias = {int(key): value for key, value in params.get("logit_bias", {}).items()}
        wanted = SamplingParams(**(given | {"logit_bias": bias, "max_tokens": 40, "logprobs": 3}))
        finish = await here.by_library([5, 6, 7], wanted)
    choice = found["choices"][0]
    assert choice["text"] == finish.text
    assert choice["logprobs"]["token_logprobs"] == [entry and entry.logprob for entry in finish.logprobs]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [3] * len(finish.ids)
    assert found["usage"]["completion_tokens"] == len(finish.ids)


async def test_health_and_metrics() -> None:
    """Who scrapes needs the key, too; who asks whether it lives does not. An idle node sees that its hub goes."""
    async with endpoint_of(tiny_target(), config=EndpointConfig(api_keys=("k",))) as here:
        key = {"Authorization": "Bearer k"}
        assert (await here.http.get("/livez")).status_code == 200
        ready = await here.http.get("/readyz")
        assert (ready.status_code, ready.json()["link"]) == (200, "up")
        assert (await here.http.get("/metrics")).status_code == 401
        body = {"model": here.model, "prompt": "go", "max_tokens": 7}
        assert (await here.http.post("/v1/completions", json=body, headers=key)).status_code == 200
        shown = await here.http.get("/metrics", headers=key)
        assert shown.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert 'baru_node_tokens_total{provenance="verified"} 7.0' in shown.text
        await here.hub.server.stop(0)
        assert (await here.http.get("/readyz")).status_code == 200, "the answer holds for a second"
        await asyncio.sleep(1.1)
        gone = await here.http.get("/readyz")
        assert (gone.status_code, gone.json()["ready"]) == (503, False)
        await until(lambda: here.node.link.state is not LinkState.UP)


# -- tools

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "set_alarm",
            "description": "Wake somebody.",
            "parameters": {
                "type": "object",
                "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}, "loud": {"type": "boolean"}},
                "required": ["hour", "loud"],
                "additionalProperties": False,
            },
        },
    }
]


_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Shaped as those of Hermes and Qwen are."""


def with_tools() -> LoadedModel:
    target = tiny_target(context_limit=1024)
    return replace(target, bundle=replace(target.bundle, chat_template=_TEMPLATE))


async def test_tools_their_calls_and_results_reach_the_template() -> None:
    """The model reads exactly what the template makes of them: the answer is its own to that text."""
    call = {"name": "set_alarm", "arguments": '{"hour": 7, "loud": true}'}
    messages: Any = [
        *_MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "set"},
    ]
    text = (
        f"<|im_start|>system\n<tools>\n{json.dumps(_TOOLS[0])}\n</tools><|im_end|>\n"
        "<|im_start|>user\nReport.<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "set_alarm", "arguments": {"hour": 7, "loud": true}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nset\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    target = with_tools()
    prompt = byte_tokenizer().encode(text, add_special_tokens=False).ids
    async with endpoint_of(target) as here:
        asks = {"messages": messages, "tools": _TOOLS, "max_tokens": 12, "ignore_eos": True, "logprobs": True}
        found = await posted(here, "chat/completions", **asks)
    said = [bytes(entry["bytes"]) for entry in found["choices"][0]["logprobs"]["content"]]
    assert said == [target.vocabulary.pieces[i] for i in plain_greedy(target, prompt, 12)]
    assert found["usage"]["prompt_tokens"] == len(prompt)


async def test_a_tool_that_must_be_called_is_called() -> None:
    """By any model, as its grammar leaves it no choice: with arguments of the schema; a stream says the same."""
    asks: dict[str, Any] = {"messages": _MESSAGES, "tools": _TOOLS, "max_tokens": 200, "temperature": 0}
    async with endpoint_of(with_tools()) as here:
        asks["model"] = here.model
        free = await here.openai.chat.completions.create(**(asks | {"max_tokens": 4}))
        forced = await here.openai.chat.completions.create(tool_choice="required", **asks)
        async with here.openai.chat.completions.stream(tool_choice="required", **asks) as stream:
            streamed = await stream.get_final_completion()
        plain = await here.openai.chat.completions.create(**(asks | {"tools": openai.omit, "max_tokens": 4}))
    assert free.choices[0].message.tool_calls is None
    assert free.usage
    assert plain.usage
    assert free.usage.prompt_tokens > plain.usage.prompt_tokens + 50, "the template tells of the tools"
    for choice in (forced.choices[0], streamed.choices[0]):
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        assert choice.message.tool_calls
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "set_alarm"
        arguments = json.loads(call.function.arguments)
        assert 0 <= arguments["hour"] <= 23
        assert isinstance(arguments["loud"], bool)


def test_calls_are_found_in_text() -> None:
    """What is no call stays text."""
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert calls_in(f"So: {call}{call}", only=False) == ("So:", [Call("f", '{"a": 1}')] * 2)
    assert calls_in("<tool_call>nonsense</tool_call>", only=False) == ("<tool_call>nonsense</tool_call>", [])
    assert calls_in('{"name": "f"}', only=True) == ("", [Call("f", "{}")])
    assert calls_in("[" * 9000, only=True) == ("[" * 9000, [])


def test_a_stream_holds_back_what_may_become_a_call() -> None:
    """And nothing else, and not for ever."""
    writer = ChatWriter(tiny_target().vocabulary, logprobs=False, watches_calls=True, calls_only=False)
    shown = [writer.delta(0, text, ())["delta"].get("content", "") for text in ("a <", "b <tool", "_c", "<tool_call>{")]
    assert shown == ["a ", "<b ", "", "<tool_c"]


# -- links that break


async def heal(here: Endpoint) -> None:
    await asyncio.sleep(0.8)
    await here.link.heal()


@pytest.mark.parametrize("reconcile", [None, "keep", "rewrite"])
async def test_a_stream_goes_on_when_the_link_breaks(reconcile: str | None) -> None:
    """By default, and with `keep`, what the node says itself is streamed, and stands; with `rewrite` only what the
    target stands behind goes out, late. Either way: what was streamed is what the answer is."""
    engine, options = scripted_engine(0.01), LinkOptions(fallback=Fallback.LOCAL, timers=_TIMERS)
    headers = {"X-Baru-Reconcile": reconcile} if reconcile else {}
    async with endpoint_of(engine, drafter=Local(0.8), options=options) as here:
        body = {"model": here.model, "prompt": "go", "max_tokens": 400, "ignore_eos": True, "stream": True}
        body["temperature"] = 0
        body["stream_options"] = {"include_usage": True}
        text = ""
        async with here.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            async for line in response.aiter_text():
                if not text:
                    await here.link.apply(Fault.BLACK_HOLE)
                    healing = asyncio.create_task(heal(here))
                text += line
        await healing
    *parts, last = chunks_of(text)
    said = "".join(part["choices"][0]["text"] for part in parts)
    spans = [span["provenance"] for span in last["usage"]["baru"]["choices"][0]["provenance"]]
    assert last["usage"]["completion_tokens"] == 400
    assert len(said) == 400
    exact = scripted_text(here, 400)
    if reconcile == "rewrite":
        assert (said, spans) == (exact, ["verified"])
    else:
        assert "provisional" in spans
        assert said != exact


@dataclass(frozen=True)
class OwnModel(FunctionDrafter):
    """Drafts nothing. While no hub answers it says eight right ids, four wrong ones, and no more."""

    answer: Sequence[int] = ()
    """What the target says, the prompt first."""
    asked: list[int] = field(default_factory=list)

    def decoder(self, sampling: SamplingContext) -> FunctionDrafter:
        return FunctionDrafter(self._say)

    def _say(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> list[int]:
        self.asked.append(len(ids))
        at, right = len(self.asked) - 1, self.answer[len(ids)]
        return [] if at >= 12 else [right + 1 if at >= 8 else right]


@pytest.mark.parametrize("reconcile", ["keep", "rewrite"])
async def test_e03_ids_of_the_nodes_own_have_no_log_probability(reconcile: str) -> None:
    """Null, until the target has said the same: then they have the target's, as in a whole answer."""
    target, prompt, num_tokens = tiny_target(), [5, 6, 7], 40
    own_model = OwnModel(lambda *_: [], answer=[*prompt, *plain_greedy(target, prompt, num_tokens)])
    asks: dict[str, Any] = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "logprobs": 0}
    options = LinkOptions(fallback=Fallback.LOCAL, timers=_TIMERS)
    async with endpoint_of(target, drafter=own_model, options=options) as here:
        plain = (await posted(here, **asks))["choices"][0]["logprobs"]["token_logprobs"]
        body = {"model": here.model, "temperature": 0, "stream": True, "reconcile": reconcile, **asks}
        body["stream_options"] = {"include_usage": True}
        asking = asyncio.create_task(here.http.post("/v1/completions", json=body))
        await until(lambda: here.hub.verifier.num_sessions)
        await here.link.apply(Fault.BLACK_HOLE)
        await until(lambda: len(own_model.asked) > 12)
        await here.link.heal()
        response = await asking
    *parts, last = chunks_of(response.text)
    entries = [part["choices"][0]["logprobs"] for part in parts]
    found = [value for each in entries if each for value in each["token_logprobs"]]
    spans = own(last)["provenance"]
    if reconcile == "rewrite":
        assert found == plain
        assert [span["provenance"] for span in spans] == ["verified"]
    else:
        start = own_model.asked[0] - len(prompt)
        nulls = [at for at, value in enumerate(found) if value is None]
        assert nulls == list(range(start, start + 12))
        assert {"start": start, "end": start + 12, "provenance": "provisional"} in spans
        assert len(found) == num_tokens


async def test_who_leaves_in_the_last_moment_leaves_nothing_behind() -> None:
    """A request that is answered is given up while its generation still takes leave: after each of its next turns."""
    async with endpoint_of(tiny_target()) as here:
        for num_turns in range(12):
            finished = asyncio.Event()

            async def follow(finished: asyncio.Event) -> None:
                async for event in here.node.generate("go", SamplingParams(max_tokens=3)):
                    if isinstance(event, Finish):
                        finished.set()

            task = asyncio.create_task(follow(finished))
            await finished.wait()
            for _ in range(num_turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert not here.node._hubs.current.streams, num_turns
        assert here.hub.verifier.num_sessions == 0


# -- many at once


@pytest.mark.parametrize(
    ("num_clients", "seconds"),
    [(50, 3), pytest.param(50, 60, marks=(pytest.mark.full, pytest.mark.timeout(300)), id="full")],
)
async def test_fifty_clients_stream_at_once(num_clients: int, seconds: float) -> None:
    """Without an error, each stream exact, in memory that does not grow."""
    memory = psutil.Process().memory_info
    async with endpoint_of(
        scripted_engine(0.005),
        drafter=SimulatedDrafter(0.8),
        config=EndpointConfig(max_running=50),
        max_sessions=64,
        options=LinkOptions(fallback=Fallback.WAIT),  # on a machine that stalls nobody shall go on alone
    ) as here:
        wanted, endless = scripted_text(here, 120), {"ignore_eos": True}
        deadline = time.monotonic() + seconds
        sizes: list[int] = []

        async def client(number: int) -> int:
            num_streams = 0
            while not num_streams or time.monotonic() < deadline:
                stream = await here.openai.completions.create(
                    model=here.model, prompt="go", max_tokens=120, temperature=0, stream=True, extra_body=endless
                )
                said = "".join([chunk.choices[0].text async for chunk in stream])
                assert said == wanted, number
                num_streams += 1
                sizes.append(memory().rss)
            return num_streams

        num_streams = sum(await asyncio.gather(*map(client, range(num_clients))))
        await until(lambda: not here.hub.verifier.num_sessions)
    assert num_streams >= num_clients
    half = len(sizes) // 2
    assert max(sizes[half:]) < max(sizes[:half]) + (64 << 20)


# -- who may come in


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        (Listen("0.0.0.0", 80), "not a loopback address"),  # noqa: S104
        (Listen("::", 80), "not a loopback address"),
        (Listen("127.0.0.1", 80, certificate=Path("x")), "go together"),
    ],
)
def test_strangers_are_kept_out(listen: Listen, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        listen.check(EndpointConfig())
