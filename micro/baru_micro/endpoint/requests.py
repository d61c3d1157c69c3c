"""Requests as they come over HTTP, checked, and what they ask of the node."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from baru_common.errors import InvalidRequest
from baru_common.sampling import Grammar, SamplingParams
from baru_micro.client import Prompt
from baru_micro.decoding import Reconcile

from .tools import Tool, ToolChoice, call_grammar, template_tools

MAX_CHOICES = 16
"""Most answers to one request, over all its prompts."""
_PENALTIES = (
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "top_k",
    "min_p",
    "ignore_eos",
    "min_tokens",
)


@dataclass(frozen=True)
class Ask:
    """What one request asks of the node."""

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    num_each: int
    """Answers to each prompt."""
    reconcile: Reconcile
    tools: tuple[Mapping[str, Any], ...] = ()
    """For the chat template."""
    with_receipts: bool = False
    """`usage` is to have the hub's receipts, whole."""
    calls_only: bool = False
    """The answer is nothing but a call of a tool, as JSON."""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.num_each


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Strict):
    """How to stream."""

    include_usage: bool = False
    include_obfuscation: bool | None = None
    """Padding of events against onlookers: not done here, where the link to the hub has its own."""


class Common(_Strict):
    """What both kinds of requests may say. The last line of each group is ours or vLLM's, for the node's own users."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # further sampling parameters, as vLLM names them
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    reconcile: Literal["rewrite", "keep"] | None = None
    receipt: bool | None = None
    # of no consequence here
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        """The last chunk of a stream is to say what it took."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def _seed(self) -> int | None:
        """Signed numbers of 64 bits are seeds, too."""
        return self.seed + 2**64 if self.seed is not None and -(2**63) <= self.seed < 0 else self.seed

    def _params(self, *, max_tokens: int | None, logprobs: int | None, grammar: Grammar | None) -> SamplingParams:
        given = {name: value for name in _PENALTIES if (value := getattr(self, name)) is not None}
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self._seed,
            stop_strings=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_ids=tuple(self.stop_token_ids or ()),
            logit_bias=_biases(self.logit_bias or {}),
            logprobs=logprobs,
            grammar=grammar,
            **given,
        )

    def _ask(self, prompts: Sequence[Prompt], params: SamplingParams, header: str | None, **more: Any) -> Ask:
        if self.stream_options and not self.streams:
            raise _wrong("stream_options", "goes with stream only")
        num_each = 1 if self.n is None else self.n
        if not 1 <= num_each * len(prompts) <= MAX_CHOICES:
            raise _wrong("n", f"asks for {num_each * len(prompts)} answers, must be 1 to {MAX_CHOICES}")
        # Nothing can be taken back from a stream whose reader does not know how.
        default = Reconcile.KEEP if self.streams else Reconcile.REWRITE
        reconcile = _reconcile(self.reconcile or header) or default
        return Ask(tuple(prompts), params, num_each, reconcile, with_receipts=bool(self.receipt), **more)


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(_Strict):
    """A call that the model made in an earlier turn."""

    name: str
    arguments: str


class ToolCall(_Strict):
    """The same, named, so that its result can be told apart."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_Strict):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the turn as chat templates read it."""
        content = self.content if not isinstance(self.content, list) else "".join(part.text for part in self.content)
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content or ""}
        if self.name is not None:
            turn["name"] = self.name
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call)},
                }
                for call in self.tool_calls
            ]
        return turn


class JsonSchema(_Strict):
    """A named schema."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema", default_factory=dict)
    description: str | None = None
    strict: bool | None = None


class TextFormat(_Strict):
    """Any text."""

    type: Literal["text"]


class JsonFormat(_Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(_Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class ChatRequest(Common):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None

    def ask(self, header: str | None) -> Ask:
        """Return what is asked; InvalidRequest for what contradicts itself or cannot be served. `header`: how to
        reconcile, where the body does not say."""
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise _wrong("max_tokens", "and max_completion_tokens contradict each other")
        if self.top_logprobs is not None and not self.logprobs:
            raise _wrong("top_logprobs", "goes with logprobs only")
        grammar = self._grammar()
        tools = tuple(self.tools or ())
        if calls := call_grammar(tools, self.tool_choice):
            if grammar:
                raise _wrong("response_format", "contradicts tool_choice, which asks for a call")
            grammar = calls
        params = self._params(
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            grammar=grammar,
        )
        return self._ask(
            [[message.for_template() for message in self.messages]],
            params,
            header,
            tools=template_tools(tools, self.tool_choice),
            calls_only=calls is not None,
        )

    def _grammar(self) -> Grammar | None:
        wanted = self.response_format
        if isinstance(wanted, JsonFormat):
            return Grammar.json_schema({"type": "object"})
        return Grammar.json_schema(wanted.json_schema.schema_) if isinstance(wanted, SchemaFormat) else None


class CompletionRequest(Common):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    def ask(self, header: str | None) -> Ask:
        """As `ChatRequest.ask`."""
        params = self._params(max_tokens=self.max_tokens, logprobs=self.logprobs, grammar=None)
        return self._ask(self._prompts(), params, header)

    def _prompts(self) -> list[Prompt]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        several: list[Prompt] = [item for item in self.prompt if not isinstance(item, int)]
        return several or [[item for item in self.prompt if isinstance(item, int)]]


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(key): value for key, value in given.items()}
    except ValueError:
        raise _wrong("logit_bias", "has a key that is no token id") from None


def _reconcile(wish: str | None) -> Reconcile | None:
    try:
        return None if wish is None else Reconcile(wish)
    except ValueError:
        names = " or ".join(each.value for each in Reconcile)
        raise _wrong("reconcile", f"is {wish!r}, must be {names}") from None


def _arguments(call: ToolCall) -> Any:
    """Templates print arguments as JSON, so they want them parsed."""
    try:
        return json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return call.function.arguments


def _wrong(param: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{param} {what}", details={"param": param})
