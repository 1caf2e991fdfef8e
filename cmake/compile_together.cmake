# Parsing headers takes seconds per source, and compiling its own 200 lines only a fraction of a second. So several sources
# of a target are compiled as one. OFF compiles each source separately: this is faster after a change of one source, and
# several times slower for all. It also checks that each source includes the headers that it uses.
option(ADAPTRT_UNITY_BUILD "Compile several sources of a target at a time" ON)

function(adaptrt_compile_together target at_a_time)
  if(ADAPTRT_UNITY_BUILD)
    # With relative paths (CMake 4.0), a compiler cache finds the objects of another checkout.
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${at_a_time}
                                               UNITY_BUILD_RELOCATABLE ON)
  endif()
endfunction()
