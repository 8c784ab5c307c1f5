"""Arguments that a stock SGLang server refuses on kvcached, with the reason."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest

from kvcached.engines import stand_ins

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module", autouse=True)
def _sglang() -> None:
    stand_ins.install_for_sglang()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at import it lists what accelerators are missing
        importlib.import_module("sglang.srt.server_args")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("pp_size", 2, "its stages plan batches at different times"),
        ("dp_size", 2, "start one server for each replica"),
        ("dcp_size", 2, "it divides the tokens of a block among ranks"),
        ("nnodes", 2, "on one machine only"),
        ("speculative_algorithm", "EAGLE", "kvcached does not have a pool for a draft model's KV"),
        ("speculative_algorithm", "NGRAM", "attention over NGRAM's trees needs a GPU"),
        ("disaggregation_mode", "prefill", "addresses that must have memory from the start"),
        ("enable_hierarchical_cache", True, "has the size of the pool"),
        ("enable_lmcache", True, "its copies of KV are not in the device's ledger"),
        ("enable_hisparse", True, "it lays out SGLang's pools"),
        ("enable_unified_memory", True, "it lays out SGLang's pools"),
        ("enable_page_major_kv_layout", True, "it lays out SGLang's pools"),
    ],
)
def test_a_refused_argument_is_named_with_the_reason(name: str, value: Any, reason: str) -> None:
    from sglang.srt.server_args import ServerArgs

    from kvcached.engines.sglang.server_platform import ServerPlatform

    arguments = ServerArgs(model_path="model", **{name: value})
    with pytest.raises(NotImplementedError, match=rf"^{name} {value!r} is not .*{reason}.*: leave"):
        ServerPlatform().apply_server_args_defaults(arguments)


def test_ranks_are_refused_on_a_gpu() -> None:
    from sglang.srt.server_args import ServerArgs

    from kvcached.engines.sglang.server_platform import CudaServer

    arguments = ServerArgs(model_path="model", tp_size=2)
    with pytest.raises(NotImplementedError, match=r"^tp_size 2 is not .*on a GPU .ranks have run"):
        CudaServer().apply_server_args_defaults(arguments)


@pytest.mark.filterwarnings("ignore")  # of imports of SGLang's models
def test_a_model_that_was_loaded_without_the_plugin_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.models.llama4 import Llama4ForCausalLM

    from kvcached.engines.sglang.server_platform import ServerPlatform

    monkeypatch.setattr(Llama4ForCausalLM, "load_weights", None)
    with pytest.raises(RuntimeError, match=r"^SGLang has not run kvcached's plugin: see its log"):
        ServerPlatform().post_load_model(None)
