// Ops of latent attention: products of each head with its own matrix. Rows are independent of each other, so
// their bits depend neither on the steps into which a prompt is cut nor on other sequences.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "lowered_op.h"
#include "ops/latent_memory.h"
#include "ops/linear/linear_layer.h"

namespace adaptrt {
namespace {

/// y = x W^T for each head, with its own W and its own part of adapters.
class HeadProducts {
 public:
  HeadProducts(const std::vector<LinearPart>& heads, std::int32_t first_site, const OpPlace& place)
      : context_(place.context),
        first_site_(first_site),
        heads_(std::ssize(heads)),
        layer_(
            {.parts = heads, .site = first_site < 0 ? nullptr : &place.context.program.lora_site(first_site)},
            place.context),
        inputs_{nullptr, activation_dtype(place.context.program.dtype), heads.front().weight.k},
        outputs_{nullptr, DType::kFloat32, heads.front().weight.n} {}

  /// Calls load(token, head, x) to fill x, multiplies, and calls store(token, head, y).
  template <class Load, class Store>
  void run(const Step& step, const Load& load, const Store& store) {
    inputs_.data = context_.memory.latent.inputs();
    outputs_.data = context_.memory.latent.outputs();
    const std::int64_t slice = tokens_of_heads(context_.program, heads_);
    for (std::int64_t first = 0; first < step.rows; first += slice) {
      const std::int64_t count = std::min(slice, step.rows - first);
      for_each_row(count, inputs_.width, [&](std::int64_t token, std::int64_t head) {
        load(first + token, head, inputs_.row(head * count + token));
      });
      multiply(step, first, count);
      for_each_row(count, outputs_.width, [&](std::int64_t token, std::int64_t head) {
        store(first + token, head, outputs_.float_row(head * count + token));
      });
    }
  }

 private:
  /// Calls body(token, head); a thread has all heads of a token.
  template <class Body>
  void for_each_row(std::int64_t count, std::int64_t width, const Body& body) const {
    const auto rows = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t token = begin; token < end; ++token) {
        for (std::int64_t head = 0; head < heads_; ++head) body(token, head);
      }
    };
    context_.threads.parallel_for(count, rows_per_chunk(width * heads_), rows);
  }

  void multiply(const Step& step, std::int64_t first, std::int64_t count) const {
    std::vector<RowGroup>& groups = context_.memory.latent.groups;
    std::vector<AdaptedRows>& adapted = context_.memory.linear.adapted_rows;
    groups.clear();
    adapted.clear();
    for (std::int64_t head = 0; head < heads_; ++head) {
      groups.push_back({{head * count, (head + 1) * count}, static_cast<std::size_t>(head)});
      if (first_site_ >= 0) add_adapted(step, first, count, head, &adapted);
    }
    context_.memory.linear.forget_reads();
    layer_.run({.input = inputs_, .output = outputs_, .groups = groups, .adapted = adapted});
  }

  /// Adds the rows of a head whose adapter changes it.
  void add_adapted(const Step& step, std::int64_t first, std::int64_t count, std::int64_t head,
                   std::vector<AdaptedRows>* adapted) const {
    for (const AdapterGroup& group : step.groups) {
      const std::int64_t begin = std::max(group.begin - first, std::int64_t{0});
      const std::int64_t end = std::min(group.end - first, count);
      const DeviceSite& site = group.adapter->sites[static_cast<std::size_t>(first_site_ + head)];
      if (begin < end && site.total_rank > 0) {
        adapted->push_back({head * count + begin, head * count + end, &site});
      }
    }
  }

  const CpuContext& context_;
  std::int32_t first_site_;
  std::int64_t heads_;
  LinearLayer layer_;
  Rows inputs_;
  Rows outputs_;
};

class LoweredLatentQueries final : public LoweredOp {
 public:
  LoweredLatentQueries(const LatentQueriesOp& op, const OpPlace& place)
      : op_(op),
        context_(place.context),
        keys_(op.keys, op.lora_site, place),
        queries_(place.context.rows_of(op.queries)),
        rows_(place.context.rows_of(op.rows)),
        output_(place.context.rows_of(op.output)) {}

  void run(Step& step) override {
    const LatentShape& shape = op_.shape;
    const DType type = activation_dtype(context_.program.dtype);
    const auto query = [&](std::int64_t token, std::int64_t head) {
      return queries_.float_row(token) + head * (shape.plain_dim + shape.rotary_dim);
    };
    keys_.run(
        step,
        [&](std::int64_t token, std::int64_t head, std::byte* x) {
          context_.kernels.scale_and_store(query(token, head), 1.0F, shape.plain_dim, x, type);
        },
        [&](std::int64_t token, std::int64_t head, const float* product) {
          float* out = output_.float_row(token) + head * shape.key_dim();
          std::copy_n(query(token, head) + shape.plain_dim, shape.rotary_dim, out);
          std::copy_n(product, shape.latent_dim, out + shape.rotary_dim);
          if (head == 0) make_key(token);
        });
  }

 private:
  void make_key(std::int64_t token) const {
    const LatentShape& shape = op_.shape;
    const float* row = rows_.float_row(token);
    float* key = output_.float_row(token) + shape.num_heads * shape.key_dim();
    std::copy_n(row + shape.latent_dim, shape.rotary_dim, key);
    context_.kernels.rms_norm(row, op_.norm.data, op_.epsilon, shape.latent_dim,
                              reinterpret_cast<std::byte*>(key + shape.rotary_dim), DType::kFloat32);
  }

  const LatentQueriesOp& op_;
  const CpuContext& context_;
  HeadProducts keys_;
  Rows queries_;
  Rows rows_;
  Rows output_;
};

class LoweredLatentValues final : public LoweredOp {
 public:
  LoweredLatentValues(const LatentValuesOp& op, const OpPlace& place)
      : op_(op),
        context_(place.context),
        values_(op.values, op.lora_site, place),
        input_(place.context.rows_of(op.input)),
        output_(place.context.rows_of(op.output)) {}

  void run(Step& step) override {
    const LatentShape& shape = op_.shape;
    const std::size_t element = size_of(input_.dtype);
    const auto latent_bytes = static_cast<std::size_t>(shape.latent_dim) * element;
    values_.run(
        step,
        [&](std::int64_t token, std::int64_t head, std::byte* x) {
          const std::int64_t column = head * shape.key_dim() + shape.rotary_dim;
          std::memcpy(x, input_.row(token) + static_cast<std::size_t>(column) * element, latent_bytes);
        },
        [&](std::int64_t token, std::int64_t head, const float* product) {
          std::byte* out = output_.row(token) + static_cast<std::size_t>(head * shape.value_dim) * element;
          context_.kernels.scale_and_store(product, 1.0F, shape.value_dim, out, output_.dtype);
        });
  }

 private:
  const LatentValuesOp& op_;
  const CpuContext& context_;
  HeadProducts values_;
  Rows input_;
  Rows output_;
};

}  // namespace

LoweredOpPtr lower(const LatentQueriesOp& op, const OpPlace& place) {
  return std::make_unique<LoweredLatentQueries>(op, place);
}

LoweredOpPtr lower(const LatentValuesOp& op, const OpPlace& place) {
  return std::make_unique<LoweredLatentValues>(op, place);
}

}  // namespace adaptrt
