// Whether a process still holds its share of a device. The truth is a lock on one byte of the
// ledger file that the kernel drops with the process; pids mislead across containers.
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

// Whether the process is over and all it had open is closed. The kernel drops a lock a little
// before it frees the process's memory files; in that time this still says no. A process of
// another pid namespace, which cannot be looked at, counts as over.
bool is_over(const ProcessId& process);

// Whether a process of this pid namespace is stopped, by a signal or a debugger.
bool is_stopped(int32_t pid);

// Memory behind a file that the process has open, as the OS counts it; 0 once the process is over
// or has closed it. Code::permission if this user may not look, or if the process is of another pid
// namespace than `pid_namespace`, the caller's own.
Result<uint64_t> resident_bytes(const ProcessId& process, int fd, uint64_t pid_namespace);

// Write-locks one byte for this open file description (not for the process).
// Code::busy if another one holds it and `wait` is false.
Status lock_byte(int fd, off_t byte, bool wait);

void unlock_byte(int fd, off_t byte);

// Read-locks one byte for this open file description, beside all others that do.
Status share_byte(int fd, off_t byte);

// Whether another open file description than fd's holds any lock on the file.
bool is_file_locked(int fd);

// Whether another open file description than fd's holds the byte.
bool is_byte_locked(int fd, off_t byte);

}  // namespace kvcached
