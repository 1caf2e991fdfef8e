# Sets ADAPTRT_TABLES to the names of the kernel tables to compile (tables.h), from the cache variable
# ADAPTRT_KERNEL_TABLES. Every table that another one is made from is included.
set(ADAPTRT_KERNEL_TABLES "all" CACHE STRING
    "Kernel tables to compile: 'all', 'runnable' (all that this machine can run), 'fastest' (the one that it would choose), or a list of names")

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(known avx512_amx avx512_bf16 avx512_vnni avx512 avx2 portable)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(known neon_bf16 neon_i8mm neon_dotprod neon portable)
else()
  set(known portable)
endif()
set(avx512_vnni_is_made_from avx512)
set(neon_dotprod_is_made_from neon)
set(neon_i8mm_is_made_from neon)

# The code that chooses a table at run time orders them here.
function(adaptrt_find_runnable_tables result)
  set(kernels ${PROJECT_SOURCE_DIR}/cpp/src/cpu/kernels)
  try_run(status is_compiled
    SOURCES ${PROJECT_SOURCE_DIR}/cmake/runnable_tables.cpp ${kernels}/kernel_choice.cpp ${kernels}/read_cpu.cpp
            ${kernels}/amx_permission.cpp
    CMAKE_FLAGS -DINCLUDE_DIRECTORIES=${PROJECT_SOURCE_DIR}/cpp/include
    CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON
    COMPILE_OUTPUT_VARIABLE errors RUN_OUTPUT_VARIABLE names NO_CACHE)
  if(NOT is_compiled OR NOT status EQUAL 0)
    message(FATAL_ERROR "ADAPTRT_KERNEL_TABLES is '${ADAPTRT_KERNEL_TABLES}', but cmake/runnable_tables.cpp could not be "
                        "run (${status}):\n${errors}")
  endif()
  set(${result} ${names} PARENT_SCOPE)
endfunction()

if(ADAPTRT_KERNEL_TABLES STREQUAL "all")
  set(ADAPTRT_TABLES ${known})
elseif(ADAPTRT_KERNEL_TABLES STREQUAL "runnable")
  adaptrt_find_runnable_tables(ADAPTRT_TABLES)
elseif(ADAPTRT_KERNEL_TABLES STREQUAL "fastest")
  adaptrt_find_runnable_tables(runnable)
  list(GET runnable 0 ADAPTRT_TABLES)
else()
  set(ADAPTRT_TABLES ${ADAPTRT_KERNEL_TABLES})
endif()
if(NOT ADAPTRT_TABLES)
  message(FATAL_ERROR "ADAPTRT_KERNEL_TABLES is empty; expected all, runnable, fastest, or some of: ${known}")
endif()
foreach(table IN LISTS ADAPTRT_TABLES)
  if(NOT table IN_LIST known)
    message(FATAL_ERROR "ADAPTRT_KERNEL_TABLES has '${table}'; expected all, runnable, fastest, or some of: ${known}")
  endif()
  list(APPEND ADAPTRT_TABLES ${${table}_is_made_from})
endforeach()
list(REMOVE_DUPLICATES ADAPTRT_TABLES)
message(STATUS "Kernel tables: ${ADAPTRT_TABLES}")
