#pragma once

#include <pybind11/pybind11.h>

#include "adaptrt/exec/logits_post_processor.h"

namespace adaptrt::bindings {

/// A Python function as a post-processor, called as TensorRT-LLM calls it: function(request id, logits, token
/// ids, stream, client id), with lists of them for a batch. Logits are [1, 1, vocab_size]: a torch tensor
/// where torch is imported by then, else a NumPy array; they share the row's memory. The stream is 0.
[[nodiscard]] PostProcessorFunction make_post_processor(pybind11::object function);
/// The function of one that make_post_processor made.
[[nodiscard]] pybind11::object function_of(const PostProcessorFunction& processor);

}  // namespace adaptrt::bindings
