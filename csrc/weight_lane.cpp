#include "weight_lane.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace kvcached {

namespace {

class HostLane final : public WeightLane {
 public:
  Status copy(const WeightChunk& chunk) override {
    char* const target = reinterpret_cast<char*>(chunk.address);
    return read_exactly(*chunk.path, chunk.file_offset, {target, chunk.bytes});
  }
  Status drain() override { return {}; }
  bool is_quiet() override { return true; }
};

Status read_failure(const std::string& path, const char* call, int error) {
  return failure(Code::weight_file, path, ": ", call, ": ", std::strerror(error));
}

// Failure for a file that ends before `wanted_end`, which lanes reach at different offsets.
Status ended(int fd, const std::string& path, uint64_t wanted_end) {
  struct stat file = {};
  if (fstat(fd, &file) != 0) return read_failure(path, "fstat", errno);
  const auto size = static_cast<uint64_t>(file.st_size);
  return failure(Code::weight_file, path, " ends at byte ", size, "; ", wanted_end,
                 " were expected: replace the file");
}

Status read_open(int fd, const std::string& path, uint64_t offset, std::span<char> target) {
  while (!target.empty()) {
    const ssize_t got = pread(fd, target.data(), target.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return read_failure(path, "pread", errno);
    if (got == 0) return ended(fd, path, offset + target.size());
    offset += static_cast<uint64_t>(got);
    target = target.subspan(static_cast<size_t>(got));
  }
  return {};
}

}  // namespace

Status read_exactly(const std::string& path, uint64_t offset, std::span<char> target) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return read_failure(path, "open", errno);
  Status status = read_open(fd, path, offset, target);
  ::close(fd);
  return status;
}

std::vector<std::unique_ptr<WeightLane>> host_lanes(size_t count) {
  std::vector<std::unique_ptr<WeightLane>> lanes;
  for (size_t i = 0; i < count; ++i) lanes.push_back(std::make_unique<HostLane>());
  return lanes;
}

}  // namespace kvcached
