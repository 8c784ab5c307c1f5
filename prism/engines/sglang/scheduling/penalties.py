"""Penalties of requests that already have output when they come into a batch."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)


def count_earlier_output(batch: ScheduleBatch, besides_last: int = 0) -> None:
    """Counts the output that the requests of this new batch had before it, without the last
    `besides_last` tokens, which a decode step counts at its start.

    SGLang counts output only after the prefill. A request that was paused, retracted, moved here or
    sent again after a failure would lose the penalties of its earlier output.
    """
    orchestrator = batch.sampling_info.penalizer_orchestrator
    if not orchestrator.is_required:
        return
    for row, req in enumerate(batch.reqs):
        known = list(req.output_ids)[: len(req.output_ids) - besides_last]
        if known:
            output = torch.tensor(known, dtype=torch.int64, device=batch.device)
            _count(orchestrator.penalizers, row, output)


def _count(penalizers: Any, row: int, output: torch.Tensor) -> None:
    frequency = penalizers[BatchedFrequencyPenalizer]
    if frequency.is_prepared():
        penalties = frequency.frequency_penalties[row].expand(len(output))
        frequency.cumulated_frequency_penalties[row].scatter_add_(0, output, penalties)
    presence = penalizers[BatchedPresencePenalizer]
    if presence.is_prepared():
        penalties = presence.presence_penalties[row].expand(len(output))
        presence.cumulated_presence_penalties[row].scatter_(0, output, penalties)
    repetition = penalizers[BatchedRepetitionPenalizer]
    if repetition.is_prepared():
        penalties = repetition.repetition_penalties[row].expand(len(output))
        repetition.cumulated_repetition_penalties[row].scatter_(0, output, penalties)
    stop_tokens = penalizers[BatchedMinNewTokensPenalizer]
    if stop_tokens.is_prepared():
        stop_tokens.len_output_tokens[row] += len(output)
