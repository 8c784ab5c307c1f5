"""Decode device for several models, which take turns (Aegaeon §4.3).

In a round each model has one turn. Between two turns the KV of one model is copied to the host and
that of the next model from it. Only the latter takes time, since links are full duplex.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from prism.policies.data import side_kv_tokens
from prism.policies.multiplexing.turns import TurnBatch, TurnPolicy
from prism.scheduler.token_turns import DecodeTurns
from prism_sim.cluster.turns.turn_memory import TurnMemory, blocks_of, kv_bytes
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import EngineSettings, ModelSetup
from prism_sim.engine.batch import Batch
from prism_sim.engine.compute import Compute, Job


@dataclass(slots=True, eq=False)
class DecodeGroup:
    """Decoding requests of one model."""

    model: ModelSetup
    # Requests with their KV on the device.
    batch: Batch
    # Requests with their KV on the host.
    outside: dict[int, SimRequest] = field(default_factory=dict)
    # KV blocks on the device.
    blocks: int = 0

    def __len__(self) -> int:
        return len(self.batch) + len(self.outside)


@dataclass(slots=True)
class Run:
    """Decode steps in flight."""

    job: Job
    since_s: float
    context_tokens: int
    steps: int


class DecodeDevice:
    """Instance that decodes for one model at a time.

    Args:
        ended: Called with each request at its last token.
        switched: Called on each switch, with the new model and the length of its turn.
    """

    def __init__(
        self,
        compute: Compute,
        memory: TurnMemory,
        *,
        settings: EngineSettings,
        policy: TurnPolicy,
        ended: Callable[[SimRequest], None],
        switched: Callable[[ModelSetup, TurnMemory, float], None],
    ) -> None:
        self._kernel = compute.kernel
        self._compute = compute
        self._memory = memory
        self._settings = settings
        self._turns = DecodeTurns(policy.quotas_s)
        self._ended = ended
        self._switched = switched
        self._groups: dict[str, DecodeGroup] = {}
        self._current: DecodeGroup | None = None
        # End of the present turn.
        self._until_s = 0.0
        self._run: Run | None = None

    def models(self) -> list[str]:
        """Returns the names of the models with requests on the device."""
        return [name for name, group in self._groups.items() if len(group)]

    def requests(self) -> list[SimRequest]:
        """Returns all requests on the device."""
        groups = self._groups.values()
        return [r for t in groups for r in (*t.batch.members.values(), *t.outside.values())]

    def add(self, model: ModelSetup, request: SimRequest) -> None:
        """Adds a request whose KV is on the host. In the present turn of its model, the request
        joins the batch once its KV is copied."""
        group = self._groups.get(model.name)
        if group is None:
            group = self._groups[model.name] = DecodeGroup(model, Batch(model.need))
        group.outside[request.index] = request
        request.device = self._memory.device.number
        if self._current is None:
            self._next_turn()
        elif self._current is group:
            copy_s = self._memory.copy_s(model, model.need.held_tokens(request.kv_tokens))
            request.ready_s = self._kernel.time_s + copy_s
            self._kernel.after(copy_s, self._end_run, group)

    # --- turns ------------------------------------------------------------------------------

    def _batches(self) -> list[TurnBatch]:
        """Returns the models with requests, for a new round."""
        self._groups = {name: group for name, group in self._groups.items() if len(group)}
        return [self._batch_view(group) for group in self._groups.values()]

    def _batch_view(self, group: DecodeGroup) -> TurnBatch:
        """Returns the view of a group: its step with all its requests, and a switch without a
        prefetch."""
        model, tokens = group.model, self._tokens(group)
        step_s = model.parts[model.tp].cost.decode_s(len(group), tokens)
        requests = (*group.batch.members.values(), *group.outside.values())
        beside = sum([side_kv_tokens(model.need, r.kv_tokens) for r in requests])
        switch_s = self._memory.switch_s(model) + self._memory.copy_s(model, tokens + beside)
        return TurnBatch(model.name, step_s, model.slo_tpot_s, switch_s)

    def _tokens(self, group: DecodeGroup) -> int:
        return group.batch.context_tokens + sum([r.kv_tokens for r in group.outside.values()])

    def _next_turn(self) -> None:
        turn = self._turns.next(self.models(), self._batches)
        if turn is None:
            self._current, self._groups = None, {}
            return
        group, quota_s, pause_s = self._groups[turn[0]], turn[1], 0.0
        self._current = group
        if group.model is not self._memory.model:
            pause_s = self._memory.switch_to(group.model)
            self._switched(group.model, self._memory, quota_s)
        coming = self._join(group)
        pause_s += self._memory.copy_s(group.model, coming)
        if not group.batch:  # the KV of all requests is being copied
            first_s = min([r.ready_s for r in group.outside.values()])
            pause_s = max(pause_s, first_s - self._kernel.time_s)
        self._kernel.after(pause_s, self._start_turn, group, quota_s)

    def _start_turn(self, group: DecodeGroup, quota_s: float) -> None:
        self._until_s = self._kernel.time_s + quota_s
        self._join(group)
        self._prefetch_next(group, quota_s)
        self._step(group, 1)

    def _prefetch_next(self, group: DecodeGroup, quota_s: float) -> None:
        """Prefetches the weights of the next turn's model if this turn's KV leaves room."""
        following = self._turns.following(group.model.name, self.models())
        if following is not None:
            grown = group.blocks + group.batch.new_blocks(max(1, self._steps_in(group, quota_s)))
            self._memory.prefetch(self._groups[following].model, kv_bytes(group.model, grown))

    def _end_turn(self, group: DecodeGroup) -> None:
        """Ends a turn. The KV goes to the host, unless no other model has requests."""
        if any(len(other) for other in self._groups.values() if other is not group):
            members = list(group.batch.members.values())
            for request in members:
                group.batch.leave(request)
            group.outside = {**{r.index: r for r in members}, **group.outside}
            self._hold(group, 0)
        self._next_turn()

    # --- steps ------------------------------------------------------------------------------

    def _join(self, group: DecodeGroup) -> float:
        """Adds requests to the batch, oldest first, while they and their next step fit. Returns the
        number of tokens whose KV is copied to the device."""
        coming, now_s, of_step = 0.0, self._kernel.time_s, group.model.need.step_blocks
        for request in [r for r in group.outside.values() if r.ready_s <= now_s]:
            blocks = blocks_of(group.model, request.kv_tokens)
            if group.batch:
                needed = group.blocks + blocks + (len(group.batch) + 1) * of_step
                if (
                    needed > self._room_blocks(group)
                    or len(group.batch) >= self._settings.max_running
                ):
                    break
            elif blocks > self._room_blocks(group):
                self._memory.drop_prefetched()
            del group.outside[request.index]
            group.batch.join(request)
            self._hold(group, group.blocks + blocks)
            coming += group.model.need.held_tokens(request.kv_tokens)
        return coming

    def _room_blocks(self, group: DecodeGroup) -> int:
        part = group.model.parts[group.model.tp]
        return self._memory.kv_room_bytes() // part.quantum_bytes * part.quantum_blocks

    def _hold(self, group: DecodeGroup, blocks: int) -> None:
        group.blocks = blocks
        self._memory.set_kv(blocks)

    def _step(self, group: DecodeGroup, at_least: int) -> None:
        """Starts a run of steps, which lasts until the turn or a member ends or memory is
        exhausted. Ends the turn if no step is left in it."""
        self._make_room(group)
        batch, left_s = group.batch, self._until_s - self._kernel.time_s
        steps = max(at_least, self._steps_in(group, left_s)) if batch.members else 0
        if not steps:
            self._end_turn(group)
            return
        steps = min(steps, batch.steps_to_end(), self._settings.run_steps)
        steps = batch.steps_within(self._room_blocks(group) - group.blocks, steps)
        cost, context = group.model.parts[group.model.tp].cost, batch.context_tokens
        self._hold(group, group.blocks + batch.new_blocks(steps))
        work_s = cost.decode_run_s(len(batch), context, steps)
        usage = partial(cost.usage, (), len(batch), context)
        job = Job([device.gpu for device in self._memory.devices], work_s, usage, self._stepped)
        self._run = Run(job, self._kernel.time_s, context, steps)
        self._compute.start(job)

    def _steps_in(self, group: DecodeGroup, seconds: float) -> int:
        """Returns the number of steps that end within `seconds`."""
        batch, cost = group.batch, group.model.parts[group.model.tp].cost
        if seconds <= 0 or not batch.members:
            return 0
        most = batch.steps_to_end()
        return cost.decode_steps(len(batch), batch.context_tokens, seconds, most)

    def _make_room(self, group: DecodeGroup) -> None:
        """Makes room for the next step: drops prefetched weights first, then moves the newest
        members to the host."""
        batch = group.batch
        while batch.members and group.blocks + batch.new_blocks(1) > self._room_blocks(group):
            if self._memory.drop_prefetched():
                continue
            newest = batch.newest()
            batch.leave(newest)
            group.outside = {newest.index: newest, **group.outside}
            self._hold(group, group.blocks - blocks_of(group.model, newest.kv_tokens))

    def _end_run(self, group: DecodeGroup) -> None:
        """Ends the run with its present step, so that a request whose KV is copied can join."""
        run = self._run
        if run is None or self._current is not group or run.steps == 1:
            return
        cost, size = group.model.parts[group.model.tp].cost, len(group.batch)
        passed_s = self._kernel.time_s - run.since_s
        done = cost.decode_steps(size, run.context_tokens, passed_s, run.steps)
        if done + 1 < run.steps:
            run.steps = done + 1
            work_s = cost.decode_run_s(size, run.context_tokens, run.steps)
            self._compute.resize(run.job, work_s)

    def _stepped(self) -> None:
        run, group, self._run = self._run, self._current, None
        assert run is not None
        assert group is not None
        for request in group.batch.advance(run.steps):
            self._ended(request)
        members = group.batch.members.values()
        self._hold(group, sum([self._blocks_now(group, r) for r in members]))
        self._join(group)
        self._step(group, 0)

    def _blocks_now(self, group: DecodeGroup, request: SimRequest) -> int:
        """Returns a member's present blocks; its own counts are those at its joining."""
        tokens = request.kv_tokens + group.batch.step - request.join_step
        return blocks_of(group.model, tokens)
