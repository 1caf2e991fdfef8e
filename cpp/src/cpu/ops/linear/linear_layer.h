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

/// Columns of a layer's output that a thread has computed.
struct ThreadPanels {
  PanelRange panels;
  Rows output;  ///< the columns of these panels
  int thread = 0;
};

/// A linear layer that is ready to run: its kernels, its tiling and the form of its input are resolved.
class LinearLayer {
 public:
  /// `context` must outlive this object.
  LinearLayer(const LinearSpec& spec, const CpuContext& context);
  LinearLayer(const LinearLayer&) = delete;
  LinearLayer& operator=(const LinearLayer&) = delete;

  void run(const LinearCall& call) const;

  /// Computes a layer with one part per group in chunks of `panels_at_once` panels, and calls finish(panels)
  /// after each chunk. call.output has the columns of one chunk. finish() reads them before the next chunk is
  /// computed, so they stay in the caches.
  void run_in_chunks(const LinearCall& call, std::int64_t panels_at_once,
                     const std::function<void(PanelRange)>& finish) const;

  /// Computes a layer with one part per group and scattered output. Each thread computes its own panels,
  /// `panels_at_once` together, one group after another, into its own memory. The first thread's memory is
  /// call.output, with rows as wide as these panels; the memory of the other threads follows. The thread that
  /// computed the panels calls finish().
  void run_by_columns(const LinearCall& call, std::int64_t panels_at_once,
                      const std::function<void(const ThreadPanels&)>& finish) const;

  /// Prepares the input for all panels, for the base and for adapters.
  void prepare(const LinearCall& call) const;

  [[nodiscard]] const LinearSpec& spec() const { return spec_; }
  [[nodiscard]] const CpuContext& context() const { return context_; }
  [[nodiscard]] const BaseProduct& base() const { return base_; }
  [[nodiscard]] const AdapterProduct& adapters() const { return adapters_; }
  [[nodiscard]] const LinearOutput& output() const { return output_; }

 private:
  [[nodiscard]] bool streams(const LinearCall& call) const;

  LinearSpec spec_;
  const CpuContext& context_;
  BaseProduct base_;
  AdapterProduct adapters_;
  LinearOutput output_;
  /// Number of panels of a group's parts; for a gated layer, of one of its parts.
  std::int64_t num_panels_;
};

}  // namespace adaptrt
