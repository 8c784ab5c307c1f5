"""Lines for the console of a cluster that is ready: addresses, and a first request."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rich.console import Console

from prism.config.schema.admin import host_and_port
from prism.config.schema.cluster_config import ClusterConfig
from prism.messages.cluster import ClusterStatus
from prism.serve.console.progress import admin_url_of, url_of


def print_ready(
    config: ClusterConfig, seconds: float, status: ClusterStatus | None, console: Console
) -> None:
    url = url_of(config)
    console.print(
        f"[bold green]ready[/] in {seconds:.1f} s: {url}/v1", highlight=False, soft_wrap=True
    )
    for line in _lines(config, status):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _lines(config: ClusterConfig, status: ClusterStatus | None) -> Iterator[str]:
    for model, why in (status.refusals if status else {}).items():
        yield f"note:   {model} cannot be placed now: {why}"
    yield f"models: {', '.join(config.names)}"
    yield f"try:    {first_request(config)}"
    yield f"watch:  {_pages(config)}"
    yield f"state:  prism-serve status --run-dir {config.run_dir}; Ctrl-C ends everything"


def first_request(config: ClusterConfig) -> str:
    """Returns a command that asks the first model."""
    path, asked = "completions", '"prompt": "Hello", "max_tokens": 16'
    if config.models and config.models[0].embedding:
        path, asked = "embeddings", '"input": "Hello"'
    certificate = config.frontend.tls_certificate
    parts = [
        "curl",
        *([f"--cacert {shlex.quote(certificate)}"] if certificate else []),
        f"{url_of(config)}/v1/{path}",
        *(['-H "Authorization: Bearer $OPENAI_API_KEY"'] if config.keys else []),
        "-H 'Content-Type: application/json'",
        f'-d \'{{"model": "{config.names[0]}", {asked}}}\'',
    ]
    return " ".join(parts)


def _pages(config: ClusterConfig) -> str:
    """Returns the addresses of the pages for operators, and what opens them."""
    if config.admin and host_and_port(config.admin) is None:
        return f"curl --unix-socket {config.admin} http://localhost/status (or /metrics)"
    url = admin_url_of(config)
    key = "; an operator's key is the browser's password" if config.keys else ""
    return f"{url}/dashboard, {url}/metrics for Prometheus{key}"
