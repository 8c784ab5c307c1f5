"""Modules of the engines' adapters that frontends use: parsers and trials of grammars."""

from __future__ import annotations

from prism.frontend.live_config import LiveConfig
from prism.frontend.requests.answer_parsing import AnswerParsers
from prism.frontend.requests.grammars import GrammarTrials
from prism.messages.model_spec import ModelSpec


class AdapterModules:
    """Parsers and grammar trials of each adapter, made for the first request that needs them. For
    one event loop."""

    def __init__(self, live: LiveConfig) -> None:
        self._live = live
        self._grammars: dict[str, GrammarTrials] = {}
        self._parsers: dict[str, AnswerParsers] = {}

    def grammars(self, model: ModelSpec) -> GrammarTrials:
        """Returns the grammar trials of the model's adapter."""
        adapter = self._live.config.adapter_of(model)
        if adapter not in self._grammars:
            self._grammars[adapter] = GrammarTrials(adapter)
        return self._grammars[adapter]

    def parsers(self, model: ModelSpec) -> AnswerParsers:
        """Returns the parsers of the model's adapter."""
        adapter = self._live.config.adapter_of(model)
        if adapter not in self._parsers:
            self._parsers[adapter] = AnswerParsers(adapter)
        return self._parsers[adapter]

    async def close(self) -> None:
        for trials in self._grammars.values():
            await trials.close()
