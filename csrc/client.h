// A process's share of a device: a record in the ledger, the lock that proves it alive, and the
// virtual memory whose pages die with the process. A process may have several clients.
// Thread rule: any thread. After a fork the child's copy is dead (Code::forked).
#pragma once

#include <atomic>
#include <mutex>
#include <type_traits>

#include "fork_guard.h"
#include "ledger.h"
#include "region.h"
#include "spare_keeper.h"
#include "streams.h"
#include "wake_thread.h"

namespace kvcached {

class Client final : private ForkGuarded {
 public:
  static Result<std::shared_ptr<Client>> open(std::shared_ptr<Ledger> ledger,
                                              const std::string& device,
                                              const ClientOptions& options);
  // The same on a Vmm of the caller. REQUIRES: it has the ledger's page size and no other user
  static Result<std::shared_ptr<Client>> open(std::shared_ptr<Ledger> ledger,
                                              std::shared_ptr<Vmm> vmm,
                                              const ClientOptions& options);
  ~Client() override;

  // Waits for the streams, then gives everything back. Reserved addresses stay as long as views of
  // them live. Code::in_use, with nothing changed, if the streams take too long or weights are
  // being loaded. Idempotent.
  Status close();
  Status check_open() const { return vmm_->check_open(); }

  const std::shared_ptr<Vmm>& vmm() const { return vmm_; }
  uint64_t page_bytes() const { return vmm_->page_bytes(); }
  // Creates pages for bytes that the ledger granted, singly or as a block (Vmm::create_block). If
  // the device is full all the same (memory of a dead process, or used outside of the ledger),
  // retries for create_wait, then fails with Code::no_room and the driver's message. After that
  // each call tries once, until kQuietWaits times create_wait have passed without a refusal, so
  // that a thread that steps an engine is not delayed repeatedly.
  Result<std::vector<Handle>> create_pages(size_t count);
  Result<std::vector<Handle>> create_block(size_t count);
  // Initial create_wait. A GPU's driver takes seconds to reclaim tens of GB of a killed process,
  // the OS of a host device takes none.
  static constexpr std::chrono::milliseconds kCreateWaitGpu{10000};
  static constexpr std::chrono::milliseconds kCreateWaitHost{500};
  static constexpr int kQuietWaits = 8;
  void set_create_wait(Streams::Clock::duration wait) { create_wait_ = wait; }
  // Vmm::guard_holes, with the guard page leased as static memory first, and Vmm::scrub_pages.
  Status guard_holes();
  void scrub_pages() { vmm_->scrub_pages(); }
  // The engine's streams. No page of this client is unmapped before their work on it is done.
  Streams& streams() { return streams_; }
  // Between begin_load and end_load, memory of this client is copied into and close is refused.
  Status begin_load();
  void end_load() { --loads_; }
  // Between begin_link and end_link, its GPU helps to load weights of another GPU and close is
  // refused.
  Status begin_link();
  void end_link() { --links_; }

  // Reserves the addresses that later regions are carved from. Code::invalid_argument for a second
  // call.
  Status reserve_addresses(uint64_t bytes);
  // Reserves addresses for a KV cache, a tensor or weights: a range of the space of
  // reserve_addresses if that exists and has room, otherwise a separate reservation.
  Result<std::shared_ptr<Region>> reserve_region(uint64_t bytes);
  // Null before reserve_addresses.
  std::shared_ptr<AddressSpace> addresses();

  // Calls of the ledger for this client's record; see ledger.h.
  Status reserve(uint64_t bytes) { return in_ledger(&Ledger::reserve, bytes); }
  Status commit(uint64_t bytes) { return in_ledger(&Ledger::commit, bytes); }
  Status cancel(uint64_t bytes) { return in_ledger(&Ledger::cancel, bytes); }
  Status release(uint64_t bytes) { return in_ledger(&Ledger::release, bytes); }
  // Bytes that reserve would grant once `given_back_bytes` of the committed ones were released.
  Result<uint64_t> available(uint64_t given_back_bytes = 0) {
    return in_ledger(&Ledger::available, given_back_bytes);
  }
  // Has the client's spare pages given back before it fails with Code::no_room.
  Status reserve_static(uint64_t bytes);
  Status release_static(uint64_t bytes) { return in_ledger(&Ledger::release_static, bytes); }
  // Gives spare pages back at once if more is held than the new limit.
  Status set_limit(uint64_t bytes);
  Status set_min(uint64_t bytes) { return in_ledger(&Ledger::set_min, bytes); }
  void count_maps(uint64_t maps, uint64_t unmaps) {
    return in_ledger(&Ledger::count_maps, maps, unmaps);
  }
  Result<ClientRecord> record() { return in_ledger(&Ledger::client); }
  // Duplicates the lock that proves this client alive, for processes that read its memory. The
  // record stays until the duplicate is closed too, even if this process dies.
  Result<Descriptor> share_liveness();

  // The balloon; see ledger.h. The descriptor is readable while a request may be open. It belongs
  // to this client and is closed with it. The thread that polls it frees the memory.
  Result<int> fileno();
  bool has_request();
  Result<std::optional<ShrinkRequest>> shrink_request() {
    return in_ledger(&Ledger::shrink_request);
  }
  Status answer(const ShrinkRequest& request, const ShrinkAnswer& answer) {
    return in_ledger(&Ledger::answer, request, answer);
  }
  Result<std::optional<uint32_t>> want(uint64_t bytes, bool is_static, int64_t until_ns) {
    return in_ledger(&Ledger::want, bytes, is_static, until_ns);
  }
  void end_wait() { return in_ledger(&Ledger::end_wait); }
  void publish_evictable(uint64_t bytes) { return in_ledger(&Ledger::publish_evictable, bytes); }
  void add_spare(int64_t bytes) { return in_ledger(&Ledger::add_spare, bytes); }
  void touch() { return in_ledger(&Ledger::touch); }
  const std::shared_ptr<Ledger>& ledger() const { return ledger_; }
  int slot() const { return slot_; }

  SpareKeeper& spares() { return spares_; }

 private:
  Client(std::shared_ptr<Ledger> ledger, std::shared_ptr<Vmm> vmm, int lock_fd, int slot);

  void lock_for_fork() override;
  void unlock_after_fork() override;
  void abandon_in_child() override;
  Result<Slack> look();
  // Calls the ledger for this client's record, unless the client is closed.
  template <class Answer, class... Parameters>
  Answer in_ledger(Answer (Ledger::*call)(int, Parameters...),
                   std::type_identity_t<Parameters>... arguments) {
    if constexpr (std::is_void_v<Answer>) {
      if (check_open().ok()) (ledger_.get()->*call)(slot_, arguments...);
    } else {
      KV_TRY(check_open());
      return (ledger_.get()->*call)(slot_, arguments...);
    }
  }
  template <class Create>
  Result<std::vector<Handle>> create_with_retries(Create create);

  const std::shared_ptr<Ledger> ledger_;
  const std::shared_ptr<Vmm> vmm_;
  Streams streams_;
  int lock_fd_;
  const int slot_;
  std::shared_ptr<AddressSpace> addresses_;
  std::atomic<bool> guards_ = false;
  std::atomic<int> loads_ = 0;
  std::atomic<int> links_ = 0;
  std::atomic<Streams::Clock::duration> create_wait_;
  std::atomic<Streams::Clock::time_point>
      retry_from_{};  // before this time a create does not retry
  std::unique_ptr<WakeThread> wake_;
  std::mutex mutex_;  // for closing, addresses_ and wake_; locked before those of spares_
  SpareKeeper spares_;
};

}  // namespace kvcached
