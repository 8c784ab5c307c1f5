// The bytes that all processes on one device share, in /dev/shm. Any change here is a new
// kLedgerVersion. The first three fields never move: they are what a stranger is told by.
#pragma once

#include <pthread.h>

#include <cstdint>

namespace kvcached {

inline constexpr char kLedgerMagic[8] = {'K', 'V', 'L', 'E', 'D', 'G', 'E', 'R'};
inline constexpr uint32_t kLedgerVersion = 1;
inline constexpr int kMaxClients = 128;
inline constexpr uint64_t kNoLimit = UINT64_MAX;

struct ClientRecord {
  uint32_t used;  // written last when a client joins, first when it leaves
  int32_t pid;
  int32_t memory_fd;  // of pid: the file that holds its pages; -1: none
  uint32_t padding;
  uint64_t pid_namespace;
  uint64_t start_ticks;
  uint64_t pending_bytes;    // reserved, the pages do not exist yet
  uint64_t committed_bytes;  // pages exist, or may exist
  uint64_t static_bytes;
  uint64_t min_bytes;
  uint64_t limit_bytes;
  uint64_t maps;    // written without the mutex, by its client alone
  uint64_t unmaps;  // likewise
  char name[64];
  uint64_t reserved[5];  // a whole number of cache lines, so that clients do not share one

  uint64_t elastic_bytes() const { return pending_bytes + committed_bytes; }
  // What the client takes from the device: a minimum counts whether it is used or not.
  uint64_t charge_bytes() const {
    return static_bytes + (elastic_bytes() > min_bytes ? elastic_bytes() : min_bytes);
  }
};

struct LedgerSegment {
  char magic[8];  // written last
  uint32_t version;
  uint32_t segment_bytes;
  char boot_id[40];
  uint64_t capacity_bytes;
  uint64_t page_bytes;
  uint32_t destroyed;
  uint32_t padding;
  uint64_t charged_bytes;  // sum of charge_bytes() over used records; rebuilt after a death
  pthread_mutex_t mutex;   // process-shared, robust
  ClientRecord clients[kMaxClients];
};

static_assert(sizeof(ClientRecord) == 192);
static_assert(sizeof(pthread_mutex_t) == 40);
static_assert(sizeof(LedgerSegment) == 128 + 192 * kMaxClients);

}  // namespace kvcached
