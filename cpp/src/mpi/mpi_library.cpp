#include "mpi_library.h"

#include <dlfcn.h>

namespace adaptrt {
namespace {

std::string last_problem() {
  const char* problem = dlerror();
  return problem == nullptr ? "unknown error" : problem;
}

}  // namespace

SharedLibrary::SharedLibrary(const std::string& path)
    : path_(path), handle_(dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL)) {
  if (handle_ == nullptr) throw ConfigError("MPI: " + last_problem());
}

SharedLibrary::~SharedLibrary() {
  dlclose(handle_);
}

void* SharedLibrary::address_of(const char* name) const {
  void* found = dlsym(handle_, name);
  if (found == nullptr) throw ConfigError("MPI: " + path_ + " has no " + name + ": " + last_problem());
  return found;
}

}  // namespace adaptrt
