"""Policy that places a model on the least loaded device and evicts the least recently used one."""

from functools import partial

from prism.policies.bins import need_bytes
from prism.policies.data import Action, Activate, ClusterView, Evict, ModelView, Refuse, Settings
from prism.policies.policy import ELASTIC_MEMORY, Policy, PolicyKnobs


class Knobs(PolicyKnobs, frozen=True):
    """Knobs of the policy, set in the YAML by `knobs: {least-loaded: {keep_s: 5}}`."""

    # Seconds after its last request in which a model is not evicted.
    keep_s: float = 1.0

    def __post_init__(self) -> None:
        if self.keep_s < 0:
            raise ValueError("must not be negative")


def policy(knobs: Knobs) -> Policy:
    """Returns the policy. The entry point names this function."""
    return Policy("least-loaded", partial(plan, knobs=knobs), frozenset({ELASTIC_MEMORY}))


def plan(view: ClusterView, settings: Settings, knobs: Knobs) -> tuple[Action, ...]:
    """Returns an action for each inactive model that has requests."""
    gpus = {g.name: g for g in view.gpus if g.alive}
    room = {name: g.free_bytes for name, g in gpus.items()}
    engines = {name: g.engines_free for name, g in gpus.items()}
    load = {d: sum(m.running + m.waiting for m in view.models if m.device == d) for d in gpus}
    unused = sorted((m.idle_s, m.name, m.device or "") for m in view.models if idle(m, knobs))
    leaving = any(m.state == "draining" for m in view.models)
    actions: list[Action] = []
    for model in (m for m in view.models if m.state == "absent" and (m.waiting or m.wanted)):
        need = need_bytes(model)
        places = [d for d in gpus if allowed(model, d) and engines[d] and room[d] >= need]
        if places:
            device = min(places, key=lambda d: (load[d], -room[d], d))
            actions.append(Activate(model.name, device, f"the device has {load[device]} requests"))
            engines[device], room[device] = engines[device] - 1, room[device] - need
            load[device] += model.waiting
        elif model.waiting and unused and not leaving:
            idle_s, name, device = unused.pop()
            actions.append(Evict(name, device, f"unused for {idle_s:.1f} s; {model.name} waits"))
        else:
            actions.append(Refuse(model.name, f"no device has an engine and {need} bytes free"))
    return tuple(actions)


def allowed(model: ModelView, device: str) -> bool:
    here = model.pinned_device in (None, device) and device not in model.barred
    return model.tp == 1 and here


def idle(model: ModelView, knobs: Knobs) -> bool:
    free = not (model.running or model.waiting or model.never_evict)
    return model.state == "active" and free and model.idle_s >= knobs.keep_s
