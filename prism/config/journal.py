"""The journals of the schedulers, in the YAML."""

from __future__ import annotations

import msgspec

from prism.config.units import Bytes
from prism.scheduler.journal import JournalConfig


class JournalYaml(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the schedulers write down beside their logs."""

    # "off", "decisions" (actions, queues, dispatches), or "inputs" (also what each decision was
    # made on).
    keep: str = JournalConfig().keep
    # The most that one journal file holds.
    max: Bytes = Bytes(JournalConfig().max_bytes)
