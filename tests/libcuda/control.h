// Functions for tests, in addition to CUDA's own; found with dlsym or ctypes.
//
// The counted calls cost time and can fail at run time: reserve, create, map, set access, unmap,
// release, free, and those of streams, events and copies. Failing one of them changes nothing in
// the simulator.
#pragma once

#include <cstdint>

extern "C" {
// Returns the counted calls since the last reset: of one function ("cuMemMap"), or of all (null).
uint64_t test_cuda_calls(const char* function);
// Returns the same for the calls of this thread.
uint64_t test_cuda_thread_calls(const char* function);
void test_cuda_reset_calls();
// Fails the Nth counted call from now on (1: the next) and the `times` - 1 after it with `error`. N
// = 0: none. The environment's KVCACHED_TEST_CUDA_FAIL_AT does the same from the start, with
// CUDA_ERROR_INVALID_VALUE once.
void test_cuda_fail_at(uint64_t call, uint64_t times, int error);
// After `calls` more counted calls in contexts of the device all of them fail, as on a GPU that has
// fallen off its bus. KVCACHED_TEST_CUDA_LOSE=DEVICE:CALLS does the same from the start.
void test_cuda_lose(int device, uint64_t calls);
uint64_t test_cuda_used_bytes(int device);
// Describes the rule that the last refusal was about.
const char* test_cuda_refusal();
// Describes what is not released; empty if everything is.
const char* test_cuda_leaks();

// Returns where a kernel on the address's device reads the range, or writes it as well: the CPU
// cannot access device memory at its own address. Null if the kernel may not; test_cuda_refusal()
// has the reason: a hole, no access yet, read-only memory. The view ends with the mapping: it
// faults when the range is unmapped or freed. Needs no current context; null before cuInit and
// after a fork.
void* test_cuda_kernel_view(uint64_t address, uint64_t bytes, int write);
// Returns the distance of every view from its address, from cuInit on; 0 before.
uint64_t test_cuda_kernel_distance();
// Does all work of the stream (0: the default one) so far, as before a kernel that runs at once.
int test_cuda_kernel_start(uint64_t stream);

// Launches a kernel that may touch the range, until it is completed: on a stream (0: the default
// one) of the current context's device. Returns CUDA's error for a missing stream or range.
int test_cuda_launch(uint64_t stream, uint64_t address, uint64_t bytes);
// Does the same for a range with holes, of which the kernel touches only what is mapped.
int test_cuda_launch_over_holes(uint64_t stream, uint64_t address, uint64_t bytes);
// Completes the oldest `count` kernels of the stream.
void test_cuda_complete(uint64_t stream, uint64_t count);
// Counts unmaps, maps elsewhere and fills of a page that a kernel may touch. Each is also refused,
// and test_cuda_refusal() names it. A real driver would allow it.
uint64_t test_cuda_violations();
// Bytes that copies moved to a device over its link from the host, and from other devices.
uint64_t test_cuda_from_host_bytes(int device);
uint64_t test_cuda_from_peer_bytes(int device);
// Returns the largest number of devices that had work at once.
uint64_t test_cuda_busy_devices_max();
}
