"""The stand-in for SGLang's compiled kernels against formulas written out number by number."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

STANDIN = Path(__file__).parent.parent.parent / "scripts" / "gpu_wheels" / "standin"
EPS = 1e-5


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Makes the package importable for one test: SGLang checks whether it is there."""
    monkeypatch.syspath_prepend(str(STANDIN))
    yield importlib.import_module("sgl_kernel")
    for name in [name for name in sys.modules if name.partition(".")[0] == "sgl_kernel"]:
        del sys.modules[name]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def norm_by_hand(row: list[float], scale: list[float]) -> list[float]:
    rms = math.sqrt(sum(value * value for value in row) / len(row) + EPS)
    return [value / rms * factor for value, factor in zip(row, scale, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("function", "added"), [("rmsnorm", 0.0), ("gemma_rmsnorm", 1.0)])
def test_norms(kernel: ModuleType, dtype: torch.dtype, function: str, added: float) -> None:
    values, weight = random(3, 8, dtype=dtype), random(8, dtype=dtype)
    scale = [float(factor) + added for factor in weight]
    expected = torch.tensor([norm_by_hand(row.tolist(), scale) for row in values.float()])
    result = getattr(kernel, function)(values, weight, EPS)
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected.to(dtype))
    out = torch.zeros_like(values)
    assert getattr(kernel, function)(values, weight, EPS, out=out) is out
    assert out.equal(result)


def test_products_of_scaled_matrices(kernel: ModuleType) -> None:
    rows, columns = random(3, 8).to(torch.float8_e4m3fn), random(8, 2).to(torch.float8_e4m3fn)
    left, right, bias = random(3, 1), random(2, 1), random(2)
    expected = [
        [
            float(left[i]) * float(right[j]) * sum(float(a) * float(b) for a, b in pairs)
            + float(bias[j])
            for j in range(2)
            for pairs in [zip(rows[i].float(), columns.float()[:, j], strict=True)]
        ]
        for i in range(3)
    ]
    result = kernel.fp8_scaled_mm(rows, columns, left, right, torch.float32, bias)
    torch.testing.assert_close(result, torch.tensor(expected))


@pytest.mark.parametrize(
    ("function", "added"), [("fused_add_rmsnorm", 0.0), ("gemma_fused_add_rmsnorm", 1.0)]
)
def test_norms_that_add_the_residual_work_in_place(
    kernel: ModuleType, function: str, added: float
) -> None:
    values, residual, weight = random(3, 8), random(4, 8)[1:], random(8)
    total = [
        [a + b for a, b in zip(*rows, strict=True)] for rows in zip(values, residual, strict=True)
    ]
    scale = [float(factor) + added for factor in weight]
    expected = torch.tensor([norm_by_hand([float(v) for v in row], scale) for row in total])
    assert getattr(kernel, function)(values, residual, weight, EPS) is None
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(residual, torch.tensor(total))


def test_the_sum_is_normalised_before_it_is_rounded(kernel: ModuleType) -> None:
    """Rounds 256 + 1 to 256 in bfloat16; the norm must still see 257."""
    values, residual = torch.ones(1, 2).bfloat16(), torch.tensor([[256.0, 0.0]]).bfloat16()
    kernel.fused_add_rmsnorm(values, residual, torch.full((2,), 128.0).bfloat16(), 0.0)
    assert residual.tolist() == [[256.0, 1.0]]
    rms = math.sqrt((257.0**2 + 1) / 2)
    assert values[0, 1].item() == torch.tensor(128 / rms).bfloat16().item()


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
    ("function", "formula"),
    [
        ("silu_and_mul", lambda x: x / (1 + math.exp(-x))),
        ("gelu_and_mul", lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2)))),
        ("gelu_tanh_and_mul", gelu_tanh),
    ],
)
def test_gated_activations(kernel: ModuleType, function: str, formula: object) -> None:
    assert callable(formula)
    values = random(2, 3, 8)
    flat = values.reshape(-1, 8)
    expected = torch.tensor(
        [[formula(float(row[i])) * float(row[i + 4]) for i in range(4)] for row in flat]
    ).reshape(2, 3, 4)
    torch.testing.assert_close(getattr(kernel, function)(values), expected)
    out = torch.zeros(2, 3, 4)
    assert getattr(kernel, function)(values, out) is out
    torch.testing.assert_close(out, expected)


def renormalised(row: list[float], keep: set[int]) -> list[float]:
    total = sum(row[i] for i in keep)
    return [row[i] / total if i in keep else 0.0 for i in range(len(row))]


def test_top_k_of_each_request(kernel: ModuleType) -> None:
    probs = random(3, 9).softmax(dim=-1)
    counts = [1, 4, 1 << 30]  # SGLang's "all tokens" is larger than any vocabulary
    expected = []
    for row, count in zip(probs.tolist(), counts, strict=True):
        ranked = sorted(range(9), key=lambda i, row=row: -row[i])
        expected.append(renormalised(row, set(ranked[:count])))
    result = kernel.top_k_renorm_prob(probs, torch.tensor(counts, dtype=torch.int32))
    torch.testing.assert_close(result, torch.tensor(expected))
    torch.testing.assert_close(kernel.top_k_renorm_prob(probs, 4)[1], result[1])


def test_top_p_of_each_request(kernel: ModuleType) -> None:
    probs = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).repeat(4, 1)
    limits = [0.3, 0.6, 0.85, 1.0]
    kept = [{1}, {1, 3}, {1, 3, 2}, {0, 1, 2, 3}]
    expected = [renormalised(probs[0].tolist(), keep) for keep in kept]
    result = kernel.top_p_renorm_prob(probs, torch.tensor(limits))
    torch.testing.assert_close(result, torch.tensor(expected))
    torch.testing.assert_close(kernel.top_p_renorm_prob(probs, 0.6)[0], result[1])


def test_sums_over_experts(kernel: ModuleType) -> None:
    parts, out = random(5, 2, 4), torch.zeros(5, 4)
    expected = torch.tensor(
        [[sum(float(part[i]) for part in token) for i in range(4)] for token in parts]
    )
    kernel.moe_sum(parts, out)
    torch.testing.assert_close(out, expected)
    kernel.moe_sum_reduce(parts, out, 2.5)
    torch.testing.assert_close(out, expected * 2.5)


def test_a_weak_reference_of_a_cpu_tensor_is_the_tensor(kernel: ModuleType) -> None:
    tensor = random(3)
    assert kernel.weak_ref_tensor(tensor).data_ptr() == tensor.data_ptr()


def test_no_kernel_starts_before_the_one_ahead_has_ended(kernel: ModuleType) -> None:
    assert importlib.import_module("sgl_kernel.utils").is_arch_support_pdl() is False


def test_what_is_not_computed_says_so_at_the_call(kernel: ModuleType) -> None:
    copies = importlib.import_module("sgl_kernel.kvcacheio")
    for function in (kernel.merge_state_v2, copies.transfer_kv_per_layer):
        with pytest.raises(NotImplementedError, match=function.__name__):
            function(1, name=2)


def test_other_symbols_do_not_exist(kernel: ModuleType) -> None:
    """Makes SGLang choose its own fallback, since the import fails."""
    assert not hasattr(kernel, "merge_state")
    with pytest.raises(ImportError):
        importlib.import_module("sgl_kernel.scalar_type")


def test_it_refuses_to_be_beside_the_real_kernels(
    monkeypatch: pytest.MonkeyPatch, kernel: ModuleType
) -> None:
    distribution = importlib.import_module("sgl_kernel.distribution")
    both = [SimpleNamespace(version=distribution.VERSION), SimpleNamespace(version="0.4.10")]
    monkeypatch.setattr(metadata, "distributions", lambda name: both)
    with pytest.raises(ImportError, match=r"sglang-kernel 0\.4\.10 is installed in addition"):
        distribution.refuse_beside_the_real_one()
