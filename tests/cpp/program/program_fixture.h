#pragma once

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <variant>

#include "adaptrt/core/error.h"
#include "adaptrt/core/thread_pool.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/engine/engine.h"
#include "cpu/random_model.h"

namespace adaptrt::testing {

/// A size that no buffer or matrix has.
inline constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

/// Returns an op of the body.
template <class OpType>
OpType& op_at(Program* program, std::size_t index) {
  return std::get<OpType>(program->body.at(index));
}

/// A random model whose program tests change. Ops: 0 embedding, 1 rope, then for each layer: 2 norm, 3 qkv, 4
/// attention, 5 dense, 6 norm, 7 gate-up, 8 down; the last layer keeps only the logit rows after its
/// attention. Buffers: 0 hidden, 1 normed, 2 qkv, 3 attended, 4 gated, 5 cosine, 6 sine, 7 last, 8 logits.
struct ProgramFixture {
  ProgramFixture() : model({.max_rank = 4}) {}

  /// Checks that the changed program has a problem with these words, and that no engine can be made of it.
  void finds(const std::string& words, const std::function<void(Program*)>& change) {
    Program program = model.program;
    change(&program);
    const auto problems = program.validate();
    std::string all;
    for (const auto& problem : problems.list()) all += "\n  " + problem;
    BOOST_TEST(all.find(words) != std::string::npos, "'" << words << "' is not among:" << all);
    BOOST_CHECK_THROW((void)make_cpu_engine(program, std::make_shared<ThreadPool>(1)), EngineError);
  }

  /// Checks that no problem of the changed program has these words.
  void does_not_find(const std::string& words, const std::function<void(Program*)>& change) {
    Program program = model.program;
    change(&program);
    const auto problems = program.validate();
    for (const auto& problem : problems.list()) {
      BOOST_TEST(problem.find(words) == std::string::npos, problem);
    }
  }

  RandomModel model;
};

}  // namespace adaptrt::testing
