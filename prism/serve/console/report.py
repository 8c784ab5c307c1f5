"""Tables of a checked configuration and of an activation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import psutil
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prism.config.checks.memory_needs import MemoryNeed, memory_need
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig
from prism.config.schema.machines import is_gpu
from prism.config.schema.units import format_size
from prism.messages.agent import ActionResult
from prism.messages.model_spec import ModelSpec
from prism.serve.node.gpu_probe import GpuFound

_STAGES = {
    "engine": "wait for a free engine",
    "shrink": "other models return memory",
    "reserve": "reservation in the ledger",
    "layout": "model on the meta device, parameters in pages",
    "weights": "copy into the pages",
    "build": "KV space and scheduler",
    "warm_up": "first tokens",
    "ready": "report to the agent",
    "total": "order to answer",
}


def configuration(
    config: ClusterConfig, gpus: Mapping[str, GpuFound] = MappingProxyType({})
) -> RenderableType:
    """Returns tables of models and their memory, of devices and the models that fit, and of GPUs,
    and the folders of models and adapters from hubs."""
    folders = [
        Text(f"{model.name}: {name} in {path}")
        for model in config.models
        for name, path in model.hub_paths.items()
    ]
    parts: list[RenderableType] = []
    if config.models:
        parts += [_models_table(config), *folders]
    if config.external:
        parts.append(_external_table(config))
    if config.devices:
        parts.append(_devices_table(config))
    if any(is_gpu(device.name) for device in config.devices):
        parts += [_gpus_table(config, gpus), _fits_table(config)]
    return Group(*parts)


def memory_warning(config: ClusterConfig) -> str | None:
    """Returns a warning if host devices, which use RAM, need more memory than is free."""
    wanted = sum(d.capacity_bytes for d in config.devices if not is_gpu(d.name))
    free = psutil.virtual_memory().available
    if wanted <= free:
        return None
    return (
        f"warning: devices[].capacity adds up to {format_size(wanted)}, but only"
        f" {format_size(free)} of memory are free; lower the capacities"
    )


def _models_table(config: ClusterConfig) -> Table:
    table = Table(
        "model", "architecture", "context", "weights", "KV/token", "KV of one request", "SLO",
        title="models", title_justify="left",
    )  # fmt: skip
    for model in config.models:
        need = _need(config, model)
        table.add_row(
            _name(model),
            f"{model.architecture} {model.dtype}",
            str(model.context_length),
            format_size(model.weight_bytes),
            format_size(model.token_bytes),
            format_size(need.kv_bytes * model.tp),
            f"{model.slo_ttft_s * 1000:g} / {model.slo_tpot_s * 1000:g} ms",
        )
    return table


def _external_table(config: ClusterConfig) -> Table:
    table = Table("model", "servers", "SLO", title="external models", title_justify="left")
    for model in config.external:
        slos = f"{model.slo_ttft_s * 1000:g} / {model.slo_tpot_s * 1000:g} ms"
        table.add_row(model.name, Text("\n".join(model.servers)), slos)
    return table


def _name(model: ModelSpec) -> str:
    """Returns a model's name with its number of devices at the start, and others that the policy
    may choose."""
    if others := ", ".join(map(str, model.degrees[1:])):
        return f"{model.name}, tp {model.tp} at first, {others} possible"
    return f"{model.name}, tp {model.tp}" if model.tp > 1 else model.name


def _devices_table(config: ClusterConfig) -> Table:
    table = Table(
        "device", "capacity", "page", "engines", "models that fit", "all together",
        title="devices", title_justify="left",
    )  # fmt: skip
    for device in config.devices:
        models = [m for m in config.models if m.pinned_device in (None, device.name)]
        needs = [memory_need(m, device, config.engine).total_bytes for m in models]
        names = [m.name for m, n in zip(models, needs, strict=True) if n <= device.models_bytes]
        table.add_row(
            device.name,
            format_size(device.capacity_bytes),
            format_size(device.page_bytes),
            str(device.engines),
            ", ".join(names),
            _total(sum(needs), device),
        )
    return table


def _total(total_bytes: int, device: DeviceConfig) -> str:
    fits = total_bytes <= device.models_bytes
    return f"{format_size(total_bytes)}{'' if fits else ': not at once'}"


def _gpus_table(config: ClusterConfig, gpus: Mapping[str, GpuFound]) -> Table:
    table = Table(
        "device", "GPU", "driver", "memory", "free now", "capacity", "engines without a model",
        "left for models", title="GPUs", title_justify="left",
    )  # fmt: skip
    for device in config.devices:
        if not is_gpu(device.name):
            continue
        found = gpus.get(device.name, GpuFound())
        table.add_row(
            device.name,
            found.name,
            found.driver_version,
            format_size(found.total_bytes) if found.total_bytes else "unknown",
            format_size(found.free_bytes) if found.total_bytes else "unknown",
            format_size(device.capacity_bytes),
            f"{device.engines} x {format_size(device.idle_bytes)}",
            format_size(device.models_bytes),
        )
    return table


def _fits_table(config: ClusterConfig) -> Table:
    """Returns a table of each model on each GPU that it may be on."""
    table = Table(
        "device", "model", "weights", "engine", "KV of one request", "total", "left free",
        title="models on GPUs", title_justify="left",
        caption="engine: torch's memory, graphs and NCCL, without the context",
        caption_justify="left",
    )  # fmt: skip
    for device in config.devices:
        models = [m for m in config.models if m.pinned_device in (None, device.name)]
        for model in models if is_gpu(device.name) else ():
            need = memory_need(model, device, config.engine)
            left_bytes = device.models_bytes - need.total_bytes
            table.add_row(
                device.name,
                f"{model.name}, one of {model.tp} parts" if model.tp > 1 else model.name,
                format_size(need.weight_bytes),
                format_size(need.static_bytes),
                format_size(need.kv_bytes),
                format_size(need.total_bytes),
                format_size(left_bytes) if left_bytes >= 0 else "does not fit",
            )
    return table


def _need(config: ClusterConfig, model: ModelSpec) -> MemoryNeed:
    name = model.pinned_device or config.devices[0].name
    return memory_need(model, config.device(name), config.engine)


def activation(result: ActionResult) -> RenderableType:
    """Returns a table of the stages of a model's last activation and their shares of the total."""
    if not result.stages_s:
        return Text("the agent has not reported any stages")
    table = Table("stage", "ms", "share", "what happens", title="activation", title_justify="left")
    total_s = result.stages_s.get("total", 0.0)
    for stage, seconds in result.stages_s.items():
        share = f"{seconds / total_s:.0%}" if total_s else ""
        table.add_row(stage, f"{seconds * 1000:.1f}", share, _STAGES.get(stage, ""))
    links = ", ".join(f"{format_size(n)} over {link}" for link, n in result.link_bytes.items())
    return Group(table, Text(f"weights: {links}")) if links else table
