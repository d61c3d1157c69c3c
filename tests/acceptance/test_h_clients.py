"""The endpoint with programs that people have: each gives what the library gives."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import langchain_openai
import pytest
import yaml
from langchain_core.messages import AIMessageChunk
from pydantic import SecretStr

from baru_common.sampling import SamplingParams
from baru_micro import Finish
from baru_micro.client import Prompt
from support.endpoint import Endpoint, endpoint_of
from support.tiny import tiny_target

_QUESTION = "What is there to report?"
_MESSAGES: Any = [{"role": "user", "content": _QUESTION}]
_NUM_TOKENS = 24
_WAIT_S = 120.0


async def answer(here: Endpoint, prompt: Prompt = _MESSAGES, **params: Any) -> Finish:
    """What the library gives, of this length."""
    return await here.by_library(prompt, SamplingParams(**{"max_tokens": _NUM_TOKENS, **params}))


async def output(*command: str, stdin: str = "", **environment: str) -> str:
    """Run a program to its end."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), _WAIT_S)
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}], ids=["greedy", "seeded"])
async def test_http_library_and_command_line_give_the_same_ids(sampled: dict[str, Any]) -> None:
    options = {f"--{name.replace('_', '-')}": str(value) for name, value in sampled.items()}
    async with endpoint_of(tiny_target()) as here:
        finish = await answer(here, **sampled)
        over_http = await here.openai.chat.completions.create(
            model=here.model,
            messages=_MESSAGES,
            max_tokens=_NUM_TOKENS,
            logprobs=True,
            **({"temperature": 0} | sampled),
        )
        told = await output(
            *(sys.executable, "-m", "baru_micro.cli", "generate", _QUESTION, "--hub", here.hub.address, "--json"),
            *("--max-tokens", str(_NUM_TOKENS), *(word for option in options.items() for word in option)),
        )
    entries = over_http.choices[0].logprobs
    assert entries
    assert entries.content
    pieces = here.node.tokenizer.vocabulary.pieces
    assert [bytes(entry.bytes or ()) for entry in entries.content] == [pieces[i] for i in finish.ids]
    assert over_http.choices[0].message.content == finish.text
    assert json.loads(told)["ids"] == list(finish.ids)


async def test_langchain() -> None:
    async with endpoint_of(tiny_target()) as here:
        wanted = (await answer(here)).text
        chat = langchain_openai.ChatOpenAI(
            base_url=f"{here.url}/v1",
            api_key=SecretStr("none"),
            model=here.model,
            temperature=0,
            max_completion_tokens=_NUM_TOKENS,
            max_retries=0,
        )
        whole = await chat.ainvoke(_QUESTION)
        parts = [part async for part in chat.astream(_QUESTION, stream_usage=True)]
    assert whole.content == wanted
    streamed = sum(parts[1:], start=parts[0])
    assert isinstance(streamed, AIMessageChunk)
    assert streamed.content == wanted
    assert streamed.usage_metadata == whole.usage_metadata
    assert whole.usage_metadata
    assert whole.usage_metadata["output_tokens"] == _NUM_TOKENS


@pytest.mark.parametrize("stream", [True, False])
async def test_llm_command(tmp_path: Path, stream: bool) -> None:
    """Its own prompt adds a line end."""
    async with endpoint_of(tiny_target()) as here:
        wanted = (await answer(here)).text
        model = {"model_id": "baru", "model_name": here.model, "api_base": f"{here.url}/v1"}
        (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump([model]))
        options = (
            "-o",
            "temperature",
            "0",
            "-o",
            "max_tokens",
            str(_NUM_TOKENS),
            *(() if stream else ("--no-stream",)),
        )
        printed = await output(
            *(sys.executable, "-m", "llm", "-m", "baru", "--no-log", *options, _QUESTION),
            LLM_USER_PATH=str(tmp_path),
            LLM_LOAD_PLUGINS="",
        )
    assert printed == wanted + "\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl is installed")
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_curl(path: str) -> None:
    asks: dict[str, Any] = {"messages": _MESSAGES} if path.startswith("chat") else {"prompt": _QUESTION}
    async with endpoint_of(tiny_target()) as here:
        wanted = (await answer(here, _MESSAGES if "messages" in asks else _QUESTION)).text
        body = {"model": here.model, "max_tokens": _NUM_TOKENS, "temperature": 0, **asks}
        command = ("curl", "--silent", "--fail", "--no-buffer", "--json", "@-", f"{here.url}/v1/{path}")
        whole = json.loads(await output(*command, stdin=json.dumps(body)))
        streamed = await output(*command, stdin=json.dumps(body | {"stream": True}))
    lines = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    if path.startswith("chat"):
        assert whole["choices"][0]["message"]["content"] == wanted
        assert "".join(choice["delta"].get("content", "") for choice in choices) == wanted
    else:
        assert whole["choices"][0]["text"] == wanted
        assert "".join(choice["text"] for choice in choices) == wanted
