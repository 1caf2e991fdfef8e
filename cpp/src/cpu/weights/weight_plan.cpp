#include "weights/weight_plan.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <variant>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "op_members.h"

namespace adaptrt {
namespace {

constexpr StepSection kSections[] = {StepSection::kEncoder, StepSection::kBody, StepSection::kHead};

/// Share of tokens: neurons that more tokens use stay in memory before linear layers, which all tokens use.
/// Scattered reads take 1.5 to 4 times as long as sequential ones.
constexpr double kShareBeforeLinears = 0.5;

class Planner {
 public:
  Planner(const Program& program, const WeightMemory& memory) : memory_(memory) {
    count_uses(program);
    mlps_ = find_neuron_mlps(program, memory, [&](const Op& op) { return is_of_one_op(op); });
    for (std::size_t i = 0; i < std::size(kSections); ++i) {
      const std::vector<Op>& ops = *program.sections()[i];
      for (std::size_t op = 0; op < ops.size(); ++op) sort_in(kSections[i], op, ops[op]);
    }
    fixed_bytes_ = FilePages(fixed_).bytes();
    for (const auto& linear : linears_) {
      linear_bytes_ += linear.pages.bytes();
      largest_linear_ = std::max(largest_linear_, linear.pages.bytes());
    }
    largest_unit_ = largest_linear_;
    for (const NeuronMlp& mlp : mlps_) {
      const std::size_t of_mlp[] = {FilePages({mlp.gate, mlp.up}).bytes(), FilePages({mlp.down}).bytes()};
      largest_unit_ = std::max({largest_unit_, of_mlp[0], of_mlp[1]});
      mlp_bytes_ += FilePages({mlp.up}).bytes() + of_mlp[1] + mlp.neuron_bytes();
    }
    slot_bytes_ = neuron_slot_bytes(mlps_);
    least_slots_ = least_neuron_slots(mlps_);
  }

  [[nodiscard]] WeightPlan plan() {
    WeightPlan plan{.resident = fixed_, .streamed = {}, .mlps = {}, .experts = {}};
    if (fixed_bytes_ + linear_bytes_ + mlp_bytes_ + all_expert_bytes() <= memory_.bytes) {
      for (const auto& linear : linears_) keep(&plan, linear.ranges);
      for (const auto& mlp : mlps_) keep(&plan, {mlp.up, mlp.down, {mlp.neurons.offset, mlp.neuron_bytes()}});
      for (const auto& layer : experts_) keep_all(&plan, layer);
      return plan;
    }
    std::size_t room = room_beside({fixed_bytes_, least_expert_bytes()});
    if (mlps_.empty() && linear_bytes_ <= room) {
      room -= linear_bytes_;
      for (const auto& linear : linears_) keep(&plan, linear.ranges);
    } else {
      room = stream_linears(&plan, room);
    }
    give_slots(&plan, room);
    return plan;
  }

 private:
  /// A linear layer, or the gate of an MLP with neurons.
  struct Linear {
    StepSection section;
    std::size_t op;
    std::vector<FileRange> ranges;
    FilePages pages;
  };
  struct Experts {
    std::size_t op;
    std::vector<std::vector<FileRange>> ranges;  ///< by expert
    std::vector<FilePages> pages;                ///< by expert
    std::size_t slot_bytes = 0;
    std::size_t least_slots = 0;  ///< number of experts of a token

    [[nodiscard]] std::size_t all_bytes() const { return slot_bytes * pages.size(); }
  };
  struct Needed {
    std::size_t fixed;
    std::size_t experts;
  };

  /// Counts the ops that use each matrix. A tied embedding table, for example, is lm_head too.
  void count_uses(const Program& program) {
    for_each_member<PanelMatrix>(program, [&](const PanelMatrix& matrix) { ++uses_[matrix.data]; });
  }

  void add_fixed(const std::optional<FileRange>& range) {
    if (range) fixed_.push_back(*range);
  }

  void sort_in(StepSection section, std::size_t index, const Op& op) {
    for_each_member<VectorView>(op,
                                [&](const VectorView& vector) { add_fixed(file_range(memory_, vector)); });
    if (section == StepSection::kBody && sort_in_mlp(index)) return;
    if (section != StepSection::kHead && is_of_one_op(op)) {
      if (const auto* linear = std::get_if<LinearOp>(&op)) {
        add_linear(section, index, linear->parts);
        return;
      }
      const auto* experts = std::get_if<ExpertsOp>(&op);
      if (experts != nullptr && section == StepSection::kBody) {
        add_experts(index, *experts);
        return;
      }
    }
    for_each_member<PanelMatrix>(op,
                                 [&](const PanelMatrix& matrix) { add_fixed(file_range(memory_, matrix)); });
  }

  /// True if an op of the body belongs to an MLP with neurons.
  bool sort_in_mlp(std::size_t index) {
    for (const NeuronMlp& mlp : mlps_) {
      if (mlp.gated_op == index) {
        const std::vector<FileRange> gate{mlp.gate};
        linears_.push_back({StepSection::kBody, index, gate, FilePages(gate)});
      }
      if (mlp.gated_op == index || mlp.down_op == index) return true;
    }
    return false;
  }

  /// True if all matrices of an op are in the file, and no other op uses them.
  [[nodiscard]] bool is_of_one_op(const Op& op) const {
    bool is = true;
    for_each_member<PanelMatrix>(op, [&](const PanelMatrix& matrix) {
      is = is && uses_.at(matrix.data) == 1 && file_range(memory_, matrix).has_value();
    });
    return is;
  }

  void add_linear(StepSection section, std::size_t op, const std::vector<LinearPart>& parts) {
    std::vector<FileRange> ranges;
    for (const LinearPart& part : parts) ranges.push_back(*file_range(memory_, part.weight));
    linears_.push_back({section, op, ranges, FilePages(ranges)});
  }

  void add_experts(std::size_t index, const ExpertsOp& op) {
    const auto count = static_cast<std::size_t>(op.num_experts());
    Experts layer{.op = index, .ranges = {}, .pages = {}};
    const std::size_t parts = op.gate_up.size() / count;
    for (std::size_t expert = 0; expert < count; ++expert) {
      std::vector<FileRange> ranges{*file_range(memory_, op.down[expert].weight)};
      for (std::size_t part = 0; part < parts; ++part) {
        ranges.push_back(*file_range(memory_, op.gate_up[expert * parts + part].weight));
      }
      layer.ranges.push_back(ranges);
      layer.pages.emplace_back(std::move(ranges));
      layer.slot_bytes = std::max(layer.slot_bytes, layer.pages.back().bytes());
    }
    layer.least_slots = std::min(count, static_cast<std::size_t>(op.routing.top_k));
    experts_.push_back(std::move(layer));
  }

  [[nodiscard]] std::size_t all_expert_bytes() const {
    std::size_t bytes = 0;
    for (const Experts& layer : experts_) bytes += layer.all_bytes();
    return bytes;
  }

  [[nodiscard]] std::size_t least_expert_bytes() const {
    std::size_t bytes = 0;
    for (const Experts& layer : experts_) bytes += layer.slot_bytes * layer.least_slots;
    return bytes;
  }

  /// Returns the bytes left for linear layers and more experts. Throws ConfigError if they are too few.
  [[nodiscard]] std::size_t room_beside(const Needed& needed) const {
    const std::size_t neurons = least_slots_ * slot_bytes_;
    const std::size_t least = needed.fixed + needed.experts + largest_unit_ + neurons;
    if (memory_.bytes >= least) return memory_.bytes - needed.fixed - needed.experts;
    std::string text = "weight_memory is " + std::to_string(memory_.bytes) +
                       "; accepted: " + std::to_string(least) +
                       " and more bytes: " + std::to_string(needed.fixed) +
                       " for embeddings, lm_head, norms and biases, which stay in memory, " +
                       std::to_string(largest_unit_) + " to read the largest layer into";
    if (neurons > 0)
      text += ", " + std::to_string(neurons) + " for the neurons that a token opens in a layer";
    if (needed.experts > 0) {
      text += ", " + std::to_string(needed.experts) + " for the experts that a token takes in each layer";
    }
    throw ConfigError(text);
  }

  static void keep(WeightPlan* plan, const std::vector<FileRange>& ranges) {
    plan->resident.insert(plan->resident.end(), ranges.begin(), ranges.end());
  }

  static void keep_all(WeightPlan* plan, const Experts& layer) {
    for (const auto& ranges : layer.ranges) keep(plan, ranges);
  }

  /// Plans linear layers. Those that do not fit are streamed into a ring, with room for two of the largest if
  /// possible. Returns the remaining bytes.
  std::size_t stream_linears(WeightPlan* plan, std::size_t room) {
    room -= least_slots_ * slot_bytes_;
    plan->ring_bytes = std::min(std::max(2 * largest_linear_, largest_unit_), room);
    room -= plan->ring_bytes;
    room -= keep_used_neurons(&mlps_, memory_.usage, kShareBeforeLinears, room);
    std::vector<bool> streams(linears_.size(), false);
    if (linear_bytes_ <= room) {
      room -= linear_bytes_;
    } else {
      streams = spread(room);
      room = 0;
    }
    for (std::size_t i = 0; i < linears_.size(); ++i) {
      const Linear& linear = linears_[i];
      if (streams[i]) {
        plan->streamed.push_back({linear.section, linear.op, linear.pages});
      } else {
        keep(plan, linear.ranges);
      }
      stream_mlp(plan, linear, streams[i]);
    }
    room -= keep_used_neurons(&mlps_, memory_.usage, 0.0, room);
    return give_neuron_slots(plan, room);
  }

  /// Adds the parts of an MLP that are streamed after its gate if single neurons are not enough.
  void stream_mlp(WeightPlan* plan, const Linear& gate, bool streams_gate) const {
    if (gate.section != StepSection::kBody) return;
    const auto found = std::ranges::find(mlps_, gate.op, &NeuronMlp::gated_op);
    if (found == mlps_.end()) return;
    std::vector<FileRange> whole{found->up};
    WeightPlan::Mlp mlp{
        .mlp = {}, .gate = {}, .whole = plan->streamed.size(), .down = plan->streamed.size() + 1};
    if (streams_gate) {
      whole.push_back(found->gate);
      mlp.gate = mlp.whole - 1;
    }
    plan->streamed.push_back({StepSection::kBody, found->gated_op, FilePages(whole), true});
    plan->streamed.push_back({StepSection::kBody, found->down_op, FilePages({found->down}), true});
    plan->mlps.push_back(std::move(mlp));
  }

  /// Plans the minimum number of neuron slots, and as many more as room and neurons allow. Returns the
  /// remaining bytes.
  std::size_t give_neuron_slots(WeightPlan* plan, std::size_t room) {
    if (mlps_.empty()) return room;
    std::size_t others = 0;
    for (const NeuronMlp& mlp : mlps_) {
      others += static_cast<std::size_t>(mlp.neurons.count) - mlp.neurons.kept.size();
    }
    const std::size_t more = std::min(room / slot_bytes_, others - std::min(others, least_slots_));
    plan->neuron_slots = least_slots_ + more;
    for (std::size_t i = 0; i < mlps_.size(); ++i) plan->mlps[i].mlp = std::move(mlps_[i]);
    return room - more * slot_bytes_;
  }

  /// Returns which layers are streamed, so that the others have at most `kept` bytes. Up to any layer, about
  /// the same share of the bytes is streamed.
  [[nodiscard]] std::vector<bool> spread(std::size_t kept) const {
    const double share = static_cast<double>(kept) / static_cast<double>(linear_bytes_);
    std::vector<bool> streams(linears_.size(), true);
    std::size_t left = kept;
    double due = 0.0;
    for (std::size_t i = 0; i < linears_.size(); ++i) {
      const std::size_t bytes = linears_[i].pages.bytes();
      due += share * static_cast<double>(bytes);
      if (due < static_cast<double>(bytes) / 2 || bytes > left) continue;
      streams[i] = false;
      left -= bytes;
      due -= static_cast<double>(bytes);
    }
    // Keeps more layers that fit after rounding.
    for (std::size_t i = linears_.size(); i-- > 0;) {
      const std::size_t bytes = linears_[i].pages.bytes();
      if (!streams[i] || bytes > left) continue;
      streams[i] = false;
      left -= bytes;
    }
    return streams;
  }

  void give_slots(WeightPlan* plan, std::size_t room) const {
    std::vector<std::size_t> slots;
    for (const Experts& layer : experts_) slots.push_back(layer.least_slots);
    for (bool gives = true; gives;) {
      gives = false;
      for (std::size_t i = 0; i < experts_.size(); ++i) {
        if (slots[i] == experts_[i].pages.size() || experts_[i].slot_bytes > room) continue;
        ++slots[i];
        room -= experts_[i].slot_bytes;
        gives = true;
      }
    }
    for (std::size_t i = 0; i < experts_.size(); ++i) {
      if (slots[i] == experts_[i].pages.size()) {
        keep_all(plan, experts_[i]);
      } else {
        plan->experts.push_back({experts_[i].op, experts_[i].pages, slots[i]});
      }
    }
  }

  const WeightMemory& memory_;
  std::map<const std::byte*, int> uses_;
  std::vector<FileRange> fixed_;
  std::size_t fixed_bytes_ = 0;
  std::vector<Linear> linears_;
  std::size_t linear_bytes_ = 0;
  std::size_t largest_linear_ = 0;
  std::vector<NeuronMlp> mlps_;
  std::size_t mlp_bytes_ = 0;     ///< bytes of MLPs without their gates
  std::size_t largest_unit_ = 0;  ///< bytes of the largest unit that is read into the ring
  std::size_t slot_bytes_ = 0;    ///< bytes of a neuron's slot
  std::size_t least_slots_ = 0;
  std::vector<Experts> experts_;
};

std::optional<FileRange> range_at(const WeightMemory& memory, const void* data, std::size_t bytes) {
  const auto offset = file_offset(memory, data);
  if (!offset || bytes == 0) return std::nullopt;
  return FileRange{*offset, bytes};
}

}  // namespace

std::optional<std::size_t> file_offset(const WeightMemory& memory, const void* data) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.mapping.data());
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  if (at < begin || at - begin >= memory.mapping.size()) return std::nullopt;
  return at - begin;
}

std::optional<FileRange> file_range(const WeightMemory& memory, const PanelMatrix& matrix) {
  return range_at(memory, matrix.data, matrix.bytes());
}

std::optional<FileRange> file_range(const WeightMemory& memory, const VectorView& vector) {
  return range_at(memory, vector.data, static_cast<std::size_t>(vector.size) * sizeof(float));
}

WeightPlan plan_weights(const Program& program, const WeightMemory& memory) {
  return Planner(program, memory).plan();
}

}  // namespace adaptrt
