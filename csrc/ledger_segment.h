// The bytes that all processes on one device share, in /dev/shm. Any change here is a new
// kLedgerVersion. The first three fields never move: they are what a stranger is told by.
#pragma once

#include <cstdint>

#include "owned_lock.h"

namespace kvcached {

inline constexpr char kLedgerMagic[8] = {'K', 'V', 'L', 'E', 'D', 'G', 'E', 'R'};
inline constexpr uint32_t kLedgerVersion = 4;
inline constexpr int kMaxClients = 128;
inline constexpr uint64_t kNoLimit = UINT64_MAX;
inline constexpr uint32_t kDestroyed = 1;    // of LedgerSegment::destroyed: by Ledger::destroy
inline constexpr uint32_t kFileRemoved = 2;  // the same: its file is gone, a new one can be made
inline constexpr uint32_t kSleepers = 1;     // bit of LedgerSegment::room: a process sleeps on it

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
  uint64_t maps;
  uint64_t unmaps;
  char name[64];
  uint64_t joined;  // tells the clients of one record apart

  // What it could give back when asked; written without the lock, by its client alone.
  uint64_t spare_bytes;      // pages without a live block
  uint64_t evictable_bytes;  // pages that only a prefix cache uses
  int64_t active_ns;         // its last allocation, on the monotonic clock
  uint64_t evicted_tokens;   // of prefix cache, to answer requests
  uint64_t evicted_bytes;    // of pages that came free with them

  // What it is asked for. A request is open while asked differs from answered.
  uint32_t asked;  // a futex: its client sleeps on it
  uint32_t answered;
  uint64_t asked_bytes;       // beyond its limit it is asked anyway
  int64_t asked_until_ns;     // after that it is not counted on
  int64_t ask_not_before_ns;  // it gave less than was asked for
  uint64_t given_bytes;       // of all answers

  // What it waits for.
  uint64_t wanted_bytes;  // of the shared part of the device; others leave them free
  int64_t wanted_until_ns;
  uint64_t wanted_since;  // the order of those who wait; 0: it does not wait

  uint64_t reserved[7];  // a whole number of cache lines, so that clients do not share one

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
  OwnedLock lock;          // of all below, and of what of the records is not said to be without
  uint32_t room;           // a futex: those who wait for room sleep on it; see kSleepers
  uint32_t has_waiters;    // a record may have wanted_since set; 0: none has
  uint64_t tickets;        // the last one given out, for joined and wanted_since
  uint64_t asks;           // requests so far: a plan made before the last is out of date
  int64_t look_until_ns;   // no pages are granted before, unless the one who looks is done; 0
  uint64_t reserved[4];
  ClientRecord clients[kMaxClients];
};

static_assert(sizeof(ClientRecord) == 320);
static_assert(sizeof(OwnedLock) == 40);
static_assert(sizeof(LedgerSegment) == 192 + 320 * kMaxClients);

}  // namespace kvcached
