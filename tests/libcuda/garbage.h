// Content of fresh memory: CUDA promises none, and no client may assume zeros.
#pragma once

#include <cstdint>

namespace test_libcuda {

// Fills with bytes that are never zero and differ by allocation. Returns false if the OS refuses.
bool fill_with_garbage(int fd, uint64_t offset, uint64_t bytes, uint64_t allocation);
void fill_with_garbage(void* memory, uint64_t bytes, uint64_t allocation);

}  // namespace test_libcuda
