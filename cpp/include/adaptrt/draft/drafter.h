#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "adaptrt/draft/draft_pace.h"
#include "adaptrt/draft/lookahead_config.h"
#include "adaptrt/draft/ngram_index.h"

namespace adaptrt {

/// Sources of a request's drafts.
struct DraftSources {
  /// Drafts of the tokens right after the prompt. As long as they are right, no other source is used.
  std::vector<std::int32_t> external = {};
  /// Drafts from the sequence's own text; nullopt: none.
  std::optional<LookaheadDecodingConfig> lookahead = std::nullopt;
  /// Maximum number of drafts of one step from a draft engine, which is used if no other source has any; 0:
  /// no draft engine.
  std::int32_t max_draft_len = 0;

  [[nodiscard]] bool empty() const { return external.empty() && !lookahead && max_draft_len == 0; }
};

/// Drafts the next tokens of one sequence, or tells how many a draft engine should make. Steps allocate
/// nothing.
class Drafter {
 public:
  /// `sources` must be valid and not empty. `max_length`: maximum number of prompt and output tokens.
  Drafter(const DraftSources& sources, std::span<const std::int32_t> prompt, std::size_t max_length);
  Drafter(const Drafter&) = delete;
  Drafter& operator=(const Drafter&) = delete;

  /// Maximum number of drafts of one step.
  [[nodiscard]] std::size_t max_drafts() const { return max_drafts_; }
  /// Replaces `drafts` with at most `most` tokens that may follow `text`, which is the prompt and the
  /// generated tokens. Call it before each step that computes the end of the text.
  void draft(std::span<const std::int32_t> text, std::int32_t most, std::vector<std::int32_t>& drafts);
  /// Number of drafts that a draft engine should make, because the last draft() made none; 0 for none.
  [[nodiscard]] std::int32_t num_wanted() const { return num_wanted_; }
  /// Records that the draft engine has made drafts, so that record() counts them as the last call's.
  void take_drafts_of_engine();
  /// Records the result of the last call's drafts: the step computed the first `num_computed` of them, and
  /// `num_right` of these were generated.
  void record(std::int32_t num_computed, std::int32_t num_right);

 private:
  void draft_external(std::span<const std::int32_t> text, std::size_t most,
                      std::vector<std::int32_t>& drafts);
  void draft_from_ngrams(std::span<const std::int32_t> text, std::int32_t most,
                         std::vector<std::int32_t>& drafts);

  std::size_t prompt_length_;
  std::size_t max_drafts_;
  std::vector<std::int32_t> external_;
  std::size_t num_right_external_ = 0;
  std::optional<NgramIndex> ngrams_;
  DraftPace pace_;
  DraftPace engine_pace_;
  bool has_engine_;
  std::int32_t num_wanted_ = 0;
  /// Pace for the last call's drafts; nullptr if their source has none.
  DraftPace* pace_of_drafts_ = nullptr;
};

}  // namespace adaptrt
