"""State of the scheduler's process. It is lost with the process and rebuilt from reports."""

from __future__ import annotations

from collections.abc import Callable

from prism.cluster.state.actions import Actions
from prism.cluster.state.activation_history import Activations
from prism.cluster.state.agents import AgentBook
from prism.cluster.state.attainment import Attainment
from prism.cluster.state.changes import Changes
from prism.cluster.state.demands import OperatorDemands, Startup
from prism.cluster.state.routes import Routes
from prism.cluster.state.served_config import ServedConfig
from prism.cluster.state.sizes import Sizes
from prism.cluster.state.speeds import DegreeSpeeds
from prism.cluster.state.start_times import StartTimes
from prism.cluster.state.timing import SchedulerTiming
from prism.cluster.state.waiting_requests import WaitingRequests
from prism.config.schema.cluster_config import ClusterConfig
from prism.messages.external import ExternalServer
from prism.policies.multiplexing.turns import InstanceTurn
from prism.policies.placement import Placement
from prism.policies.policy import Policy
from prism.policies.profiles import EQUAL
from prism.policies.queues import VirtualQueue
from prism.queueing.request_queue import RequestQueue
from prism.scheduler.decision_journal import Sink
from prism.scheduler.rates import TokenRates
from prism.scheduler.traffic import TrafficBook


class SchedulerState:
    """Parts of the state. Each comment names the modules that change the part; others read it.

    Call `changes.notify` after each change that plans depend on.

    Args:
        now_s: monotonic clock of all times in the state.
        journal: receives actions and turns. None: no journal is written.
    """

    def __init__(
        self,
        config: ClusterConfig,
        policy: Policy,
        timing: SchedulerTiming,
        now_s: Callable[[], float],
        journal: Sink | None = None,
    ) -> None:
        started_s, devices = now_s(), [device.name for device in config.devices]
        self.policy = policy
        self.journal = journal
        self.timing = timing
        self.now_s = now_s
        self.changes = Changes()
        # cluster_reload; it also applies a new configuration to the other parts
        self.served = ServedConfig(config)
        # agent_monitor; the deadline of first reports: controller
        self.book = AgentBook(devices, started_s, timing.start_grace_s, timing.activation_s)
        self.rates = TokenRates(config.scheduler.rate_window_s)
        # agent_monitor; arrivals: controller
        self.traffic = TrafficBook()
        # agent_monitor, if the policy has `next_interval`; resets: placement_search
        self.attainment = Attainment()
        self.sizes = Sizes(self.config, learn=policy.evicts)
        self.speeds = DegreeSpeeds()
        # agent_monitor; prefetches: actuator, operator_commands
        self.starts = StartTimes()
        # actuator; refusals and plans: controller; totals: agent_monitor
        self.actions = Actions(now_s, journal)
        # actuator, agent_monitor; refusals: controller; refusals and pauses: operator_commands
        self.activations = Activations(timing, started_s)
        # controller
        self.routes = Routes(self.book, self.actions.moves)
        # controller; wanted models: actuator, agent_monitor
        self.startup = Startup(self.book, self.activations)
        # placement_search; None: not searched yet, or the policy has no search
        self.target: Placement | None = None
        # requests, for policies that bind requests to devices
        self.waiting = WaitingRequests(self._output_tokens)
        self.queues: tuple[VirtualQueue, ...] = ()
        # requests, for policies that switch models between tokens
        self.turns: tuple[InstanceTurn, ...] = ()
        # external; the previous scheduler's: controller. None: not read yet
        self.external: list[ExternalServer] | None = None
        # operator_commands; drained devices: controller
        self.demands = OperatorDemands()

    @property
    def config(self) -> ClusterConfig:
        return self.served.config

    def turn_on(self, device: str) -> InstanceTurn | None:
        """Returns the turn of the instance with rank 0 on this device, or None."""
        return next((turn for turn in self.turns if turn.devices[0] == device), None)

    async def read_waiting(self, queue: RequestQueue) -> dict[str, int]:
        """Reads the requests that wait to be bound. Returns model -> their number. Raises
        QueueUnavailableError."""
        devices = [device.name for device in self.config.devices]
        await self.waiting.read(queue, devices, self.now_s())
        return self.waiting.counts()

    def _output_tokens(self, model: str) -> float:
        """Returns the mean output of a model's requests, or what is expected of it."""
        seen = self.traffic.of(model, self.now_s()).output_tokens
        expected = next((m.expected for m in self.config.models if m.name == model), None)
        return seen or (expected.output_tokens if expected else EQUAL.output_tokens)
