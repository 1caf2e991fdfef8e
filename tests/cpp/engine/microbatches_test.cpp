// Micro-batches of whole sequences for pipeline stages.

#include "adaptrt/engine/microbatches.h"

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <utility>
#include <vector>

namespace adaptrt::testing::microbatches_test {
namespace {

using Ends = std::vector<std::pair<std::size_t, std::size_t>>;

Ends runs_of(const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> offsets{0};
  for (const std::int32_t length : lengths) offsets.push_back(offsets.back() + length);
  Ends ends;
  for (const SequenceRun& run : runs_of_whole_sequences(offsets)) ends.emplace_back(run.first, run.last);
  return ends;
}

BOOST_AUTO_TEST_SUITE(microbatches)

BOOST_AUTO_TEST_CASE(runs_have_enough_tokens) {
  BOOST_TEST((runs_of({1}) == Ends{{0, 1}}));
  BOOST_TEST((runs_of({20, 43}) == Ends{{0, 2}}));
  BOOST_TEST((runs_of({64}) == Ends{{0, 1}}));
  BOOST_TEST((runs_of({500}) == Ends{{0, 1}}));
  BOOST_TEST((runs_of({63, 1, 64, 63, 2}) == Ends{{0, 2}, {2, 3}, {3, 5}}));
  BOOST_TEST((runs_of({64, 63}) == Ends{{0, 2}}));  // the rest is too short for a micro-batch of its own
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::microbatches_test
