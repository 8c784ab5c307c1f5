"""Penalties of requests that already have output when their prefill begins."""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.penaltylib import BatchedFrequencyPenalizer, BatchedPresencePenalizer


def count_earlier_output(batch: ScheduleBatch) -> None:
    """Counts what the requests of this prefill put out before it.

    SGLang counts output from the prefill on. A request that was retracted, moved here or is sent
    again after a failure would lose the penalties of its earlier output.
    """
    orchestrator = batch.sampling_info.penalizer_orchestrator
    if not orchestrator.is_required:
        return
    penalizers = orchestrator.penalizers
    frequency = penalizers[BatchedFrequencyPenalizer]
    presence = penalizers[BatchedPresencePenalizer]
    for row, req in enumerate(batch.reqs):
        if not req.output_ids:
            continue
        output = torch.tensor(list(req.output_ids), dtype=torch.int64, device=batch.device)
        if frequency.is_prepared():
            penalties = frequency.frequency_penalties[row].expand(len(output))
            frequency.cumulated_frequency_penalties[row].scatter_add_(0, output, penalties)
        if presence.is_prepared():
            penalties = presence.presence_penalties[row].expand(len(output))
            presence.cumulated_presence_penalties[row].scatter_(0, output, penalties)
