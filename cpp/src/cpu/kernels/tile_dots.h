#pragma once

// The products of tile registers as types, for templates. Included after a header with Tiles.

namespace adaptrt {
namespace {

struct BFloat16Dot {
  template <int kSums, int kA, int kB>
  static void add() {
    Tiles::dot_bfloat16<kSums, kA, kB>();
  }
};

struct Int8Dot {
  template <int kSums, int kA, int kB>
  static void add() {
    Tiles::dot_int8<kSums, kA, kB>();
  }
};

struct SignedInt8Dot {
  template <int kSums, int kA, int kB>
  static void add() {
    Tiles::dot_signed_int8<kSums, kA, kB>();
  }
};

}  // namespace
}  // namespace adaptrt
