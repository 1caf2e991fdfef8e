#pragma once

#include <cstdint>
#include <functional>

#include "context.h"
#include "ops/linear/adapter_product.h"
#include "ops/linear/base_product.h"
#include "ops/linear/linear_output.h"
#include "ops/linear/linear_spec.h"
#include "ops/linear/linear_units.h"

namespace adaptrt {

/// The columns that a thread has made of a layer.
struct ThreadPanels {
  PanelRange panels;
  Rows output;  ///< the columns of these panels
  int thread = 0;
};

/// A linear layer that is ready to run: its kernels, its tiling and the form of its input are resolved.
class LinearLayer {
 public:
  /// `context` outlives it.
  LinearLayer(const LinearSpec& spec, const CpuContext& context);
  LinearLayer(const LinearLayer&) = delete;
  LinearLayer& operator=(const LinearLayer&) = delete;

  void run(const LinearCall& call) const;

  /// Makes a layer with one part for each group `panels_at_once` panels at a time, and calls finish(panels)
  /// after each of these chunks: call.output has the columns of one chunk, in rows as wide as they are, and
  /// is read before the next is made, so that it stays in the caches.
  void run_in_chunks(const LinearCall& call, std::int64_t panels_at_once,
                     const std::function<void(PanelRange)>& finish) const;

  /// Makes a layer with one part for each group whose output is scattered: each thread makes panels of its
  /// own, `panels_at_once` together, for one group after the other, to memory of its own. The memory of the
  /// first thread is call.output, with rows as wide as these panels; that of the others follows. finish() is
  /// called in the thread that made them.
  void run_by_columns(const LinearCall& call, std::int64_t panels_at_once,
                      const std::function<void(const ThreadPanels&)>& finish) const;

  /// Makes what all panels need of the input, for the base and for adapters.
  void prepare(const LinearCall& call) const;

  [[nodiscard]] const LinearSpec& spec() const { return spec_; }
  [[nodiscard]] const CpuContext& context() const { return context_; }
  [[nodiscard]] const BaseProduct& base() const { return base_; }
  [[nodiscard]] const AdapterProduct& adapters() const { return adapters_; }
  [[nodiscard]] const LinearOutput& output() const { return output_; }
  /// Panels of a group's parts, of one of them where they are gated.
  [[nodiscard]] std::int64_t num_panels() const { return num_panels_; }

 private:
  [[nodiscard]] bool streams(const LinearCall& call) const;

  LinearSpec spec_;
  const CpuContext& context_;
  BaseProduct base_;
  AdapterProduct adapters_;
  LinearOutput output_;
  std::int64_t num_panels_;
};

}  // namespace adaptrt
