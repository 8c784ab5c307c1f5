// The bytes that all processes on one device share, in /dev/shm. Any change here needs a new
// kLedgerVersion. The first three fields never move: other versions identify a ledger by them.
#pragma once

#include <cstdint>

#include "owned_lock.h"

namespace kvcached {

inline constexpr char kLedgerMagic[8] = {'K', 'V', 'L', 'E', 'D', 'G', 'E', 'R'};
inline constexpr uint32_t kLedgerVersion = 4;
inline constexpr int kMaxClients = 128;
inline constexpr uint64_t kNoLimit = UINT64_MAX;
inline constexpr uint32_t kDestroyed = 1;    // of LedgerSegment::destroyed: by Ledger::destroy
inline constexpr uint32_t kFileRemoved = 2;  // the same: its file was removed
inline constexpr uint32_t kSleepers = 1;     // bit of LedgerSegment::room: a process sleeps on it

struct ClientRecord {
  uint32_t used;  // written last when a client joins, first when it leaves
  int32_t pid;
  int32_t memory_fd;  // descriptor of pid whose file holds the pages; -1: none
  uint32_t padding;
  uint64_t pid_namespace;
  uint64_t start_ticks;
  uint64_t pending_bytes;    // reserved, the pages do not exist yet
  uint64_t committed_bytes;  // pages exist, or may exist
  uint64_t static_bytes;
  uint64_t min_bytes;
  uint64_t limit_bytes;
  uint64_t maps;
  uint64_t unmaps;
  char name[64];
  uint64_t joined;  // tells the clients of one record apart

  // What the client could give back. Written without the lock, by the client only.
  uint64_t spare_bytes;      // pages without a live block
  uint64_t evictable_bytes;  // pages that only a prefix cache uses
  int64_t active_ns;         // its last allocation, on the monotonic clock
  uint64_t evicted_tokens;   // of prefix cache, to answer requests
  uint64_t evicted_bytes;    // of pages that came free with them

  // What the client is asked to give back. A request is open while asked differs from answered.
  uint32_t asked;  // futex that the client sleeps on
  uint32_t answered;
  uint64_t asked_bytes;       // bytes above the limit are asked for in addition
  int64_t asked_until_ns;     // time after which no other client counts on it
  int64_t ask_not_before_ns;  // set after an answer of less than was asked for
  uint64_t given_bytes;       // sum of all answers

  // What the client waits for.
  uint64_t wanted_bytes;  // of the device's shared part, which other clients leave free
  int64_t wanted_until_ns;
  uint64_t wanted_since;  // ticket, in the order of waiting; 0: does not wait

  uint64_t reserved[7];  // a whole number of cache lines, so that clients do not share one

  uint64_t elastic_bytes() const { return pending_bytes + committed_bytes; }
  // Bytes that the client takes from the device. A minimum counts whether it is used or not.
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
  OwnedLock lock;          // guards the fields below, and the records' fields unless said otherwise
  uint32_t room;           // futex that clients waiting for room sleep on; see kSleepers
  uint32_t has_waiters;    // 0: no record has wanted_since set
  uint64_t tickets;        // the last one issued, for joined and wanted_since
  uint64_t asks;           // number of plans posted; an older view is out of date
  int64_t scan_until_ns;   // end of a scan of resident memory, which stops grants; 0: no scan
  uint64_t reserved[4];
  ClientRecord clients[kMaxClients];
};

static_assert(sizeof(ClientRecord) == 320);
static_assert(sizeof(OwnedLock) == 40);
static_assert(sizeof(LedgerSegment) == 192 + 320 * kMaxClients);

}  // namespace kvcached
