#include "emulation/hopper_machine.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "cuda/kernels/types.h"
#include "emulation/ptx_emulated.h"
#include "emulation/race_detector.h"

namespace adaptrt::cuda::emulation {
namespace {

constexpr std::uint32_t kWindowBegin = 1024 + 16;
constexpr std::uint32_t kPieceBytes = 16;
constexpr std::uint32_t kBoxRowBytes = 128;
constexpr int kBoxColumns = 64;
constexpr int kPoison = 0xff;
constexpr std::uint32_t kRunning = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint64_t kBarrierBits = 0x6261727269657221;
constexpr std::size_t kMaxThreads = 1024;
constexpr int kNamedBarriers = 16;

struct PhaseBarrier {
  int arrivals = 0;
  int pending = 0;
  std::int64_t bytes = 0;    ///< expected and not yet copied
  std::uint32_t phases = 0;  ///< that have ended
  bool is_fenced = false;    ///< visible to the copy engine
  std::vector<std::uint32_t> seen =
      std::vector<std::uint32_t>(kMaxThreads);  ///< phases whose end a thread saw
  char place = 0;                               ///< of the race detector
};

struct BoxCopy {
  std::uint32_t shared;
  CUtensorMap map;
  std::uint32_t barrier;
  int column;
  int row;
};

/// State of 16 bytes of shared memory.
struct Piece {
  std::uint32_t barrier = 0;  ///< of the copy that wrote them; 0: none
  std::uint32_t phase = 0;    ///< after so many phases of the barrier the copy is visible, or kRunning
  std::uint32_t writer = 0;   ///< 1 + the thread that wrote them and did not fence; 0: none
  std::uint32_t readers = 0;  ///< running products that may read them
};

struct NamedBarrier {
  int came = 0;
  int threads = 0;
  std::size_t rounds = 0;
  std::array<char, 2> places{};  ///< of the race detector, used in turn
};

/// A product of a warp that has not been computed.
struct Product {
  std::array<WgmmaCall, kWarpSize> lanes;
  std::vector<std::uint32_t> pieces;
  std::size_t group;
};

struct WarpProducts {
  std::deque<Product> running;
  std::size_t groups = 0;
  bool is_fenced = false;
};

struct HopperBlock {
  std::map<std::uint32_t, PhaseBarrier> barriers;
  std::deque<BoxCopy> copies;
  std::vector<Piece> pieces;
  std::map<std::uint32_t, std::vector<std::size_t>> unfenced;  ///< pieces that a thread wrote
  std::array<NamedBarrier, kNamedBarriers> named{};
  std::map<std::uint32_t, WarpProducts> warps;
};

thread_local HopperBlock state;
thread_local std::size_t box_copies = 0;

std::uint32_t thread_index() {
  return coordinates.thread.x;
}

unsigned char* at(std::uint32_t address, std::uint32_t bytes) {
  unsigned char* place = shared_memory() + (address - kWindowBegin);
  check_shared(place, bytes, 1, "an address of an instruction for shared memory");
  return place;
}

Piece& piece_at(std::uint32_t address) {
  const std::size_t index = (address - kWindowBegin) / kPieceBytes;
  if (index >= state.pieces.size()) state.pieces.resize(index + 1);
  return state.pieces[index];
}

/// Sets the state of a piece that is written from now on.
void write_piece(std::uint32_t address, const Piece& written) {
  Piece& piece = piece_at(address);
  if (piece.readers != 0) throw EmulationError("shared memory is written that a running product may read");
  piece = written;
}

PhaseBarrier& barrier_at(std::uint32_t address) {
  const auto found = state.barriers.find(address);
  if (found == state.barriers.end()) throw EmulationError("an mbarrier is used that was not initialised");
  std::uint64_t bits = 0;
  std::memcpy(&bits, at(address, sizeof(bits)), sizeof(bits));
  if (bits != kBarrierBits) throw EmulationError("an mbarrier was overwritten");
  return found->second;
}

void end_phase_if_complete(PhaseBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phases;
  barrier.pending = barrier.arrivals;
}

/// The 128-byte swizzle exchanges bits 4 to 6 of an address, according to bits 7 to 9.
std::uint32_t swizzled(std::uint32_t address) {
  return address ^ ((address >> 7 & 7U) << 4);
}

/// Decoded operand in shared memory.
struct Descriptor {
  std::uint32_t address;
  std::uint32_t leading;
  std::uint32_t stride;

  explicit Descriptor(std::uint64_t bits)
      : address(static_cast<std::uint32_t>(bits & 0x3fffU) << 4),
        leading(static_cast<std::uint32_t>(bits >> 16 & 0x3fffU) << 4),
        stride(static_cast<std::uint32_t>(bits >> 32 & 0x3fffU) << 4) {
    if (bits >> 62 != 1) throw EmulationError("an operand of wgmma is not in the 128-byte swizzle");
    if ((bits >> 49 & 7U) != 0) throw EmulationError("an operand of wgmma has a base offset");
  }

  /// Address of term k of row (output) `row`; the rows' terms are adjacent.
  [[nodiscard]] std::uint32_t k_major(std::uint32_t row, std::uint32_t k) const {
    return swizzled(address + row / 8 * stride + row % 8 * kBoxRowBytes + k * 2);
  }
  /// The same, if the terms' outputs are adjacent.
  [[nodiscard]] std::uint32_t mn_major(std::uint32_t row, std::uint32_t k) const {
    return swizzled(address + row / 64 * leading + row % 64 * 2 + k / 8 * stride + k % 8 * kBoxRowBytes);
  }
};

/// Addresses of the 16-byte pieces of a warpgroup's operands. Which warp reads which of them is not known.
std::vector<std::uint32_t> pieces_of(const WgmmaCall& call) {
  std::vector<std::uint32_t> pieces;
  if (call.a == nullptr) {
    const Descriptor a(call.a_descriptor);
    for (std::uint32_t row = 0; row < 64; ++row) {
      for (std::uint32_t k = 0; k < 16; k += 8) pieces.push_back(a.k_major(row, k));
    }
  }
  const Descriptor b(call.b_descriptor);
  const auto columns = static_cast<std::uint32_t>(call.columns);
  if (call.b_is_transposed) {
    for (std::uint32_t k = 0; k < 16; ++k) {
      for (std::uint32_t column = 0; column < columns; column += 8) pieces.push_back(b.mn_major(column, k));
    }
  } else {
    for (std::uint32_t column = 0; column < columns; ++column) {
      for (std::uint32_t k = 0; k < 16; k += 8) pieces.push_back(b.k_major(column, k));
    }
  }
  return pieces;
}

/// Tells the race detector that this lane reads its share of the operands.
void note_operands(const WgmmaCall& call) {
#ifdef ADAPTRT_RACE_DETECTOR
  const std::uint32_t lane = thread_index() % kWarpSize;
  const auto pieces = pieces_of(call);
  for (std::size_t i = lane; i < pieces.size(); i += kWarpSize) {
    race_detector::note_read(at(pieces[i], kPieceBytes), kPieceBytes);
  }
#else
  static_cast<void>(call);
#endif
}

void check_operands(const std::vector<std::uint32_t>& pieces, std::uint32_t first_thread) {
  std::uint32_t barrier = 0;
  std::uint32_t phase = 0;
  for (const std::uint32_t address : pieces) {
    at(address, kPieceBytes);
    const Piece& piece = piece_at(address);
    if (piece.writer != 0) {
      throw EmulationError("wgmma reads what a thread wrote without fence.proxy.async after it");
    }
    if (piece.barrier == 0 || (piece.barrier == barrier && piece.phase == phase)) continue;
    barrier = piece.barrier;
    phase = piece.phase;
    const std::vector<std::uint32_t>& seen = barrier_at(barrier).seen;
    for (std::uint32_t lane = 0; lane < kWarpSize; ++lane) {
      if (seen[first_thread + lane] < phase || phase == kRunning) {
        throw EmulationError("wgmma reads a box before a thread of it has waited for the copy");
      }
    }
  }
}

template <typename T>
void load_row(std::uint32_t address, float (&to)[8]) {
  T elements[8];
  std::memcpy(elements, at(address, sizeof(elements)), sizeof(elements));
  for (int i = 0; i < 8; ++i) to[i] = to_float(elements[i]);
}

template <typename T>
void load_a(const Product& product, std::uint32_t warp, float (&a)[16][16]) {
  const WgmmaCall& call = product.lanes[0];
  if (call.a == nullptr) {
    const Descriptor descriptor(call.a_descriptor);
    for (std::uint32_t row = 0; row < 16; ++row) {
      for (std::uint32_t k = 0; k < 16; k += 8) {
        float part[8];
        load_row<T>(descriptor.k_major(warp % 4 * 16 + row, k), part);
        std::copy_n(part, 8, &a[row][k]);
      }
    }
    return;
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const FloatPair values = unpack_pair<T>(product.lanes[static_cast<std::size_t>(lane)].a[i]);
      a[lane / 4 + 8 * (i % 2)][2 * (lane % 4) + 8 * (i / 2)] = values.first;
      a[lane / 4 + 8 * (i % 2)][2 * (lane % 4) + 8 * (i / 2) + 1] = values.second;
    }
  }
}

template <typename T>
void load_b(const WgmmaCall& call, std::vector<float>& b) {
  const Descriptor descriptor(call.b_descriptor);
  const auto columns = static_cast<std::uint32_t>(call.columns);
  b.resize(std::size_t{16} * columns);
  float part[8];
  if (call.b_is_transposed) {
    for (std::uint32_t k = 0; k < 16; ++k) {
      for (std::uint32_t column = 0; column < columns; column += 8) {
        load_row<T>(descriptor.mn_major(column, k), part);
        std::copy_n(part, 8, &b[k * columns + column]);
      }
    }
    return;
  }
  for (std::uint32_t column = 0; column < columns; ++column) {
    for (std::uint32_t k = 0; k < 16; k += 8) {
      load_row<T>(descriptor.k_major(column, k), part);
      for (std::uint32_t i = 0; i < 8; ++i) b[(k + i) * columns + column] = part[i];
    }
  }
}

/// Adds the terms in the order of the emulated mma.sync.
template <typename T>
void compute(const Product& product, std::uint32_t warp) {
  const WgmmaCall& call = product.lanes[0];
  const auto columns = static_cast<std::size_t>(call.columns);
  float a[16][16];
  std::vector<float> b;
  load_a<T>(product, warp, a);
  load_b<T>(call, b);
  std::vector<float> d(16 * columns);
  const auto each = [&](const auto& visit) {
    for (std::size_t lane = 0; lane < kWarpSize; ++lane) {
      for (std::size_t i = 0; i < columns / 2; ++i) {
        visit(product.lanes[lane].d[i],
              d[(lane / 4 + i / 2 % 2 * 8) * columns + i / 4 * 8 + lane % 4 * 2 + i % 2]);
      }
    }
  };
  if (call.accumulate) each([](const float& of_lane, float& sum) { sum = of_lane; });
  for (std::size_t row = 0; row < 16; ++row) {
    for (std::size_t k = 0; k < 16; ++k) {
      for (std::size_t column = 0; column < columns; ++column) {
        d[row * columns + column] += a[row][k] * b[k * columns + column];
      }
    }
  }
  each([](float& of_lane, const float& sum) { of_lane = sum; });
}

std::string where(Site site) {
  return std::string(site.file) + ":" + std::to_string(site.line);
}

struct WarpCall {
  const WgmmaCall* product;
  std::uint32_t first_thread;
  std::size_t pending;
  Site site;
};

const WarpCall& first_call(const WarpArguments& arguments) {
  return *static_cast<const WarpCall*>(arguments.of_lane[0]);
}

WarpProducts& warp_of(const WarpCall& call) {
  return state.warps[call.first_thread / kWarpSize];
}

void warp_call(const WgmmaCall* product, std::size_t pending, void (*operation)(const WarpArguments&),
               Site site) {
  WarpCall own{product, thread_index() / kWarpSize * kWarpSize, pending, site};
  warp_collective(kAllLanes, &own, operation, site);
}

}  // namespace

std::uint32_t shared_window_address(const void* address) {
  return kWindowBegin +
         static_cast<std::uint32_t>(static_cast<const unsigned char*>(address) - shared_memory());
}

void init_phase_barrier(std::uint32_t barrier, int arrivals) {
  unsigned char* place = at(barrier, sizeof(kBarrierBits));
  check_aligned(reinterpret_cast<const void*>(std::uintptr_t{barrier}), sizeof(kBarrierBits), "an mbarrier");
  std::memcpy(place, &kBarrierBits, sizeof(kBarrierBits));
  const race_detector::Pause pause;
  PhaseBarrier& made = state.barriers[barrier];
  made.arrivals = arrivals;
  made.pending = arrivals;
}

void fence_phase_barriers() {
  for (auto& [address, barrier] : state.barriers) barrier.is_fenced = true;
}

void arrive_at_phase(std::uint32_t address, int bytes) {
  PhaseBarrier& barrier = barrier_at(address);
  race_detector::release(&barrier.place);
  if (barrier.pending == 0) throw EmulationError("more threads arrive at an mbarrier than it was made for");
  barrier.bytes += bytes;
  --barrier.pending;
  end_phase_if_complete(barrier);
  may_yield_to_waiting();
}

void wait_for_phase(std::uint32_t address, std::uint32_t parity, Site site) {
  const auto is_done = [address, parity] { return (barrier_at(address).phases & 1U) != parity; };
  // Now and then, copies are early.
  if (random_bits() % 64 == 0) {
    while (!is_done() && complete_oldest_copy()) {
    }
  }
  if (!is_done()) wait_until(is_done, site);
  PhaseBarrier& barrier = barrier_at(address);
  barrier.seen[thread_index()] = barrier.phases;
  race_detector::acquire(&barrier.place);
}

void begin_box_copy(std::uint32_t shared, const CUtensorMap& map, std::uint32_t barrier, int column,
                    int row) {
  const std::uint32_t bytes = static_cast<std::uint32_t>(map.box_rows) * kBoxRowBytes;
  unsigned char* to = at(shared, bytes);
  if (shared % kBoxRowBytes != 0)
    throw EmulationError("the destination of a box is not aligned to 128 bytes");
  if (!barrier_at(barrier).is_fenced) throw EmulationError("a box copy uses an mbarrier that was not fenced");
  race_detector::note_write(to, bytes);
  race_detector::release(&barrier_at(barrier).place);
  const race_detector::Pause pause;
  for (std::uint32_t i = 0; i < bytes; i += kPieceBytes) {
    const Piece& piece = piece_at(shared + i);
    if (piece.writer != 0) {
      throw EmulationError("a box is copied over what a thread wrote without fence.proxy.async after it");
    }
    if (piece.phase == kRunning) throw EmulationError("a box is copied over a running copy");
    write_piece(shared + i, {.barrier = barrier, .phase = kRunning});
  }
  std::memset(to, kPoison, bytes);
  state.copies.push_back({shared, map, barrier, column, row});
  ++box_copies;
}

std::size_t count_box_copies() {
  return box_copies;
}

bool complete_oldest_copy() {
  if (state.copies.empty()) return false;
  const race_detector::Pause pause;
  const BoxCopy copy = state.copies.front();
  state.copies.pop_front();
  PhaseBarrier& barrier = barrier_at(copy.barrier);
  for (int row = 0; row < copy.map.box_rows; ++row) {
    for (int column = 0; column < kBoxColumns; column += 8) {
      const std::uint32_t to = copy.shared + static_cast<std::uint32_t>(row) * kBoxRowBytes +
                               static_cast<std::uint32_t>(column) * 2;
      unsigned char* place = at(swizzled(to), kPieceBytes);
      const std::int64_t from_row = copy.row + row;
      const std::int64_t from_column = copy.column + column;
      const bool inside =
          from_row >= 0 && from_row < copy.map.rows && from_column >= 0 && from_column < copy.map.columns;
      std::memset(place, 0, kPieceBytes);
      if (inside) {
        std::memcpy(place, copy.map.matrix + (from_row * copy.map.columns + from_column) * 2, kPieceBytes);
      }
      write_piece(swizzled(to), {.barrier = copy.barrier, .phase = barrier.phases + 1});
    }
  }
  barrier.bytes -= static_cast<std::int64_t>(copy.map.box_rows) * kBoxRowBytes;
  end_phase_if_complete(barrier);
  return true;
}

void fence_async_proxy() {
  const race_detector::Pause pause;
  const auto found = state.unfenced.find(thread_index());
  if (found == state.unfenced.end()) return;
  for (const std::size_t index : found->second) {
    if (state.pieces[index].writer == thread_index() + 1) state.pieces[index].writer = 0;
  }
  state.unfenced.erase(found);
}

void note_thread_write(const void* address, std::size_t bytes) {
  const race_detector::Pause pause;
  const auto offset = static_cast<const unsigned char*>(address) - shared_memory();
  if (offset < 0 || static_cast<std::size_t>(offset) + bytes > shared_memory_bytes()) return;
  const std::uint32_t begin = shared_window_address(address);
  for (std::uint32_t i = begin / kPieceBytes * kPieceBytes; i < begin + bytes; i += kPieceBytes) {
    write_piece(i, {.writer = thread_index() + 1});
    state.unfenced[thread_index()].push_back((i - kWindowBegin) / kPieceBytes);
  }
}

void named_barrier(int number, int threads, bool waits, Site site) {
  if (number < 1 || number >= kNamedBarriers || threads % kWarpSize != 0) {
    throw EmulationError(where(site) + ": no such barrier");
  }
  NamedBarrier& barrier = state.named[static_cast<std::size_t>(number)];
  if (barrier.came != 0 && barrier.threads != threads) {
    throw EmulationError(where(site) + ": the calls for a barrier differ in their number of threads");
  }
  barrier.threads = threads;
  const std::size_t round = barrier.rounds;
  char* place = &barrier.places[round % 2];
  race_detector::release(place);
  if (++barrier.came == threads) {
    barrier.came = 0;
    ++barrier.rounds;
  }
  if (!waits) return;
  if (barrier.rounds == round) wait_until([&barrier, round] { return barrier.rounds != round; }, site);
  race_detector::acquire(place);
}

void begin_wgmma(const WgmmaCall& call, Site site) {
  note_operands(call);
  // Early reads of the result find NaN.
  if (!call.accumulate)
    std::memset(call.d, kPoison, static_cast<std::size_t>(call.columns) / 2 * sizeof(float));
  warp_call(
      &call, 0,
      [](const WarpArguments& arguments) {
        const WarpCall& first = first_call(arguments);
        WarpProducts& warp = warp_of(first);
        if (!warp.is_fenced) {
          throw EmulationError(where(first.site) + ": no wgmma.fence since the warp waited for products");
        }
        Product product{};
        for (std::size_t lane = 0; lane < kWarpSize; ++lane) {
          product.lanes[lane] = *static_cast<const WarpCall*>(arguments.of_lane[lane])->product;
          if (product.lanes[lane].a_descriptor != first.product->a_descriptor ||
              product.lanes[lane].b_descriptor != first.product->b_descriptor) {
            throw EmulationError(where(first.site) + ": the lanes' descriptors differ");
          }
        }
        product.group = warp.groups;
        product.pieces = pieces_of(*first.product);
        check_operands(product.pieces, first.first_thread);
        for (const std::uint32_t address : product.pieces) ++piece_at(address).readers;
        warp.running.push_back(product);
      },
      site);
}

void fence_wgmma(Site site) {
  warp_call(
      nullptr, 0, [](const WarpArguments& arguments) { warp_of(first_call(arguments)).is_fenced = true; },
      site);
}

void commit_wgmma(Site site) {
  warp_call(
      nullptr, 0, [](const WarpArguments& arguments) { ++warp_of(first_call(arguments)).groups; }, site);
}

void wait_for_wgmma(std::size_t pending, Site site) {
#ifdef ADAPTRT_RACE_DETECTOR
  const WarpProducts& own = state.warps[thread_index() / kWarpSize];
  for (const Product& product : own.running) {
    if (product.group + pending < own.groups) note_operands(product.lanes[0]);
  }
#endif
  warp_call(
      nullptr, pending,
      [](const WarpArguments& arguments) {
        const WarpCall& first = first_call(arguments);
        WarpProducts& warp = warp_of(first);
        // Registers may change from now on.
        warp.is_fenced = false;
        while (!warp.running.empty() && warp.running.front().group + first.pending < warp.groups) {
          const Product product = warp.running.front();
          warp.running.pop_front();
          for (const std::uint32_t address : product.pieces) --piece_at(address).readers;
          if (product.lanes[0].is_half) {
            compute<Half>(product, first.first_thread / kWarpSize);
          } else {
            compute<BFloat16>(product, first.first_thread / kWarpSize);
          }
        }
      },
      site);
}

void begin_hopper_block() {
  state = {};
}

void end_hopper_block() {
  if (!state.copies.empty()) throw EmulationError("a box copy still runs when its block ends");
  for (const auto& [index, warp] : state.warps) {
    if (!warp.running.empty()) throw EmulationError("a product still runs when its warp ends");
  }
  for (const NamedBarrier& barrier : state.named) {
    if (barrier.came != 0) throw EmulationError("threads came to a named barrier at which none waits");
  }
}

}  // namespace adaptrt::cuda::emulation
