#include "adaptrt/exec/executor.h"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "adapter_admissions.h"
#include "adaptrt/core/error.h"
#include "draft_target.h"
#include "guides.h"
#include "pools.h"
#include "request_queue.h"
#include "response_board.h"
#include "second_level.h"
#include "statistics.h"
#include "step_loop.h"

namespace adaptrt {
namespace {

std::optional<LookaheadDecodingConfig> lookahead_of(const ExecutorConfig& config) {
  return config.decoding_config ? config.decoding_config->lookahead_decoding_config : std::nullopt;
}

const ExecutorConfig& validated(const ExecutorConfig& config, const EngineInfo& engine) {
  config.validate(engine).throw_if_any<ConfigError>("ExecutorConfig");
  return config;
}

PeftCacheConfig peft_config_of(const ExecutorConfig& config) {
  return config.peft_cache_config.value_or(PeftCacheConfig{});
}

}  // namespace

void check_config(const ExecutorConfig& config, const EngineInfo& engine, const EngineInfo* draft_engine,
                  std::size_t available_memory) {
  validated(config, engine);
  const auto& draft = config.draft_target_decoding_config;
  if (draft && draft_engine != nullptr) {
    check_draft_target(*draft, engine, *draft_engine);
    if (!draft_engine->lora.sites.empty()) {
      static_cast<void>(resolve_cache_sizes(draft->peft_cache_config, draft_engine->lora, available_memory));
    }
  }
  static_cast<void>(lora_cache_sizes(config, engine, available_memory));
  static_cast<void>(count_kv_blocks(config, engine, available_memory));
  static_cast<void>(count_cross_kv_blocks(config, engine, available_memory));
  check_second_level_size(config.kv_cache_config, engine);
}

class Executor::Impl {
 public:
  Impl(std::shared_ptr<Engine> engine, const ExecutorConfig& config, std::size_t available_memory,
       StepObserver observer, std::shared_ptr<Engine> draft_engine)
      : engine_(std::move(engine)),
        max_batch_size_(config.max_batch_size.value_or(engine_->info().max_batch_size)),
        max_beam_width_(config.max_beam_width),
        queue_(validated(config, engine_->info()).max_queue_size),
        statistics_(config),
        post_processors_(config.logits_post_processor_config),
        lookahead_(lookahead_of(config)),
        guides_(engine_->info().vocab_size),
        draft_target_(make_draft_target(config, engine_->info(), std::move(draft_engine), available_memory)),
        lora_cache_(make_lora_cache(peft_config_of(config), *engine_, max_batch_size_, available_memory,
                                    reserved_device_memory(),
                                    {.num_load_workers = peft_config_of(config).num_ensure_workers,
                                     .on_load_end = [this] { queue_.wake(); }})),
        loop_(*engine_, config, count_kv_blocks(config, *engine_, available_memory, reserved_device_memory()),
              count_cross_kv_blocks(config, *engine_, available_memory, reserved_device_memory()),
              count_state_slots(config, *engine_, available_memory, reserved_device_memory()),
              lora_cache_.get(), draft_target_.get(), queue_, board_, statistics_, std::move(observer)) {
    // Engines cannot free KV blocks, so everything that may be refused comes first.
    if (loop_.num_kv_blocks() > 0) engine_->allocate_kv_blocks(loop_.num_kv_blocks());
    if (loop_.num_cross_kv_blocks() > 0) engine_->allocate_cross_kv_blocks(loop_.num_cross_kv_blocks());
    if (loop_.num_state_slots() > 0) engine_->allocate_states(loop_.num_state_slots());
    if (draft_target_) draft_target_->allocate_kv_blocks();
    thread_ = std::thread([this] { loop_.run(); });
  }

  ~Impl() { shutdown(); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  std::vector<RequestId> enqueue(const std::vector<Request>& requests) {
    queue_.throw_if_closed();
    Problems problems;
    std::vector<AdapterTerms> terms;
    BroughtAdapters brought;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const std::string prefix = requests.size() == 1 ? "" : "requests[" + std::to_string(i) + "].";
      terms.push_back(terms_of(requests[i], brought));
      if (brings_weights(requests[i].lora_config))
        brought[requests[i].lora_config->task_id] = &*requests[i].lora_config;
      problems.add_all(prefix, validate(requests[i], terms.back()));
    }
    problems.throw_if_any<RequestError>("request refused");
    const auto last_use = last_use_of_task(requests, &Request::lora_config);
    const auto last_draft_use = last_use_of_task(requests, &Request::draft_lora_config);

    queue_.reserve(requests.size());
    std::vector<RequestId> ids;
    try {
      std::optional<AdapterAdmissions> admissions;
      if (lora_cache_) admissions.emplace(*lora_cache_);
      std::optional<AdapterAdmissions> draft_admissions;
      if (draft_target_ && draft_target_->lora_cache() != nullptr) {
        draft_admissions.emplace(*draft_target_->lora_cache());
      }
      std::vector<std::shared_ptr<const HostAdapter>> held;  // for later requests in the list
      std::vector<std::unique_ptr<ActiveRequest>> active;
      std::vector<Response> errors;
      for (std::size_t i = 0; i < requests.size(); ++i) {
        const Request& request = requests[i];
        std::vector<std::shared_ptr<TokenGuide>> guides;
        if (auto error = error_to_answer(request, vocab_size_of(terms[i]), guides); !error.empty()) {
          ids.push_back(next_id_.fetch_add(1));
          errors.push_back({ids.back(), request.client_id, std::move(error), {}});
          if (is_used_later(request.lora_config, i, last_use)) {
            held.push_back(admissions->admit(*request.lora_config));
          }
          if (draft_admissions && is_used_later(request.draft_lora_config, i, last_draft_use)) {
            held.push_back(draft_target_->admit(request, &*draft_admissions));
          }
          continue;
        }
        const auto adapter = request.lora_config ? admissions->admit(*request.lora_config) : nullptr;
        require_terms(adapter.get(), terms[i]);
        if (adapter != nullptr && loop_.has_second_level()) static_cast<void>(adapter->content_digest());
        const auto draft_adapter =
            draft_target_ ? draft_target_->admit(request, draft_admissions ? &*draft_admissions : nullptr)
                          : nullptr;
        ids.push_back(next_id_.fetch_add(1));
        active.push_back(std::make_unique<ActiveRequest>(ids.back(), request, adapter, std::move(guides),
                                                         post_processor_of(request), engine_->info()));
        active.back()->draft_from(draft_sources_of(request, vocab_size_of(terms[i])), draft_adapter);
      }
      board_.open(ids);
      expect_adapters(active);
      for (Response& error : errors) board_.post(std::move(error));
      queue_.submit(active);  // the last call that may throw: a running request is not taken back
      queue_.release(errors.size());
      if (admissions) admissions->keep();
      if (draft_admissions) draft_admissions->keep();
    } catch (...) {
      board_.discard(ids);
      queue_.release(requests.size());
      throw;
    }
    return ids;
  }

  void cancel(RequestId id) {
    queue_.throw_if_closed();
    if (id == 0 || id >= next_id_.load()) throw RequestError("there is no request " + std::to_string(id));
    queue_.cancel(id);
  }

  void shutdown() {
    const std::lock_guard lock(shutdown_mutex_);
    is_shut_down_ = true;
    queue_.stop();
    if (!thread_.joinable()) return;
    thread_.join();
    engine_->end_steps();
    if (draft_target_) draft_target_->end_steps();
  }

  /// If the executor has died, ready responses can still be taken.
  ResponseBoard& board() {
    if (is_shut_down_) queue_.throw_if_closed();
    return board_;
  }
  RequestQueue& queue() { return queue_; }
  Guides& guides() { return guides_; }
  std::shared_ptr<KVCacheEventManager> events() {
    queue_.throw_if_closed();
    return loop_.events();
  }
  Statistics& statistics() {
    queue_.throw_if_closed();
    return statistics_;
  }
  LoraCache& lora_cache() {
    queue_.throw_if_closed();
    if (!lora_cache_) {
      throw AdapterError(
          "the engine was built without LoRA (build it with --lora_plugin and --lora_target_modules)");
    }
    return *lora_cache_;
  }
  LoraCache& draft_lora_cache() {
    queue_.throw_if_closed();
    if (!draft_target_) throw AdapterError("the executor has no draft engine");
    if (draft_target_->lora_cache() == nullptr) throw AdapterError(DraftTarget::kWithoutLora);
    return *draft_target_->lora_cache();
  }
  [[nodiscard]] const EngineInfo& engine_info() const { return engine_->info(); }
  [[nodiscard]] std::int32_t num_kv_blocks() const { return loop_.num_kv_blocks(); }
  [[nodiscard]] bool is_shut_down() const { return is_shut_down_; }
  [[nodiscard]] bool is_in_a_fork() const { return getpid() != process_; }

 private:
  /// Returns the bytes that the draft engine's KV blocks will need in device memory.
  [[nodiscard]] std::size_t reserved_device_memory() const {
    return draft_target_ ? draft_target_->reserved_device_memory() : 0;
  }

  /// Maps task ids to the adapters whose weights the requests of a list contain, for the part of the list
  /// read so far.
  using BroughtAdapters = std::unordered_map<std::uint64_t, const LoraConfig*>;
  /// Index of the last request of a list that names a task_id without weights.
  using LastUses = std::unordered_map<std::uint64_t, std::size_t>;

  [[nodiscard]] static bool brings_weights(const std::optional<LoraConfig>& config) {
    return config && config->weights.has_value();
  }

  [[nodiscard]] static LastUses last_use_of_task(const std::vector<Request>& requests,
                                                 std::optional<LoraConfig> Request::* config) {
    LastUses uses;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const auto& named = requests[i].*config;
      if (named && !named->weights) uses[named->task_id] = i;
    }
    return uses;
  }

  /// True if a request after requests[index] needs the weights that this one contains.
  [[nodiscard]] static bool is_used_later(const std::optional<LoraConfig>& config, std::size_t index,
                                          const LastUses& last_use) {
    if (!brings_weights(config)) return false;
    const auto found = last_use.find(config->task_id);
    return found != last_use.end() && found->second > index;
  }

  /// Returns the terms of the request's adapter. An earlier request of the list may contain the adapter.
  /// Throws AdapterError.
  [[nodiscard]] AdapterTerms terms_of(const Request& request, const BroughtAdapters& brought) {
    if (!request.lora_config) return {};
    const LoraConfig* config = &*request.lora_config;
    if (!config->weights) {
      if (const auto found = brought.find(config->task_id); found != brought.end()) config = found->second;
    }
    if (const auto known = lora_cache().terms_of(*config)) return *known;
    return lora_cache().admit(*config)->terms();  // throws with the reason
  }

  [[nodiscard]] std::int64_t vocab_size_of(const AdapterTerms& terms) const {
    return engine_->info().vocab_size + terms.vocabulary_change;
  }

  /// Throws RequestError if the adapter was replaced after its request was validated.
  static void require_terms(const HostAdapter* adapter, const AdapterTerms& terms) {
    if ((adapter == nullptr ? AdapterTerms{} : adapter->terms()) == terms) return;
    throw RequestError(
        "the adapter was replaced by one with another vocabulary or other positions while the request was "
        "made; "
        "send it again");
  }

  [[nodiscard]] Problems validate(const Request& request, const AdapterTerms& terms) const {
    Problems problems = request.validate(engine_->info(), terms);
    const auto& name = request.logits_post_processor_name;
    if (name && !post_processor_of(request).processor) {
      problems.add("logits_post_processor_name is '" + *name +
                   "', which the executor's logits_post_processor_config does not have");
    }
    if (request.guided_decoding_params && !guides_.are_there()) {
      problems.add(
          "guided_decoding_params is given; accepted: None, because the executor has no GrammarCompiler");
    }
    if (request.draft_lora_config && !draft_target_) {
      problems.add("draft_lora_config is given; accepted: None, because the executor has no draft engine");
    }
    if (const std::int32_t width = request.sampling_config.beam_width;
        width > max_beam_width_ && width <= engine_->info().max_beam_width) {
      problems.add("sampling_config.beam_width is " + std::to_string(width) +
                   "; the executor's max_beam_width is " + std::to_string(max_beam_width_) +
                   ", the engine's is " + std::to_string(engine_->info().max_beam_width));
    }
    if (!problems.empty()) return problems;
    const auto reason = loop_.check_capacity(static_cast<std::int64_t>(request.input_token_ids.size()),
                                             request.max_scheduled_tokens(), request.num_sequences(),
                                             request.has_beams(), request.encoder_length());
    if (reason) problems.add(*reason);
    return problems;
  }

  /// Returns the error for virtual tokens that attend to each other and do not fit into a step; empty if they
  /// do.
  [[nodiscard]] std::string error_of_joint_tokens(const Request& request, std::int64_t vocab_size) const {
    const std::int32_t column = engine_->info().joint_column;
    if (column < 0 || !request.prompt_tuning_config) return {};
    const std::int32_t most = loop_.max_num_tokens();
    for (const JointTokens& tokens :
         request.prompt_tuning_config->joint_tokens(request.input_token_ids, vocab_size, column)) {
      if (tokens.end - tokens.begin <= most) continue;
      return "the prompt has " + std::to_string(tokens.end - tokens.begin) +
             " virtual tokens from position " + std::to_string(tokens.begin) +
             " on that attend to each other, such as those of an image; a step takes max_num_tokens = " +
             std::to_string(most);
    }
    return {};
  }

  /// Returns the error to answer a valid request with; empty if it can run. Then `guides` has the guides of
  /// its sequences.
  [[nodiscard]] std::string error_to_answer(const Request& request, std::int64_t vocab_size,
                                            std::vector<std::shared_ptr<TokenGuide>>& guides) {
    std::string error = request.error_to_answer(vocab_size);
    if (error.empty()) error = error_of_joint_tokens(request, vocab_size);
    if (!error.empty() || !request.guided_decoding_params) return error;
    try {
      for (std::int32_t i = 0; i < request.num_sequences(); ++i) {
        guides.push_back(guides_.begin(*request.guided_decoding_params));
      }
    } catch (const RequestError& refusal) {
      error = refusal.what();
    }
    return error;
  }

  [[nodiscard]] PostProcessorOfRequest post_processor_of(const Request& request) const {
    if (request.logits_post_processor) return {.processor = request.logits_post_processor->processor};
    if (!request.logits_post_processor_name || !post_processors_) return {};
    if (*request.logits_post_processor_name == kBatchedPostProcessorName) {
      const auto& batched = post_processors_->processor_batched;
      return {.processor = batched ? batched->processor : nullptr, .is_batched = true};
    }
    if (!post_processors_->processor_map) return {};
    const auto found = post_processors_->processor_map->find(*request.logits_post_processor_name);
    const bool is_known = found != post_processors_->processor_map->end() && found->second.has_value();
    return {.processor = is_known ? found->second->processor : nullptr};
  }

  [[nodiscard]] DraftSources draft_sources_of(const Request& request, std::int64_t vocab_size) const {
    DraftSources sources;
    if (request.external_draft_tokens_config) sources.external = request.external_draft_tokens_config->tokens;
    const auto& lookahead = request.lookahead_config ? request.lookahead_config : lookahead_;
    if (lookahead && lookahead->drafts()) sources.lookahead = lookahead;
    // The draft engine knows neither the tokens added by the target's adapter nor virtual tokens.
    const bool has_others = vocab_size > engine_->info().vocab_size || request.prompt_tuning_config;
    if (draft_target_ && !has_others) sources.max_draft_len = draft_target_->max_draft_len();
    return sources;
  }

  /// Starts adapter loads during the running step, so that the next step can start their requests. For
  /// requests further back in the queue, the plans ask for the adapters later.
  void expect_adapters(const std::vector<std::unique_ptr<ActiveRequest>>& requests) {
    if (!lora_cache_ || std::cmp_greater(queue_.num_queued(), max_batch_size_)) return;
    for (const auto& request : requests) {
      if (request->adapter() != nullptr) lora_cache_->expect(*request->adapter());
    }
  }

  const pid_t process_ = getpid();
  std::shared_ptr<Engine> engine_;
  const std::int32_t max_batch_size_;
  const std::int32_t max_beam_width_;
  ResponseBoard board_;
  RequestQueue queue_;
  Statistics statistics_;
  const std::optional<LogitsPostProcessorConfig> post_processors_;
  const std::optional<LookaheadDecodingConfig> lookahead_;
  Guides guides_;
  std::unique_ptr<DraftTarget> draft_target_;
  std::unique_ptr<LoraCache> lora_cache_;
  StepLoop loop_;
  std::atomic<RequestId> next_id_ = 1;
  std::mutex shutdown_mutex_;
  std::atomic<bool> is_shut_down_ = false;
  std::thread thread_;  // last member: it ends before everything that it uses
};

Executor::Executor(std::shared_ptr<Engine> engine, const ExecutorConfig& config, std::size_t available_memory,
                   StepObserver observer, std::shared_ptr<Engine> draft_engine)
    : impl_(std::make_unique<Impl>(std::move(engine), config, available_memory, std::move(observer),
                                   std::move(draft_engine))) {}

Executor::~Executor() {
  // After a fork its thread does not exist, and threads that do not exist may hold the locks.
  if (impl_->is_in_a_fork()) static_cast<void>(impl_.release());
}

Executor::Impl& Executor::impl() const {
  if (impl_->is_in_a_fork()) {
    throw ExecutorClosedError(
        "the executor works in the process that this one was forked from; make another");
  }
  return *impl_;
}

std::vector<RequestId> Executor::enqueue_requests(const std::vector<Request>& requests) {
  return impl().enqueue(requests);
}

RequestId Executor::enqueue_request(const Request& request) {
  return impl().enqueue({request}).front();
}

void Executor::set_grammar_compiler(std::shared_ptr<GrammarCompiler> compiler) {
  impl().guides().set_compiler(std::move(compiler));
}

void Executor::check_guide(const GuidedDecodingParams& params) {
  params.validate().throw_if_any<RequestError>("guided_decoding_params");
  impl().guides().check(params);
}

bool Executor::has_compiled_guide(const GuidedDecodingParams& params) {
  return impl().guides().has_compiled(params);
}

std::vector<Response> Executor::await_responses(Timeout timeout) {
  return impl().board().await_any(timeout);
}

std::vector<Response> Executor::await_responses(RequestId id, Timeout timeout) {
  return impl().board().await(id, timeout);
}

std::optional<std::vector<std::vector<Response>>> Executor::await_responses(const std::vector<RequestId>& ids,
                                                                            Timeout timeout,
                                                                            AtTimeout at_timeout) {
  return impl().board().await_each(ids, timeout, at_timeout);
}

std::size_t Executor::get_num_responses_ready(std::optional<RequestId> id) const {
  return impl().board().num_ready(id);
}

void Executor::cancel_request(RequestId id) {
  impl().cancel(id);
}

void Executor::reset_prefix_cache() {
  impl().queue().reset_prefix_cache();
}

std::vector<IterationStats> Executor::get_latest_iteration_stats() {
  return impl().statistics().take_iterations();
}

std::vector<RequestStatsPerIteration> Executor::get_latest_request_stats() {
  return impl().statistics().take_requests();
}

std::shared_ptr<KVCacheEventManager> Executor::get_kv_cache_event_manager() const {
  return impl().events();
}

bool Executor::can_enqueue_requests() const {
  return !impl_->is_in_a_fork() && impl_->queue().has_room();
}

bool Executor::is_alive() const {
  return !impl_->is_in_a_fork() && impl_->queue().is_open();
}

bool Executor::is_shut_down() const {
  return impl_->is_in_a_fork() || impl_->is_shut_down();
}

void Executor::throw_if_closed() const {
  impl().queue().throw_if_closed();
}

void Executor::shutdown() {
  if (!impl_->is_in_a_fork()) impl_->shutdown();
}

std::vector<LoraCacheEntry> Executor::list_adapters() const {
  return impl().lora_cache().list();
}

void Executor::put_adapter(const LoraConfig& config) {
  static_cast<void>(impl().lora_cache().admit(config));
}

void Executor::pin_adapter(std::uint64_t task_id) {
  impl().lora_cache().pin(task_id);
}

void Executor::unpin_adapter(std::uint64_t task_id) {
  impl().lora_cache().unpin(task_id);
}

void Executor::unload_adapter(std::uint64_t task_id) {
  impl().lora_cache().unload(task_id);
}

void Executor::set_adapter_outdated(std::uint64_t task_id, bool outdated) {
  impl().lora_cache().set_outdated(task_id, outdated);
}

void Executor::put_draft_adapter(const LoraConfig& config) {
  static_cast<void>(impl().draft_lora_cache().admit(config));
}

void Executor::unload_draft_adapter(std::uint64_t task_id) {
  impl().draft_lora_cache().unload(task_id);
}

LoraCacheStats Executor::lora_cache_stats() const {
  return impl().lora_cache().stats();
}

std::int32_t Executor::num_kv_blocks() const {
  return impl_->num_kv_blocks();
}

const EngineInfo& Executor::engine_info() const {
  return impl_->engine_info();
}

}  // namespace adaptrt
