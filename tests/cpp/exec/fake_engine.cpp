#include "fake_engine.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "adaptrt/core/error.h"
#include "adaptrt/sched/invariants.h"
#include "lora/hooked_pages.h"
#include "support/found_highest.h"

namespace adaptrt::test {
namespace {

std::uint64_t mix(std::uint64_t state, std::uint64_t value) {
  state ^= value + 0x9e3779b97f4a7c15U + (state << 6) + (state >> 2);
  state *= 0xbf58476d1ce4e5b9U;
  return state ^ (state >> 31);
}

/// Returns the value that a token writes to the KV cache.
std::uint64_t slot_value(TokenId token, std::int32_t position, std::uint64_t task_id) {
  return mix(mix(mix(1, static_cast<std::uint64_t>(token)), static_cast<std::uint64_t>(position)), task_id);
}

void write_logits(std::uint64_t hash, std::int64_t vocab_size, float* logits) {
  for (std::int64_t i = 0; i < vocab_size; ++i) {
    logits[i] = static_cast<float>(mix(hash, static_cast<std::uint64_t>(i)) % 10007) / 1000.0F;
  }
}

void write_hidden(std::uint64_t hash, std::int64_t hidden_size, float* hidden) {
  for (std::int64_t i = 0; i < hidden_size; ++i) {
    hidden[i] = static_cast<float>(mix(hash, static_cast<std::uint64_t>(i + 7)) % 2003) / 1001.0F - 1.0F;
  }
}

std::uint64_t hash_of(const std::vector<TokenId>& history, std::uint64_t task_id) {
  std::uint64_t hash = 0;
  for (std::size_t i = 0; i < history.size(); ++i) {
    hash = mix(hash, slot_value(history[i], static_cast<std::int32_t>(i), task_id));
  }
  return hash;
}

void require(bool holds, const char* rule) {
  if (!holds) throw EngineError(std::string("StepInput: ") + rule);
}

LoraLayout fake_layout() {
  LoraLayout layout;
  layout.num_layers = 1;
  layout.max_rank = 8;
  layout.dora_enabled = true;
  layout.target_modules = {LoraModule::kAttnQ};
  layout.sites = {{0, 8, {{LoraModule::kAttnQ, 8}, {LoraModule::kAttnK, 4}, {LoraModule::kAttnV, 4}}}};
  return layout;
}

template <class Element>
TensorView tensor(std::vector<Element> elements, TensorType type, std::string type_name,
                  std::vector<std::int64_t> shape) {
  auto owner = std::make_shared<const std::vector<Element>>(std::move(elements));
  TensorView view;
  view.data = reinterpret_cast<const std::byte*>(owner->data());
  view.type = type;
  view.type_name = std::move(type_name);
  view.shape = std::move(shape);
  view.owner = owner;
  return view;
}

}  // namespace

FakeEngine::FakeEngine(Options options, Hook hook)
    : hook_(std::move(hook)),
      in_load_(std::move(options.in_load)),
      free_device_memory_(options.free_device_memory),
      ahead_(options.ahead) {
  info_.vocab_size = options.vocab_size;
  info_.num_layers = 1;
  info_.max_batch_size = options.max_batch_size;
  info_.max_num_tokens = options.max_num_tokens;
  info_.max_input_len = options.max_input_len;
  info_.max_seq_len = options.max_seq_len;
  info_.max_beam_width = options.max_beam_width;
  info_.tokens_per_block = options.tokens_per_block;
  info_.kv_block_bytes = static_cast<std::size_t>(options.tokens_per_block) * sizeof(Slot);
  info_.kv_identity = options.kv_identity;
  info_.max_reusable_prompt_len = options.max_seq_len;
  if (options.has_states) info_.state_bytes = sizeof(std::uint64_t);
  if (options.with_lora) info_.lora = fake_layout();
  info_.hidden_size = options.hidden_size;
  info_.has_logits = options.has_logits;
  info_.finds_best_tokens = options.finds_best_tokens;
  info_.finds_highest_logits = options.finds_highest_logits;
  logits_.resize(static_cast<std::size_t>(options.max_batch_size * options.vocab_size));
  hidden_.resize(static_cast<std::size_t>(options.max_batch_size * options.hidden_size));
}

void FakeEngine::allocate_kv_blocks(std::int32_t num_blocks) {
  slots_.resize(static_cast<std::size_t>(num_blocks) * static_cast<std::size_t>(info_.tokens_per_block));
}

void FakeEngine::allocate_states(std::int32_t num_slots) {
  if (!info_.has_states()) return Engine::allocate_states(num_slots);
  constexpr std::uint64_t kGarbage = 0xdead;
  states_.resize(static_cast<std::size_t>(num_slots), kGarbage);
}

void FakeEngine::advance_states(const StepInput& input) {
  checker_.check(input, info_, static_cast<std::int32_t>(std::ssize(slots_)) / info_.tokens_per_block,
                 static_cast<std::int32_t>(std::ssize(states_)));
  for (std::size_t i = 0; i < input.state_copies_from.size(); ++i) {
    states_.at(static_cast<std::size_t>(input.state_copies_to[i])) =
        states_.at(static_cast<std::size_t>(input.state_copies_from[i]));
    ++num_state_copies_;
  }
  row_states_.clear();
  for (std::size_t sequence = 0; sequence < input.state_slots.size(); ++sequence) {
    std::uint64_t& state = states_.at(static_cast<std::size_t>(input.state_slots[sequence]));
    const std::uint64_t task_id = input.adapters[sequence] != nullptr ? input.adapters[sequence]->task_id : 0;
    for (auto token = static_cast<std::size_t>(input.sequence_offsets[sequence]);
         std::cmp_less(token, input.sequence_offsets[sequence + 1]); ++token) {
      if (input.positions[token] == 0) state = 0;
      state = mix(state, slot_value(input.token_ids[token], input.positions[token], task_id));
      row_states_.push_back(state);
    }
  }
}

void FakeEngine::read_kv_block(std::int32_t block, std::span<std::byte> bytes) const {
  const auto size = static_cast<std::size_t>(info_.tokens_per_block);
  std::ranges::copy(std::as_bytes(std::span(slots_).subspan(static_cast<std::size_t>(block) * size, size)),
                    bytes.begin());
}

void FakeEngine::write_kv_block(std::int32_t block, std::span<const std::byte> bytes) {
  const auto size = static_cast<std::size_t>(info_.tokens_per_block);
  std::ranges::copy(
      bytes, std::as_writable_bytes(std::span(slots_).subspan(static_cast<std::size_t>(block) * size, size))
                 .begin());
}

void FakeEngine::read_states(std::int32_t slot, std::span<std::byte> bytes) const {
  std::ranges::copy(std::as_bytes(std::span(states_).subspan(static_cast<std::size_t>(slot), 1)),
                    bytes.begin());
}

void FakeEngine::write_states(std::int32_t slot, std::span<const std::byte> bytes) {
  std::ranges::copy(
      bytes, std::as_writable_bytes(std::span(states_).subspan(static_cast<std::size_t>(slot), 1)).begin());
}

std::unique_ptr<AdapterPages> FakeEngine::make_adapter_pages(std::size_t page_bytes, std::int64_t num_pages,
                                                             std::int32_t /*num_copy_streams*/) {
  return std::make_unique<testing::HookedPages>(page_bytes, num_pages, in_load_);
}

FakeEngine::Slot& FakeEngine::slot(const StepInput& input, std::size_t sequence, std::int32_t position) {
  const std::int32_t index = position / info_.tokens_per_block;
  require(index < input.max_blocks_per_sequence, "the block table is too short");
  const std::int32_t block =
      input.block_tables[sequence * static_cast<std::size_t>(input.max_blocks_per_sequence) +
                         static_cast<std::size_t>(index)];
  require(block >= 0, "a needed block is missing");
  return slots_.at(
      static_cast<std::size_t>(block * info_.tokens_per_block + position % info_.tokens_per_block));
}

void FakeEngine::step(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) {
  if (hook_) hook_(num_steps_++);
  const std::size_t num_sequences = input.prompt_lengths.size();
  require(input.sequence_offsets.size() == num_sequences + 1, "sequence_offsets has another size");
  require(input.adapters.size() == num_sequences, "adapters has another size");
  require(static_cast<std::size_t>(input.sequence_offsets.back()) == input.token_ids.size(),
          "the offsets do not end at T");
  require(std::cmp_less_equal(input.token_ids.size(), info_.max_num_tokens), "there are too many tokens");
  require(std::cmp_less_equal(num_sequences, info_.max_batch_size), "there are too many sequences");
  require(info_.has_logits || input.logit_rows.empty(), "logits are wanted of a model without lm_head");
  require(info_.finds_best_tokens || input.best_token_rows.empty(), "best tokens are wanted");
  require(input.best_tokens.size() == input.best_token_rows.size(), "best_tokens has another size");
  num_logit_rows_ += std::ssize(input.logit_rows);
  num_best_tokens_ += std::ssize(input.best_token_rows);
  const HighestRows& highest = input.highest;
  require(info_.finds_highest_logits || highest.empty(), "highest logits are wanted");
  require(highest.count <= kMaxHighestLogits, "too many highest logits are wanted");
  require(highest.summaries.size() == highest.rows.size(), "summaries has another size");
  require(std::ssize(highest.logits) == std::ssize(highest.rows) * highest.count, "logits has another size");
  num_highest_rows_ += std::ssize(highest.rows);
  max_highest_ = std::max(max_highest_.load(), highest.count);

  require(input.copies_from.size() == input.copies_to.size(), "copies_to has another size");
  for (std::size_t i = 0; i < input.copies_from.size(); ++i) {
    const auto first_of = [&](std::int32_t block) {
      return slots_.begin() + std::ptrdiff_t{block} * info_.tokens_per_block;
    };
    std::copy_n(first_of(input.copies_from[i]), info_.tokens_per_block, first_of(input.copies_to[i]));
    ++num_copies_;
  }

  num_tokens_ += static_cast<std::int64_t>(input.token_ids.size());
  for (std::size_t sequence = 0; sequence < num_sequences; ++sequence) {
    const std::uint64_t task_id = input.adapters[sequence] != nullptr ? input.adapters[sequence]->task_id : 0;
    for (std::int32_t token = input.sequence_offsets[sequence]; token < input.sequence_offsets[sequence + 1];
         ++token) {
      const std::int32_t position = input.positions[static_cast<std::size_t>(token)];
      slot(input, sequence, position) = {
          slot_value(input.token_ids[static_cast<std::size_t>(token)], position, task_id), 1};
    }
  }
  if (info_.has_states()) advance_states(input);
  make_rows(input, input.logit_rows, info_.vocab_size, logits_, sink, write_logits);
  const auto find_best = [this, &input](std::int64_t first_row, std::int64_t num_rows, const float* logits) {
    for (std::int64_t row = first_row; row < first_row + num_rows; ++row, logits += info_.vocab_size) {
      input.best_tokens[static_cast<std::size_t>(row)] =
          static_cast<std::int32_t>(std::max_element(logits, logits + info_.vocab_size) - logits);
    }
  };
  make_rows(input, input.best_token_rows, info_.vocab_size, logits_, find_best, write_logits);
  const auto find_highest = [&](std::int64_t first_row, std::int64_t num_rows, const float* logits) {
    const auto count = static_cast<std::size_t>(highest.count);
    for (std::int64_t row = first_row; row < first_row + num_rows; ++row, logits += info_.vocab_size) {
      const auto place = static_cast<std::size_t>(row);
      highest.summaries[place] = testing::find_highest_logits(
          {logits, static_cast<std::size_t>(info_.vocab_size)}, highest.logits.subspan(place * count, count));
    }
  };
  make_rows(input, highest.rows, info_.vocab_size, logits_, find_highest, write_logits);
  make_rows(input, input.hidden_rows, info_.hidden_size, hidden_, hidden_sink, write_hidden);
}

void FakeEngine::begin_step(const StepInput& input) {
  require(num_in_flight_ == 0, "another step is in flight");
  flights_[0].input = input;
  flights_[0].is_computed = false;
  ++num_in_flight_;
}

void FakeEngine::begin_ahead(const StepInput& input, std::span<const std::int32_t> previous_rows) {
  require(num_in_flight_ == 1, "no step is in flight, or two are");
  const StepInput& previous = flights_[0].input;
  for (const StepInput* step : {&previous, &input}) {
    require(step->token_ids.size() == step->prompt_lengths.size(), "a step ahead is no decode step");
    require(step->logit_rows.empty() && step->hidden_rows.empty(), "a step ahead returns rows");
    require(step->copies_to.empty() || step == &previous, "a step ahead copies blocks");
  }
  require(previous_rows.size() == input.token_ids.size(), "previous_rows has another size");
  for (std::size_t i = 0; i < previous_rows.size(); ++i) {
    const auto row = static_cast<std::size_t>(previous_rows[i]);
    require(std::ranges::binary_search(previous.best_token_rows, previous_rows[i]) ||
                std::ranges::binary_search(previous.highest.rows, previous_rows[i]),
            "a token is taken from a row without a best token");
    require(previous.positions[row] + 1 == input.positions[i], "a token is taken from another sequence");
    require(previous.adapters[row] == input.adapters[i], "a step ahead has other adapters");
  }
  Flight& flight = flights_[1];
  flight.input = input;
  flight.is_computed = false;
  flight.error = nullptr;
  flight.previous_rows.assign(previous_rows.begin(), previous_rows.end());
  ++num_in_flight_;
  ++num_ahead_;
}

StepInput FakeEngine::with_tokens(Flight& flight, const StepInput& previous) {
  flight.token_ids.clear();
  for (const std::int32_t row : flight.previous_rows) {
    const auto best = std::ranges::find(previous.best_token_rows, row);
    const auto highest = std::ranges::find(previous.highest.rows, row);
    const std::int32_t token =
        best != previous.best_token_rows.end()
            ? previous.best_tokens[static_cast<std::size_t>(best - previous.best_token_rows.begin())]
            : previous.highest.summaries[static_cast<std::size_t>(highest - previous.highest.rows.begin())]
                  .best_token;
    flight.token_ids.push_back(std::max(token, 0));
  }
  StepInput input = flight.input;
  input.token_ids = flight.token_ids;
  return input;
}

void FakeEngine::compute_early(Flight& flight) {
  StepInput input = flight.input;
  flight.best_tokens.resize(input.best_tokens.size());
  flight.summaries.resize(input.highest.summaries.size());
  flight.highest.resize(input.highest.logits.size());
  input.best_tokens = flight.best_tokens;
  input.highest.summaries = flight.summaries;
  input.highest.logits = flight.highest;
  try {
    step(input, {}, {});
  } catch (const std::exception&) {
    flight.error = std::current_exception();
  }
  flight.is_computed = true;
}

void FakeEngine::await_step(const LogitsSink& sink, const HiddenSink& hidden_sink) {
  require(num_in_flight_ > 0, "no step is in flight");
  std::swap(flights_[0], flights_[1]);
  Flight& flight = flights_[1];
  const bool is_followed = --num_in_flight_ == 1;
  try {
    if (flight.error) std::rethrow_exception(std::exchange(flight.error, nullptr));
    if (!flight.is_computed) {
      step(flight.input, sink, hidden_sink);
    } else {
      std::ranges::copy(flight.best_tokens, flight.input.best_tokens.begin());
      std::ranges::copy(flight.summaries, flight.input.highest.summaries.begin());
      std::ranges::copy(flight.highest, flight.input.highest.logits.begin());
    }
  } catch (...) {
    if (is_followed) flights_[0].error = std::make_exception_ptr(StepError("the step before failed"));
    throw;
  }
  if (!is_followed) return;
  flights_[0].input = with_tokens(flights_[0], flight.input);
  if (ahead_ == Options::Ahead::kEarly) compute_early(flights_[0]);
}

template <class Write>
void FakeEngine::make_rows(const StepInput& input, std::span<const std::int32_t> rows, std::int64_t width,
                           std::vector<float>& memory,
                           const std::function<void(std::int64_t, std::int64_t, const float*)>& sink,
                           const Write& write) {
  require(std::ranges::is_sorted(rows), "rows are not ascending");
  require(rows.empty() || std::cmp_less(rows.back(), input.token_ids.size()), "rows point outside the step");
  std::int64_t first_row = 0;
  std::int64_t num_rows = 0;
  const auto flush = [&] {
    if (num_rows > 0) sink(first_row, num_rows, memory.data());
    first_row += std::exchange(num_rows, 0);
  };
  for (const std::int32_t row : rows) {
    const auto after = std::ranges::upper_bound(input.sequence_offsets, row);
    const auto sequence = static_cast<std::size_t>(after - input.sequence_offsets.begin() - 1);
    std::uint64_t hash = 0;
    for (std::int32_t seen = 0; seen <= input.positions[static_cast<std::size_t>(row)]; ++seen) {
      const Slot& read = slot(input, sequence, seen);
      require(read.is_written == 1, "KV is read before it was written");
      hash = mix(hash, read.value);
    }
    // The state of the right tokens is the same hash.
    if (info_.has_states() && row_states_[static_cast<std::size_t>(row)] != hash) hash = mix(hash, 1);
    write(hash, width, memory.data() + num_rows * width);
    if (++num_rows == info_.max_batch_size) flush();
  }
  flush();
}

std::vector<float> FakeEngine::logits_after(const std::vector<TokenId>& history, std::uint64_t task_id,
                                            std::int64_t vocab_size) {
  std::vector<float> logits(static_cast<std::size_t>(vocab_size));
  write_logits(hash_of(history, task_id), vocab_size, logits.data());
  return logits;
}

std::vector<float> FakeEngine::hidden_after(const std::vector<TokenId>& history, std::uint64_t task_id,
                                            std::int64_t hidden_size) {
  std::vector<float> hidden(static_cast<std::size_t>(hidden_size));
  write_hidden(hash_of(history, task_id), hidden_size, hidden.data());
  return hidden;
}

std::vector<TokenId> expected_tokens(std::vector<TokenId> prompt, std::int32_t count, std::uint64_t task_id,
                                     std::int64_t vocab_size) {
  std::vector<TokenId> generated;
  for (std::int32_t i = 0; i < count; ++i) {
    const auto logits = FakeEngine::logits_after(prompt, task_id, vocab_size);
    generated.push_back(static_cast<TokenId>(std::ranges::max_element(logits) - logits.begin()));
    prompt.push_back(generated.back());
  }
  return generated;
}

LoraConfig fake_adapter(std::uint64_t task_id, std::int32_t rank, float seed) {
  LoraConfig config = task_alone(task_id);
  const std::int64_t width = rank * (8 + 8);
  std::vector<float> weights(static_cast<std::size_t>(width));
  for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = seed + static_cast<float>(i);
  config.weights = tensor(std::move(weights), TensorType::kFloat32, "float32", {1, width});
  config.config = tensor(std::vector<std::int32_t>{1, 0, rank}, TensorType::kInt32, "int32", {1, 3});
  return config;
}

LoraConfig task_alone(std::uint64_t task_id) {
  LoraConfig config;
  config.task_id = task_id;
  return config;
}

Request make_request(std::vector<TokenId> prompt, std::int32_t max_tokens) {
  Request request;
  request.input_token_ids = std::move(prompt);
  request.max_tokens = max_tokens;
  request.output_config.exclude_input_from_output = true;
  return request;
}

void check_every_step(const StepPlan* plan, const Scheduler& scheduler, const LoraCache* lora_cache,
                      const DraftEngine* draft_engine) {
  std::string broken;
  const auto add = [&](const std::vector<std::string>& problems) {
    for (const auto& problem : problems) broken += problem + "\n";
  };
  add(check_invariants(scheduler, lora_cache));
  if (plan != nullptr) add(check_invariants(*plan, scheduler));
  if (draft_engine != nullptr) add(draft_engine->check_invariants());
  if (!broken.empty()) throw std::logic_error(broken);
}

std::unique_ptr<Executor> make_executor(const ExecutorConfig& config, FakeEngine::Options options,
                                        FakeEngine::Hook hook) {
  return std::make_unique<Executor>(std::make_shared<FakeEngine>(options, std::move(hook)), config,
                                    kAvailableMemory, check_every_step);
}

std::unique_ptr<Executor> make_drafting_executor(const ExecutorConfig& config,
                                                 const FakeEngine::Options& options,
                                                 std::shared_ptr<FakeEngine> draft_engine) {
  return std::make_unique<Executor>(std::make_shared<FakeEngine>(options), config, kAvailableMemory,
                                    check_every_step, std::move(draft_engine));
}

Unsupported given(const std::string& type_name) {
  class Named final : public ForeignValue {
   public:
    explicit Named(std::string name) : name_(std::move(name)) {}
    [[nodiscard]] std::string type_name() const override { return name_; }
    [[nodiscard]] bool equals(const ForeignValue& other) const override { return name_ == other.type_name(); }

   private:
    std::string name_;
  };
  return {std::make_shared<const Named>(type_name)};
}

FloatTensor bias_of(const std::vector<float>& values) {
  return {std::make_shared<const std::vector<float>>(values), {static_cast<std::int64_t>(values.size())}};
}

std::vector<Response> collect(Executor& executor, RequestId id) {
  std::vector<Response> all;
  while (all.empty() || !all.back().is_final()) {
    auto responses = executor.await_responses(id, std::chrono::minutes(1));
    BOOST_REQUIRE(!responses.empty());
    for (auto& response : responses) all.push_back(std::move(response));
  }
  return all;
}

Result collect_result(Executor& executor, RequestId id) {
  const auto responses = collect(executor, id);
  BOOST_REQUIRE_EQUAL(responses.size(), 1);
  BOOST_REQUIRE_EQUAL(responses[0].error_msg, "");
  return responses[0].result;
}

void Gate::open() {
  is_open_ = true;
  is_open_.notify_all();
}

void Gate::wait() {
  has_visitor_ = true;
  has_visitor_.notify_all();
  is_open_.wait(false);
}

void Gate::await_visitor() {
  has_visitor_.wait(false);
}

}  // namespace adaptrt::test
