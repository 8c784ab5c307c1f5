// Arithmetic on the records of a ledger. Nothing here takes a lock or makes a system call.
// REQUIRES, for each function that takes a segment: the segment's lock is held.
#pragma once

#include <atomic>

#include "ledger.h"
#include "steps.h"

namespace kvcached {

inline uint64_t capped_sum(uint64_t a, uint64_t b) {
  return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

// a - b, or 0 if b is larger.
inline uint64_t above(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

// Sum of the charges of all used records.
uint64_t total_charge(const LedgerSegment& segment);

// Bytes that no client is charged for.
inline uint64_t free_bytes(const LedgerSegment& segment) {
  // A client that was killed inside commit can count twice until it is reaped.
  return above(segment.capacity_bytes, segment.charged_bytes);
}

// Shared bytes that clients which have waited for longer than `client` want. A client that does
// not wait comes after all that do.
uint64_t wanted_before(LedgerSegment& segment, const ClientRecord& client);

// Free bytes without wanted_before.
inline uint64_t free_bytes_for(LedgerSegment& segment, const ClientRecord& client) {
  const uint64_t wanted = segment.has_waiters == 0 ? 0 : wanted_before(segment, client);
  return above(free_bytes(segment), wanted);
}

// Bytes of pages that the client could reserve now.
inline uint64_t room_for(LedgerSegment& segment, const ClientRecord& client) {
  const uint64_t elastic = client.elastic_bytes();
  const uint64_t of_device =
      capped_sum(free_bytes_for(segment, client), above(client.min_bytes, elastic));
  return std::min(above(client.limit_bytes, elastic), of_device);
}

// room_for, once `given_back_bytes` of the client's pages were released.
uint64_t room_after_release(LedgerSegment& segment, const ClientRecord& client,
                            uint64_t given_back_bytes);

// Part of a reservation that must come from memory that is guaranteed to no client. 0 also if the
// reservation can never be granted.
uint64_t shared_part(const LedgerSegment& segment, const ClientRecord& client, uint64_t bytes,
                     bool is_static);

// Subtracts bytes that the client got from those that it waits for. Done in the same hold of the
// lock as the grant, so that no plan asks other clients for these bytes again.
inline void reduce_wanted(ClientRecord& client, uint64_t bytes) {
  if (client.wanted_bytes > 0) client.wanted_bytes = above(client.wanted_bytes, bytes);
}

// Applies `change` to a used record and keeps the total of the charges right.
template <class Change>
void update(LedgerSegment& segment, ClientRecord& client, Change change) {
  const uint64_t before = client.charge_bytes();
  change(client);
  step("charge: in the record");
  segment.charged_bytes = segment.charged_bytes - before + client.charge_bytes();
  step("charge: in the total");
}

// Fills in a free record. Code::busy if it is used, Code::no_room for the minimum.
Status claim_record(LedgerSegment& segment, ClientRecord& client, const ClientOptions& options,
                    const ProcessId& owner, int memory_fd);

// Frees a used record.
void vacate(LedgerSegment& segment, ClientRecord& client);

// Slot of the one client that matches. Code::unknown_client, Code::ambiguous_client
Result<int> find_client(const LedgerSegment& segment, const ClientQuery& query);

// Copy of a record. Fields that the client writes without the lock may be newer than the others.
ClientRecord copy_of(ClientRecord& record);

Status no_room(uint64_t need, uint64_t free, const char* why);

}  // namespace kvcached
