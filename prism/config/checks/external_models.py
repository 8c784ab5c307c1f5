"""Models with the adapter "external": checked, and apart from those that engines serve."""

from __future__ import annotations

import msgspec

from prism.config.checks.names import check_model_names
from prism.config.schema.access import server_headers
from prism.config.schema.cluster_config import FrontendConfig, ModelYaml, ServeYaml
from prism.errors import ConfigError
from prism.messages.external import ExternalModel

EXTERNAL = "external"
_PORT_MAX = 65535
_OWN_HOSTS = ("127.0.0.1", "::1", "localhost")
_OWN_KEYS = ("servers", "server_key_variable", "sleep_after")
_KEYS = ("name", "adapter", "slo", "aliases", *_OWN_KEYS)
_SLEEP_AFTER_MIN_S = 1.0


def split_external(data: ServeYaml) -> tuple[ServeYaml, list[ExternalModel]]:
    """Returns the file without its external models, and these. Raises ConfigError.

    They come last, so that errors name the other models by their place in the file.
    """
    own = [model for model in data.models if model.adapter != EXTERNAL]
    for index, model in enumerate(data.models):
        _check_place(model, f"models[{index}]", is_last=index >= len(own))
    external = [
        _external(m, f"models[{len(own) + i}]") for i, m in enumerate(data.models[len(own) :])
    ]
    if external:
        _check_servers([url for model in external for url in model.servers], data.frontend)
    return msgspec.structs.replace(data, models=own), external


def _check_servers(urls: list[str], frontend: FrontendConfig) -> None:
    import httpx

    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"models: the server {url} is given twice; remove one of them")
        parts = httpx.URL(url)
        if parts.port == frontend.port and parts.host in (*_OWN_HOSTS, frontend.host):
            raise ConfigError(
                f"models: the server {url} is this cluster's own endpoint; give another server's"
            )


def _check_place(data: ModelYaml, key: str, *, is_last: bool) -> None:
    if data.adapter == EXTERNAL and not is_last:
        raise ConfigError(f"{key}: external models come last; move {data.name} to the end")
    if data.adapter == EXTERNAL:
        return
    for name in _OWN_KEYS:
        if getattr(data, name):
            raise ConfigError(f"{key}.{name}: needs adapter: external; add it, or remove the key")


def _external(data: ModelYaml, key: str) -> ExternalModel:
    check_model_names(data, key)
    plain = ModelYaml(name=data.name)
    for field in msgspec.structs.fields(ModelYaml):
        if field.name not in _KEYS and getattr(data, field.name) != getattr(plain, field.name):
            raise ConfigError(
                f"{key}.{field.encode_name}: an external model's own server decides that; remove"
                " the key"
            )
    if not data.servers:
        raise ConfigError(f"{key}.servers: is empty; add the URL of a server")
    try:
        server_headers(data.server_key_variable)
    except ConfigError as error:
        raise ConfigError(f"{key}.server_key_variable: {error}") from error
    if data.sleep_after is not None and data.sleep_after < _SLEEP_AFTER_MIN_S:
        raise ConfigError(f"{key}.sleep_after: must be >= 1s")
    return ExternalModel(
        name=data.name,
        servers=tuple(_url(url, f"{key}.servers[{i}]") for i, url in enumerate(data.servers)),
        slo_ttft_s=float(data.slo.ttft),
        slo_tpot_s=float(data.slo.tpot),
        aliases=tuple(data.aliases),
        key_variable=data.server_key_variable,
        sleep_after_s=None if data.sleep_after is None else float(data.sleep_after),
    )


def _url(url: str, key: str) -> str:
    import httpx  # what it refuses here cannot end a process later

    try:
        parts = httpx.URL(url)
        parts.host.encode("idna")
        valid = parts.scheme in ("http", "https") and bool(parts.host)
        valid = valid and (parts.port is None or 0 < parts.port <= _PORT_MAX)
    except (httpx.InvalidURL, UnicodeError):
        valid = False
    if not valid or parts.query or parts.fragment or parts.userinfo or not url.isprintable():
        raise ConfigError(f"{key}: {url!r} is not a server's URL; write http://HOST:PORT")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ConfigError(f"{key}: {url!r} ends with /v1, which frontends add; remove it")
    return url.rstrip("/")
