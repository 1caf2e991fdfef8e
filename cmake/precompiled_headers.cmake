# Parses headers once for all sources of `target`, and of the targets that are given the same `first` later: those that are
# compiled with the same options. ccache saves more, and keeps what uses a precompiled header only where it is told to by
# CCACHE_SLOPPINESS, and GCC to preprocess for it.
function(adaptrt_precompile target first)
  if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache")
    if(NOT "$ENV{CCACHE_SLOPPINESS}" MATCHES "pch_defines")
      return()
    endif()
    target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
  endif()
  if(target STREQUAL first)
    target_precompile_headers(${target} PRIVATE ${ARGN})
  else()
    target_precompile_headers(${target} REUSE_FROM ${first})
  endif()
endfunction()
