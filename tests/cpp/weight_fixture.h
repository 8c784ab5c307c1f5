// A client on a separate ledger for tests of weights, and files to load.
#pragma once

#include <unistd.h>

#include <fstream>
#include <random>
#include <string>

#include "check.h"
#include "vmm_fault.h"
#include "weight_load.h"

namespace kvcached::testing {

inline constexpr uint64_t kWeightCapacity = 64 * kPage;
inline constexpr std::chrono::milliseconds kLong{60'000};

struct WeightFixture {
  explicit WeightFixture(const std::string& device)
      : vmm(std::make_shared<FaultVmm>(value_of(make_vmm(device, kPage)))) {}

  std::string path = fresh_ledger_path();
  std::shared_ptr<Ledger> ledger = value_of(Ledger::open({path, kWeightCapacity, kPage}));
  std::shared_ptr<FaultVmm> vmm;
  std::shared_ptr<Client> client = value_of(Client::open(ledger, vmm, {.name = "test"}));

  ~WeightFixture() {
    CHECK(static_bytes() == 0);
    CHECK_OK(client->close());
    CHECK_OK(ledger->destroy(false));
  }
  uint64_t static_bytes() { return value_of(client->record()).static_bytes; }
};

// A file of random bytes, and what is in it.
struct SourceFile {
  std::string path = "/dev/shm/prism-cpp-weights-" + std::to_string(getpid());
  std::string content;

  explicit SourceFile(size_t bytes) {
    std::mt19937 random(1);
    for (size_t i = 0; i < bytes; ++i) content.push_back(static_cast<char>(random()));
    std::ofstream(path, std::ios::binary) << content;
  }
  ~SourceFile() { (void)unlink(path.c_str()); }
};

}  // namespace kvcached::testing
