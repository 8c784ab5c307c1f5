"""A device that decodes for several models in turns (Aegaeon §4.3).

A round gives each model one turn. Between two turns the KV of one model goes to the host and that
of the next one comes; only what comes is waited for, since a link carries both ways at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from prism.policies.turns import TurnBatch, TurnPolicy
from prism_sim.cluster.seat import Seat, blocks_of, kv_bytes
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import EngineSettings, ModelSetup
from prism_sim.engine.batch import Batch
from prism_sim.engine.compute import Compute, Job


@dataclass(slots=True, eq=False)
class Turn:
    """A model's requests: those of `batch` have their KV on the device, `outside` on the host."""

    model: ModelSetup
    batch: Batch
    outside: dict[int, SimRequest] = field(default_factory=dict)
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
    """ended: gets each request with its last token; switched: each model that takes the device,
    with the length of its turn."""

    def __init__(
        self,
        compute: Compute,
        seat: Seat,
        *,
        settings: EngineSettings,
        policy: TurnPolicy,
        ended: Callable[[SimRequest], None],
        switched: Callable[[ModelSetup, Seat, float], None],
    ) -> None:
        self._kernel = compute.kernel
        self._compute = compute
        self._seat = seat
        self._settings = settings
        self._policy = policy
        self._ended = ended
        self._switched = switched
        self._turns: dict[int, Turn] = {}
        self._order: deque[tuple[Turn, float]] = deque()
        self._now: Turn | None = None
        # Until when the present turn lasts.
        self._until_s = 0.0
        self._run: Run | None = None

    def models(self) -> list[str]:
        """Those that it has batches of."""
        return [turn.model.name for turn in self._turns.values() if len(turn)]

    def requests(self) -> list[SimRequest]:
        """All that it holds."""
        turns = self._turns.values()
        return [r for t in turns for r in (*t.batch.members.values(), *t.outside.values())]

    def add(self, model: ModelSetup, request: SimRequest) -> None:
        """A request whose KV is on the host. If it is its model's turn, it joins that once its KV
        has come."""
        turn = self._turns.get(model.index)
        if turn is None:
            turn = self._turns[model.index] = Turn(model, Batch(model.block_tokens))
        turn.outside[request.index] = request
        request.device = self._seat.device.number
        if self._now is None:
            self._begin_round()
        elif self._now is turn:
            copy_s = self._seat.copy_s(model, request.kv_tokens)
            request.ready_s = self._kernel.time_s + copy_s
            self._kernel.after(copy_s, self._end_run, turn)

    # --- turns ------------------------------------------------------------------------------

    def _begin_round(self) -> None:
        self._turns = {index: turn for index, turn in self._turns.items() if len(turn)}
        turns = list(self._turns.values())
        quotas_s = self._policy.quotas_s([self._batch_view(turn) for turn in turns])
        self._order.extend(zip(turns, quotas_s, strict=True))
        self._now = None
        if turns:
            self._next_turn()

    def _batch_view(self, turn: Turn) -> TurnBatch:
        """Its step with all its requests, and its switch as if nothing were fetched ahead."""
        model, tokens = turn.model, self._tokens(turn)
        step_s = model.parts[1].cost.decode_s(len(turn), tokens)
        switch_s = self._seat.switch_s(model) + self._seat.copy_s(model, tokens)
        return TurnBatch(model.name, step_s, model.slo_tpot_s, switch_s)

    def _tokens(self, turn: Turn) -> int:
        return turn.batch.context_tokens + sum([r.kv_tokens for r in turn.outside.values()])

    def _next_turn(self) -> None:
        while self._order:
            turn, quota_s = self._order.popleft()
            if not len(turn):
                continue
            self._now, pause_s = turn, 0.0
            if turn.model is not self._seat.model:
                pause_s = self._seat.take(turn.model)
                self._switched(turn.model, self._seat, quota_s)
            coming = self._join(turn)
            pause_s += self._seat.copy_s(turn.model, coming)
            if not turn.batch:  # all are on their way
                first_s = min([r.ready_s for r in turn.outside.values()])
                pause_s = max(pause_s, first_s - self._kernel.time_s)
            self._kernel.after(pause_s, self._start_turn, turn, quota_s)
            return
        self._begin_round()

    def _start_turn(self, turn: Turn, quota_s: float) -> None:
        self._until_s = self._kernel.time_s + quota_s
        self._join(turn)
        self._fetch_next(turn, quota_s)
        self._step(turn, 1)

    def _fetch_next(self, turn: Turn, quota_s: float) -> None:
        """Weights for the next turn come during this one, where its KV leaves them room."""
        coming = [t for t, _ in self._order] + list(self._turns.values())
        following = next((t.model for t in coming if len(t) and t is not turn), None)
        if following is not None:
            grown = turn.blocks + turn.batch.new_blocks(max(1, self._steps_in(turn, quota_s)))
            self._seat.fetch_ahead(following, kv_bytes(turn.model, grown))

    def _end_turn(self, turn: Turn) -> None:
        """Its KV goes to the host, unless no other model wants the device."""
        if any(len(other) for other in self._turns.values() if other is not turn):
            members = list(turn.batch.members.values())
            for request in members:
                turn.batch.leave(request)
            turn.outside = {**{r.index: r for r in members}, **turn.outside}
            self._hold(turn, 0)
        self._next_turn()

    # --- steps ------------------------------------------------------------------------------

    def _join(self, turn: Turn) -> int:
        """Oldest first as far as memory goes, with room for their next step; returns the tokens
        whose KV comes."""
        coming, now_s = 0, self._kernel.time_s
        for request in [r for r in turn.outside.values() if r.ready_s <= now_s]:
            blocks = blocks_of(turn.model, request.kv_tokens)
            if turn.batch:
                needed = turn.blocks + blocks + len(turn.batch) + 1
                if (
                    needed > self._room_blocks(turn)
                    or len(turn.batch) >= self._settings.max_running
                ):
                    break
            elif blocks > self._room_blocks(turn):
                self._seat.drop_ahead()
            del turn.outside[request.index]
            turn.batch.join(request)
            self._hold(turn, turn.blocks + blocks)
            coming += request.kv_tokens
        return coming

    def _room_blocks(self, turn: Turn) -> int:
        part = turn.model.parts[1]
        return self._seat.kv_room_bytes() // part.quantum_bytes * part.quantum_blocks

    def _hold(self, turn: Turn, blocks: int) -> None:
        turn.blocks = blocks
        self._seat.hold(blocks)

    def _step(self, turn: Turn, at_least: int) -> None:
        """A run of steps to the turn's end, a member's end, or the end of memory."""
        self._make_room(turn)
        batch, left_s = turn.batch, self._until_s - self._kernel.time_s
        steps = max(at_least, self._steps_in(turn, left_s)) if batch.members else 0
        if not steps:
            self._end_turn(turn)
            return
        steps = min(steps, batch.steps_to_end(), self._settings.run_steps)
        steps = batch.steps_within(self._room_blocks(turn) - turn.blocks, steps)
        cost, context = turn.model.parts[1].cost, batch.context_tokens
        self._hold(turn, turn.blocks + batch.new_blocks(steps))
        work_s = cost.decode_run_s(len(batch), context, steps)
        usage = partial(cost.usage, (), len(batch), context)
        job = Job([self._seat.device.gpu], work_s, usage, self._stepped)
        self._run = Run(job, self._kernel.time_s, context, steps)
        self._compute.start(job)

    def _steps_in(self, turn: Turn, seconds: float) -> int:
        """That end within `seconds`."""
        batch, cost = turn.batch, turn.model.parts[1].cost
        if seconds <= 0 or not batch.members:
            return 0
        most = batch.steps_to_end()
        return cost.decode_steps(len(batch), batch.context_tokens, seconds, most)

    def _make_room(self, turn: Turn) -> None:
        """Without weights fetched ahead, then with the newest members on the host, the next step of
        the others fits."""
        batch = turn.batch
        while batch.members and turn.blocks + batch.new_blocks(1) > self._room_blocks(turn):
            if self._seat.drop_ahead():
                continue
            newest = batch.newest()
            batch.leave(newest)
            turn.outside = {newest.index: newest, **turn.outside}
            self._hold(turn, turn.blocks - blocks_of(turn.model, newest.kv_tokens))

    def _end_run(self, turn: Turn) -> None:
        """A request of the turn has come: it joins after the present step."""
        run = self._run
        if run is None or self._now is not turn or run.steps == 1:
            return
        cost, size = turn.model.parts[1].cost, len(turn.batch)
        passed_s = self._kernel.time_s - run.since_s
        done = cost.decode_steps(size, run.context_tokens, passed_s, run.steps)
        if done + 1 < run.steps:
            run.steps = done + 1
            work_s = cost.decode_run_s(size, run.context_tokens, run.steps)
            self._compute.resize(run.job, work_s)

    def _stepped(self) -> None:
        run, turn, self._run = self._run, self._now, None
        assert run is not None
        assert turn is not None
        for request in turn.batch.advance(run.steps):
            self._ended(request)
        members = turn.batch.members.values()
        self._hold(turn, sum([self._blocks_now(turn, r) for r in members]))
        self._join(turn)
        self._step(turn, 0)

    def _blocks_now(self, turn: Turn, request: SimRequest) -> int:
        """A member's counts are those of when it joined."""
        tokens = request.kv_tokens + turn.batch.step - request.join_step
        return blocks_of(turn.model, tokens)
