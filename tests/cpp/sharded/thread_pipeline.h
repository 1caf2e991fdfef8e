#pragma once

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/sharded/sharded_engine.h"
#include "sharded/thread_ranks.h"

namespace adaptrt::testing {

/// Engines of all pipeline stages; those after the first run in threads.
class Pipeline {
 public:
  static constexpr std::int32_t kBlocks = 40;

  Pipeline(std::int32_t num_stages, const std::function<Program(std::int32_t stage)>& program_of,
           const PipelineFacts& facts, const std::shared_ptr<StepProfile>& profile = nullptr)
      : room_(std::make_shared<MailRoom>(num_stages, true)) {
    for (std::int32_t stage = num_stages - 1; stage >= 0; --stage) {
      auto communicator = std::make_shared<ThreadCommunicator>(room_, stage);
      std::shared_ptr<Engine> local = make_cpu_engine(program_of(stage), std::make_shared<ThreadPool>(1), "",
                                                      stage == 0 ? profile : nullptr, communicator);
      if (stage > 0) {
        others_.emplace_back([local, communicator] { serve_rank(*local, *communicator); });
        continue;
      }
      BOOST_CHECK_THROW(make_sharded_engine(local, communicator), EngineError);
      engine = make_sharded_engine(std::move(local), std::move(communicator), facts, profile);
    }
    if (engine->info().has_kv_cache) engine->allocate_kv_blocks(kBlocks);
    if (engine->info().has_encoder()) engine->allocate_cross_kv_blocks(kBlocks);
  }
  ~Pipeline() { engine.reset(); }
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;
  Pipeline(Pipeline&&) = delete;
  Pipeline& operator=(Pipeline&&) = delete;

 private:
  std::shared_ptr<MailRoom> room_;
  std::vector<std::jthread> others_;

 public:
  std::unique_ptr<Engine> engine;
};

}  // namespace adaptrt::testing
