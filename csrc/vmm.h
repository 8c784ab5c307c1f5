// Virtual memory of one client on one device. This header is the manual; it states CUDA's rules,
// and every backend enforces them, so that code that is right on the host device is right on a GPU.
//
//   reserve      an address range: nothing resident, every access is a fault
//   create       physical pages, each a handle of exactly page_bytes()
//   create_block the same, created at once, and mapped, unmapped and released only together and in
//                order (Code::invalid_argument otherwise): one call to a GPU's driver, where single
//                pages take one each
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
// knows what it touches. The caller of unmap records an event after the last work that may touch
// the page, and unmaps once that has passed.
//
// Holes, the unmapped parts of a reservation, fault: an access ends the process, on a GPU the
// context and, under MPS, the contexts of all clients. After guard_holes, holes that unmap leaves
// and holes of ranges given to cover show zeros instead, until they are mapped. Other holes still
// fault. The guard page costs a page of the device, which the caller has leased.
//
// A page that is mapped again contains what it held when it was unmapped: data of this client,
// maybe of another tensor. A page from create is zero on a host device; CUDA makes no promise for a
// GPU. After scrub_pages every unmap zeroes the pages, so that no data leaves its tensor, to
// another tensor or to the device. A process that is killed zeroes nothing.
//
// Other processes:
//   export_pages files through which another process can map pages, for as long as it keeps them;
//                only their contents are shared, their creator owns them and is charged for them
//   open_window  such pages of another process, mapped read-only and consecutively, until the
//                window is destroyed. They have no handles here and need no lease. A host device
//                refuses files that end before their pages, because reading there raises a signal.
// Memory that is released while a window shows it becomes zeros on a host device, and stays until
// the end of the window on a GPU. So an owner keeps pages until the windows are destroyed.
//
// Streams:
//   record_event an event after all work that was submitted to the stream so far
// After a fork the child's copy is dead: every call fails with Code::forked.
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

// Queue of the engine's work: a CUstream on a GPU (0: the default stream), a fake stream of
// host_stream.h on a host device, whose default stream never has work.
using Stream = uint64_t;

// A point in a stream's work. Does not keep the stream alive. Destroyed before its Vmm. Thread
// rule: the owner's.
class StreamEvent : private NonCopyable {
 public:
  virtual ~StreamEvent() = default;
  // True if all earlier work is done. Never waits. After an error (of the stream's context, for
  // example) the state of that work is unknown.
  virtual Result<bool> has_passed() = 0;
};

// Place of the memory: RAM that the CPU reads and writes, or a GPU.
struct Location {
  bool on_gpu = false;
  int ordinal = 0;
};

// Pages that another process can map: the index of a file and the offset in it, for each.
struct SharedPages {
  struct Place {
    uint64_t file;
    uint64_t offset;
  };
  std::vector<Descriptor> files;
  std::vector<Place> places;
};

// A copy from an offset in a window to an address of the device that opened it.
struct CopyRun {
  uint64_t source_offset;
  uint64_t target;
  uint64_t bytes;
};

// Pages of another process, mapped read-only until the window is destroyed, which must precede the
// close of its Vmm. Thread rule: one thread at a time.
class PageWindow : private NonCopyable {
 public:
  virtual ~PageWindow() = default;
  virtual uint64_t address() const = 0;
  virtual uint64_t bytes() const = 0;
  // Returns once all bytes are copied. After a failure the contents of the targets are undefined.
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

  // Sets every byte and waits for that. REQUIRES: mapped with access, and no pending work touches
  // it
  virtual Status fill(uint64_t address, uint64_t bytes, unsigned char value) = 0;
  // True if pages from create are zero.
  virtual bool makes_zeros() const = 0;

  // map and set_access in one step, for backends that can do both in one call to the OS.
  virtual Status map_accessible(uint64_t address, std::span<const Handle> handles);

  // True if a window of the other device can show pages of this one.
  virtual bool can_share_with(const Location& other) const = 0;
  // Code::unavailable if the driver cannot export them.
  virtual Result<SharedPages> export_pages(std::span<const Handle> handles) = 0;
  // Code::unavailable for memory that this device cannot read.
  virtual Result<std::unique_ptr<PageWindow>> open_window(const SharedPages& pages) = 0;

  // Makes holes of later unmaps show zeros; see above. Idempotent. If the driver does not cover a
  // hole, the unmap succeeds all the same and the hole faults until a later call covers it.
  virtual Status guard_holes() = 0;
  // After guard_holes (otherwise does nothing), makes the range's holes show zeros also where
  // nothing was mapped yet. For tensors that kernels index by values of a caller. A refusal of the
  // driver is handled as in unmap. REQUIRES: the range is reserved
  virtual Status cover(uint64_t address, uint64_t bytes) = 0;
  // Makes later unmaps, and close, zero their pages first. A failed unmap may leave zeroed pages
  // mapped. REQUIRES, at each: no work that may touch the pages is pending
  virtual void scrub_pages() = 0;

  // Code::invalid_argument for a stream that is known to be dead. REQUIRES: the stream is alive
  virtual Result<std::unique_ptr<StreamEvent>> record_event(Stream stream) = 0;

  // Unmaps everything and gives all memory back. Reservations stay, so that a view that outlives
  // its client faults instead of reading what is mapped there later. Further calls except
  // free_address fail with Code::closed. Idempotent.
  virtual Status close() = 0;

  // Ok, Code::closed or Code::forked.
  virtual Status check_open() const = 0;

  // File whose resident bytes other processes can read, or -1 if there is none.
  virtual int memory_fd() const = 0;
};

// `device` is "host:N" or "cuda:N". REQUIRES: page_bytes > 0
// Code::no_driver, Code::old_driver, Code::unsupported or Code::hidden_device for a GPU that cannot
// be used here, Code::unknown_device for any other name.
Result<std::shared_ptr<Vmm>> make_vmm(const std::string& device, uint64_t page_bytes);

// Checks the name, and that its backend can be loaded. Makes no call to a driver, so that the
// process can still fork. Opening a client checks that cuda:N exists.
Status check_device_name(const std::string& device);

}  // namespace kvcached
