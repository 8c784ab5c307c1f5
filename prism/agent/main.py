"""Reads the resolved configuration and runs one device's agent until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

import uvloop

from kvcached import KvcachedError
from prism.agent.device_agent import Agent
from prism.agent.network.weight_server import serving_weights
from prism.agent.state.device_state import AgentTiming
from prism.config.resolved import read_resolved
from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import ConfigError, PrismError
from prism.process import LoopWatchdog, beat, configure_logging, die_with_parent


async def _serve(config: ClusterConfig, config_path: Path, device: str) -> None:
    watchdog = LoopWatchdog()
    beating = asyncio.create_task(beat(watchdog))
    timing = AgentTiming(activation_s=float(config.engine.activation_timeout_s))
    agent = Agent(config, config_path, device, timing)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, agent.stop)
    with serving_weights(config, device):
        await agent.run(watchdog)
    beating.cancel()


def _checked(config: ClusterConfig, device: str) -> ClusterConfig:
    names = [each.name for each in config.devices]
    if device not in names:
        raise ConfigError(
            f"--device {device} is not in the configuration; its devices: {', '.join(names)}"
        )
    return config


def main(arguments: list[str] | None = None) -> int:
    """Runs the agent and returns 0 after SIGTERM or Drain, 2 for a wrong setting, else 1."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m prism.agent", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the resolved cluster.json")
    parser.add_argument("--device", required=True, help="the device's name, such as host:0")
    options = parser.parse_args(arguments)
    configure_logging()
    try:
        config = _checked(read_resolved(options.config), options.device)
        uvloop.run(_serve(config, options.config, options.device))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (PrismError, KvcachedError) as error:
        logging.getLogger(__name__).error("the agent of %s ends: %s", options.device, error)
        return 1
    return 0
