// Sliding windows and chunks: a token attends to the right keys, wherever its window or its chunk begins.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"

namespace adaptrt::testing::window_test {
namespace {

BOOST_AUTO_TEST_SUITE(window)

BOOST_DATA_TEST_CASE(a_decode_sees_what_it_sees_in_the_whole_prompt,
                     boost::unit_test::data::make({16, 23, 16, 23}) ^
                         boost::unit_test::data::make({false, false, true, true}) ^
                         boost::unit_test::data::make({0, 70, 45, 0}),
                     tokens_per_block, int8_kv_cache, chunk) {
  // With a window of 70 positions and tiles of 64, the first visible position takes all places in a tile.
  constexpr std::int32_t kLength = 210;
  RandomModel model({.sliding_window = chunk == 0 ? 70 : 0,
                     .chunk = chunk,
                     .tokens_per_block = tokens_per_block,
                     .int8_kv_cache = int8_kv_cache});
  Random random(4);
  Piece prompt{.prompt_length = kLength};
  for (std::int32_t i = 0; i < kLength; ++i) {
    prompt.tokens.push_back(static_cast<std::int32_t>(random.below(model.program.vocab_size)));
  }
  prompt.blocks.resize(static_cast<std::size_t>((kLength + tokens_per_block - 1) / tokens_per_block));
  std::iota(prompt.blocks.begin(), prompt.blocks.end(), 0);
  const auto engine = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1));
  engine->allocate_kv_blocks(static_cast<std::int32_t>(prompt.blocks.size()));
  const auto whole = logits_of(engine.get(), StepArrays({prompt}).input());
  const auto vocab = static_cast<std::size_t>(model.program.vocab_size);
  for (std::int32_t position = 0; position < kLength; ++position) {
    Piece decode = prompt;
    decode.tokens = {prompt.tokens[static_cast<std::size_t>(position)]};
    decode.first_position = position;
    const auto logits = logits_of(engine.get(), StepArrays({decode}).input());
    const float* expected = whole.data() + static_cast<std::size_t>(position) * vocab;
    BOOST_TEST(std::memcmp(logits.data(), expected, vocab * sizeof(float)) == 0, "position " << position);
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::window_test
