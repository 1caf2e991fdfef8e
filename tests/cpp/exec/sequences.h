#pragma once

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "adaptrt/exec/executor.h"
#include "fake_engine.h"
#include "fake_grammar.h"

namespace adaptrt::test {

inline const std::vector<TokenId> kPrompt = {5, 9, 2, 7, 1, 3, 8};

inline Request sampled(std::vector<TokenId> prompt, std::int32_t max_tokens, std::uint64_t seed) {
  Request request = make_request(std::move(prompt), max_tokens);
  request.sampling_config.top_k = 30;
  request.sampling_config.temperature = 2.0;
  request.sampling_config.seed = seed;
  return request;
}

inline Request several(Request request, std::int32_t num_sequences) {
  request.num_return_sequences = num_sequences;
  return request;
}

inline std::unique_ptr<Executor> make_guided(const ExecutorConfig& config = {},
                                             FakeEngine::Options options = {}) {
  auto executor = make_executor(config, options);
  executor->set_grammar_compiler(std::make_shared<FakeCompiler>());
  return executor;
}

/// Returns the results of one request by sequence_index, in order. Fails the test on an error, and on a wrong
/// is_final or is_sequence_final.
inline std::map<std::int32_t, std::vector<Result>> results_of(Executor& executor, RequestId id) {
  std::map<std::int32_t, std::vector<Result>> results;
  const auto responses = collect(executor, id);
  for (const Response& response : responses) {
    BOOST_TEST_REQUIRE(response.error_msg == "");
    auto& of_sequence = results[response.result.sequence_index];
    BOOST_TEST((of_sequence.empty() || !of_sequence.back().is_sequence_final));
    of_sequence.push_back(response.result);
    BOOST_TEST(response.result.is_final == (&response == &responses.back()));
  }
  for (const auto& [index, of_sequence] : results) BOOST_TEST(of_sequence.back().is_sequence_final);
  return results;
}

inline std::vector<TokenId> tokens_of(const std::vector<Result>& results) {
  std::vector<TokenId> tokens;
  for (const Result& result : results) {
    const auto& part = result.output_token_ids.at(0);
    tokens.insert(tokens.end(), part.begin(), part.end());
  }
  return tokens;
}

/// Returns the tokens of the sequences when each is requested alone.
inline std::vector<std::vector<TokenId>> each_alone(const Request& request) {
  std::vector<std::vector<TokenId>> all;
  for (std::int32_t i = 0; i < request.num_sequences(); ++i) {
    Request alone = several(request, 1);
    alone.sampling_config.num_return_sequences.reset();
    alone.sampling_config.seed = request.sampling_config.seed.value_or(0) + static_cast<std::uint64_t>(i);
    const auto executor = make_guided();
    all.push_back(tokens_of(results_of(*executor, executor->enqueue_request(alone)).at(0)));
  }
  return all;
}

}  // namespace adaptrt::test
