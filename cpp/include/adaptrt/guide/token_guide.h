#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "adaptrt/guide/grammar.h"

namespace adaptrt {

class MaskThread;

/// The tokens that may come next in one request's output. The executor's thread reports the chosen token and
/// asks for the next mask one step later. In between, a MaskThread makes the mask while the engine runs its
/// step.
class TokenGuide : public std::enable_shared_from_this<TokenGuide> {
 public:
  /// `stop_token_ids` and `thread` must outlive it.
  [[nodiscard]] static std::shared_ptr<TokenGuide> begin(std::unique_ptr<GrammarState> grammar,
                                                         std::int64_t vocab_size,
                                                         std::span<const std::int32_t> stop_token_ids,
                                                         MaskThread& thread);

  /// Returns the mask of the next token, in the format of GrammarState::fill_mask. Waits for the mask, or
  /// makes it if no thread has begun to. Valid until accept(). Throws StepError with the grammar's reason; it
  /// has no more masks then.
  [[nodiscard]] std::span<const std::uint32_t> mask();
  /// Advances by the sampled token; call it after mask().
  void accept(std::int32_t token);
  [[nodiscard]] bool is_stop_token(std::int32_t token) const;

 private:
  friend class MaskThread;
  TokenGuide(std::unique_ptr<GrammarState> grammar, std::int64_t vocab_size,
             std::span<const std::int32_t> stop_token_ids, MaskThread& thread);
  enum class Stage : std::uint8_t { kWanted, kInTheMaking, kReady };
  /// Makes the mask, unless another thread has begun to.
  void make();

  std::unique_ptr<GrammarState> grammar_;
  std::span<const std::int32_t> stop_token_ids_;
  MaskThread& thread_;
  std::atomic<Stage> stage_ = Stage::kWanted;
  // Only the thread that moved stage_ from kWanted to kInTheMaking uses these members until it is kReady.
  std::optional<std::int32_t> chosen_;
  std::vector<std::uint32_t> mask_;
  std::string error_;
};

/// A thread that makes masks before they are needed.
class MaskThread {
 public:
  MaskThread();
  /// Masks that are not made yet are left to the threads that need them.
  ~MaskThread();
  MaskThread(const MaskThread&) = delete;
  MaskThread& operator=(const MaskThread&) = delete;

  /// Makes the mask that the guide needs, soon.
  void prepare(std::shared_ptr<TokenGuide> guide);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<TokenGuide>> wanted_;
  bool stop_ = false;
  std::thread thread_;  // last member: everything that it uses exists when it starts
};

}  // namespace adaptrt
