// Liveness of processes that hold memory of a device: a lock on one byte of the ledger file, which
// the kernel drops with the process. Pids are ambiguous across containers.
#pragma once

#include <sys/types.h>

#include <cstdint>

#include "status.h"

namespace kvcached {

struct ProcessId {
  int32_t pid = 0;
  uint64_t pid_namespace = 0;  // inode of /proc/self/ns/pid
  uint64_t start_ticks = 0;    // tells a reused pid from the process that had it before
};

ProcessId this_process();
uint64_t this_pid_namespace();

// True if the process has ended and all its files are closed. The kernel drops a lock a little
// before it frees the process's memory files; until then this is false. True for a process of
// another pid namespace, which cannot be inspected.
bool is_over(const ProcessId& process);

// True if a process of this pid namespace is stopped, by a signal or a debugger.
bool is_stopped(int32_t pid);

// Resident memory of a file that the process has open, as the OS counts it. 0 once the process has
// ended or closed it. Code::permission if this user may not read it, or if the process is of
// another pid namespace than `pid_namespace`, the caller's own.
Result<uint64_t> resident_bytes(const ProcessId& process, int fd, uint64_t pid_namespace);

// Write-locks one byte for this open file description (not for the process). Code::busy if another
// description holds it and `wait` is false.
Status lock_byte(int fd, off_t byte, bool wait);

void unlock_byte(int fd, off_t byte);

// Read-locks one byte for this open file description. Several descriptions can do so at once.
Status share_byte(int fd, off_t byte);

// True if an open file description other than fd's holds any lock on the file.
bool is_file_locked(int fd);

// True if an open file description other than fd's holds the byte.
bool is_byte_locked(int fd, off_t byte);

}  // namespace kvcached
