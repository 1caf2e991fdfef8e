#include "active_request.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace adaptrt {
namespace {

std::optional<TokenId> end_id_of(const Request& request) {
  return request.end_id == TokenId{-1} ? std::nullopt : request.end_id;
}

StopCriteria stop_criteria_of(const Request& request) {
  StopCriteria stop;
  stop.end_id = end_id_of(request);
  if (request.stop_words) stop.stop_words = *request.stop_words;
  stop.max_tokens = request.max_tokens;
  return stop;
}

SamplerState sampler_of(const Request& request) {
  TokenConstraints constraints;
  constraints.end_id = end_id_of(request);
  if (request.bad_words) constraints.bad_words = *request.bad_words;
  if (request.embedding_bias) constraints.embedding_bias = request.embedding_bias->values;
  const auto prompt_length = static_cast<std::int32_t>(request.input_token_ids.size());
  return SamplerState(resolve(request.sampling_config), std::move(constraints), prompt_length,
                      prompt_length + request.max_tokens);
}

std::vector<std::vector<TokenLogProb>> in_rows_of(std::size_t length, std::span<const TokenLogProb> entries) {
  std::vector<std::vector<TokenLogProb>> rows;
  rows.reserve(entries.size() / length);
  for (; !entries.empty(); entries = entries.subspan(length)) {
    rows.emplace_back(entries.begin(), entries.begin() + static_cast<std::ptrdiff_t>(length));
  }
  return rows;
}

}  // namespace

ActiveRequest::ActiveRequest(RequestId request_id, const Request& request,
                             std::shared_ptr<const HostAdapter> host_adapter,
                             std::shared_ptr<TokenGuide> guide, PostProcessorOfRequest post_processor,
                             std::int64_t vocab_size)
    : output_(request.output_config),
      streaming_(request.streaming),
      return_all_generated_tokens_(request.return_all_generated_tokens),
      client_id_(request.client_id),
      stop_(stop_criteria_of(request)),
      sampler_(sampler_of(request)),
      guide_(std::move(guide)),
      post_processor_(std::move(post_processor)),
      vocab_size_(vocab_size),
      num_most_likely_(
          static_cast<std::size_t>(std::min(std::int64_t{request.output_config.top_log_probs}, vocab_size))) {
  id = request_id;
  priority = request.priority;
  prompt_length = static_cast<std::int32_t>(request.input_token_ids.size());
  max_tokens = request.max_tokens;
  adapter = std::move(host_adapter);
  cache_salt = request.cache_salt_id;
  if (request.kv_cache_retention_config) {
    retention = std::make_shared<const KvCacheRetentionConfig>(*request.kv_cache_retention_config);
  }
  tokens.reserve(request.input_token_ids.size() + static_cast<std::size_t>(max_tokens));
  tokens = request.input_token_ids;

  if (request.allotted_time_ms) deadline_ = arrival + *request.allotted_time_ms;
  if (output_.return_log_probs) log_probs_.reserve(static_cast<std::size_t>(max_tokens));
  const auto row = static_cast<std::size_t>(vocab_size);
  if (output_.return_prompt_log_probs) {
    end_of_prompt_rows_ = prompt_length - 1;
    const auto num_rows = static_cast<std::size_t>(end_of_prompt_rows_);
    prompt_log_probs_.emplace().reserve(num_rows);
    prompt_top_log_probs_.reserve(num_rows * num_most_likely_);
  }
  if (output_.return_context_logits) {
    end_of_prompt_rows_ = prompt_length;
    context_logits_ = std::make_shared<std::vector<float>>(tokens.size() * row);
  }
  compute_whole_prompt = end_of_prompt_rows_ > 0;
  const std::size_t num_kept = sends_each_token_once() ? 1 : static_cast<std::size_t>(max_tokens);
  if (output_.return_generation_logits) generation_logits_.reserve(num_kept * row);
  top_log_probs_.reserve(num_kept * num_most_likely_);
}

void ActiveRequest::add_prompt_row(const float* logits) {
  const std::int32_t position = next_prompt_row_++;
  if (context_logits_) std::copy_n(logits, vocab_size_, context_logits_->begin() + position * vocab_size_);
  if (prompt_log_probs_ && position + 1 < prompt_length) add_prompt_log_probs(position, logits);
}

void ActiveRequest::add_prompt_log_probs(std::int32_t position, const float* logits) {
  const LogSoftmax softmax(std::span(logits, static_cast<std::size_t>(vocab_size_)));
  prompt_log_probs_->push_back(softmax.log_prob(tokens[static_cast<std::size_t>(position) + 1]));
  const std::size_t num_before = prompt_top_log_probs_.size();
  prompt_top_log_probs_.resize(num_before + num_most_likely_);
  softmax.find_most_likely(std::span(prompt_top_log_probs_).subspan(num_before));
}

FinishReason ActiveRequest::append(const SampledToken& sampled, const float* logits,
                                   std::span<const TokenLogProb> most_likely) {
  tokens.push_back(sampled.token);
  const FinishReason reason =
      guide_ && guide_->is_stop_token(sampled.token)
          ? FinishReason::kEndId
          : stop_.check(std::span(tokens).subspan(static_cast<std::size_t>(prompt_length)));
  if (guide_ && reason == FinishReason::kNotFinished) guide_->accept(sampled.token);
  ended_by_end_id_ = reason == FinishReason::kEndId;
  if (ended_by_end_id_) return reason;
  if (wants_log_probs()) log_probs_.push_back(sampled.log_prob);
  if (wants_generation_logits())
    generation_logits_.insert(generation_logits_.end(), logits, logits + vocab_size_);
  top_log_probs_.insert(top_log_probs_.end(), most_likely.begin(), most_likely.end());
  return reason;
}

Response ActiveRequest::make_response(FinishReason reason) {
  Response response;
  response.request_id = id;
  response.client_id = client_id_;
  Result& result = response.result;
  result.is_final = result.is_sequence_final = reason != FinishReason::kNotFinished;
  result.finish_reasons = {reason};
  result.decoding_iter = num_generated();

  const std::int32_t first_token = sends_each_token_once() ? num_sent_ : 0;
  num_sent_ = num_output_tokens();
  const auto begin = streaming_ || output_.exclude_input_from_output ? prompt_length + first_token : 0;
  result.output_token_ids.emplace_back(tokens.begin() + begin, tokens.begin() + prompt_length + num_sent_);
  if (wants_log_probs()) {
    result.cum_log_probs = {std::accumulate(log_probs_.begin(), log_probs_.end(), 0.0F)};
    result.log_probs.emplace().push_back(log_probs_);
  }
  // A request that ends early may not have all rows of its prompt; then it has none.
  if (next_prompt_row_ == end_of_prompt_rows_) {
    if (context_logits_) result.context_logits = FloatTensor{context_logits_, {prompt_length, vocab_size_}};
    move_prompt_log_probs(result);
  }
  if (wants_generation_logits()) result.generation_logits = take_generation_logits(first_token);
  if (num_most_likely_ > 0) result.top_log_probs.emplace().push_back(take_top_log_probs());
  return response;
}

std::vector<std::vector<TokenLogProb>> ActiveRequest::take_top_log_probs() {
  auto rows = in_rows_of(num_most_likely_, top_log_probs_);
  if (sends_each_token_once()) top_log_probs_.clear();
  return rows;
}

void ActiveRequest::move_prompt_log_probs(Result& result) {
  if (!prompt_log_probs_) return;
  if (num_most_likely_ > 0) {
    result.prompt_top_log_probs = in_rows_of(num_most_likely_, std::exchange(prompt_top_log_probs_, {}));
  }
  result.prompt_log_probs = std::exchange(prompt_log_probs_, std::nullopt);
}

FloatTensor ActiveRequest::take_generation_logits(std::int32_t first_token) {
  const std::int64_t count = num_sent_ - first_token;
  FloatTensor tensor;
  if (!streaming_) {
    tensor.values = std::make_shared<const std::vector<float>>(std::move(generation_logits_));
    tensor.shape = {1, count, vocab_size_};
    return tensor;
  }
  tensor.values = std::make_shared<const std::vector<float>>(generation_logits_);
  tensor.shape = {count, 1, vocab_size_};
  // Rows that were sent are not sent again, unless all are, each time.
  if (!return_all_generated_tokens_) generation_logits_.clear();
  return tensor;
}

Response ActiveRequest::make_error(std::string reason) const {
  Response response;
  response.request_id = id;
  response.client_id = client_id_;
  response.error_msg = std::move(reason);
  return response;
}

}  // namespace adaptrt
