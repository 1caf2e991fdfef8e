#include "active_sequence.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "active_request.h"

namespace adaptrt {
namespace {

/// Seeds each sequence like a request of its own with this seed plus its index (TensorRT-LLM does so too).
SamplingParams params_of(const Request& request, std::int32_t sequence_index) {
  SamplingParams params = resolve(request.sampling_config);
  params.seed += static_cast<std::uint64_t>(sequence_index);
  return params;
}

SamplerState sampler_of(const Request& request, std::int32_t sequence_index, const HostAdapter* adapter) {
  TokenConstraints constraints;
  constraints.end_id = end_id_of(request);
  for (const auto& word : request.stop_words.value_or(std::vector<std::vector<TokenId>>{})) {
    if (word.size() == 1) constraints.stop_ids.push_back(word.front());
  }
  if (request.bad_words) constraints.bad_words = *request.bad_words;
  if (request.embedding_bias) constraints.embedding_bias = request.embedding_bias->values;
  const auto prompt_length = static_cast<std::int32_t>(request.input_token_ids.size());
  return SamplerState(params_of(request, sequence_index), std::move(constraints), prompt_length,
                      prompt_length + request.max_tokens,
                      adapter == nullptr ? 0 : adapter->terms().vocabulary_change);
}

}  // namespace

ActiveSequence::ActiveSequence(ActiveRequest& owner, std::int32_t sequence_index, const Request& request,
                               std::shared_ptr<const HostAdapter> host_adapter,
                               std::shared_ptr<TokenGuide> guide, std::int64_t vocab_size,
                               bool has_coordinates)
    : request_(owner),
      sampler_(sampler_of(request, sequence_index, host_adapter.get())),
      guide_(std::move(guide)),
      vocab_size_(vocab_size) {
  id = owner.id();
  index = sequence_index;
  priority = request.priority;
  prompt_length = static_cast<std::int32_t>(request.input_token_ids.size());
  max_tokens = request.max_scheduled_tokens();
  is_beam = request.has_beams();
  adapter = std::move(host_adapter);
  if (request.lora_config) adapter_from = request.lora_config->active_from;
  cache_salt = request.cache_salt_id;
  if (request.prompt_tuning_config) embedding_table_ = request.prompt_tuning_config->embedding_table;
  tokens.reserve(request.input_token_ids.size() + static_cast<std::size_t>(max_tokens));
  tokens = request.input_token_ids;
  if (has_coordinates) set_position_shifts();

  if (owner.wants_log_probs()) log_probs_.reserve(static_cast<std::size_t>(max_tokens));
  reserve_outputs(owner.sends_each_token_once() ? 1 : static_cast<std::size_t>(max_tokens));
}

void ActiveSequence::set_position_shifts() {
  std::int32_t shift = 0;
  for (std::int32_t position = 0; position < prompt_length; ++position) {
    const std::int64_t row = tokens[static_cast<std::size_t>(position)] - vocab_size_;
    if (row < 0) continue;
    const std::int32_t next = embedding_table_.next_position(row);
    if (next < 0 || next - (position + 1) == shift) continue;
    shift = next - (position + 1);
    position_shifts_.push_back({.first = position + 1, .shift = shift});
  }
}

std::int32_t ActiveSequence::rotary_position_of(std::int32_t position) const {
  const auto after = std::ranges::upper_bound(position_shifts_, position, {}, &PositionShift::first);
  return after == position_shifts_.begin() ? position : position + std::prev(after)->shift;
}

void ActiveSequence::reserve_outputs(std::size_t num_tokens) {
  if (request_.wants_generation_logits())
    generation_logits_.reserve(num_tokens * static_cast<std::size_t>(vocab_size_));
  top_log_probs_.reserve(num_tokens * request_.num_most_likely());
}

void ActiveSequence::draft_from(const DraftSources& sources,
                                const std::shared_ptr<const HostAdapter>& draft_adapter) {
  draft_sequence_.set(draft_adapter, cache_salt);
  drafter_ = std::make_unique<Drafter>(sources, tokens, tokens.size() + static_cast<std::size_t>(max_tokens));
  drafts.reserve(drafter_->max_drafts());
  if (request_.sends_each_token_once()) reserve_outputs(1 + drafter_->max_drafts());
  make_drafts(0, 0, 0);
}

void ActiveSequence::make_drafts(std::int32_t num_verified, std::int32_t num_right, std::int32_t num_gained) {
  num_gained_ += num_gained;
  num_computed_drafts_ += num_verified;
  drafter_->record(num_verified, num_right);
  drafter_->draft(tokens, std::max(max_tokens - num_generated() - 1, 0), drafts);
  // A drafter that copies from the prompt may copy virtual tokens, which are never generated.
  const auto first_virtual =
      std::ranges::find_if(drafts, [this](TokenId token) { return token >= vocab_size_; });
  drafts.erase(first_virtual, drafts.end());
}

RowNeed ActiveSequence::row_need() const {
  if (is_beam || guide_ || request_.post_processor().processor || request_.wants_generation_logits()) {
    return {};
  }
  const std::optional<std::int32_t> of_sampler = sampler_.num_highest_needed(tokens.size());
  if (!of_sampler) return {};
  const auto most_likely = static_cast<std::int32_t>(request_.num_most_likely());
  if (*of_sampler == 1 && !request_.wants_log_probs() && most_likely == 0) {
    return {.kind = RowNeed::Kind::kBestToken};
  }
  const std::int64_t count = std::min<std::int64_t>(std::max(*of_sampler, most_likely), vocab_size_);
  if (count > kMaxHighestLogits) return {};
  return {.kind = RowNeed::Kind::kHighest, .num_highest = static_cast<std::int32_t>(count)};
}

FinishReason ActiveSequence::append(const StopCriteria& stop, const SampledToken& sampled,
                                    const float* logits, std::span<const TokenLogProb> most_likely) {
  tokens.push_back(sampled.token);
  const FinishReason reason =
      guide_ && guide_->is_stop_token(sampled.token)
          ? FinishReason::kEndId
          : stop.check(std::span(tokens).subspan(static_cast<std::size_t>(prompt_length)));
  if (guide_ && reason == FinishReason::kNotFinished) guide_->accept(sampled.token);
  is_complete_ = reason != FinishReason::kNotFinished;
  ended_by_end_id_ = reason == FinishReason::kEndId;
  if (ended_by_end_id_) return reason;
  if (request_.wants_log_probs()) log_probs_.push_back(sampled.log_prob);
  if (request_.wants_generation_logits())
    generation_logits_.insert(generation_logits_.end(), logits, logits + vocab_size_);
  top_log_probs_.insert(top_log_probs_.end(), most_likely.begin(), most_likely.end());
  return reason;
}

void ActiveSequence::follow(const ActiveSequence& other) {
  tokens = other.tokens;
  sampler_.follow(other.sampler_);
  log_probs_ = other.log_probs_;
  top_log_probs_ = other.top_log_probs_;
}

void ActiveSequence::go_on_with(const ScoredToken& next, std::span<const TokenLogProb> most_likely) {
  tokens.push_back(next.token);
  if (request_.wants_log_probs()) log_probs_.push_back(next.log_prob);
  top_log_probs_.insert(top_log_probs_.end(), most_likely.begin(), most_likely.end());
}

Result ActiveSequence::make_result(FinishReason reason) {
  has_ended_ = reason != FinishReason::kNotFinished;
  Result result;
  result.sequence_index = index;
  result.is_sequence_final = has_ended_;
  result.finish_reasons = {reason};
  result.decoding_iter = num_decoding_steps();

  const std::int32_t first_token = request_.sends_each_token_once() ? num_sent_ : 0;
  num_sent_ = num_output_tokens();
  const auto begin = request_.has_prompt_in_output() ? 0 : prompt_length + first_token;
  result.output_token_ids.emplace_back(tokens.begin() + begin, tokens.begin() + prompt_length + num_sent_);
  if (request_.wants_log_probs()) {
    result.cum_log_probs = {std::accumulate(log_probs_.begin(), log_probs_.end(), 0.0F)};
    result.log_probs.emplace().push_back(log_probs_);
  }
  if (request_.wants_generation_logits()) result.generation_logits = take_generation_logits(first_token);
  if (request_.num_most_likely() > 0) result.top_log_probs.emplace().push_back(take_top_log_probs());
  return result;
}

std::vector<std::vector<TokenLogProb>> ActiveSequence::take_top_log_probs() {
  auto rows = in_rows_of(request_.num_most_likely(), top_log_probs_);
  if (request_.sends_each_token_once()) top_log_probs_.clear();
  return rows;
}

FloatTensor ActiveSequence::take_generation_logits(std::int32_t first_token) {
  const std::int64_t count = num_sent_ - first_token;
  FloatTensor tensor;
  if (!request_.is_streaming()) {
    tensor.values = std::make_shared<const std::vector<float>>(std::move(generation_logits_));
    tensor.shape = {1, count, vocab_size_};
    return tensor;
  }
  tensor.values = std::make_shared<const std::vector<float>>(generation_logits_);
  tensor.shape = {count, 1, vocab_size_};
  // Rows that were sent are dropped, unless each response repeats all rows.
  if (request_.sends_each_token_once()) generation_logits_.clear();
  return tensor;
}

std::vector<std::vector<TokenLogProb>> in_rows_of(std::size_t length, std::span<const TokenLogProb> entries) {
  std::vector<std::vector<TokenLogProb>> rows;
  rows.reserve(entries.size() / length);
  for (; !entries.empty(); entries = entries.subspan(length)) {
    rows.emplace_back(entries.begin(), entries.begin() + static_cast<std::ptrdiff_t>(length));
  }
  return rows;
}

}  // namespace adaptrt
