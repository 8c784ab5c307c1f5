"""Answers told apart into reasoning, text and tool calls, by the adapter's parsers."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from prism.frontend.chat_types import ChatBody, NamedTool
from prism.frontend.errors import UnavailableError, bad_request
from prism.frontend.grammars import checked
from prism.frontend.tokenizers import ModelTokenizer
from prism.messages.models import ModelSpec
from prism.messages.requests import Grammar

_KEPT_PROMPT_CHARS = 256
# Without one of these a template knows no reasoning.
_REASONING_MARKS = ("think", "THINK", "reason", "<|channel|>")


@dataclass(frozen=True, slots=True)
class Parsing:
    """How one request's answers are parsed."""

    module: Any
    tool_parser: str
    reasoning_parser: str
    tools: tuple[dict[str, Any], ...]
    checked_tools: list[Any]  # the same, of the adapter's type
    tool_choice: Any
    prompt: str  # its end
    loop: asyncio.AbstractEventLoop  # where the parsers run

    def parser(self) -> Any:
        """For one choice: `push` its text, or ask for the `whole`."""
        return self.module.AnswerParser(
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
            tools=self.checked_tools,
            tool_choice=self.tool_choice,
            prompt=self.prompt,
            loop=self.loop,
        )


class AnswerParsers:
    """Imports the adapter's parsers when a model needs one, and knows each model's. For one event
    loop."""

    def __init__(self, adapter: str) -> None:
        self._name = f"prism.engines.{adapter}.parsers"
        self._can = importlib.util.find_spec(self._name) is not None
        self._found: dict[str, tuple[str, str]] = {}

    async def parsing(
        self, body: ChatBody, model: ModelSpec, tokenizer: ModelTokenizer, prompt: str
    ) -> Parsing | None:
        """None: the answers are plain text. Raises BadRequestError where tools have no parser."""
        if not body.uses_tools and not self._may_reason(model, tokenizer):
            return None
        names = await self._names(model, tokenizer)
        if body.uses_tools and not names[0]:
            text = f"tools: {model.name} has no tool_parser; name one in the YAML, or remove them"
            raise bad_request(text, "tools")
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
        if not self._can or model.reasoning_parser == "none":
            return False
        template = tokenizer.chat_template
        marked = template is not None and any(m in template.source for m in _REASONING_MARKS)
        return marked or model.reasoning_parser != "auto"

    async def _names(self, model: ModelSpec, tokenizer: ModelTokenizer) -> tuple[str, str]:
        """(tool parser, reasoning parser); "" for none."""
        if not self._can:
            return "", ""
        if model.name not in self._found:
            self._found[model.name] = await asyncio.to_thread(self._look, model, tokenizer)
        return self._found[model.name]

    def _look(self, model: ModelSpec, tokenizer: ModelTokenizer) -> tuple[str, str]:
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
    """What makes the model call the tools that it must, behind its reasoning. `all_strict`: the
    arguments follow every tool's schema, not only those of strict tools. Raises BadRequestError."""
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
        text = f"tool_choice: calls of {parsing.tool_parser} cannot be forced; use auto"
        raise bad_request(text, "tool_choice")
    return behind_reasoning(parsing, checked(Grammar(*found), "tools")) if found else None


def behind_reasoning(parsing: Parsing, grammar: Grammar) -> Grammar:
    """The same, free to reason first where the prompt has the model do so."""
    if not parsing.reasoning_parser:
        return grammar
    name, prompt = parsing.reasoning_parser, parsing.prompt
    return Grammar(*parsing.module.after_reasoning(name, prompt, grammar.kind, grammar.text))


def _chosen(body: ChatBody) -> list[Any]:
    """The tools, or the one that must be called."""
    tools, choice = body.tools or [], body.tool_choice
    if isinstance(choice, NamedTool):
        return [tool for tool in tools if tool.function.name == choice.function.name]
    return tools


def _choice(body: ChatBody) -> Any:
    choice = body.tool_choice or "auto"
    return choice.model_dump() if isinstance(choice, NamedTool) else choice
