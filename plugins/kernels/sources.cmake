# What nvcc compiles for adaptrt_cuda_kernels, and a C++ compiler for the tests' emulation.
file(GLOB ADAPTRT_CUDA_KERNEL_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cu ${CMAKE_CURRENT_LIST_DIR}/*/*.cu)
