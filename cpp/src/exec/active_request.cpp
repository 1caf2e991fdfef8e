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
  if (request.embedding_bias) {
    constraints.embedding_bias = std::make_shared<const std::vector<float>>(*request.embedding_bias);
  }
  const auto prompt_length = static_cast<std::int32_t>(request.input_token_ids.size());
  return SamplerState(resolve(request.sampling_config), std::move(constraints), prompt_length,
                      prompt_length + request.max_tokens);
}

}  // namespace

ActiveRequest::ActiveRequest(RequestId request_id, const Request& request,
                             std::shared_ptr<const HostAdapter> host_adapter, std::int64_t vocab_size)
    : output_(request.output_config),
      streaming_(request.streaming),
      return_all_generated_tokens_(request.return_all_generated_tokens),
      client_id_(request.client_id),
      stop_(stop_criteria_of(request)),
      sampler_(sampler_of(request)),
      vocab_size_(vocab_size) {
  id = request_id;
  priority = request.priority;
  prompt_length = static_cast<std::int32_t>(request.input_token_ids.size());
  max_tokens = request.max_tokens;
  adapter = std::move(host_adapter);
  cache_salt = request.cache_salt_id;
  compute_whole_prompt = output_.return_context_logits;
  tokens.reserve(request.input_token_ids.size() + static_cast<std::size_t>(max_tokens));
  tokens = request.input_token_ids;

  if (request.allotted_time_ms) deadline_ = Clock::now() + *request.allotted_time_ms;
  if (output_.return_log_probs) log_probs_.reserve(static_cast<std::size_t>(max_tokens));
  const auto row = static_cast<std::size_t>(vocab_size);
  next_context_logits_ = prompt_length;
  if (output_.return_context_logits) {
    next_context_logits_ = 0;
    context_logits_ = std::make_shared<std::vector<float>>(tokens.size() * row);
  }
  if (output_.return_generation_logits) {
    const bool sent_at_once = streaming_ && !return_all_generated_tokens_;
    generation_logits_.reserve(sent_at_once ? row : static_cast<std::size_t>(max_tokens) * row);
  }
}

void ActiveRequest::add_context_logits(const float* logits) {
  std::copy_n(logits, vocab_size_, context_logits_->begin() + next_context_logits_ * vocab_size_);
  ++next_context_logits_;
}

FinishReason ActiveRequest::append(const SampledToken& sampled, const float* logits) {
  tokens.push_back(sampled.token);
  const FinishReason reason = stop_.check(std::span(tokens).subspan(static_cast<std::size_t>(prompt_length)));
  ended_by_end_id_ = reason == FinishReason::kEndId;
  if (ended_by_end_id_) return reason;
  if (wants_log_probs()) log_probs_.push_back(sampled.log_prob);
  if (wants_generation_logits())
    generation_logits_.insert(generation_logits_.end(), logits, logits + vocab_size_);
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

  const std::int32_t first_token = streaming_ && !return_all_generated_tokens_ ? num_sent_ : 0;
  num_sent_ = num_output_tokens();
  const auto begin = streaming_ || output_.exclude_input_from_output ? prompt_length + first_token : 0;
  result.output_token_ids.emplace_back(tokens.begin() + begin, tokens.begin() + prompt_length + num_sent_);
  if (wants_log_probs()) {
    result.cum_log_probs = {std::accumulate(log_probs_.begin(), log_probs_.end(), 0.0F)};
    result.log_probs.emplace().push_back(log_probs_);
  }
  // A request that ends early may not have all rows of its prompt; then it has none.
  if (context_logits_ && next_context_logits_ == prompt_length) {
    result.context_logits = FloatTensor{context_logits_, {prompt_length, vocab_size_}};
  }
  if (wants_generation_logits()) result.generation_logits = take_generation_logits(first_token);
  return response;
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
