"""Section of the YAML for the schedulers' journals."""

from __future__ import annotations

import msgspec

from prism.config.schema.units import Bytes
from prism.scheduler.journal import JournalConfig


class JournalYaml(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Journals of the schedulers, in the folder of the logs."""

    # "off", "decisions" (actions, queues, dispatches), or "inputs" (also what each decision was
    # made on).
    keep: str = JournalConfig().keep
    # The most that one journal file holds.
    max: Bytes = Bytes(JournalConfig().max_bytes)
