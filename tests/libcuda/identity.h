// The GPUs of the machine, and those that a process sees.
#pragma once

#include <array>
#include <string>
#include <vector>

namespace test_libcuda {

using Uuid = std::array<unsigned char, 16>;

Uuid uuid_of(int gpu);
// As in "GPU-7e57c0da-0000-4000-8000-000000000001".
std::string uuid_text(int gpu);

// The machine's GPUs by ordinal, as CUDA_VISIBLE_DEVICES orders them: numbers, or beginnings of
// UUIDs that fit one GPU. The list ends at the first name that fits none; a GPU that is named twice
// makes it empty.
std::vector<int> visible_gpus(int gpus, const char* variable);

}  // namespace test_libcuda
