#include <cstdint>
#include <string>

#include "adaptrt/cuda/expert_kernels.h"
#include "bindings.h"
#include "kernel_arguments.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

void enqueue_route(std::int64_t tokens, std::int32_t experts, int scores, std::int32_t top_k,
                   std::int32_t num_groups, std::int32_t topk_groups, bool norm_topk_prob, float scale,
                   Address bias, Address logits, Address chosen, Address weights, Address stream) {
  constexpr int kLast = static_cast<int>(RouterScores::kSoftmaxOfChosen);
  if (scores < 0 || scores > kLast) {
    throw ConfigError("scores is " + std::to_string(scores) + "; expected 0 to " + std::to_string(kLast));
  }
  cuda::enqueue(cuda::RouteTokens{.tokens = tokens,
                                  .experts = experts,
                                  .scores = static_cast<RouterScores>(scores),
                                  .top_k = top_k,
                                  .num_groups = num_groups,
                                  .topk_groups = topk_groups,
                                  .norm_topk_prob = norm_topk_prob,
                                  .scale = scale,
                                  .bias = at_address<const float>(bias),
                                  .logits = at_address<const float>(logits),
                                  .chosen = at_address<std::int32_t>(chosen),
                                  .weights = at_address<float>(weights)},
                at_address<void>(stream));
}

void enqueue_number_slots(std::int64_t slots, std::int32_t experts, Address chosen, Address offsets,
                          Address entries, Address slots_of, Address expert_of, Address stream) {
  cuda::enqueue(cuda::NumberSlots{.slots = slots,
                                  .experts = experts,
                                  .chosen = at_address<const std::int32_t>(chosen),
                                  .offsets = at_address<std::int32_t>(offsets),
                                  .entries = at_address<std::int32_t>(entries),
                                  .slots_of = at_address<std::int32_t>(slots_of),
                                  .expert_of = at_address<std::int32_t>(expert_of)},
                at_address<void>(stream));
}

void enqueue_expert_product(int dtype, std::int64_t slots, std::int32_t experts, std::int32_t in_size,
                            std::int32_t out_size, Address offsets, Address entries,
                            std::int32_t entries_per_row, Address x, Address weights, Address y,
                            Address stream) {
  cuda::enqueue(cuda::ExpertProduct{.dtype = dtype_of(dtype),
                                    .slots = slots,
                                    .experts = experts,
                                    .in_size = in_size,
                                    .out_size = out_size,
                                    .offsets = at_address<const std::int32_t>(offsets),
                                    .entries = at_address<const std::int32_t>(entries),
                                    .entries_per_row = entries_per_row,
                                    .x = at_address<const void>(x),
                                    .weights = at_address<const void>(weights),
                                    .y = at_address<void>(y)},
                at_address<void>(stream));
}

void enqueue_sum_slots(int dtype, std::int64_t tokens, std::int32_t top_k, std::int64_t width,
                       Address slots_of, Address weights, Address y, Address bias, Address chosen, bool adds,
                       Address output, Address stream) {
  cuda::enqueue(cuda::SumSlots{.dtype = dtype_of(dtype),
                               .tokens = tokens,
                               .top_k = top_k,
                               .width = width,
                               .slots_of = at_address<const std::int32_t>(slots_of),
                               .weights = at_address<const float>(weights),
                               .y = at_address<const void>(y),
                               .bias = at_address<const float>(bias),
                               .chosen = at_address<const std::int32_t>(chosen),
                               .adds = adds,
                               .output = at_address<float>(output)},
                at_address<void>(stream));
}

}  // namespace

// Addresses are device addresses; 0 is no tensor. See adaptrt/cuda/expert_kernels.h for shapes.
void bind_expert_kernels(py::module_& module) {
  module.def("enqueue_route", &enqueue_route, py::kw_only(), py::arg("tokens"), py::arg("experts"),
             py::arg("scores"), py::arg("top_k"), py::arg("num_groups") = 1, py::arg("topk_groups") = 1,
             py::arg("norm_topk_prob") = false, py::arg("scale") = 1.0F, py::arg("bias") = 0,
             py::arg("logits"), py::arg("chosen"), py::arg("weights"), py::arg("stream"),
             "Chooses each token's experts and their weights. scores: a value of RouterScores.");
  module.def("enqueue_number_slots", &enqueue_number_slots, py::kw_only(), py::arg("slots"),
             py::arg("experts"), py::arg("chosen"), py::arg("offsets"), py::arg("entries"),
             py::arg("slots_of"), py::arg("expert_of"), py::arg("stream"),
             "Numbers the slots expert by expert.");
  module.def("enqueue_expert_product", &enqueue_expert_product, py::kw_only(), py::arg("dtype"),
             py::arg("slots"), py::arg("experts"), py::arg("in_size"), py::arg("out_size"),
             py::arg("offsets"), py::arg("entries") = 0, py::arg("entries_per_row") = 1, py::arg("x"),
             py::arg("weights"), py::arg("y"), py::arg("stream"),
             "y = x W^T with the W of each slot's expert.");
  module.def("enqueue_sum_slots", &enqueue_sum_slots, py::kw_only(), py::arg("dtype"), py::arg("tokens"),
             py::arg("top_k"), py::arg("width"), py::arg("slots_of"), py::arg("weights"), py::arg("y"),
             py::arg("bias") = 0, py::arg("chosen") = 0, py::arg("adds"), py::arg("output"),
             py::arg("stream"), "output (+)= the weighted sum of each token's slots.");
}

}  // namespace adaptrt::bindings
