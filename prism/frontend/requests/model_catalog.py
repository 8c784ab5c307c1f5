"""Models that requests may name, and their tokenizers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from prism.errors import UnknownModelError
from prism.frontend.http.access_control import may_use
from prism.frontend.http.error_bodies import UnavailableError
from prism.frontend.text.tokenizers import ModelTokenizer, load_tokenizers
from prism.messages.model_spec import ModelSpec

RETRY_S = 10.0


class ModelCatalog:
    """Models that requests may name, and their tokenizers. Only `replace` and `retry_unreadable`
    change it. For one event loop."""

    def __init__(
        self,
        models: Sequence[ModelSpec],
        tokenizers: dict[str, ModelTokenizer],
        unreadable: dict[str, str],
    ) -> None:
        self._models = models
        self.tokenizers = tokenizers  # by model, for all that can be loaded
        self._unreadable = unreadable  # model -> why it cannot be loaded
        self.started_unix_s = int(time.time())
        # Names of models that are not here, for messages.
        self.external_names: Callable[[], list[str]] = list

    @classmethod
    async def load(
        cls, models: Sequence[ModelSpec], without_unreadable: bool = False
    ) -> ModelCatalog:
        """Loads the models' tokenizers. Raises ConfigError if one cannot be loaded, unless
        `without_unreadable`."""
        unreadable: dict[str, str] = {}
        reasons = unreadable if without_unreadable else None
        return cls(models, await asyncio.to_thread(load_tokenizers, models, reasons), unreadable)

    def names(self) -> list[tuple[str, ModelSpec, str]]:
        """Returns (name, model, adapter) for each name that the current request may use: of models,
        aliases and adapters."""
        named = [(n, m, m.adapter_in(n) or "") for m in self._models for n in m.names]
        return [(name, m, adapter) for name, m, adapter in named if may_use(m.named(adapter))]

    def resolve(self, name: str) -> tuple[ModelSpec, str]:
        """Returns the model that `name` refers to, and the name of its adapter or an empty string.
        Raises UnknownModelError, also if the current key may not use it, or UnavailableError."""
        for model in self._models:
            adapter = model.adapter_in(name)
            if adapter is not None and may_use(model.named(adapter)):
                if reason := self._unreadable.get(model.name):
                    message = f"{model.name} cannot be served now: {reason}"
                    raise UnavailableError(message, "model_unavailable")
                return model, adapter
        names = self.names()
        known = ", ".join([*(n for n, _, _ in names), *self.external_names()])
        every = sum(len(m.names) for m in self._models)
        hint = "" if len(names) == every else ", or not for this key"
        error = UnknownModelError(
            f"the model {name!r:.200} does not exist{hint}; available models: {known}"
        )
        error.param = "model"
        raise error

    def tokenizer(self, model: str) -> ModelTokenizer:
        """Returns the tokenizer of a model that `resolve` has returned. Raises UnknownModelError if
        it was removed meanwhile."""
        if model not in self.tokenizers:
            raise UnknownModelError(f"the model {model!r} was removed")
        return self.tokenizers[model]

    def problems(self) -> dict[str, str]:
        """Returns model -> error, for models that are not served or have no conversations."""
        templates = {name: one.template_error for name, one in self.tokenizers.items()}
        return {name: error for name, error in templates.items() if error} | self._unreadable

    async def replace(self, models: Sequence[ModelSpec]) -> None:
        """Loads the new models' tokenizers, and then replaces the models. Models whose tokenizer
        cannot be loaded are left out until it can be."""
        known = {model.name for model in self._models}
        added = [model for model in models if model.name not in known]
        unreadable: dict[str, str] = {}
        loaded = await asyncio.to_thread(load_tokenizers, added, unreadable)
        names = {model.name for model in models}
        self._models = models
        self.tokenizers = {n: t for n, t in self.tokenizers.items() if n in names} | loaded
        self._unreadable = {n: r for n, r in self._unreadable.items() if n in names} | unreadable

    async def retry_unreadable(self) -> None:
        """Retries to load missing tokenizers and chat templates, until cancelled."""
        while True:
            await asyncio.sleep(RETRY_S)
            missing = [model for model in self._models if model.name in self.problems()]
            still: dict[str, str] = {}
            loaded = await asyncio.to_thread(load_tokenizers, missing, still)
            # Read after the wait, in which `replace` may have set another dict.
            self.tokenizers |= loaded
            for name in self._unreadable.keys() & {model.name for model in missing}:
                if name in still:
                    self._unreadable[name] = still[name]
                else:
                    del self._unreadable[name]
