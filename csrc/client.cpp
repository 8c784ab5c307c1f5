#include "client.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "futex.h"
#include "steps.h"

namespace kvcached {

namespace {

// The kernel closes a dying process's files in the order of their numbers, so the lock gets a
// higher one than the memory.
Result<int> open_lock_above(const Ledger& ledger, int memory_fd) {
  Result<int> fd = ledger.open_lock_fd();
  if (!fd.ok()) return fd;
  const int moved = fcntl(fd.value(), F_DUPFD_CLOEXEC, memory_fd + 1);
  const int error = errno;
  ::close(fd.value());
  if (moved < 0) return system_failure("fcntl(F_DUPFD_CLOEXEC)", error);
  return moved;
}

// Memory that kernels may still touch is left to the end of the process, where the driver tears
// the context down.
void keep_to_the_end(std::shared_ptr<Vmm> vmm) {
  static std::mutex mutex;
  static auto* kept = new std::vector<std::shared_ptr<Vmm>>;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(vmm));
}

}  // namespace

Result<std::shared_ptr<Client>> Client::open(std::shared_ptr<Ledger> ledger,
                                             const std::string& device,
                                             const ClientOptions& options) {
  Result<std::shared_ptr<Vmm>> vmm = make_vmm(device, ledger->page_bytes());
  if (!vmm.ok()) return vmm.status();
  return open(std::move(ledger), std::move(vmm.value()), options);
}

Result<std::shared_ptr<Client>> Client::open(std::shared_ptr<Ledger> ledger,
                                             std::shared_ptr<Vmm> vmm,
                                             const ClientOptions& options) {
  Result<int> lock_fd = open_lock_above(*ledger, vmm->memory_fd());
  if (!lock_fd.ok()) return lock_fd.status();
  step("client: about to join");
  Result<int> slot = ledger->join(options, lock_fd.value(), vmm->memory_fd());
  step("client: joined");
  if (!slot.ok()) {
    ::close(lock_fd.value());
    return slot.status();
  }
  return std::shared_ptr<Client>(
      new Client(std::move(ledger), std::move(vmm), lock_fd.value(), slot.value()));
}

Client::Client(std::shared_ptr<Ledger> ledger, std::shared_ptr<Vmm> vmm, int lock_fd, int slot)
    : ledger_(std::move(ledger)),
      vmm_(std::move(vmm)),
      streams_(vmm_),
      lock_fd_(lock_fd),
      slot_(slot),
      spares_([this] { return look(); }) {
  guard_against_fork(this);
}

Client::~Client() {
  unguard_against_fork(this);
  // After a failure the record is reaped once the process has ended.
  if (close().code == Code::in_use) keep_to_the_end(vmm_);
  spares_.stop();
}

Status Client::close() {
  const std::lock_guard lock(mutex_);
  if (lock_fd_ < 0) return {};
  if (loads_ > 0) {
    return failure(Code::in_use, "weights are being copied into an arena; cancel the load first");
  }
  if (links_ > 0) {
    return failure(Code::in_use, "weight links to another GPU use this one; drop or close them");
  }
  KV_TRY(streams_.wait());
  spares_.stop();
  KV_TRY(vmm_->close());
  step("client: memory given back");
  wake_.reset();
  Status left = ledger_->leave(slot_);
  step("client: left");
  ::close(lock_fd_);
  lock_fd_ = -1;
  return left;
}

void Client::abandon_in_child() {
  if (lock_fd_ >= 0) ::close(lock_fd_);
  lock_fd_ = -1;
  if (wake_) wake_->abandon_in_child();
  spares_.abandon_in_child();
}

void Client::lock_for_fork() {
  mutex_.lock();
  spares_.lock_for_fork();
}

void Client::unlock_after_fork() {
  spares_.unlock_after_fork();
  mutex_.unlock();
}

Result<Slack> Client::look() {
  Result<ClientRecord> own = record();
  if (!own.ok()) return own.status();
  Result<LedgerUsage> device = ledger_->usage();
  if (!device.ok()) return device.status();
  return slack_of(device.value(), own.value(), monotonic_ns());
}

Status Client::reserve_addresses(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  if (addresses_ != nullptr) {
    return failure(Code::invalid_argument,
                   "the client has an address space of " + std::to_string(addresses_->bytes()) +
                       " bytes already; it is kept until the client closes");
  }
  Result<std::shared_ptr<AddressSpace>> space = AddressSpace::reserve(vmm_, bytes);
  if (!space.ok()) return space.status();
  addresses_ = std::move(space.value());
  return {};
}

std::shared_ptr<AddressSpace> Client::addresses() {
  const std::lock_guard lock(mutex_);
  return addresses_;
}

Result<std::shared_ptr<Region>> Client::reserve_region(uint64_t bytes) {
  if (Status status = check_open(); !status.ok()) return status;
  const std::shared_ptr<AddressSpace> space = addresses();
  if (space != nullptr && bytes > 0 && bytes % page_bytes() == 0) {
    std::shared_ptr<Region> carved = Region::carve(vmm_, space, bytes);
    if (carved != nullptr) return carved;
  }
  return Region::reserve(vmm_, bytes);
}

Status Client::reserve(uint64_t bytes) {
  KV_TRY(check_open());
  return ledger_->reserve(slot_, bytes);
}

Status Client::commit(uint64_t bytes) {
  KV_TRY(check_open());
  return ledger_->commit(slot_, bytes);
}

Status Client::cancel(uint64_t bytes) {
  KV_TRY(check_open());
  return ledger_->cancel(slot_, bytes);
}

Status Client::release(uint64_t bytes) {
  KV_TRY(check_open());
  return ledger_->release(slot_, bytes);
}

Result<uint64_t> Client::available(uint64_t given_back_bytes) {
  if (Status status = check_open(); !status.ok()) return status;
  return ledger_->available(slot_, given_back_bytes);
}

Status Client::reserve_static(uint64_t bytes) {
  KV_TRY(check_open());
  Status status = ledger_->reserve_static(slot_, bytes);
  if (status.code != Code::no_room) return status;
  spares_.give_back(nullptr);
  return ledger_->reserve_static(slot_, bytes);
}

Result<std::vector<Handle>> Client::create_pages(size_t count) {
  using std::chrono::milliseconds;
  const Streams::Clock::duration wait = create_wait_;
  const Streams::Clock::time_point deadline = Streams::Clock::now() + wait;
  size_t tries = 1;
  for (Pause pause(milliseconds(20));; pause.sleep(), ++tries) {
    Result<std::vector<Handle>> pages = vmm_->create(count);
    if (pages.ok() || pages.status().code != Code::no_room) return pages;
    if (Streams::Clock::now() < deadline) continue;
    Status full = pages.status();
    const int64_t waited_ms = std::chrono::duration_cast<milliseconds>(wait).count();
    full.message += " (" + std::to_string(tries) + " tries in " + std::to_string(waited_ms) +
                    " ms; the ledger had granted it: memory is used outside of the ledger)";
    return full;
  }
}

Status Client::guard_holes() {
  if (guards_.exchange(true)) return {};
  Status status = reserve_static(page_bytes());
  if (status.ok()) {
    status = vmm_->guard_holes();
    if (!status.ok()) (void)release_static(page_bytes());
  }
  guards_ = status.ok();
  return status;
}

Status Client::begin_load() {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  ++loads_;
  return {};
}

Status Client::begin_link() {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  ++links_;
  return {};
}

Status Client::release_static(uint64_t bytes) {
  KV_TRY(check_open());
  return ledger_->release_static(slot_, bytes);
}

Status Client::set_limit(uint64_t bytes) {
  KV_TRY(check_open());
  KV_TRY(ledger_->set_limit(slot_, bytes));
  Result<ClientRecord> now = ledger_->client(slot_);
  if (now.ok() && now.value().elastic_bytes() > bytes) spares_.give_back(nullptr);
  return {};
}

Status Client::set_min(uint64_t bytes) {
  KV_TRY(check_open());
  return ledger_->set_min(slot_, bytes);
}

Result<int> Client::fileno() {
  const std::lock_guard lock(mutex_);
  if (Status status = check_open(); !status.ok()) return status;
  if (!wake_) {
    const uint32_t seen = ledger_->answered_request(slot_);
    Result<std::unique_ptr<WakeThread>> made =
        WakeThread::start(ledger_->request_word(slot_), seen);
    if (!made.ok()) return made.status();
    wake_ = std::move(made.value());
  }
  return wake_->fd();
}

bool Client::has_request() {
  const std::lock_guard lock(mutex_);
  if (wake_) wake_->clear();
  return check_open().ok() && ledger_->has_request(slot_);
}

Result<std::optional<ShrinkRequest>> Client::shrink_request() {
  if (Status status = check_open(); !status.ok()) return status;
  return ledger_->shrink_request(slot_);
}

Status Client::answer(const ShrinkRequest& request, const ShrinkAnswer& answer) {
  KV_TRY(check_open());
  return ledger_->answer(slot_, request, answer);
}

Result<std::optional<uint32_t>> Client::want(uint64_t bytes, bool is_static, int64_t until_ns) {
  if (Status status = check_open(); !status.ok()) return status;
  return ledger_->want(slot_, bytes, is_static, until_ns);
}

void Client::end_wait() {
  if (check_open().ok()) ledger_->end_wait(slot_);
}

void Client::publish_evictable(uint64_t bytes) {
  if (check_open().ok()) ledger_->publish_evictable(slot_, bytes);
}

void Client::add_spare(int64_t bytes) {
  if (check_open().ok()) ledger_->add_spare(slot_, bytes);
}

void Client::touch() {
  if (check_open().ok()) ledger_->touch(slot_);
}

void Client::count_maps(uint64_t maps, uint64_t unmaps) {
  if (check_open().ok()) ledger_->count_maps(slot_, maps, unmaps);
}

Result<ClientRecord> Client::record() {
  if (Status status = check_open(); !status.ok()) return status;
  return ledger_->client(slot_);
}

Result<Descriptor> Client::share_liveness() {
  const std::lock_guard lock(mutex_);
  if (Status status = check_open(); !status.ok()) return status;
  Descriptor shared(fcntl(lock_fd_, F_DUPFD_CLOEXEC, 0));
  if (shared.get() < 0) return system_failure("fcntl(F_DUPFD_CLOEXEC)", errno);
  return shared;
}

}  // namespace kvcached
