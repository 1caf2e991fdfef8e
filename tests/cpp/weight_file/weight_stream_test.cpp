#include "adaptrt/weight_file/weight_stream.h"

#include <boost/test/unit_test.hpp>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "files.h"

namespace adaptrt::testing::weight_stream_test {
namespace {

constexpr std::size_t kFileBytes = 64 * kFilePage;

/// A stream of units of different sizes, contiguous in the file.
struct Streamed {
  Streamed(std::size_t ring_pages, std::size_t first_again, const std::vector<std::size_t>& unexpected = {})
      : file(kFileBytes), weights(std::make_shared<WeightFile>(file.path())) {
    std::vector<WeightStream::Unit> units;
    std::size_t offset = 64;
    for (const std::size_t bytes : {5000U, 100U, 9000U, 4096U, 12000U, 64U}) {
      ranges.push_back({offset, bytes});
      units.push_back({FilePages({{offset, bytes}})});
      offset += bytes + 640;
    }
    for (const std::size_t unit : unexpected) units[unit].is_unexpected = true;
    stream = std::make_unique<WeightStream>(weights, std::move(units), ring_pages * kFilePage, first_again);
  }

  void use(std::size_t unit) {
    const auto held = stream->hold(unit);
    const FileRange& range = ranges[unit];
    for (std::size_t at = range.offset; at < range.end(); at += 13) {
      BOOST_REQUIRE(*stream->address_of(unit, at) == TestFile::byte_at(at));
    }
  }

  TestFile file;
  std::shared_ptr<WeightFile> weights;
  std::vector<FileRange> ranges;
  std::unique_ptr<WeightStream> stream;
};

}  // namespace

BOOST_AUTO_TEST_SUITE(weight_stream)

BOOST_AUTO_TEST_CASE(units_come_round_after_round) {
  for (const std::size_t ring_pages : {4U, 5U, 7U, 40U}) {
    Streamed streamed(ring_pages, 2);
    for (std::size_t unit = 0; unit < 6; ++unit) streamed.use(unit);
    for (int round = 0; round < 50; ++round) {
      for (std::size_t unit = 2; unit < 6; ++unit) streamed.use(unit);
    }
  }
}

BOOST_AUTO_TEST_CASE(any_unit_can_be_asked_for) {
  Streamed streamed(5, 0);
  std::mt19937 random(3);
  for (int i = 0; i < 500; ++i) streamed.use(random() % 6);
}

BOOST_AUTO_TEST_CASE(units_that_are_not_expected_are_not_read) {
  Streamed streamed(20, 0, {0, 3});
  const auto bytes_of = [&](const std::vector<std::size_t>& units) {
    std::uint64_t bytes = 0;
    for (const std::size_t unit : units) bytes += pages_of(streamed.ranges[unit]).bytes;
    return bytes;
  };
  const std::vector<std::size_t> expected{1, 2, 4, 5};
  for (int round = 0; round < 3; ++round) {
    for (const std::size_t unit : expected) streamed.use(unit);
  }
  streamed.stream->expect(4, false);
  streamed.stream->expect(0, true);
  for (int round = 0; round < 3; ++round) {
    for (const std::size_t unit : {0U, 1U, 2U, 5U}) streamed.use(unit);
  }
  for (const std::size_t unit : {3U, 0U, 4U, 1U}) streamed.use(unit);
  // At most one round is prefetched, and the discarded units once more.
  streamed.stream.reset();
  BOOST_TEST(streamed.weights->bytes_read() <=
             5 * bytes_of(expected) + 5 * bytes_of({0, 1, 2, 5}) + 2 * bytes_of({0, 1, 2, 3, 4, 5}));
}

BOOST_AUTO_TEST_CASE(unexpected_units_alone_do_not_stop_a_stream) {
  Streamed streamed(4, 0, {0, 1, 2, 3, 4, 5});
  std::mt19937 random(4);
  for (int i = 0; i < 50; ++i) {
    const std::size_t unit = random() % 6;
    streamed.stream->expect(random() % 6, i % 2 == 0);
    streamed.use(unit);
  }
}

BOOST_AUTO_TEST_CASE(a_unit_that_cannot_be_read_is_an_error_whenever_it_is_asked_for) {
  Streamed streamed(4, 0);
  streamed.use(0);
  streamed.file.cut(streamed.ranges[4].offset + 10);
  streamed.use(1);
  for (int i = 0; i < 3; ++i) {
    BOOST_CHECK_EXCEPTION(streamed.use(4), StepError, [&](const StepError& error) {
      return std::string(error.what()).starts_with(streamed.file.path() + ": ends at byte ");
    });
    streamed.use(0);
  }
  streamed.file.restore(kFileBytes);
  for (std::size_t unit = 0; unit < 6; ++unit) streamed.use(unit);
}

BOOST_AUTO_TEST_CASE(a_stream_ends_while_it_reads) {
  for (int i = 0; i < 20; ++i) {
    Streamed streamed(4, 0);
    if (i % 2 == 0) streamed.use(static_cast<std::size_t>(i) % 6);
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace adaptrt::testing::weight_stream_test
