# A source of 200 lines takes seconds for the headers that it includes and a fraction of one for itself: those of a target
# are compiled so many at a time, as if they were one. OFF compiles each by itself, which takes less after a change of
# one and several times as long for all; there, each has to include what it uses.
option(ADAPTRT_UNITY_BUILD "Compile several sources of a target at a time" ON)

function(adaptrt_compile_together target at_a_time)
  if(ADAPTRT_UNITY_BUILD)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${at_a_time})
  endif()
endfunction()
