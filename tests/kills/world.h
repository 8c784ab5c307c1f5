// One device with two clients that live through every death: `held`, a record of this process, and
// a bystander, a process that allocates and frees KV blocks within its minimum all the time.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "ledger_fixture.h"
#include "region.h"

namespace kvcached::testing {

class World {
 public:
  explicit World(std::string device);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  const std::string device;
  const std::string path = fresh_ledger_path();
  // A ledger for scenarios that create or destroy one.
  const std::string other_path = fresh_ledger_path();
  std::shared_ptr<Ledger> ledger;
  std::unique_ptr<Member> held;
  // For what `prepare` makes and `verify` looks at.
  std::shared_ptr<Ledger> other;
  std::unique_ptr<Member> member;

  // Free bytes when all subjects are gone.
  uint64_t free_bytes() const { return kCapacity - charged_; }

  // Checks that the bystander continues, and that other processes hold no memory: neither by the
  // ledger nor by the OS. All free memory can be reserved.
  void check_whole();

 private:
  struct Orders;

  void pause_bystander();

  Orders* orders_;
  pid_t bystander_;
  uint64_t charged_ = 0;
  uint64_t resident_ = 0;
};

// Gives memory to all pages that are mapped, where the CPU can write.
void touch(const Vmm& vmm, const Region& region);

// Checks that a ledger at `path` can be created, has all its capacity, and can be removed.
void check_starts_whole(const std::string& path);

// Joins, reserves and commits in a child that ends without leaving.
void leave_a_dead_client(const std::string& path, uint64_t bytes);

}  // namespace kvcached::testing
