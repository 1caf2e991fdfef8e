# Parses headers once for all sources of `target`, and of later targets with the same `first`. Such targets must have the
# same compile options. ccache saves more time than precompiled headers. It caches sources that use them only if
# CCACHE_SLOPPINESS allows it and GCC gets -fpch-preprocess.
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
