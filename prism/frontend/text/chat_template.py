"""Renders conversations with the model's Jinja template, in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prism.errors import BadRequestError, ConfigError
from prism.frontend.text.template_forms import Forms, forms_of, in_forms
from prism.models.special_tokens import read_json, token_text

# Raised by a template, also for values of `chat_template_kwargs` that it cannot process.
_REFUSALS = (
    TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
# Raised by Jinja or Python for a template that cannot be compiled.
_INVALID = (TemplateError, RecursionError, SyntaxError, TypeError, ValueError)
_SPECIAL_TOKENS = (
    "bos_token", "cls_token", "eos_token", "mask_token", "pad_token", "sep_token", "unk_token",
)  # fmt: skip


class ChatTemplate:
    """Compiled template with the special tokens that it may name (bos_token, ...).

    `tool_source` is a separate template for conversations with tools.
    """

    def __init__(
        self, source: str, special_tokens: dict[str, str], tool_source: str | None = None
    ) -> None:
        self.source = source + (tool_source or "")  # searched for marks of parsers
        environment = _environment()
        self._template = environment.from_string(source)
        self._with_tools = environment.from_string(tool_source or source)
        self._special_tokens = special_tokens
        self._forms: dict[bool, Forms] = {}

    def render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """Returns the prompt up to the start of the assistant's answer. Raises BadRequestError if
        the template rejects the conversation (for roles in the wrong order, for example)."""
        template = self._with_tools if options.get("tools") else self._template
        try:
            return self._rendered(template, in_forms(messages, self._forms_of(template)), options)
        except _REFUSALS as error:
            # Not by `bad_request`, whose module imports fastapi: `check` reads templates too.
            refusal = BadRequestError(f"messages: rejected by the model's chat template: {error}")
            refusal.param = "messages"
            raise refusal from error

    def _rendered(
        self, template: Template, messages: list[dict[str, Any]], options: dict[str, Any]
    ) -> str:
        # transformers passes these to every template.
        given = {"add_generation_prompt": True, "tools": None, "documents": None}
        return template.render({**given, **self._special_tokens, **options, "messages": messages})

    def _forms_of(self, template: Template) -> Forms:
        """Returns the template's forms, which are detected at the first conversation."""

        def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
            try:
                return self._rendered(template, messages, {"tools": tools})
            except _REFUSALS:
                return ""

        with_tools = template is self._with_tools
        if with_tools not in self._forms:
            self._forms[with_tools] = forms_of(render)
        return self._forms[with_tools]


def load_chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> ChatTemplate | None:
    """Returns the template of the model in `directory`, or None if it has none (a base model).
    Raises ConfigError."""
    source, tool_source = _sources(directory, tokenizer_config)
    if source is None:
        return None
    tokens = {name: token_text(tokenizer_config.get(name)) for name in _SPECIAL_TOKENS}
    try:
        known = {name: text for name, text in tokens.items() if text}
        return ChatTemplate(source, known, tool_source)
    except _INVALID as error:
        line = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
        raise ConfigError(
            f"{directory}: the chat template is not valid Jinja: {error}{line}; repair it"
        ) from error


def _sources(directory: Path, tokenizer_config: dict[str, Any]) -> tuple[str | None, str | None]:
    """Returns the template, and the one for tools if they differ."""
    if (file := directory / "chat_template.jinja").is_file():
        tool_file = directory / "additional_chat_templates" / "tool_use.jinja"
        return _read(file), _read(tool_file) if tool_file.is_file() else None
    # Processors of older models have a separate file.
    entry = read_json(directory / "chat_template.json").get("chat_template")
    entry = entry or tokenizer_config.get("chat_template")
    if isinstance(entry, list):
        named = {str(e.get("name")): e.get("template") for e in entry if isinstance(e, dict)}
        sources = (named.get("default"), named.get("tool_use"))
    else:
        sources = (entry, None)
    if entry is not None and not isinstance(sources[0], str):
        raise ConfigError(f"{directory}: chat_template is not text; repair tokenizer_config.json")
    source, tool_source = (each if isinstance(each, str) else None for each in sources)
    return source, tool_source


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}; repair the file") from error


class _GenerationTag(Extension):
    """Jinja tag `{% generation %}`, which marks text for training. The text is rendered unchanged
    in a separate scope, as in transformers."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Macro) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns the environment that Hugging Face templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns `value` as JSON. The parameters are those of Hugging Face's filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


# Names that every template is given, and that the client's options may not contain.
GIVEN = frozenset(
    {"messages", "tools", "add_generation_prompt", *_SPECIAL_TOKENS, *_environment().globals}
)
