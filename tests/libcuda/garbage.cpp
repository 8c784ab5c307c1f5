#include "garbage.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace test_libcuda {

namespace {

constexpr uint64_t kPieceBytes = 1 << 20;
constexpr uint64_t kShifts = 4093;  // an allocation begins at one of these places of the piece

const unsigned char* piece() {
  static const auto* made = [] {
    auto* bytes = new std::vector<unsigned char>(kPieceBytes + kShifts);
    uint64_t state = 0x9e3779b97f4a7c15;
    for (unsigned char& byte : *bytes) {
      state = state * 6364136223846793005 + 1442695040888963407;
      byte = static_cast<unsigned char>(1 + (state >> 33) % 255);
    }
    return bytes;
  }();
  return made->data();
}

}  // namespace

bool fill_with_garbage(int fd, uint64_t offset, uint64_t bytes, uint64_t allocation) {
  const unsigned char* const from = piece() + allocation % kShifts;
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t wanted = std::min(kPieceBytes, bytes - done);
    const ssize_t written = pwrite(fd, from, wanted, static_cast<off_t>(offset + done));
    if (written <= 0) return false;
    done += static_cast<uint64_t>(written);
  }
  return true;
}

void fill_with_garbage(void* memory, uint64_t bytes, uint64_t allocation) {
  const unsigned char* const from = piece() + allocation % kShifts;
  auto* const to = static_cast<unsigned char*>(memory);
  for (uint64_t done = 0; done < bytes; done += kPieceBytes) {
    std::memcpy(to + done, from, std::min(kPieceBytes, bytes - done));
  }
}

}  // namespace test_libcuda
