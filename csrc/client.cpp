#include "client.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "futex.h"
#include "steps.h"

namespace kvcached {

namespace {

// The kernel closes the files of a dying process in the order of their numbers, so the lock gets a
// higher number than the memory.
Result<int> open_lock_above(const Ledger& ledger, int memory_fd) {
  KV_ASSIGN(int fd, ledger.open_lock_fd());
  const int moved = fcntl(fd, F_DUPFD_CLOEXEC, memory_fd + 1);
  const int error = errno;
  ::close(fd);
  if (moved < 0) return system_failure("fcntl(F_DUPFD_CLOEXEC)", error);
  return moved;
}

// Memory that kernels may still touch is left to the exit of the process, when the driver destroys
// the context.
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
  KV_ASSIGN(std::shared_ptr<Vmm> vmm, make_vmm(device, ledger->page_bytes()));
  return open(std::move(ledger), std::move(vmm), options);
}

Result<std::shared_ptr<Client>> Client::open(std::shared_ptr<Ledger> ledger,
                                             std::shared_ptr<Vmm> vmm,
                                             const ClientOptions& options) {
  KV_ASSIGN(int lock_fd, open_lock_above(*ledger, vmm->memory_fd()));
  step("client: about to join");
  Result<int> slot = ledger->join(options, lock_fd, vmm->memory_fd());
  step("client: joined");
  if (!slot.ok()) {
    ::close(lock_fd);
    return slot.status();
  }
  return std::shared_ptr<Client>(
      new Client(std::move(ledger), std::move(vmm), lock_fd, slot.value()));
}

Client::Client(std::shared_ptr<Ledger> ledger, std::shared_ptr<Vmm> vmm, int lock_fd, int slot)
    : ledger_(std::move(ledger)),
      vmm_(std::move(vmm)),
      streams_(vmm_),
      lock_fd_(lock_fd),
      slot_(slot),
      create_wait_(vmm_->location().on_gpu ? kCreateWaitGpu : kCreateWaitHost),
      spares_([this] { return look(); }) {
  guard_against_fork(this);
}

Client::~Client() {
  unguard_against_fork(this);
  // After a failure the record is reaped when the process has ended.
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
  KV_ASSIGN(ClientRecord own, record());
  KV_ASSIGN(LedgerUsage device, ledger_->usage());
  return slack_of(device, own, monotonic_ns());
}

Status Client::reserve_addresses(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  if (addresses_ != nullptr) {
    return failure(Code::invalid_argument, "the client has an address space of ",
                   addresses_->bytes(), " bytes already; it is kept until the client closes");
  }
  KV_ASSIGN(addresses_, AddressSpace::reserve(vmm_, bytes));
  return {};
}

std::shared_ptr<AddressSpace> Client::addresses() {
  const std::lock_guard lock(mutex_);
  return addresses_;
}

Result<std::shared_ptr<Region>> Client::reserve_region(uint64_t bytes) {
  KV_TRY(check_open());
  const std::shared_ptr<AddressSpace> space = addresses();
  if (space != nullptr && bytes > 0 && bytes % page_bytes() == 0) {
    std::shared_ptr<Region> carved = Region::carve(vmm_, space, bytes);
    if (carved != nullptr) return carved;
  }
  return Region::reserve(vmm_, bytes);
}

Status Client::reserve_static(uint64_t bytes) {
  KV_TRY(check_open());
  Status status = ledger_->reserve_static(slot_, bytes);
  if (status.code != Code::no_room) return status;
  spares_.give_back(nullptr);
  return ledger_->reserve_static(slot_, bytes);
}

template <class Create>
Result<std::vector<Handle>> Client::create_with_retries(Create create) {
  using std::chrono::milliseconds;
  using Clock = Streams::Clock;
  const Clock::time_point start = Clock::now();
  const Clock::duration wait = start < retry_from_.load() ? milliseconds(0) : create_wait_.load();
  const Clock::time_point deadline = start + wait;
  size_t tries = 1;
  for (Pause pause(milliseconds(20));; pause.sleep(), ++tries) {
    Result<std::vector<Handle>> pages = create();
    const bool full = !pages.ok() && pages.status().code == Code::no_room;
    if (!full) return pages;
    const Clock::time_point now = Clock::now();
    if (now < deadline) continue;
    retry_from_ = now + kQuietWaits * create_wait_.load();
    Status status = pages.status();
    const int64_t waited_ms = std::chrono::duration_cast<milliseconds>(wait).count();
    status.message +=
        " (" + std::to_string(tries) + " tries in " + std::to_string(waited_ms) +
        " ms, although the ledger granted it: memory is used outside of the ledger. "
        "End the processes that hold it, lower the device's capacity, or pass a longer "
        "time to set_create_wait if a killed process is still being cleaned up)";
    return status;
  }
}

Result<std::vector<Handle>> Client::create_pages(size_t count) {
  return create_with_retries([&] { return vmm_->create(count); });
}

Result<std::vector<Handle>> Client::create_block(size_t count) {
  return create_with_retries([&] { return vmm_->create_block(count); });
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

Status Client::set_limit(uint64_t bytes) {
  KV_TRY(check_open());
  KV_TRY(ledger_->set_limit(slot_, bytes));
  Result<ClientRecord> now = ledger_->client(slot_);
  if (now.ok() && now.value().elastic_bytes() > bytes) spares_.give_back(nullptr);
  return {};
}

Result<int> Client::fileno() {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  if (!wake_) {
    const uint32_t seen = ledger_->answered_request(slot_);
    KV_ASSIGN(wake_, WakeThread::start(ledger_->request_word(slot_), seen));
  }
  return wake_->fd();
}

bool Client::has_request() {
  const std::lock_guard lock(mutex_);
  if (wake_) wake_->clear();
  return check_open().ok() && ledger_->has_request(slot_);
}

Result<Descriptor> Client::share_liveness() {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  Descriptor shared(fcntl(lock_fd_, F_DUPFD_CLOEXEC, 0));
  if (shared.get() < 0) return system_failure("fcntl(F_DUPFD_CLOEXEC)", errno);
  return shared;
}

}  // namespace kvcached
