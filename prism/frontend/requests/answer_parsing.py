"""Parsing of answers into reasoning, text and tool calls, by the adapter's parsers."""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import dataclass
from typing import Any

from prism.config.checks.adapters import grammars_module
from prism.frontend.http.error_bodies import UnavailableError, bad_request
from prism.frontend.protocol.chat_types import ChatBody, NamedTool
from prism.frontend.requests.grammars import checked
from prism.frontend.text.tokenizers import ModelTokenizer
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Grammar

_KEPT_PROMPT_CHARS = 256
# Templates without any of these do not support reasoning.
_REASONING_MARKS = ("think", "THINK", "reason", "<|channel|>")


@dataclass(frozen=True, slots=True)
class Parsing:
    """Parser settings of one request."""

    module: Any
    tool_parser: str
    reasoning_parser: str
    tools: tuple[dict[str, Any], ...]
    checked_tools: list[Any]  # `tools` as the adapter's type
    tool_choice: Any
    prompt: str  # the end of the prompt
    loop: asyncio.AbstractEventLoop  # the loop that the parsers run in

    def parser(self) -> Any:
        """Returns a parser for one choice, with `push` for its stream and `whole` for all of it."""
        return self.module.AnswerParser(
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
            tools=self.checked_tools,
            tool_choice=self.tool_choice,
            prompt=self.prompt,
            loop=self.loop,
        )


class AnswerParsers:
    """Parsers of an adapter, imported when a model needs one, and their names for each model. For
    one event loop."""

    def __init__(self, adapter: str) -> None:
        self._name = grammars_module(adapter, "parsers")
        self._found: dict[str, tuple[str, str]] = {}

    async def parsing(
        self, body: ChatBody, model: ModelSpec, tokenizer: ModelTokenizer, prompt: str
    ) -> Parsing | None:
        """Returns the parser settings, or None if answers are plain text. Raises BadRequestError if
        there are tools and no tool parser."""
        if not body.uses_tools and not self._may_reason(model, tokenizer):
            return None
        names = await self._names(model, tokenizer)
        if body.uses_tools and not names[0]:
            text = f"{model.name} does not have a tool_parser; set one in the YAML, or remove tools"
            raise bad_request(f"tools: {text}", "tools")
        tool_parser = names[0] if body.uses_tools else ""
        if not tool_parser and not names[1]:
            return None
        tools = tuple(t.model_dump(exclude_none=True) for t in _chosen(body)) if tool_parser else ()
        module = self._module()
        if body.continue_final_message and names[1]:
            prompt = module.through_mark(names[1], body.messages[-1].content)
        tail = prompt[-_KEPT_PROMPT_CHARS:]
        loop, checked_tools = asyncio.get_running_loop(), module.checked_tools(tools)
        chosen = (tools, checked_tools, _choice(body))
        return Parsing(module, tool_parser, names[1], *chosen, tail, loop)

    def _may_reason(self, model: ModelSpec, tokenizer: ModelTokenizer) -> bool:
        if not self._name or model.reasoning_parser == "none":
            return False
        template = tokenizer.chat_template
        marked = template is not None and any(m in template.source for m in _REASONING_MARKS)
        return marked or model.reasoning_parser != "auto"

    async def _names(self, model: ModelSpec, tokenizer: ModelTokenizer) -> tuple[str, str]:
        """Returns the names of the model's tool and reasoning parser, "" for none."""
        if not self._name:
            return "", ""
        if model.name not in self._found:
            self._found[model.name] = await asyncio.to_thread(self._find, model, tokenizer)
        return self._found[model.name]

    def _find(self, model: ModelSpec, tokenizer: ModelTokenizer) -> tuple[str, str]:
        module = self._module()
        wanted = (model.tool_parser, model.reasoning_parser)
        named = ["" if name in ("auto", "none") else name for name in wanted]
        if error := module.unknown(*named):
            raise UnavailableError(f"{model.name} cannot be served: {error}")
        template = tokenizer.chat_template
        auto = module.detect(template.source, tokenizer.tokenizer) if template else ("", "")
        tool, reasoning = (
            found if name == "auto" else mine
            for name, mine, found in zip(wanted, named, auto, strict=True)
        )
        return tool, reasoning

    def _module(self) -> Any:
        return importlib.import_module(self._name)


def tool_grammar(parsing: Parsing, body: ChatBody, all_strict: bool = False) -> Grammar | None:
    """Returns the grammar that enforces tool calls after the reasoning, or None. `all_strict`:
    enforce the schema of every tool's arguments, not only of strict tools. Raises
    BadRequestError."""
    if not parsing.tools:
        return None
    parallel = body.parallel_tool_calls is not False
    strict = {"strict": True} if all_strict else {}
    tools = [{**tool, "function": {**tool["function"], **strict}} for tool in parsing.tools]
    try:
        found = parsing.module.constraint(parsing.tool_parser, tools, parsing.tool_choice, parallel)
    except ValueError as error:
        raise bad_request(f"tools: {error}", "tools") from error
    must = parsing.tool_choice != "auto"
    if found is None and must:
        text = f"tool_choice: the parser {parsing.tool_parser} cannot enforce calls; use auto"
        raise bad_request(text, "tool_choice")
    return after_reasoning(parsing, checked(Grammar(*found), "tools")) if found else None


def after_reasoning(parsing: Parsing, grammar: Grammar) -> Grammar:
    """Returns `grammar`, preceded by free reasoning if the prompt starts it."""
    if not parsing.reasoning_parser:
        return grammar
    name, prompt = parsing.reasoning_parser, parsing.prompt
    return Grammar(*parsing.module.after_reasoning(name, prompt, grammar.kind, grammar.text))


def _chosen(body: ChatBody) -> list[Any]:
    """Returns the tools, or the one that must be called."""
    tools, choice = body.tools or [], body.tool_choice
    if isinstance(choice, NamedTool):
        return [tool for tool in tools if tool.function.name == choice.function.name]
    return tools


def _choice(body: ChatBody) -> Any:
    choice = body.tool_choice or "auto"
    return choice.model_dump() if isinstance(choice, NamedTool) else choice
