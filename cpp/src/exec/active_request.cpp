#include "active_request.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace adaptrt {
namespace {

StopCriteria stop_criteria_of(const Request& request) {
  StopCriteria stop;
  stop.end_id = end_id_of(request);
  if (request.stop_words) stop.stop_words = *request.stop_words;
  stop.max_tokens = request.max_tokens;
  return stop;
}

}  // namespace

std::optional<TokenId> end_id_of(const Request& request) {
  return request.end_id == TokenId{-1} ? std::nullopt : request.end_id;
}

ActiveRequest::ActiveRequest(RequestId request_id, const Request& request,
                             const std::shared_ptr<const HostAdapter>& host_adapter,
                             std::vector<std::shared_ptr<TokenGuide>> guides,
                             PostProcessorOfRequest post_processor, const EngineInfo& engine)
    : id_(request_id),
      output_(request.output_config),
      streaming_(request.streaming),
      // Each response may have different beams than the one before.
      return_all_generated_tokens_(request.return_all_generated_tokens || request.has_beams()),
      client_id_(request.client_id),
      stop_(stop_criteria_of(request)),
      post_processor_(std::move(post_processor)),
      vocab_size_(engine.vocab_size + (host_adapter ? host_adapter->terms().vocabulary_change : 0)),
      num_most_likely_(
          static_cast<std::size_t>(std::min(std::int64_t{request.output_config.top_log_probs}, vocab_size_))),
      num_sequences_left_(request.has_beams() ? 1 : request.num_sequences()),
      encoder_hidden_size_(engine.encoder_hidden_size) {
  if (request.allotted_time_ms) deadline_ = arrival + *request.allotted_time_ms;
  const auto prompt_length = static_cast<std::int32_t>(request.input_token_ids.size());
  if (output_.return_prompt_log_probs) {
    end_of_prompt_rows_ = prompt_length - 1;
    const auto num_rows = static_cast<std::size_t>(end_of_prompt_rows_);
    prompt_log_probs_.emplace().reserve(num_rows);
    prompt_top_log_probs_.reserve(num_rows * num_most_likely_);
  }
  if (output_.return_context_logits) {
    end_of_prompt_rows_ = prompt_length;
    context_logits_ = std::make_shared<std::vector<float>>();
    // Unwritten memory takes no room yet, so a waiting request costs nothing.
    context_logits_->reserve(request.input_token_ids.size() * static_cast<std::size_t>(vocab_size_));
  }
  const std::int32_t num_sequences = request.num_sequences();
  sequences_.reserve(static_cast<std::size_t>(num_sequences));
  for (std::int32_t i = 0; i < num_sequences; ++i) {
    std::shared_ptr<TokenGuide> guide =
        guides.empty() ? nullptr : std::move(guides[static_cast<std::size_t>(i)]);
    sequences_.push_back(std::make_unique<ActiveSequence>(*this, i, request, host_adapter, std::move(guide),
                                                          vocab_size_, engine.num_coordinates > 0));
  }
  if (request.kv_cache_retention_config) {
    const auto retention = std::make_shared<const KvCacheRetentionConfig>(*request.kv_cache_retention_config);
    for (const auto& sequence : sequences_) sequence->retention = retention;
  }
  if (request.prompt_tuning_config) {
    const auto given = std::make_shared<const PrefixDigests>(
        request.prompt_tuning_config->digests_of(request.input_token_ids, vocab_size_));
    for (const auto& sequence : sequences_) sequence->given = given;
    if (engine.joint_column >= 0) {
      const auto joint =
          std::make_shared<const std::vector<JointTokens>>(request.prompt_tuning_config->joint_tokens(
              request.input_token_ids, vocab_size_, engine.joint_column));
      for (const auto& sequence : sequences_) sequence->joint = joint;
    }
  }
  if (request.encoder_length() > 0) {
    const auto tokens = std::make_shared<const std::vector<std::int32_t>>(*request.encoder_input_token_ids);
    for (const auto& sequence : sequences_) sequence->encoder_tokens = tokens;
  }
  if (output_.return_encoder_output && engine.has_encoder()) {
    encoder_output_ = std::make_shared<std::vector<float>>(
        static_cast<std::size_t>(request.encoder_length() * encoder_hidden_size_));
    first().compute_encoder_input = true;
  }
  if (request.token_type_ids) token_types_ = *request.token_type_ids;
  if (request.pooling_params) {
    pooler_ = std::make_unique<Pooler>(*request.pooling_params, prompt_length, engine.hidden_size);
  } else if (!engine.has_kv_cache) {
    pooler_ = std::make_unique<Pooler>(PoolingParams{.pooling_type = PoolingType::kAll}, prompt_length,
                                       engine.hidden_size);
    pools_encoder_output_ = true;
  }
  first().compute_whole_prompt = end_of_prompt_rows_ > 0 || (pooler_ && pooler_->needs_whole_prompt());
  // After one token all sequences have ended.
  first().num_forks = request.max_scheduled_tokens() == 1 ? 0 : num_sequences - 1;
  if (request.has_beams()) {
    beams_ = std::make_unique<ActiveBeams>(request, sequences_, stop_, num_most_likely_);
  }
}

void ActiveRequest::draft_from(const DraftSources& sources,
                               const std::shared_ptr<const HostAdapter>& draft_adapter) {
  if (sources.empty() || post_processor_.processor || beams_ || pooler_) return;
  for (const auto& sequence : sequences_) sequence->draft_from(sources, draft_adapter);
}

void ActiveRequest::add_prompt_row(const float* logits) {
  const std::int32_t position = next_prompt_row_++;
  if (context_logits_) context_logits_->insert(context_logits_->end(), logits, logits + vocab_size_);
  if (prompt_log_probs_ && position + 1 < first().prompt_length) add_prompt_log_probs(position, logits);
}

void ActiveRequest::add_prompt_log_probs(std::int32_t position, const float* logits) {
  const LogSoftmax softmax(std::span(logits, static_cast<std::size_t>(vocab_size_)));
  const TokenId next = first().tokens[static_cast<std::size_t>(position) + 1];
  // Virtual tokens have no logit.
  prompt_log_probs_->push_back(next < vocab_size_ ? softmax.log_prob(next)
                                                  : std::numeric_limits<float>::quiet_NaN());
  const std::size_t num_before = prompt_top_log_probs_.size();
  prompt_top_log_probs_.resize(num_before + num_most_likely_);
  softmax.find_most_likely(std::span(prompt_top_log_probs_).subspan(num_before));
}

float* ActiveRequest::encoder_output_to_fill() {
  return encoder_output_ && !encoder_output_is_there_ ? encoder_output_->data() : nullptr;
}

bool ActiveRequest::start(Clock::time_point time) {
  if (std::exchange(has_started, true)) return false;
  start_ = time;
  num_cached_tokens_ = first().num_computed();
  return true;
}

void ActiveRequest::note_tokens(Clock::time_point time, std::int64_t iteration) {
  newest_token_ = time;
  newest_token_step_ = static_cast<std::uint64_t>(iteration);
  if (first_token_step_) return;
  first_token_ = newest_token_;
  first_token_step_ = newest_token_step_;
}

RequestPerfMetrics ActiveRequest::perf_metrics() const {
  RequestPerfMetrics metrics;
  metrics.timing_metrics.arrival_time = arrival;
  metrics.timing_metrics.first_scheduled_time = start_;
  metrics.timing_metrics.first_token_time = first_token_;
  metrics.timing_metrics.last_token_time = newest_token_;
  const BlockCounts blocks = count_blocks(*this);
  KvCacheMetrics& kv_cache = metrics.kv_cache_metrics;
  kv_cache.num_new_allocated_blocks = static_cast<std::int32_t>(blocks.alloc_new_blocks);
  kv_cache.num_reused_blocks = static_cast<std::int32_t>(blocks.reused_blocks);
  kv_cache.num_total_allocated_blocks = kv_cache.num_new_allocated_blocks + kv_cache.num_reused_blocks;
  kv_cache.num_missed_blocks = static_cast<std::int32_t>(blocks.missed_blocks);
  kv_cache.kv_cache_hit_rate = static_cast<float>(blocks.hit_rate());
  SpeculativeDecodingMetrics& drafts = metrics.speculative_decoding;
  for (const auto& sequence : sequences_) {
    drafts.total_draft_tokens += sequence->num_computed_drafts();
    drafts.total_accepted_draft_tokens += sequence->num_gained();
  }
  if (drafts.total_draft_tokens > 0) {
    drafts.acceptance_rate = static_cast<float>(drafts.total_accepted_draft_tokens) /
                             static_cast<float>(drafts.total_draft_tokens);
  }
  metrics.first_iter = first_token_step_;
  metrics.iter = newest_token_step_;
  if (has_ended) metrics.last_iter = newest_token_step_;
  return metrics;
}

double BlockCounts::hit_rate() const {
  const std::int64_t looked_for = reused_blocks + missed_blocks;
  return looked_for > 0 ? static_cast<double>(reused_blocks) / static_cast<double>(looked_for) : 0.0;
}

BlockCounts count_blocks(const ActiveRequest& request) {
  BlockCounts counts;
  for (const auto& sequence : request.sequences()) {
    const BlockTable& table = sequence->memory.table;
    const CrossCounts& cross = sequence->memory.cross_counts;
    counts.alloc_new_blocks += table.alloc_new_blocks + cross.alloc_new_blocks;
    counts.reused_blocks += table.reused_blocks + cross.reused_blocks;
    counts.missed_blocks += table.missed_blocks + cross.missed_blocks;
  }
  return counts;
}

Response ActiveRequest::make_response(ActiveSequence& sequence, FinishReason reason) {
  Response response;
  response.request_id = id_;
  response.client_id = client_id_;
  response.result =
      beams_ ? beams_->make_result(reason, has_prompt_in_output()) : sequence.make_result(reason);
  Result& result = response.result;
  if (result.is_sequence_final) --num_sequences_left_;
  result.is_final = has_ended = num_sequences_left_ == 0;
  result.num_cached_tokens = num_cached_tokens_;
  if (output_.return_perf_metrics) result.request_perf_metrics = perf_metrics();
  if (encoder_output_ && encoder_output_is_there_) {
    result.encoder_output = FloatTensor{encoder_output_, {first().encoder_length(), encoder_hidden_size_}};
  }
  if (pooler_ && pooler_->is_complete()) {
    (pools_encoder_output_ ? result.encoder_output : result.pooled_output) = pooler_->take_output();
  }
  // A request that ends early may lack rows of its prompt; then it returns none.
  if (next_prompt_row_ == end_of_prompt_rows_) {
    if (context_logits_) {
      result.context_logits = FloatTensor{context_logits_, {sequence.prompt_length, vocab_size_}};
    }
    if (sequence.index == 0) move_prompt_log_probs(result);
  }
  return response;
}

void ActiveRequest::move_prompt_log_probs(Result& result) {
  if (!prompt_log_probs_) return;
  if (num_most_likely_ > 0) {
    result.prompt_top_log_probs = in_rows_of(num_most_likely_, std::exchange(prompt_top_log_probs_, {}));
  }
  result.prompt_log_probs = std::exchange(prompt_log_probs_, std::nullopt);
}

Response ActiveRequest::make_error(std::string reason) const {
  Response response;
  response.request_id = id_;
  response.client_id = client_id_;
  response.error_msg = std::move(reason);
  return response;
}

}  // namespace adaptrt
