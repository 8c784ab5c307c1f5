#include "liveness.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>

namespace kvcached {

namespace {

struct ProcessStat {
  bool exists = false;
  char state = 'X';
  uint64_t start_ticks = 0;
};

ProcessStat read_stat(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string line;
  if (!std::getline(file, line)) return {};
  // The command name may contain blanks and brackets, so fields are counted from the last bracket.
  std::istringstream fields(line.substr(line.rfind(')') + 1));
  ProcessStat stat{.exists = true};
  fields >> stat.state;
  std::string skipped;
  for (int i = 0; i < 18; ++i) fields >> skipped;
  fields >> stat.start_ticks;
  return stat;
}

struct flock one_byte(off_t byte) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return lock;
}

}  // namespace

uint64_t this_pid_namespace() {
  struct stat name_space = {};
  return stat("/proc/self/ns/pid", &name_space) == 0 ? name_space.st_ino : 0;
}

ProcessId this_process() { return {getpid(), this_pid_namespace(), read_stat("self").start_ticks}; }

bool is_over(const ProcessId& process) {
  if (process.pid_namespace != this_pid_namespace()) return true;
  const ProcessStat stat = read_stat(std::to_string(process.pid));
  if (!stat.exists || stat.start_ticks != process.start_ticks) return true;
  return stat.state == 'Z' || stat.state == 'X';
}

bool is_stopped(int32_t pid) {
  const ProcessStat stat = read_stat(std::to_string(pid));
  return stat.state == 'T' || stat.state == 't';
}

Result<uint64_t> resident_bytes(const ProcessId& process, int fd, uint64_t pid_namespace) {
  constexpr uint64_t kBlockBytes = 512;  // of st_blocks
  const std::string pid = std::to_string(process.pid);
  if (process.pid_namespace != pid_namespace) {
    return failure(Code::permission, "process ", pid,
                   " is of another pid namespace; run this inside it");
  }
  struct stat info = {};
  if (stat(("/proc/" + pid + "/fd/" + std::to_string(fd)).c_str(), &info) == 0) {
    return static_cast<uint64_t>(info.st_blocks) * kBlockBytes;
  }
  if (errno == ENOENT || errno == ESRCH) return uint64_t{0};
  if (errno == EACCES || errno == EPERM) {
    return failure(Code::permission, "no permission to read the memory of process ", pid,
                   "; run as its user");
  }
  return system_failure("stat of a client's memory", errno);
}

Status lock_byte(int fd, off_t byte, bool wait) {
  struct flock lock = one_byte(byte);
  int result = 0;
  do {
    result = fcntl(fd, wait ? F_OFD_SETLKW : F_OFD_SETLK, &lock);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return {};
  if (errno == EAGAIN || errno == EACCES) return failure(Code::busy, "the byte is locked");
  return system_failure("fcntl(F_OFD_SETLK)", errno);
}

void unlock_byte(int fd, off_t byte) {
  struct flock lock = one_byte(byte);
  lock.l_type = F_UNLCK;
  fcntl(fd, F_OFD_SETLK, &lock);
}

Status share_byte(int fd, off_t byte) {
  struct flock lock = one_byte(byte);
  lock.l_type = F_RDLCK;
  if (fcntl(fd, F_OFD_SETLK, &lock) == 0) return {};
  return system_failure("fcntl(F_OFD_SETLK)", errno);
}

bool is_file_locked(int fd) {
  struct flock lock = one_byte(0);
  lock.l_len = 0;  // to the end of the file
  return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

bool is_byte_locked(int fd, off_t byte) {
  struct flock lock = one_byte(byte);
  return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

}  // namespace kvcached
