// Prints the names of the kernel tables that this machine can run, as a list of CMake; the runtime would
// choose the first (kernel_tables.cmake runs this program).

#include <iostream>
#include <string_view>

#include "adaptrt/cpu/kernel_choice.h"

int main() {
  std::string_view separator;
  for (const adaptrt::KernelFit& fit : adaptrt::fit_kernels(adaptrt::read_cpu())) {
    if (!fit.obstacle.empty()) continue;
    std::cout << separator << fit.name;
    separator = ";";
  }
}
