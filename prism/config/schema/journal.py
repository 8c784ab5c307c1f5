"""Section of the YAML for the schedulers' journals."""

from __future__ import annotations

from prism.config.schema.machines import Strict
from prism.config.schema.units import Bytes
from prism.scheduler.decision_journal import JournalConfig


class JournalYaml(Strict, frozen=True):
    """Journals of the schedulers, in the folder of the logs."""

    # "off", "decisions" (actions, queues, dispatches), or "inputs" (also what each decision was
    # made on).
    keep: str = JournalConfig().keep
    # The most that one journal file holds.
    max: Bytes = Bytes(JournalConfig().max_bytes)
