// Prints the name of the kernel table that the runtime would choose on this machine (kernel_tables.cmake runs
// it).

#include <iostream>

#include "adaptrt/cpu/kernel_choice.h"

int main() {
  std::cout << adaptrt::fit_kernels(adaptrt::read_cpu()).front().name;
}
