#include "cuda_program/weight_ring.h"

#include <array>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "cuda_program/weight_sections.h"
#include "support/host_device.h"

namespace adaptrt::testing::weight_ring_test {
namespace {

/// A ring whose sections have two pieces of one number each, and a stream that reads them in runs.
struct Fixture {
  explicit Fixture(std::size_t count, StreamTime time = StreamTime::kLate)
      : device(std::size_t{1} << 20, time), stream(device.make_stream()) {
    ring.emplace(device, std::vector<std::size_t>(count, 2 * WeightRing::kAlignment));
    for (std::size_t section = 0; section < count; ++section) {
      for (std::size_t piece = 0; piece < 2; ++piece) {
        const WeightRing::Place place = ring->append(section, sizeof(std::int32_t));
        places.at(piece).push_back(place.on_device);
        const auto value = static_cast<std::int32_t>(10 * section + piece);
        std::memcpy(place.on_host, &value, sizeof value);
      }
    }
  }

  /// Enqueues the work of a run with a section: notes its first number, and its second.
  void use(std::size_t section) {
    for (const auto& pieces : places) {
      submit(host_stream(stream->handle()), [this, address = pieces[section]] {
        std::int32_t value = -1;
        if (device.owns(address, sizeof value)) std::memcpy(&value, address, sizeof value);
        found.push_back(value);
      });
    }
  }
  void run() {
    for (std::size_t section = 0; section < places[0].size(); ++section) {
      ring->begin(section, *stream);
      use(section);
      ring->end(section, *stream);
    }
  }

  HostDevice device;
  std::unique_ptr<Stream> stream;
  std::array<std::vector<std::byte*>, 2> places;
  std::vector<std::int32_t> found;
  std::optional<WeightRing> ring;
};

BOOST_AUTO_TEST_SUITE(weight_ring)

BOOST_AUTO_TEST_CASE(every_run_sees_all_sections) {
  for (const StreamTime time : {StreamTime::kAtOnce, StreamTime::kLate}) {
    for (const std::size_t count : {1, 2, 3, 4, 5}) {
      Fixture f(count, time);
      std::vector<std::int32_t> expected;
      for (int run = 0; run < 3; ++run) {
        f.run();
        for (std::size_t section = 0; section < count; ++section) {
          expected.push_back(static_cast<std::int32_t>(10 * section));
          expected.push_back(static_cast<std::int32_t>(10 * section + 1));
        }
      }
      f.stream->synchronize();
      BOOST_TEST_INFO_SCOPE(count << " sections");
      BOOST_TEST(f.found == expected, boost::test_tools::per_element());
    }
  }
}

BOOST_AUTO_TEST_CASE(pieces_are_aligned) {
  const Fixture f(3);
  for (std::size_t section = 0; section < 3; ++section) {
    BOOST_TEST(f.places[1][section] - f.places[0][section] == std::ptrdiff_t{WeightRing::kAlignment});
  }
}

BOOST_AUTO_TEST_CASE(sections_are_copied_ahead_of_use) {
  Fixture f(5);
  f.run();
  const std::int64_t copies = f.device.calls("copy_to_device");
  // The first two sections of the next run are on their way.
  f.ring->begin(0, *f.stream);
  f.ring->begin(1, *f.stream);
  BOOST_TEST(f.device.calls("copy_to_device") == copies);
  BOOST_TEST(copies == 7);
}

BOOST_AUTO_TEST_CASE(two_sections_stay_where_they_are) {
  Fixture f(2);
  f.run();
  f.run();
  BOOST_TEST(f.device.calls("copy_to_device") == 2);
}

BOOST_AUTO_TEST_CASE(a_slot_is_filled_when_its_section_was_used) {
  Fixture f(3);
  f.run();
  // The ring waits for its copies, before the stream that reads the slots was told to work.
  f.ring.reset();
  f.stream->synchronize();
  BOOST_TEST(f.found == (std::vector<std::int32_t>{0, 1, 10, 11, 20, 21}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_run_after_one_that_failed_sees_all_sections) {
  for (const char* call : {"copy_to_device", "record", "wait"}) {
    for (int successes = 0; successes < 6; ++successes) {
      Fixture f(4);
      f.device.fail(call, Failure::kOnce, successes);
      BOOST_CHECK_THROW(f.run(), StepError);
      f.stream->synchronize();
      f.found.clear();
      f.run();
      f.stream->synchronize();
      BOOST_TEST_INFO_SCOPE(call << " after " << successes);
      BOOST_TEST(f.found == (std::vector<std::int32_t>{0, 1, 10, 11, 20, 21, 30, 31}),
                 boost::test_tools::per_element());
    }
  }
}

BOOST_AUTO_TEST_CASE(as_few_sections_as_possible_stream) {
  const WeightSizes sizes{.outside = 100, .sections = {10, 8, 10, 9, 10, 10}};
  const auto streamed = [&](std::size_t weight_memory) { return streamed_sections(sizes, weight_memory); };
  const std::vector<bool> none(6, false);
  const std::vector<bool> all(6, true);
  BOOST_TEST((streamed(157) == none));
  BOOST_TEST((streamed(156) == std::vector<bool>{false, true, false, true, false, true}));
  BOOST_TEST((streamed(149) == std::vector<bool>{false, true, true, false, true, true}));
  BOOST_TEST((streamed(130) == std::vector<bool>{false, true, true, true, true, true}));
  BOOST_TEST((streamed(129) == all));
  BOOST_TEST((streamed(120) == all));
  BOOST_CHECK_EXCEPTION(static_cast<void>(streamed(119)), ConfigError, [](const ConfigError& error) {
    return std::string(error.what()) ==
           "weight_memory is 119; expected at least 120: 100 bytes stay on the GPU, and two layers of at "
           "most "
           "10 bytes take turns there";
  });
}

BOOST_AUTO_TEST_CASE(a_program_of_few_sections_needs_no_more_memory_than_without_a_limit) {
  BOOST_CHECK_EXCEPTION(static_cast<void>(streamed_sections({.outside = 100, .sections = {10}}, 109)),
                        ConfigError, [](const ConfigError& error) {
                          return std::string(error.what()).find("expected at least 110") != std::string::npos;
                        });
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::weight_ring_test
