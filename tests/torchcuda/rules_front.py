"""Rules of devices, operators, streams and graphs; each runs in a separate process."""

from __future__ import annotations

import ctypes
import os
import weakref

import torch
from torch.nn import functional

from tests.torchcuda.forked import rule
from tests.torchcuda.rules_memory import DEVICE, MIB, empty, libcuda, refused

NOT_INITIALISED = 3
FORKED = "Cannot re-initialize CUDA in forked subprocess"


def driver_count() -> int:
    """Returns cuDeviceGetCount's result, which is 3 before cuInit."""
    return int(libcuda().cuDeviceGetCount(ctypes.byref(ctypes.c_int())))


def in_child(call: object) -> int:
    """Returns the exit status of a forked child that makes the call."""
    assert callable(call)
    child = os.fork()
    if child == 0:
        try:
            call()
            os._exit(0)
        except RuntimeError as error:
            os._exit(7 if FORKED in str(error) else 8)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def make_tensor() -> None:
    torch.zeros(1, device=DEVICE)


@rule
def importing_and_asking_by_nvml_initialise_nothing() -> None:
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    assert torch.version.cuda
    assert torch.backends.cuda.is_built()
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    assert not torch.cuda.is_initialized()
    assert driver_count() == NOT_INITIALISED
    assert in_child(make_tensor) == 0
    make_tensor()
    assert torch.cuda.is_initialized()
    assert driver_count() == 0


@rule
def asking_without_nvml_spoils_a_fork() -> None:
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    assert torch.cuda.is_available()
    assert not torch.cuda.is_initialized()
    assert driver_count() == 0
    assert in_child(make_tensor) == 7


@rule
def questions_that_initialise() -> None:
    for question in (
        torch.cuda.current_device,
        torch.cuda.get_device_properties,
        torch.cuda.get_device_capability,
        torch.cuda.get_device_name,
        torch.cuda.current_stream,
        torch.cuda.mem_get_info,
    ):
        child = os.fork()
        if child == 0:
            question()
            os._exit(0 if torch.cuda.is_initialized() and driver_count() == 0 else 1)
        assert os.waitpid(child, 0)[1] == 0, question


@rule
def a_forked_child_has_no_cuda() -> None:
    x = torch.ones(3, device=DEVICE)
    assert in_child(make_tensor) == 7
    assert in_child(torch.cuda.init) == 7
    assert in_child(lambda: torch.cuda.set_device(0)) != 0
    assert in_child(lambda: x.sum().item()) != 0
    assert x.sum().item() == 3


@rule
def devices_have_properties() -> None:
    assert torch.cuda.device_count() == 2
    properties = torch.cuda.get_device_properties(1)
    assert (properties.major, properties.minor) == torch.cuda.get_device_capability(1) == (9, 0)
    assert properties.total_memory == 1024 * MIB
    assert torch.cuda.get_device_name() == properties.name == "NVIDIA H200"
    torch.cuda.set_device(1)
    assert torch.cuda.current_device() == 1
    assert torch.zeros(1, device="cuda").device.index == 1
    with torch.cuda.device(0):
        assert torch.zeros(1, device="cuda").device.index == 0
    refused("invalid device ordinal", lambda: torch.cuda.set_device(2))
    assert str(torch.accelerator.current_accelerator()) == "cuda"
    assert torch.get_device_module(DEVICE) is torch.cuda


@rule
def tensors_of_unlike_devices_do_not_mix() -> None:
    x, other = torch.ones(4, 4, device=DEVICE), torch.ones(4, 4)
    message = "Expected all tensors to be on the same device"
    refused(message, lambda: x + other)
    refused(message, lambda: x @ other)
    refused(message, lambda: x + other.to("cuda:1"))
    refused(message, lambda: functional.embedding(torch.tensor([1]), x))
    refused(message, lambda: torch.cat([x, other]))
    refused("", lambda: other[torch.tensor([1], device=DEVICE)])
    assert (x + torch.tensor(1.0)).sum().item() == 32  # a number on the CPU may
    assert x[torch.tensor([1, 2])].shape == (2, 4)  # and so may indices


@rule
def operators_compute_what_the_cpu_does() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(6, 8).to(dtype), torch.randn(8, 5).to(dtype)
        x, y = a.to(DEVICE), b.to(DEVICE)
        for function in (
            lambda p, q: p @ q,
            lambda p, q: functional.linear(p, q.t()),
            lambda p, q: torch.softmax(p.float(), -1).cumsum(1),
            lambda p, q: p.transpose(0, 1)[2:5].contiguous(),
            lambda p, q: torch.cat([p.flatten(), q.flatten()]).sort().values,
            lambda p, q: p.clone().masked_fill_(p > 0, 3).unfold(1, 2, 2),
            lambda p, q: p.float().topk(2).indices,
            lambda p, q: functional.scaled_dot_product_attention(*(p[None, None],) * 3),
            lambda p, q: functional.rms_norm(p.float(), (8,)),
            lambda p, q: torch.where(p > 0)[0],
        ):
            made = function(x, y)
            assert made.is_cuda
            assert torch.equal(made.cpu(), function(a, b))


@rule
def writes_go_through() -> None:
    x = torch.zeros(4, 4, device=DEVICE)
    x[1] = 2
    x[:, 2].add_(1)
    torch.add(x, x, out=x)
    x.index_put_((torch.tensor([3], device=DEVICE),), torch.tensor(5.0, device=DEVICE))
    assert x.tolist() == [[0, 0, 2, 0], [4, 4, 6, 4], [0, 0, 2, 0], [5, 5, 5, 5]]
    grown = torch.empty(0, device=DEVICE)
    torch.mul(x, 2, out=grown)
    assert grown.shape == (4, 4)
    assert grown.sum().item() == 2 * x.sum().item()
    moved = torch.nn.Linear(4, 4).to(DEVICE)
    assert moved(x).device == x.device


@rule
def random_numbers_follow_the_devices_seed() -> None:
    torch.cuda.manual_seed(3)
    first = torch.rand(4, device=DEVICE)
    torch.manual_seed(3)  # seeds every device as well
    assert torch.equal(torch.rand(4, device=DEVICE), first)
    generator = torch.Generator(device=DEVICE).manual_seed(5)
    a = torch.rand(4, device=DEVICE, generator=generator)
    assert torch.equal(torch.rand(4, device=DEVICE, generator=generator.manual_seed(5)), a)
    assert torch.multinomial(torch.ones(4, device=DEVICE), 2).is_cuda


@rule
def work_is_pending_until_somebody_waits() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        x = torch.zeros(100, device=DEVICE)
        event = stream.record_event()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert not stream.query()
    assert not event.query()
    torch.cuda.current_stream().wait_event(event)
    event.synchronize()
    assert event.query()
    assert stream.query()
    torch.cuda._sleep(1000)
    assert not torch.cuda.current_stream().query()
    x.sum().item()  # waits
    assert torch.cuda.current_stream().query()


@rule
def another_streams_copy_is_not_there_without_waiting() -> None:
    source, stream = torch.ones(8, pin_memory=True), torch.cuda.Stream()
    target = torch.zeros(8, device=DEVICE)
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    assert target.sum().item() == 0.0
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    assert target.sum().item() == 8.0


# --- graphs ------------------------------------------------------------------------------------


@rule
def a_capture_runs_nothing_and_a_replay_what_was_captured() -> None:
    source, total = torch.zeros(4, device=DEVICE), torch.zeros(1, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = source * 2 + 1
        picked = doubled[torch.arange(2, device=DEVICE)]
        total += doubled.sum()
    assert total.item() == 0.0
    source.copy_(torch.tensor([1.0, 2, 3, 4]))
    for times in (1, 2):
        graph.replay()
        assert doubled.tolist() == [3, 5, 7, 9]
        assert picked.tolist() == [3, 5]
        assert total.item() == 24.0 * times


@rule
def nothing_waits_within_a_capture() -> None:
    x = torch.ones(4, device=DEVICE)
    event = torch.cuda.Event()
    event.record()
    for wrong in (
        lambda: x.sum().item(),
        x.cpu,
        lambda: x.copy_(torch.ones(4)),
        torch.cuda.synchronize,
        event.query,
        lambda: torch.nonzero(x),
        torch.cuda.current_stream().synchronize,
    ):
        graph = torch.cuda.CUDAGraph()
        said = ""
        try:
            with torch.cuda.graph(graph):
                x.add(1)
                wrong_one = wrong
                if wrong is event.query or wrong.__qualname__.startswith("Stream"):
                    wrong_one = event.query
                wrong_one()
        except RuntimeError as error:
            said = f"{error} {error.__context__}"
        assert "capturing" in said or "capture" in said, (wrong, said)
        refused("without a preceding successful capture", graph.replay)
    assert x.add(1).sum().item() == 8.0


@rule
def a_graph_looks_up_indices_that_it_has_computed() -> None:
    table = torch.arange(8.0, device=DEVICE).reshape(4, 2)
    indices = torch.tensor([1, 3], dtype=torch.int32, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.nn.functional.embedding(indices.long(), table)
    indices.copy_(torch.tensor([2, 0]))
    graph.replay()
    assert found.tolist() == [[4, 5], [0, 1]]


@rule
def a_graphs_pool_is_kept_for_it() -> None:
    torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = empty(3 * MIB).fill_(1)
    assert torch.cuda.memory_reserved() == before + 20 * MIB
    assert torch.cuda.mem_get_info()[0] == free - 22 * MIB, "the graph itself takes 2 MiB"
    address = made.data_ptr()
    del made
    assert empty(3 * MIB).data_ptr() != address, "replays write there"
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before + 20 * MIB
    graph.replay()
    graph.reset()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before
    assert torch.cuda.mem_get_info()[0] == free


@rule
def graphs_may_share_a_pool() -> None:
    pool = torch.cuda.graph_pool_handle()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first, pool=pool):
        empty(3 * MIB).fill_(1)
    reserved = torch.cuda.memory_reserved()
    with torch.cuda.graph(second, pool=pool):
        empty(3 * MIB).fill_(2)
    assert torch.cuda.memory_reserved() == reserved
    assert first.pool() == second.pool()


@rule
def a_stream_that_waits_for_the_capture_is_captured() -> None:
    x, side = torch.zeros(4, device=DEVICE), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x += 1
        torch.cuda.current_stream().wait_stream(side)
    assert x.sum().item() == 0.0
    graph.replay()
    assert x.sum().item() == 4.0


@rule
def a_replay_needs_its_memory() -> None:
    x = torch.zeros(8 * MIB, dtype=torch.uint8, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
    del x
    torch.cuda.empty_cache()
    graph.replay()  # ends the process, or is refused
    torch.cuda.synchronize()


# --- Triton ------------------------------------------------------------------------------------


@rule
def triton_kernels_run_on_device_memory() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def add(x, y, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < size) + 1, mask=at < size)

    x = torch.arange(10, device=DEVICE)
    y = torch.zeros(12, dtype=torch.int64, device=DEVICE)
    add[(triton.cdiv(10, 4),)](x, y, 10, BLOCK=4)
    assert y.tolist() == [*range(1, 11), 0, 0]
    refused("cpu tensor", lambda: add[(3,)](x.cpu(), x, 10, BLOCK=4), ValueError)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add[(3,)](x, y, 10, BLOCK=4)
    x += 5
    assert y.tolist()[0] == 1
    graph.replay()
    assert y.tolist()[0] == 6
    held = weakref.ref(y)
    del y
    assert held() is None, "a graph has addresses, and keeps no tensor"
    refused("no tl.surely_not", tl.surely_not, NotImplementedError)
