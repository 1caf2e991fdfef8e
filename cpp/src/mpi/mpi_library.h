#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "adaptrt/core/error.h"

namespace adaptrt {

/// A shared library that stays loaded as long as this object.
class SharedLibrary {
 public:
  /// Throws ConfigError if it cannot be loaded.
  explicit SharedLibrary(const std::string& path);
  ~SharedLibrary();
  SharedLibrary(const SharedLibrary&) = delete;
  SharedLibrary& operator=(const SharedLibrary&) = delete;
  SharedLibrary(SharedLibrary&&) = delete;
  SharedLibrary& operator=(SharedLibrary&&) = delete;

  /// Finds a function in it or in the libraries linked to it. Throws ConfigError if there is none.
  template <class Function>
  Function* find(const char* name) const {
    return reinterpret_cast<Function*>(address_of(name));
  }

 private:
  [[nodiscard]] void* address_of(const char* name) const;
  std::string path_;
  void* handle_;
};

/// The MPI functions used here, as the MPI standard declares them. Handle is the library's handle type: int
/// in MPICH, a pointer in Open MPI and in the standard's ABI. A status is written to kStatusBytes bytes of
/// memory, more than any library needs.
template <class Handle>
struct MpiFunctions {
  explicit MpiFunctions(const SharedLibrary& library)
      : comm_rank(library.find<int(Handle, int*)>("MPI_Comm_rank")),
        comm_size(library.find<int(Handle, int*)>("MPI_Comm_size")),
        isend(library.find<int(const void*, int, Handle, int, int, Handle, Handle*)>("MPI_Isend")),
        irecv(library.find<int(void*, int, Handle, int, int, Handle, Handle*)>("MPI_Irecv")),
        test(library.find<int(Handle*, int*, void*)>("MPI_Test")),
        cancel(library.find<int(Handle*)>("MPI_Cancel")) {}

  int (*comm_rank)(Handle, int*);
  int (*comm_size)(Handle, int*);
  int (*isend)(const void*, int, Handle, int, int, Handle, Handle*);
  int (*irecv)(void*, int, Handle, int, int, Handle, Handle*);
  int (*test)(Handle*, int*, void*);
  int (*cancel)(Handle*);
};

inline constexpr int kMpiSuccess = 0;
inline constexpr std::size_t kStatusBytes = 256;

}  // namespace adaptrt
