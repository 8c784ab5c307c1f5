#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <string>

#include "backends.h"
#include "check.h"
#include "control.h"
#include "kv_cache.h"
#include "weight_fixture.h"

namespace kvcached::testing {

namespace {

using std::chrono::milliseconds;

std::string device_under_test;

constexpr uint64_t kCapacity = kWeightCapacity;

struct Fixture : WeightFixture {
  Fixture() : WeightFixture(device_under_test) {}
};

void an_arena_is_leased_before_its_first_page() {
  Fixture f;
  const auto arena = value_of(WeightArena::create(f.client, 5 * kPage + 1));
  CHECK(arena->bytes() == 6 * kPage && f.static_bytes() == 6 * kPage);
  CHECK(arena->backed_bytes() == 0);
  CHECK_OK(arena->back(1));
  CHECK(arena->backed_bytes() == kPage);
  CHECK_OK(arena->back(2 * kPage, 2 * kPage));
  CHECK_OK(arena->back(3 * kPage, 100 * kPage));
  CHECK(arena->backed_bytes() == 4 * kPage);
  CHECK_OK(arena->back(5 * kPage, 100 * kPage));
  CHECK(arena->backed_bytes() == 6 * kPage);
  CHECK_CODE(arena->back(7 * kPage), Code::invalid_argument);
  CHECK(is_accessible(arena->region()->address() + 6 * kPage - 1));
  CHECK_CODE(WeightArena::create(f.client, kCapacity).status(), Code::no_room);
  CHECK_CODE(WeightArena::create(f.client, 0).status(), Code::invalid_argument);
  CHECK_OK(arena->close());
  CHECK_OK(arena->close());
  CHECK(f.static_bytes() == 0);
  CHECK_CODE(arena->back(1), Code::closed);
  CHECK(!is_accessible(arena->region()->address()));
}

// create, map and set_access fail in turn, then each with the release that follows.
void a_failing_call_leaves_what_close_gives_back() {
  for (size_t times = 1; times <= 2; ++times) {
    for (size_t call = 1; call <= 3; ++call) {
      Fixture f;
      const auto arena = value_of(WeightArena::create(f.client, 4 * kPage));
      CHECK_OK(arena->back(kPage));
      f.vmm->fail_at(call, times);
      CHECK(!arena->back(4 * kPage).ok());
      f.vmm->fail_at(0, 0);
      CHECK(f.static_bytes() == 4 * kPage);
      CHECK_OK(arena->close());
    }
  }
}

void a_failing_close_keeps_the_lease_and_can_be_repeated() {
  for (size_t call = 1; call <= 2; ++call) {  // unmap, release
    Fixture f;
    const auto arena = value_of(WeightArena::create(f.client, 4 * kPage));
    CHECK_OK(arena->back(4 * kPage));
    f.vmm->fail_at(call);
    CHECK_CODE(arena->close(), Code::system_call);
    CHECK(f.static_bytes() == 4 * kPage);
    CHECK_OK(arena->close());
    CHECK(f.static_bytes() == 0);
  }
}

void weights_and_kv_share_one_address_space() {
  Fixture f;
  CHECK_OK(f.client->reserve_addresses(32 * kPage));
  const size_t calls = f.vmm->calls().size();
  for (int turn = 0; turn < 4; ++turn) {
    const auto arena = value_of(WeightArena::create(f.client, (8 + 4 * (turn % 2)) * kPage));
    const auto cache = value_of(KvCache::create(
        f.client, {.slab_pages = {1, 2}, .slabs = 4, .blocks_per_slab = 4, .reserved_blocks = 0}));
    CHECK_OK(arena->back(arena->bytes()));
    CHECK_OK(arena->close());
  }
  const std::vector<VmmCall> all = f.vmm->calls();
  for (size_t i = calls; i < all.size(); ++i) {
    CHECK(all[i] != VmmCall::reserve && all[i] != VmmCall::free_address);
  }
  CHECK(f.client->addresses()->free_bytes() == 32 * kPage);
  CHECK_CODE(f.client->reserve_addresses(kPage), Code::invalid_argument);
}

// Ranges never overlap, and all of the space comes back as one.
void random_ranges_agree_with_a_map() {
  const auto vmm = value_of(make_vmm(device_under_test, kPage));
  const auto space = value_of(AddressSpace::reserve(vmm, 64 * kPage));
  std::mt19937 random(3);
  std::map<uint64_t, uint64_t> taken;
  for (int step = 0; step < 4000; ++step) {
    const uint64_t bytes = (1 + random() % 12) * kPage;
    if (random() % 2 == 0 && !taken.empty()) {
      const auto at = std::next(taken.begin(), static_cast<int>(random() % taken.size()));
      space->give(at->first, at->second);
      taken.erase(at);
    } else if (const uint64_t address = space->take(bytes); address != 0) {
      const auto after = taken.lower_bound(address);
      CHECK(after == taken.end() || address + bytes <= after->first);
      CHECK(after == taken.begin() ||
            std::prev(after)->first + std::prev(after)->second <= address);
      taken.emplace(address, bytes);
    } else {
      CHECK(space->largest_free_bytes() < bytes);
    }
  }
  for (const auto& [address, bytes] : taken) space->give(address, bytes);
  CHECK(space->free_bytes() == 64 * kPage && space->largest_free_bytes() == 64 * kPage);
}

std::shared_ptr<WeightLinks> links_of(const std::shared_ptr<Client>& client) {
  return value_of(WeightLinks::open(client, {.threads = 3, .staging_bytes = 2 * kPage}));
}

std::shared_ptr<WeightLoad> start(const std::shared_ptr<WeightArena>& arena,
                                  std::vector<WeightPiece> pieces, const LoadOptions& options) {
  return value_of(WeightLoad::start(arena, std::move(pieces), links_of(arena->client()), options));
}

void every_byte_arrives_whatever_the_chunks() {
  for (const uint64_t chunk : {uint64_t{1000}, uint64_t{4096}, uint64_t{1} << 20}) {
    Fixture f;
    const SourceFile file(3 * kPage + 77);
    const uint64_t half = file.content.size() / 2;
    const auto arena = value_of(WeightArena::create(f.client, 4 * kPage));
    const auto load = start(arena,
                            {{file.path, half, file.content.size() - half, half + 1},
                             {file.path, 0, half, 0},
                             {file.path, 0, 0, 4 * kPage}},
                            {.chunk_bytes = chunk});
    CHECK(load->wait(kLong));
    CHECK_OK(load->outcome());
    CHECK(load->started_bytes() == file.content.size() &&
          load->total_bytes() == file.content.size());
    const char* const loaded = reinterpret_cast<const char*>(cpu_view(arena->region()->address()));
    CHECK(std::memcmp(loaded, file.content.data(), half) == 0);
    CHECK(std::memcmp(loaded + half + 1, file.content.data() + half, file.content.size() - half) ==
          0);
    CHECK_OK(arena->close());
  }
}

void a_load_ends_with_the_first_failure() {
  Fixture f;
  const SourceFile file(kPage);
  const auto arena = value_of(WeightArena::create(f.client, 4 * kPage));
  const LoadOptions options{.chunk_bytes = 4096};
  const auto missing = start(arena, {{file.path + "-not", 0, kPage, 0}}, options);
  CHECK(missing->wait(kLong));
  CHECK(missing->outcome().code == Code::weight_file);
  const auto cut = start(arena, {{file.path, 0, 2 * kPage, 0}}, options);
  CHECK(cut->wait(kLong));
  CHECK(cut->outcome().code == Code::weight_file);
  const std::string expected = file.path + " ends at byte " + std::to_string(kPage);
  CHECK(cut->outcome().message.find(expected) != std::string::npos);
  const auto other = value_of(WeightArena::create(f.client, 4 * kPage));
  f.vmm->fail_at(1, 100);
  const auto unmapped = start(other, {{file.path, 0, kPage, 0}}, options);
  CHECK(unmapped->wait(kLong));
  CHECK(unmapped->outcome().code == Code::system_call);
  f.vmm->fail_at(0, 0);
  CHECK_OK(other->close());
  CHECK_CODE(
      WeightLoad::start(arena, {{file.path, 0, kPage, 4 * kPage}}, links_of(f.client), options)
          .status(),
      Code::invalid_argument);
  CHECK_OK(arena->close());
}

void a_load_is_cancelled_at_once() {
  Fixture f;
  const SourceFile file(4 * kPage);
  const auto arena = value_of(WeightArena::create(f.client, 4 * kPage));
  // Would take a week.
  const auto slow = start(arena, {{file.path, 0, 4 * kPage, 0}}, {.bytes_per_s = 1});
  CHECK(!slow->wait(milliseconds(1)));
  slow->cancel();
  CHECK(slow->wait(kLong));
  CHECK(slow->outcome().code == Code::cancelled);
  (void)start(arena, {{file.path, 0, 4 * kPage, 0}}, {.bytes_per_s = 1});  // dropped: the same
  const auto done = start(arena, {{file.path, 0, 4 * kPage, 0}}, {});
  CHECK(done->wait(kLong));
  done->cancel();
  CHECK_OK(done->outcome());
  CHECK_OK(arena->close());
}

// Nothing is unmapped under a copy.
void a_client_does_not_close_under_its_load() {
  const SourceFile file(16 * kPage);
  Fixture f;
  const auto links = value_of(WeightLinks::open(f.client, {.threads = 2}));
  const auto arena = value_of(WeightArena::create(f.client, 16 * kPage));
  {
    const auto load = value_of(WeightLoad::start(arena, {{file.path, 0, 16 * kPage, 0}}, links,
                                                 {.chunk_bytes = kPage, .bytes_per_s = kPage}));
    CHECK_CODE(f.client->close(), Code::in_use);
    CHECK(f.static_bytes() == 16 * kPage);
    load->cancel();
    CHECK(load->wait(kLong));
  }
  CHECK_OK(arena->close());
}

// No thread can start while this exists, since its stack would not fit.
class NoThreads {
 public:
  NoThreads() {
    CHECK(pthread_getattr_default_np(&before_) == 0);
    pthread_attr_t huge;
    CHECK(pthread_attr_init(&huge) == 0);
    CHECK(pthread_attr_setstacksize(&huge, size_t{1} << 47) == 0);
    CHECK(pthread_setattr_default_np(&huge) == 0);
  }
  ~NoThreads() { CHECK(pthread_setattr_default_np(&before_) == 0); }

 private:
  pthread_attr_t before_;
};

void threads_are_bounded() {
  Fixture f;
  for (const size_t count : {size_t{0}, WeightLinks::kMaxThreads + 1, size_t{1} << 31}) {
    CHECK_CODE(WeightLinks::open(f.client, {.threads = count}).status(), Code::invalid_argument);
  }
}

void threads_that_cannot_start_are_named() {
  const SourceFile file(kPage);
  Fixture f;
  const auto links = value_of(WeightLinks::open(f.client, {.threads = 2}));
  const auto arena = value_of(WeightArena::create(f.client, kPage));
  const auto start = [&] {
    return WeightLoad::start(arena, {{file.path, 0, kPage, 0}}, links, {});
  };
  {
    const NoThreads none;
    CHECK_CODE(start().status(), Code::system_call);
    CHECK_CODE(f.client->fileno().status(), Code::system_call);
    f.client->spares().allow();
    CHECK_CODE(f.client->spares().start(), Code::system_call);
  }
  CHECK(value_of(start())->wait(kLong));
  CHECK_OK(arena->close());
}

void a_rate_spreads_transfers_over_time() {
  ByteRate rate(1000);
  const auto first = rate.book(500);
  const auto second = rate.book(250);
  CHECK(second - first >= milliseconds(500));
  CHECK(rate.book(1) - second >= milliseconds(250));
}

}  // namespace

void test_weights(const std::string& device) {
  device_under_test = device;
  an_arena_is_leased_before_its_first_page();
  a_failing_call_leaves_what_close_gives_back();
  a_failing_close_keeps_the_lease_and_can_be_repeated();
  weights_and_kv_share_one_address_space();
  random_ranges_agree_with_a_map();
  every_byte_arrives_whatever_the_chunks();
  a_load_ends_with_the_first_failure();
  a_load_is_cancelled_at_once();
  a_client_does_not_close_under_its_load();
  threads_are_bounded();
  threads_that_cannot_start_are_named();
  a_rate_spreads_transfers_over_time();
}

}  // namespace kvcached::testing
