"""Rules of memory on the double; each runs in a separate process (see forked.py)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re

import pytest
import torch
from torch.utils.dlpack import from_dlpack

import kvcached
from tests.torchcuda.forked import rule

MIB = 1 << 20
DEVICE = "cuda:0"


def libcuda() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ["KVCACHED_LIBCUDA"])
    library.test_cuda_violations.restype = ctypes.c_uint64
    return library


def refused(message: str, call: object, error: type[Exception] = RuntimeError) -> None:
    assert callable(call)
    with pytest.raises(error, match=re.escape(message)):
        call()


def empty(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE)


@rule
def the_cpu_reads_no_device_memory() -> None:
    x = torch.ones(8, device=DEVICE)
    refused("can't convert cuda:0 device type tensor to numpy", x.numpy, TypeError)
    ctypes.string_at(x.data_ptr(), 4)  # ends the process


@rule
def fresh_tensors_hold_garbage() -> None:
    assert empty(MIB).count_nonzero().item() > 0
    del_me = torch.full((1024,), 7, dtype=torch.uint8, device=DEVICE)
    address = del_me.data_ptr()
    del del_me
    again = empty(1024)
    assert again.data_ptr() == address
    assert again.eq(7).all().item(), "a block that is given again holds what it held"


@rule
def segments_are_held_until_the_cache_is_emptied() -> None:
    free = torch.cuda.mem_get_info()[0]
    small, middle = empty(100), empty(3 * MIB)
    assert torch.cuda.memory_allocated() == 512 + 3 * MIB
    assert torch.cuda.memory_reserved() == 2 * MIB + 20 * MIB
    large = empty(18 * MIB - 1)  # more than the rest of the 20 MiB
    assert torch.cuda.memory_reserved() == 22 * MIB + 18 * MIB
    del small, middle, large
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.memory_reserved() == 40 * MIB
    assert torch.cuda.mem_get_info()[0] == free - 40 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    assert torch.cuda.mem_get_info()[0] == free


@rule
def a_used_block_keeps_its_whole_segment() -> None:
    kept, gone = empty(2 * MIB), empty(2 * MIB)
    del gone
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 20 * MIB
    stats = torch.cuda.memory_stats()
    assert stats["inactive_split_bytes.all.current"] == 18 * MIB
    assert kept.numel() == 2 * MIB


@rule
def neighbours_become_one_block_again() -> None:
    blocks = [empty(5 * MIB) for _ in range(4)]
    assert torch.cuda.memory_reserved() == 20 * MIB
    first = blocks[0].data_ptr()
    del blocks
    assert empty(9 * MIB).data_ptr() == first
    assert torch.cuda.memory_reserved() == 20 * MIB


@rule
def peaks_are_known_and_reset() -> None:
    x = empty(4 * MIB)
    del x
    assert torch.cuda.max_memory_allocated() == 4 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    assert torch.cuda.max_memory_reserved() == 20 * MIB


@rule
def a_fraction_caps_what_is_reserved() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(40 * MIB / total)
    held = empty(20 * MIB)
    refused("CUDA out of memory", lambda: empty(24 * MIB), torch.OutOfMemoryError)
    del held
    assert empty(24 * MIB).numel()  # the cache made room
    assert torch.cuda.memory_stats()["num_ooms"] == 1


@rule
def the_device_ends_somewhere() -> None:
    free, total = torch.cuda.mem_get_info()
    assert total == 1024 * MIB
    assert free == total - 64 * MIB, "the context takes its part"
    refused("CUDA out of memory", lambda: empty(free + 2 * MIB), torch.OutOfMemoryError)
    assert empty(free).numel() == free
    assert torch.cuda.mem_get_info()[0] == 0


@rule
def a_block_waits_for_the_streams_that_were_named() -> None:
    side = torch.cuda.Stream()
    x = empty(MIB // 2)
    address = x.data_ptr()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1)
    x.record_stream(side)
    del x
    assert empty(MIB // 2).data_ptr() != address
    torch.cuda.synchronize()
    assert address in {empty(MIB // 2).data_ptr() for _ in range(3)}


@rule
def a_stream_reuses_its_own_blocks_only() -> None:
    x = empty(MIB // 2)
    address = x.data_ptr()
    del x
    with torch.cuda.stream(torch.cuda.Stream()):
        assert empty(MIB // 2).data_ptr() != address
    assert empty(MIB // 2).data_ptr() == address


@rule
def pinned_memory_is_kept_while_any_stream_copies() -> None:
    source, side = torch.ones(1 << 16, device=DEVICE), torch.cuda.Stream()
    with torch.cuda.stream(side):
        target = torch.empty(1 << 16, pin_memory=True)
        target.copy_(source, non_blocking=True)
    del target  # frees it at once, and would end the process
    assert libcuda().test_cuda_violations() == 0


@rule
def pinned_memory_is_copied_when_the_stream_comes_to_it() -> None:
    source = torch.ones(64, pin_memory=True)
    assert source.is_pinned()
    assert not torch.ones(64).is_pinned()
    target = torch.empty(64, device=DEVICE)
    target.copy_(source, non_blocking=True)
    source.fill_(2.0)  # too early: the copy delivers it
    torch.cuda.synchronize()
    assert target.sum().item() == 128.0
    back = torch.zeros(64, pin_memory=True)
    back.copy_(target, non_blocking=True)
    assert back.sum().item() == 0.0, "nothing is there before the stream was waited for"
    torch.cuda.synchronize()
    assert back.sum().item() == 128.0


@rule
def a_pageable_copy_is_done_when_the_call_returns() -> None:
    source = torch.ones(64)
    target = source.to(DEVICE, non_blocking=True)
    source.fill_(2.0)
    assert target.sum().item() == 64.0


@rule
def dlpack_carries_device_memory() -> None:
    x = torch.arange(6.0, device=DEVICE)
    assert x.__dlpack_device__() == (2, 0)
    y = from_dlpack(x)
    assert y.device == x.device
    assert y.data_ptr() == x.data_ptr()
    y += 1
    assert x.tolist() == [1, 2, 3, 4, 5, 6]
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.from_dlpack(x).sum().item() == 21


def opened_kv() -> tuple[kvcached.Device, kvcached.Client, kvcached.KVCache]:
    device = kvcached.Device.open(
        DEVICE, capacity_bytes=256 * MIB, page_bytes=2 * MIB, namespace=f"t{os.getpid()}"
    )
    client = device.client("e0", background=False)
    layout = kvcached.Layout(2, 2, 64, dtype="float32", block_tokens=16)
    return device, client, client.alloc_kvcache(layout, 65536)


@rule
def kvcached_tensors_are_read_and_written() -> None:
    device, client, kv = opened_kv()
    view = from_dlpack(kv.blocks(0, "k"))
    assert view.device == torch.device(DEVICE)
    assert view.shape[0] == kv.num_blocks
    ids = kv.alloc_kv(3)
    assert ids is not None
    index = torch.from_numpy(ids).to(DEVICE)
    view[index] = torch.arange(3.0, device=DEVICE)[:, None, None, None].expand(view[index].shape)
    assert view[index].mean(dim=(1, 2, 3)).tolist() == [0.0, 1.0, 2.0]
    torch.cuda.synchronize()
    del view
    client.close()
    device.destroy(force=True)


@rule
def a_hole_of_kv_space_cannot_be_touched() -> None:
    _device, _client, kv = opened_kv()
    from_dlpack(kv.blocks(0, "k"))[kv.num_blocks - 1].sum().item()  # ends the process


@rule
def unmapping_under_a_kernel_is_seen() -> None:
    """Waits for the streams that kvcached knows. One that it does not know shows as a violation."""
    for told in (True, False):
        device, client, kv = opened_kv()
        stream = torch.cuda.Stream()
        client.set_streams([stream.cuda_stream] if told else [])
        ids = kv.alloc_kv(300)  # more than a slab: the first stays mapped
        assert ids is not None
        with torch.cuda.stream(stream):
            from_dlpack(kv.blocks(0, "k"))[int(ids[-1])].fill_(1.0)
        before = libcuda().test_cuda_violations()
        with (
            contextlib.nullcontext()
            if told
            else contextlib.suppress(kvcached.errors.SystemCallError)
        ):
            kv.free_kv(ids)
            kv.trim()
        seen = libcuda().test_cuda_violations() - before
        assert bool(seen) != told, (told, seen)
        torch.cuda.synchronize()
        if told:
            client.close()
        device.destroy(force=True)
