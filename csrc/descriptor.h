// Owner of a file descriptor, which it closes.
#pragma once

#include <unistd.h>

#include <utility>

namespace kvcached {

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }

  int get() const { return fd_; }
  // Releases the descriptor, which the caller closes.
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

}  // namespace kvcached
