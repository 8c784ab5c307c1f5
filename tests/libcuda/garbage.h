// What fresh memory holds: CUDA promises nothing, and no client may take it for zero.
#pragma once

#include <cstdint>

namespace test_libcuda {

// Bytes that are never zero and differ from allocation to allocation. False if the OS refuses.
bool fill_with_garbage(int fd, uint64_t offset, uint64_t bytes, uint64_t allocation);
void fill_with_garbage(void* memory, uint64_t bytes, uint64_t allocation);

}  // namespace test_libcuda
