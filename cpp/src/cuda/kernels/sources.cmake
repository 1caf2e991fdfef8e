# Sources that nvcc compiles, and a C++ compiler for the tests' emulation. Row kernels are small: most of the time to
# compile them goes into headers.
set(ADAPTRT_CUDA_KERNEL_SOURCES
    lora/lora.cu
    attention/any_size.cu
    attention/decode.cu
    attention/int8_decode.cu
    attention/int8_prefill.cu
    attention/paged_attention.cu
    attention/prefill.cu
    attention/rotate_and_write.cu
    experts/expert_product.cu
    latent/attention.cu
    product/product.cu
    product/quantized.cu
    product/sparse.cu)
set(ADAPTRT_CUDA_ROW_SOURCES
    lora/adapted_embedding.cu
    lora/new_token_logits.cu
    experts/gather_slots.cu
    experts/number_slots.cu
    experts/number_tiles.cu
    experts/route.cu
    experts/sum_slots.cu
    latent/heads.cu
    rows/added_norm.cu
    rows/addition.cu
    rows/best_tokens.cu
    rows/cast.cu
    rows/embedding.cu
    rows/finish.cu
    rows/finish_logits.cu
    rows/find_highest.cu
    rows/gated_add.cu
    rows/gated_columns.cu
    rows/head_norms.cu
    rows/layer_norm.cu
    rows/rms_norm.cu
    rows/rope_table.cu
    rows/take_tokens.cu
    rows/xielu.cu
    states/convolution.cu
    states/gated_delta.cu
    states/gates.cu
    states/selective_scan.cu)
list(TRANSFORM ADAPTRT_CUDA_KERNEL_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM ADAPTRT_CUDA_ROW_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
# Sources for compute capability 9.0 only: they use instructions that no other GPU has. The emulation has these
# instructions for the first list.
set(ADAPTRT_CUDA_HOPPER_EMULATED_SOURCES attention/hopper_prefill.cu)
set(ADAPTRT_CUDA_HOPPER_SOURCES hopper/tensor_map.cu product/hopper.cu product/hopper_float32.cu)
list(TRANSFORM ADAPTRT_CUDA_HOPPER_EMULATED_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM ADAPTRT_CUDA_HOPPER_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
