"""Each adapter's contract holds in the installed engine, and another version is looked at."""

from __future__ import annotations

import pytest

from kvcached.engines.contract import Contract
from kvcached.engines.sglang.contract import CONTRACT as SGLANG
from prism.models.hugging_face import import_transformers
from tests.sglang.uncorrected import printed

pytestmark = pytest.mark.sglang

import_transformers()

from kvcached.engines.transformers.contract import CACHE, CONTINUOUS  # noqa: E402

ALL = [SGLANG, CACHE, CONTINUOUS]


@pytest.mark.parametrize("number", range(len(ALL)), ids=["sglang", "cache", "continuous"])
def test_the_installed_engine_has_what_the_adapter_relies_on(number: int) -> None:
    [told] = printed(__name__, print_warning.__name__, number)
    assert f"tested with {ALL[number].engine}" in told
    assert "not with 99.1" in told


def print_warning(number: int) -> None:
    ALL[number].check("99.1", print)


def test_a_tested_version_is_not_looked_at() -> None:
    missing = Contract("engine", ("1.0",), calls={"nowhere:at_all": ("self",)})
    missing.check("1.0+cpu", pytest.fail)


def test_what_a_version_lacks_is_named() -> None:
    lacks = Contract(
        "engine",
        ("1.0",),
        calls={"json:dumps": ("obj", "colour")},
        attributes=("json:nothing",),
        fields={"kvcached.engines.contract:Contract": ("engine", "size")},
        behaviours=(lambda: ["an order"],),
    )
    named = r"json:nothing, json:dumps\(colour\), kvcached.*Contract.size, an order\): install 1.0"
    with pytest.raises(RuntimeError, match=named):
        lacks.check("2.0", lambda _text: None)
