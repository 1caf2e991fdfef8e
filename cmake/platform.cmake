# Ends the configuration with a clear message on platforms where AdaptRT cannot be built; otherwise the compiler would report
# hundreds of errors.
option(ADAPTRT_ALLOW_MUSL "Build with another C library than glibc, which was never tried" OFF)
option(ADAPTRT_ALLOW_MACOS "Build on macOS, which was never tried" OFF)

# system: CMAKE_HOST_SYSTEM_NAME, which is known before a compiler is looked for.
function(adaptrt_check_system system)
  if(system STREQUAL "Darwin" AND ADAPTRT_ALLOW_MACOS)
    return()
  endif()
  if(NOT system STREQUAL "Linux")
    message(FATAL_ERROR "AdaptRT cannot be built on ${system}; expected Linux. On Windows use WSL 2, on macOS a Linux "
                        "virtual machine or container, or try ADAPTRT_ALLOW_MACOS=ON, which was never done.")
  endif()
endfunction()

function(adaptrt_check_c_library has_glibc)
  if(NOT has_glibc AND NOT ADAPTRT_ALLOW_MUSL AND NOT ADAPTRT_ALLOW_MACOS)
    message(FATAL_ERROR "AdaptRT was never built with another C library than glibc, such as musl (Alpine Linux); expected a "
                        "distribution with glibc, such as Debian. To try it all the same: "
                        "pip install . --config-settings=cmake.define.ADAPTRT_ALLOW_MUSL=ON")
  endif()
endfunction()
