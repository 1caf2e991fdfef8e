#include "config_rows.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "adaptrt/core/element_scan.h"

namespace adaptrt {
namespace {

std::string names_of(const std::vector<LoraModule>& modules) {
  std::string text;
  for (const LoraModule module : modules) {
    text.append(text.empty() ? "" : ", ").append(info_of(module).name);
  }
  return text;
}

/// One row of the config tensor, as sent.
struct ConfigRow {
  std::int32_t module_id = 0;
  std::int32_t layer = 0;
  std::int32_t rank = 0;
  std::int32_t vectors = 0;  ///< flags of RowVectors
  bool is_gate_up = false;   ///< sent as mlp_h_to_4h
};

std::vector<ConfigRow> read_config(const TensorView& config, MatrixShape shape) {
  std::vector<ConfigRow> rows(static_cast<std::size_t>(shape.rows));
  const auto columns = static_cast<std::size_t>(shape.columns);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::int32_t values[4] = {};
    std::memcpy(values, config.data + i * columns * sizeof(std::int32_t), columns * sizeof(std::int32_t));
    rows[i] = {values[0], values[1], values[2], values[3]};
  }
  return rows;
}

/// True if a row of mlp_h_to_4h has values in the elements that only mlp_gate_up has.
bool has_fused_gate_up(const std::vector<ConfigRow>& rows, const SentWeights& weights,
                       const SiteIndex& index) {
  if (weights.data == nullptr) return false;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const ConfigRow& row = rows[i];
    if (row.module_id != static_cast<std::int32_t>(LoraModule::kMlpHTo4H)) continue;
    const ModulePlace* narrow = index.find(row.layer, LoraModule::kMlpHTo4H);
    const ModulePlace* fused = index.find(row.layer, LoraModule::kMlpGateUp);
    if (narrow == nullptr || fused == nullptr || row.rank < 1 || row.rank > *weights.columns) continue;
    const std::int64_t vectors = RowVectors::of(row.vectors).count();
    const auto elements = [&](const ModuleSizes& sizes) {
      return row.rank * (sizes.a_per_rank() + sizes.b_per_rank()) + vectors * sizes.vector();
    };
    const std::int64_t begin = elements(narrow->sizes), end = elements(fused->sizes);
    if (end > *weights.columns) continue;
    const std::size_t first =
        i * static_cast<std::size_t>(*weights.columns) + static_cast<std::size_t>(begin);
    if (find_not_zero(weights.data + first * size_of(weights.dtype), weights.dtype,
                      static_cast<std::size_t>(end - begin))) {
      return true;
    }
  }
  return false;
}

/// Changes the id of mlp_h_to_4h rows that are mlp_gate_up.
void rename_fused_gate_up(std::vector<ConfigRow>& rows, const SentWeights& weights, const SiteIndex& index) {
  if (!has_fused_gate_up(rows, weights, index)) return;
  for (ConfigRow& row : rows) {
    if (row.module_id != static_cast<std::int32_t>(LoraModule::kMlpHTo4H)) continue;
    row.module_id = static_cast<std::int32_t>(LoraModule::kMlpGateUp);
    row.is_gate_up = true;
  }
}

/// First check of a row: does the engine have this module and layer?
const LoraModuleInfo* check_place(const ConfigRow& sent, const std::string& where, const LoraLayout& layout,
                                  AdapterProblems& problems) {
  const LoraModuleInfo* info = find_lora_module(std::int64_t{sent.module_id});
  const auto refuse = [&](const std::string& what) {
    problems.add(where + what);
    return nullptr;
  };
  if (info == nullptr) {
    return refuse("module_id " + std::to_string(sent.module_id) + " is unknown; accepted: 0 to " +
                  std::to_string(lora_modules().size() - 1));
  }
  const std::string name =
      sent.is_gate_up ? "module_id 5 (mlp_h_to_4h) has twice its outputs, so it is mlp_gate_up, which"
                      : "module_id " + std::to_string(sent.module_id) + " (" + std::string(info->name) + ")";
  if (!info->is_served) {
    return refuse(name + " is not part of the networks that engines have");
  }
  if (info->module == LoraModule::kNewTokens || is_setting(info->module))
    return info;                           // its rank is checked
                                           // later
  if (is_norm(info->module)) return info;  // its number is checked later
  if (std::ranges::find(layout.target_modules, info->module) == layout.target_modules.end()) {
    return refuse(name + " is not enabled in this engine; its lora_target_modules are " +
                  names_of(layout.target_modules));
  }
  if (is_of_vocabulary(info->module)) return info;  // its slices are checked later
  if (sent.layer < 0 || sent.layer >= layout.num_layers) {
    return refuse("layer " + std::to_string(sent.layer) + " of " + std::string(info->name) +
                  " is out of range; accepted: 0 to " + std::to_string(layout.num_layers - 1));
  }
  return info;
}

/// Error for tokens beyond the vocabulary that the engine has no site for.
std::string no_room_for_new_tokens(const ConfigRow& sent, const LoraLayout& layout) {
  if (layout.max_extra_tokens > 0)
    return "layer " + std::to_string(sent.layer) + " of new_tokens; accepted: 0";
  const std::string count = std::to_string(sent.rank);
  return "the engine was built without room for new tokens; the adapter adds " + count +
         " (adaptrt build --max_extra_tokens " + count + " makes it)";
}

/// Error for a module that the engine has, but not at this place.
std::string no_such_place(const ConfigRow& sent, const LoraModuleInfo& info) {
  const std::string number = std::to_string(sent.layer), name(info.name);
  if (is_norm(info.module)) return "this engine has no norm " + number + " whose bias adapters can shift";
  if (is_of_vocabulary(info.module))
    return "this engine's vocabulary has no slice " + number + " for " + name;
  return "layer " + number + " of this engine has no " + name;
}

std::string listed(const std::vector<std::int32_t>& numbers) {
  std::string text;
  for (const std::int32_t number : numbers)
    text.append(text.empty() ? "" : ", ").append(std::to_string(number));
  return text;
}

/// Checks a row with a setting.
bool check_setting(const ConfigRow& sent, LoraModule module, const std::string& where,
                   const LoraLayout& layout, AdapterProblems& problems) {
  const std::string number = std::to_string(sent.rank);
  std::string problem;
  if (sent.layer != 0 || sent.vectors != 0) {
    problem = "layer is " + std::to_string(sent.layer) + " and vectors " + std::to_string(sent.vectors) +
              "; accepted: 0 of both";
  } else if (module == LoraModule::kAbsentTokens) {
    if (sent.rank < 1) problem = "its number of absent tokens is " + number + "; accepted: 1 or more";
  } else if (std::ranges::find(layout.rotary_factors, sent.rank) == layout.rotary_factors.end()) {
    problem = "it divides rotary positions by " + number + "; " +
              (layout.rotary_factors.empty()
                   ? "the engine was built without such factors (adaptrt build --long_lora_scaling_factors " +
                         number + " makes it take that one)"
                   : "the engine's long_lora_scaling_factors are " + listed(layout.rotary_factors));
  }
  if (problem.empty()) return true;
  problems.add(where + problem);
  return false;
}

/// Second check of a row: do rank, vectors and width match?
bool check_size(const ConfigRow& sent, LoraModule module, const std::string& where, ModuleSizes sizes,
                std::optional<std::int64_t> width, const LoraLayout& layout, AdapterProblems& problems) {
  bool good = true;
  const auto refuse = [&](const std::string& what) {
    problems.add(where + what);
    good = false;
  };
  const bool is_known = sent.vectors >= 0 && sent.vectors <= RowVectors{true, true}.flags();
  const RowVectors vectors = is_known ? RowVectors::of(sent.vectors) : RowVectors{};
  if (!is_known) {
    refuse("vectors is " + std::to_string(sent.vectors) +
           "; accepted: 0, 1 (a magnitude), 2 (a shift) or 3 (both)");
  }
  if (vectors.magnitude && sent.is_gate_up) {
    refuse(
        "it was sent as mlp_h_to_4h with twice its outputs and a magnitude, whose halves are not in the "
        "order "
        "of B's; expected mlp_gate_up (18), as adaptrt hf-lora-convert writes it");
  }
  if (vectors.magnitude && !layout.dora_enabled) {
    refuse("it has a magnitude, but this engine was built without DoRA (build it with --dora_plugin enable)");
  }
  if (vectors.shift && !layout.shifts_enabled) {
    refuse("it has a shift (of a bias), which TensorRT engines do not add");
  }
  if (is_norm(module)) {
    if (sent.rank != 1 || vectors != RowVectors{.shift = true}) {
      refuse("rank is " + std::to_string(sent.rank) + " and vectors " + std::to_string(sent.vectors) +
             "; accepted: 1 and 2, because a norm has only a shift");
    }
  } else if (module == LoraModule::kNewTokens) {
    if (sent.vectors != 0) refuse("vectors is " + std::to_string(sent.vectors) + "; accepted: 0");
    if (sent.rank <= 0 || sent.rank > layout.max_extra_tokens) {
      const std::string count = std::to_string(sent.rank);
      refuse("its number of new tokens is " + count + "; accepted: 1 to the engine's max_extra_tokens " +
             std::to_string(layout.max_extra_tokens) +
             (sent.rank > 0 ? " (adaptrt build --max_extra_tokens " + count + " makes room)" : ""));
    }
  } else if (sent.rank <= 0 || sent.rank > layout.max_rank) {
    refuse("rank " + std::to_string(sent.rank) +
           " is out of range; accepted: 1 to the engine's max_lora_rank " + std::to_string(layout.max_rank));
  }
  if (!good || !width) return good;
  const std::int64_t behind = vectors.count() * sizes.vector();
  const std::int64_t per_rank = sizes.a_per_rank() + sizes.b_per_rank();
  if (*width < behind || sent.rank > (*width - behind) / per_rank) {
    const std::string experts = sizes.experts == 1 ? "" : std::to_string(sizes.experts) + ", ";
    refuse("weights has " + std::to_string(*width) + " columns, but A[" + experts +
           std::to_string(sent.rank) + ", " + std::to_string(sizes.in) + "] and B[" + experts +
           std::to_string(sizes.out) + ", " + std::to_string(sent.rank) + "]" +
           (vectors.magnitude ? " and magnitude[" + experts + std::to_string(sizes.out) + "]" : "") +
           (vectors.shift ? " and shift[" + experts + std::to_string(sizes.out) + "]" : "") + " need " +
           std::to_string(sent.rank * per_rank + behind));
  }
  return good;
}

/// Finds rows that change the same outputs: repeated rows, and attn_qkv or mlp_gate_up together with their
/// parts.
class Overlaps {
 public:
  bool check(const CheckedRow& checked, AdapterProblems& problems) {
    for (const LoraModule part : parts_of(checked.row.module)) {
      const auto [other, is_new] = taken_.try_emplace({checked.row.layer, part}, checked);
      if (is_new) continue;
      const bool same_module = other->second.row.module == checked.row.module;
      problems.add(describe_row(checked) + ": " +
                   (same_module ? "repeats " : "changes the same outputs as ") + describe_row(other->second));
      return false;
    }
    return true;
  }

 private:
  std::map<std::pair<std::int32_t, LoraModule>, CheckedRow> taken_;
};

/// Finds rows that are valid by themselves but not together.
void check_together(const std::vector<CheckedRow>& rows, AdapterProblems& problems) {
  const auto has = [&](LoraModule module) {
    return std::ranges::any_of(rows, [&](const CheckedRow& checked) { return checked.row.module == module; });
  };
  if (has(LoraModule::kNewTokens) && has(LoraModule::kAbsentTokens)) {
    problems.add("it brings new_tokens and has absent_tokens; accepted: one of them");
  }
  const auto is_setting_row = [](const CheckedRow& checked) { return is_setting(checked.row.module); };
  if (!rows.empty() && std::ranges::all_of(rows, is_setting_row)) {
    problems.add("no row of config has weights; an adapter changes one module at least");
  }
}

/// Adds a row's setting to the terms.
void add_terms(LoraModule module, std::int32_t rank, AdapterTerms* terms) {
  if (module == LoraModule::kNewTokens) terms->vocabulary_change = rank;
  if (module == LoraModule::kAbsentTokens) terms->vocabulary_change = -rank;
  if (module == LoraModule::kRotaryScaling) terms->rotary_factor = rank;
}

}  // namespace

AdapterTerms terms_of_rows(std::span<const AdapterRow> rows) {
  AdapterTerms terms;
  for (const AdapterRow& row : rows) add_terms(row.module, row.rank, &terms);
  return terms;
}

std::optional<AdapterTerms> terms_of_config(const TensorView& config) {
  AdapterProblems problems;
  const auto shape = matrix_shape(config, "config", problems);
  if (!shape || config.type != TensorType::kInt32 || (shape->columns != 3 && shape->columns != 4)) {
    return std::nullopt;
  }
  AdapterTerms terms;
  for (const ConfigRow& row : read_config(config, *shape)) {
    const LoraModuleInfo* info = find_lora_module(std::int64_t{row.module_id});
    if (info == nullptr || row.rank < 1) return std::nullopt;
    add_terms(info->module, row.rank, &terms);
  }
  return terms;
}

std::vector<CheckedRow> check_rows(const TensorView& config, MatrixShape shape, const SentWeights& weights,
                                   const LoraLayout& layout, const SiteIndex& index,
                                   AdapterProblems& problems) {
  bool readable = true;
  const auto refuse = [&](const std::string& what) {
    problems.add(what);
    readable = false;
  };
  if (config.type != TensorType::kInt32) {
    refuse("config is of type " + config.type_name + "; accepted: int32");
  }
  if (shape.columns != 3 && shape.columns != 4) {
    refuse("config has " + std::to_string(shape.columns) +
           " columns; accepted: 3 (module_id, layer, rank) or 4 (module_id, layer, rank, vectors)");
  }
  const auto most_rows = std::int64_t{kNumLoraModules} * layout.num_layers + std::ssize(layout.sites);
  if (shape.rows == 0) {
    refuse("config has no rows; an adapter has at least one");
  } else if (shape.rows > most_rows) {
    refuse("config has " + std::to_string(shape.rows) + " rows, more than the " + std::to_string(most_rows) +
           " that modules and layers allow");
  }
  if (!readable) return {};

  std::vector<CheckedRow> rows;
  Overlaps overlaps;
  std::vector<ConfigRow> sent = read_config(config, shape);
  rename_fused_gate_up(sent, weights, index);
  for (std::size_t i = 0; i < sent.size(); ++i) {
    const std::string where = "row " + std::to_string(i);
    const LoraModuleInfo* info = check_place(sent[i], where + ": ", layout, problems);
    if (info == nullptr) continue;
    if (is_setting(info->module)) {
      const CheckedRow checked{{info->module, sent[i].layer, sent[i].rank, {}, {}, 0}, i};
      const bool alone = overlaps.check(checked, problems);
      if (check_setting(sent[i], info->module, describe_row(checked) + ": ", layout, problems) && alone) {
        rows.push_back(checked);
      }
      continue;
    }
    const ModulePlace* place = index.find(sent[i].layer, info->module);
    if (place == nullptr && info->module == LoraModule::kNewTokens) {
      problems.add(where + ": " + no_room_for_new_tokens(sent[i], layout));
      continue;
    }
    if (place == nullptr) {
      problems.add(where + ": " + no_such_place(sent[i], *info));
      continue;
    }
    const ModuleSizes sizes = place->sizes;
    const CheckedRow checked{
        {info->module, sent[i].layer, sent[i].rank, RowVectors::of(sent[i].vectors), sizes, 0}, i};
    const bool alone = overlaps.check(checked, problems);
    if (check_size(sent[i], info->module, describe_row(checked) + ": ", sizes, weights.columns, layout,
                   problems) &&
        alone) {
      rows.push_back(checked);
    }
  }
  check_together(rows, problems);
  return rows;
}

}  // namespace adaptrt
