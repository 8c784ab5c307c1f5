// Virtual memory of one client on one device. This header is the manual; it states CUDA's rules,
// and every backend enforces them, so that code that is right on the host device is right on a GPU.
//
//   reserve      an address range: nothing resident, every access is a fault
//   create       physical pages, each a handle of exactly page_bytes()
//   create_block the same, made at once, which are then mapped, unmapped and released all together
//                and in order (Code::invalid_argument otherwise): one call to a GPU's driver where
//                single pages take one each
//   map          whole handles, in order, at consecutive addresses that are all unmapped
//   set_access   before the first access to a mapped page
//   unmap        a range in which every page is mapped; the handles stay valid
//   release      the handle; its memory returns to the device once it is unmapped as well
//   free_address a whole reservation, exactly as it was reserved, with nothing mapped in it
//
// Every call that names a range or several handles is all or nothing: on failure nothing changed.
// Sizes and addresses are multiples of page_bytes(). Calls may come from any thread.
//
// Work runs on streams, after the call that submitted it has returned. No call here waits for it or
// knows what it touches: the caller of unmap records an event behind the last work that may touch
// the page, and unmaps once that has passed.
//
// Holes, the unmapped parts of a reservation, fault: an access ends the process, on a GPU the
// context and, under MPS, those of all its clients. After guard_holes a hole that is left by unmap
// shows zeros instead, and so does a hole of a range that cover names; map takes the place of that.
// Other holes still fault. It costs a page of the device, which the caller has leased.
//
// What a page contains when it is mapped: what it held when it was unmapped, so data of this
// client, of other tensors of it as well. Fresh from create it is zero on a host device, where the
// OS sees to that; of a GPU's memory CUDA promises nothing. After scrub_pages every unmap zeroes
// the pages, so that no data leaves the tensor it was written to, be it to another one or to the
// device; a process that is killed zeroes nothing.
//
// Other processes:
//   export_pages files through which another process can map pages, for as long as it keeps them;
//                only their contents are shared, who made them owns and pays for them
//   open_window  such pages of another process, mapped read-only one behind the other, until the
//                window goes. They are no handles here, and no lease grows. A host device
//                refuses files that end before their pages: to read there would be a signal.
// Memory that is released while a window shows it is zeros on a host device; on a GPU it stays
// until the window goes. So an owner keeps pages until the windows are gone.
//
// Streams:
//   record_event an event behind everything that the stream was given so far
// After a fork the child's copy is dead: every call answers Code::forked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "descriptor.h"
#include "non_copyable.h"
#include "status.h"

namespace kvcached {

using Handle = uint64_t;  // never 0, never reused within one Vmm
inline constexpr Handle kNoHandle = 0;

// The engine's queue of work: a CUstream on a GPU (0: the default stream), a fake one of
// host_stream.h on a host device, whose default stream never has work.
using Stream = uint64_t;

// A point in a stream's work. Does not keep the stream alive.
// Thread rule: the owner's. Dropped before its Vmm.
class StreamEvent : private NonCopyable {
 public:
  virtual ~StreamEvent() = default;
  // Whether all work before it is done. Never waits. After an error (the stream's context is
  // broken, say) nothing is known of that work.
  virtual Result<bool> has_passed() = 0;
};

// Where the memory is: RAM that the CPU reads and writes, or a GPU.
struct Location {
  bool on_gpu = false;
  int ordinal = 0;
};

// Where another process finds pages: for each in which of the files, and how far from its start.
struct SharedPages {
  struct Place {
    uint64_t file;
    uint64_t offset;
  };
  std::vector<Descriptor> files;
  std::vector<Place> places;
};

// Bytes from so far into a window to an address of the device that opened it.
struct CopyRun {
  uint64_t source_offset;
  uint64_t target;
  uint64_t bytes;
};

// Thread rule: one thread at a time. Goes before its Vmm closes; unmaps.
class PageWindow : private NonCopyable {
 public:
  virtual ~PageWindow() = default;
  virtual uint64_t address() const = 0;
  virtual uint64_t bytes() const = 0;
  // Returns once all bytes are there. After a failure the targets hold anything.
  // REQUIRES: targets are mapped with access, and no pending work touches them
  virtual Status copy(std::span<const CopyRun> runs) = 0;
};

class Vmm : private NonCopyable {
 public:
  virtual ~Vmm() = default;

  virtual uint64_t page_bytes() const = 0;
  virtual Location location() const = 0;

  virtual Result<uint64_t> reserve(uint64_t bytes) = 0;
  virtual Status free_address(uint64_t address, uint64_t bytes) = 0;

  virtual Result<std::vector<Handle>> create(size_t count) = 0;
  virtual Result<std::vector<Handle>> create_block(size_t count) = 0;
  virtual Status release(std::span<const Handle> handles) = 0;

  virtual Status map(uint64_t address, std::span<const Handle> handles) = 0;
  virtual Status set_access(uint64_t address, uint64_t bytes) = 0;
  virtual Status unmap(uint64_t address, uint64_t bytes) = 0;

  // Sets every byte, and waits for that. REQUIRES: mapped with access, no pending work touches it
  virtual Status fill(uint64_t address, uint64_t bytes, unsigned char value) = 0;
  // Whether pages fresh from create are zero.
  virtual bool makes_zeros() const = 0;

  // map and set_access in one step, for backends that can do both in one call to the OS.
  virtual Status map_accessible(uint64_t address, std::span<const Handle> handles);

  // Whether a window over there can show pages of this device.
  virtual bool can_share_with(const Location& other) const = 0;
  // Code::unavailable if the driver cannot.
  virtual Result<SharedPages> export_pages(std::span<const Handle> handles) = 0;
  // Code::unavailable for memory that this device cannot read.
  virtual Result<std::unique_ptr<PageWindow>> open_window(const SharedPages& pages) = 0;

  // For all unmaps from now on; see above. Idempotent. An unmap whose hole the driver does not
  // cover is done all the same, and the next call tries again; until then that hole faults.
  virtual Status guard_holes() = 0;
  // After guard_holes, else nothing: the range's holes show zeros as well where nothing was mapped
  // yet. For tensors that kernels index by what a caller gave. As unmap, where the driver refuses.
  // REQUIRES: the range is reserved
  virtual Status cover(uint64_t address, uint64_t bytes) = 0;
  // For all unmaps from now on, close included: their pages are zeroed first, of those that a
  // failed unmap leaves mapped as well. REQUIRES of each: no work that may touch the pages is
  // pending.
  virtual void scrub_pages() = 0;

  // REQUIRES: the stream is alive. Code::invalid_argument where that can be known and is not so.
  virtual Result<std::unique_ptr<StreamEvent>> record_event(Stream stream) = 0;

  // Unmaps everything and gives all memory back. Reservations stay (a view that outlives its
  // client faults instead of reading what was mapped there later); further calls but
  // free_address answer Code::closed. Idempotent.
  virtual Status close() = 0;

  // Whether calls still make sense: ok, Code::closed or Code::forked.
  virtual Status check_open() const = 0;

  // The file whose resident bytes other processes can look at, or -1 where there is none.
  virtual int memory_fd() const = 0;
};

// `device` is "host:N" or "cuda:N". REQUIRES: page_bytes > 0
// Code::no_driver, Code::old_driver, Code::unsupported or Code::hidden_device for a GPU that cannot
// be used here; Code::unknown_device for a name that means nothing.
Result<std::shared_ptr<Vmm>> make_vmm(const std::string& device, uint64_t page_bytes);

// Checks the name alone and that its backend can be loaded. Makes no call to a driver, so that the
// process can still fork; whether cuda:N exists is known when a client is opened.
Status check_device_name(const std::string& device);

}  // namespace kvcached
