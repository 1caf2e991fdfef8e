#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/kernel_table.h"
#include "kernel_tables.h"

namespace adaptrt::elementwise_test {
namespace {

namespace data = boost::unit_test::data;

constexpr std::int64_t kSizes[] = {1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 17, 31, 33, 64, 67, 130};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
/// Relative error of a few operations that round to float32.
constexpr double kFewRoundings = 8 * 0x1p-24;

std::byte* bytes(std::vector<float>* values) {
  return reinterpret_cast<std::byte*>(values->data());
}

/// Returns n poisoned elements and one more, which must stay poisoned.
std::vector<float> poisoned(std::int64_t n) {
  return std::vector<float>(static_cast<std::size_t>(n) + 1, kPoison);
}

/// Converts the first n of `halves` to float32, as sums of groups of one.
void widen(const KernelTable& table, const std::vector<std::uint16_t>& halves, DType dtype, std::int64_t n,
           std::vector<float>* wide) {
  table.sum_groups(reinterpret_cast<const std::byte*>(halves.data()), dtype, n, 1, wide->data());
}

BOOST_AUTO_TEST_SUITE(elementwise)

BOOST_AUTO_TEST_CASE(tables_are_found_by_name_and_unknown_names_are_refused) {
  BOOST_TEST(find_kernels("").name == available_kernels().front()->name);
  BOOST_TEST(available_kernels().back()->name == "portable");
  BOOST_CHECK_THROW((void)find_kernels("abacus"), ConfigError);
}

BOOST_DATA_TEST_CASE(exp_is_within_its_bound, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  auto x = random.vector(20000, -87.33F, 88.0F);
  const auto near_zero = random.vector(20000, -1.0F, 1.0F);
  x.insert(x.end(), near_zero.begin(), near_zero.end());
  std::vector<float> out(x.size(), kPoison);
  table.exp(x.data(), static_cast<std::int64_t>(x.size()), out.data());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double expected = std::exp(static_cast<double>(x[i]));
    check_near(out[i], expected, kExpRelativeError * expected);
  }
}

BOOST_DATA_TEST_CASE(exp_at_its_ends, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  const std::vector<float> x = {0.0F, -0.0F, -87.4F, -1000.0F, -kInfinity, 1000.0F, kInfinity, std::nanf("")};
  std::vector<float> out(x.size(), kPoison);
  table.exp(x.data(), static_cast<std::int64_t>(x.size()), out.data());
  BOOST_TEST(out[0] == 1.0F);
  BOOST_TEST(out[1] == 1.0F);
  for (const std::size_t i : {2, 3, 4}) BOOST_TEST(out[i] == 0.0F);
  for (const std::size_t i : {5, 6}) BOOST_TEST((out[i] > 1e38F && std::isfinite(out[i])));
  BOOST_TEST(std::isnan(out[7]));
}

BOOST_DATA_TEST_CASE(conversions_are_those_of_the_dtypes, kernel_tables() * data::make({1, 2}), name,
                     dtype_index) {
  const auto& table = kernel_table(name);
  const auto dtype = static_cast<DType>(dtype_index);
  FreshRandom random;
  for (const std::int64_t n : kSizes) {
    auto x = random.vector(n, -70000.0F, 70000.0F);
    for (std::size_t i = 0; i < x.size(); i += 3) x[i] = std::ldexp(x[i], -40);  // subnormal halves and zeros
    if (n > 4) {
      x[1] = kInfinity;
      x[4] = -0.0F;
    }
    std::vector<std::uint16_t> halves(static_cast<std::size_t>(n) + 1, 0xabcd);
    table.scale_and_store(x.data(), 1.0F, n, reinterpret_cast<std::byte*>(halves.data()), dtype);
    BOOST_TEST(halves.back() == 0xabcd);
    auto wide = poisoned(n);
    widen(table, halves, dtype, n, &wide);
    BOOST_TEST(wide.back() == kPoison);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const auto expected = dtype == DType::kBFloat16 ? float_to_bfloat16(x[i]) : float_to_float16(x[i]);
      BOOST_TEST_REQUIRE(halves[i] == expected, x[i]);
      BOOST_TEST_REQUIRE(
          wide[i] == (dtype == DType::kBFloat16 ? bfloat16_to_float(expected) : float16_to_float(expected)));
    }
  }
}

BOOST_DATA_TEST_CASE(every_half_is_widened_exactly, kernel_tables() * data::make({1, 2}), name, dtype_index) {
  const auto& table = kernel_table(name);
  const auto dtype = static_cast<DType>(dtype_index);
  std::vector<std::uint16_t> halves(0x10000);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  std::vector<float> wide(halves.size(), kPoison);
  widen(table, halves, dtype, 0x10000, &wide);
  for (std::size_t i = 0; i < halves.size(); ++i) {
    const float expected =
        dtype == DType::kBFloat16 ? bfloat16_to_float(halves[i]) : float16_to_float(halves[i]);
    if (std::isnan(expected)) {
      BOOST_TEST_REQUIRE(std::isnan(wide[i]));
    } else {
      BOOST_TEST_REQUIRE(wide[i] == expected);
    }
  }
}

BOOST_DATA_TEST_CASE(nan_stays_nan_when_it_is_stored, kernel_tables() * data::make({1, 2}), name,
                     dtype_index) {
  const auto& table = kernel_table(name);
  const auto dtype = static_cast<DType>(dtype_index);
  std::vector<float> x(19, std::nanf(""));
  x[3] = std::bit_cast<float>(0x7f800001U);
  x[18] = std::bit_cast<float>(0xffffffffU);
  std::vector<std::uint16_t> halves(x.size());
  table.scale_and_store(x.data(), 1.0F, 19, reinterpret_cast<std::byte*>(halves.data()), dtype);
  for (const auto half : halves) {
    BOOST_TEST(std::isnan(dtype == DType::kBFloat16 ? bfloat16_to_float(half) : float16_to_float(half)));
  }
}

BOOST_DATA_TEST_CASE(rms_norm_matches_float64, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  for (const std::int64_t n : kSizes) {
    const auto x = random.vector(n, -3.0F, 3.0F);
    const auto weight = random.vector(n);
    auto out = poisoned(n);
    table.rms_norm(x.data(), weight.data(), 1e-5F, n, bytes(&out), DType::kFloat32);
    double squares = 0.0;
    for (const float value : x) squares += static_cast<double>(value) * value;
    const double factor = 1.0 / std::sqrt(squares / static_cast<double>(n) + 1e-5F);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double expected = x[i] * factor * weight[i];
      // The sum of squares has only rounding errors; the root halves the relative error.
      check_near(out[i], expected, (kFewRoundings + static_cast<double>(n) * 0x1p-25) * std::abs(expected));
    }
    BOOST_TEST(out.back() == kPoison);
    auto in_place = x;
    table.rms_norm(in_place.data(), weight.data(), 1e-5F, n, bytes(&in_place), DType::kFloat32);
    BOOST_TEST(std::memcmp(in_place.data(), out.data(), in_place.size() * sizeof(float)) == 0);
  }
}

BOOST_DATA_TEST_CASE(layer_norm_matches_float64, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  for (const std::int64_t n : kSizes) {
    const auto x = random.vector(n, 30.0F, 34.0F);
    const auto weight = random.vector(n);
    const auto bias = random.vector(n);
    double mean = 0.0;
    for (const float value : x) mean += value / static_cast<double>(n);
    double variance = 0.0;
    for (const float value : x) variance += (value - mean) * (value - mean) / static_cast<double>(n);
    const double factor = 1.0 / std::sqrt(variance + 1e-3);
    for (const float* shift : {bias.data(), static_cast<const float*>(nullptr)}) {
      auto out = poisoned(n);
      table.layer_norm(x.data(), weight.data(), shift, 1e-3F, n, bytes(&out), DType::kFloat32);
      for (std::size_t i = 0; i < x.size(); ++i) {
        const double expected = (x[i] - mean) * factor * weight[i] + (shift == nullptr ? 0.0 : shift[i]);
        // The mean of up to 130 numbers up to 34 has a few rounding errors.
        check_near(out[i], expected, 34.0 * factor * kFewRoundings + 1e-6);
      }
      BOOST_TEST(out.back() == kPoison);
      auto in_place = x;
      table.layer_norm(in_place.data(), weight.data(), shift, 1e-3F, n, bytes(&in_place), DType::kFloat32);
      BOOST_TEST(std::memcmp(in_place.data(), out.data(), x.size() * sizeof(float)) == 0);
    }
  }
}

BOOST_DATA_TEST_CASE(softcap_matches_float64, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  for (const std::int64_t n : kSizes) {
    auto x = random.vector(n, -100.0F, 100.0F);
    x[0] = n % 2 == 0 ? -1e30F : 1e30F;
    auto capped = x;
    table.softcap(30.0F, n, capped.data());
    for (std::size_t i = 0; i < x.size(); ++i) {
      check_near(capped[i], 30.0 * std::tanh(x[i] / 30.0), 30.0 * kFewRoundings);
    }
  }
}

BOOST_DATA_TEST_CASE(weighted_rows_are_added_in_order, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  constexpr std::int64_t kRows = 5, kStride = 70;
  constexpr std::int32_t kRowOf[] = {3, 0, 4};
  FreshRandom random;
  const auto rows = random.vector(kRows * kStride);
  const auto weights = random.vector(3);
  for (const std::int64_t count : {1, 2, 3}) {
    for (const std::int64_t width : {1, 15, 16, 33, 64}) {
      for (const bool accumulate : {false, true}) {
        const auto before = random.vector(width);
        auto out = before;
        out.push_back(kPoison);
        table.add_up_rows({.rows = rows.data(),
                           .stride = kStride,
                           .row_of = kRowOf,
                           .weights = weights.data(),
                           .count = count,
                           .width = width,
                           .out = out.data(),
                           .accumulate = accumulate});
        for (std::int64_t i = 0; i < width; ++i) {
          const auto product = [&](std::int64_t number) {
            return weights[number] * rows[kRowOf[number] * kStride + i];
          };
          float expected = product(0);
          for (std::int64_t number = 1; number < count; ++number) expected += product(number);
          BOOST_TEST(out[i] == (accumulate ? before[i] + expected : expected));
        }
        BOOST_TEST(out.back() == kPoison);
      }
    }
  }
}

BOOST_DATA_TEST_CASE(scattered_rows_are_weighted_and_added, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  constexpr std::int64_t kRows = 3, kStride = 70, kOutRows = 6, kOutStride = 72;
  constexpr std::int32_t kRowOf[kRows] = {4, 0, 3};
  FreshRandom random;
  const auto rows = random.vector(kRows * kStride);
  const auto weights = random.vector(kRows);
  for (const std::int64_t count : {0, 1, 3}) {
    for (const std::int64_t width : {1, 15, 16, 33, 64}) {
      const auto before = random.vector(kOutRows * kOutStride);
      auto out = before;
      table.scatter_rows({.rows = rows.data(),
                          .stride = kStride,
                          .row_of = kRowOf,
                          .weights = weights.data(),
                          .count = count,
                          .width = width,
                          .out = out.data(),
                          .out_stride = kOutStride});
      auto expected = before;
      for (std::int64_t row = 0; row < count; ++row) {
        for (std::int64_t i = 0; i < width; ++i) {
          const float product = weights[row] * rows[row * kStride + i];
          expected[kRowOf[row] * kOutStride + i] += product;
        }
      }
      BOOST_TEST(out == expected, boost::test_tools::per_element());
    }
  }
}

// Rows of whole cache lines at aligned addresses, and others.
BOOST_DATA_TEST_CASE(streamed_rows_are_copies, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  if (table.stream_rows == nullptr) return;
  constexpr std::int64_t kRows = 5, kStride = 80, kOutStride = 192;
  FreshRandom random;
  const auto from = random.vector(kRows * kStride);
  for (const std::int64_t floats : {0, 3, 16, 32, 47}) {
    for (const std::int64_t shift : {0, 1, 16}) {
      alignas(64) float out[kRows * kOutStride];
      std::fill_n(out, kRows * kOutStride, kPoison);
      table.stream_rows(reinterpret_cast<const std::byte*>(from.data()), kStride * 4, kRows, floats * 4,
                        reinterpret_cast<std::byte*>(out + shift), kOutStride * 4);
      for (std::int64_t i = 0; i < kRows * kOutStride; ++i) {
        const std::int64_t row = i / kOutStride, column = i % kOutStride - shift;
        const bool is_there = column >= 0 && column < floats;
        const float expected = is_there ? from[static_cast<std::size_t>(row * kStride + column)] : kPoison;
        BOOST_TEST_REQUIRE(out[i] == expected, "floats " << floats << " shift " << shift << " element " << i);
      }
    }
  }
}

BOOST_DATA_TEST_CASE(sums_and_products_are_rounded_once, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  for (const std::int64_t n : kSizes) {
    const auto x = random.vector(n);
    auto base = random.vector(n + 1);
    base.back() = kPoison;
    auto added = base;
    table.add(x.data(), n, added.data());
    auto multiplied = base;
    table.multiply(x.data(), n, multiplied.data());
    for (std::size_t i = 0; i < x.size(); ++i) {
      BOOST_TEST_REQUIRE(added[i] == base[i] + x[i]);
      BOOST_TEST_REQUIRE(multiplied[i] == base[i] * x[i]);
    }
    BOOST_TEST(added.back() == kPoison);
    BOOST_TEST(multiplied.back() == kPoison);
  }
}

BOOST_DATA_TEST_CASE(rotation_turns_pairs_of_the_two_halves_of_each_head,
                     kernel_tables() * data::make({0, 1, 2}), name, dtype_index) {
  const auto& table = kernel_table(name);
  const auto dtype = static_cast<DType>(dtype_index);
  FreshRandom random;
  constexpr std::int64_t kHeads = 3;
  for (const std::int64_t half : {1, 3, 6, 16, 40, 64}) {
    for (const std::int64_t unrotated : {0, 5}) {
      const std::int64_t head_dim = 2 * half + unrotated;
      const std::int64_t size = kHeads * head_dim;
      const auto x = random.vector(size);
      const auto cosine = random.vector(half);
      const auto sine = random.vector(half);
      std::vector<std::byte> out(static_cast<std::size_t>(size) * size_of(dtype) + 1, std::byte{0x5a});
      table.rotate_heads({.cosine = cosine.data(),
                          .sine = sine.data(),
                          .half = half,
                          .x = x.data(),
                          .heads = kHeads,
                          .head_dim = head_dim,
                          .factor = 0.75F,
                          .out = out.data(),
                          .out_type = dtype});
      auto turned = x;
      for (std::int64_t pair = 0; pair < kHeads * half; ++pair) {
        const auto i = static_cast<std::size_t>(pair % half);
        const auto at = static_cast<std::size_t>(pair / half * head_dim) + i;
        const std::size_t other = at + static_cast<std::size_t>(half);
        turned[at] = x[at] * cosine[i] - x[other] * sine[i];
        turned[other] = x[other] * cosine[i] + x[at] * sine[i];
      }
      std::vector<std::byte> expected(out.size(), std::byte{0x5a});
      for (std::size_t i = 0; i < turned.size(); ++i) {
        store_from_float(expected.data(), dtype, i, turned[i] * 0.75F);
      }
      BOOST_TEST_REQUIRE(out == expected, "half " << half << ", " << unrotated << " not rotated");
    }
  }
}

BOOST_DATA_TEST_CASE(pairs_of_bfloat16_are_those_of_the_two_rows, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  for (const std::int64_t n : kSizes) {
    const auto even = random.vector(n);
    const auto odd = random.vector(n);
    std::vector<std::uint16_t> out(static_cast<std::size_t>(2 * n + 1), 0x5a5a);
    BOOST_TEST(
        table.store_bfloat16_pairs(even.data(), odd.data(), n, reinterpret_cast<std::byte*>(out.data())));
    for (std::size_t i = 0; i < even.size(); ++i) {
      BOOST_TEST_REQUIRE(out[2 * i] == float_to_bfloat16(even[i]));
      BOOST_TEST_REQUIRE(out[2 * i + 1] == float_to_bfloat16(odd[i]));
    }
    BOOST_TEST(out.back() == 0x5a5a);
  }
}

BOOST_DATA_TEST_CASE(a_number_that_is_not_finite_once_rounded_is_found,
                     kernel_tables() * data::make({0, 1, 2}), name, dtype_index) {
  const auto& table = kernel_table(name);
  const auto dtype = static_cast<DType>(dtype_index);
  // The largest float32 that stays finite, and the next one.
  const float greatest = dtype == DType::kFloat32    ? std::numeric_limits<float>::max()
                         : dtype == DType::kBFloat16 ? 0x1.fefffep127F
                                                     : 0x1.ffdffep15F;
  const float above = std::nextafter(greatest, kInfinity);
  for (const std::int64_t n : kSizes) {
    std::vector<float> x(static_cast<std::size_t>(n), -greatest);
    x.push_back(kInfinity);
    std::vector<float> out(x.size());
    BOOST_TEST_REQUIRE(table.are_finite(x.data(), n, dtype));
    for (const float bad : {above, -above, std::nanf("")}) {
      for (const std::size_t at : {std::size_t{0}, static_cast<std::size_t>(n - 1)}) {
        auto with_bad = x;
        with_bad[at] = bad;
        BOOST_TEST_REQUIRE(!table.are_finite(with_bad.data(), n, dtype), bad << " at " << at << " of " << n);
        if (dtype != DType::kBFloat16) continue;
        auto* pairs = reinterpret_cast<std::byte*>(out.data());
        BOOST_TEST_REQUIRE(table.store_bfloat16_pairs(x.data(), x.data(), n, pairs));
        BOOST_TEST_REQUIRE(!table.store_bfloat16_pairs(x.data(), with_bad.data(), n, pairs));
        BOOST_TEST_REQUIRE(!table.store_bfloat16_pairs(with_bad.data(), x.data(), n, pairs));
      }
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::elementwise_test
