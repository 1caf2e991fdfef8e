#include "adaptrt/core/fields.h"

#include <boost/test/unit_test.hpp>
#include <string>

namespace adaptrt::fields_test {
namespace {

struct Example {
  int size = 0;
  std::string name = {};
  double parts = 0.0;
};

constexpr auto first_fields_of(const Example* /*type*/) {
  return FieldList{Field{"size", &Example::size, ""}, Field{"name", &Example::name, ""}};
}

constexpr auto fields_of(const Example* type) {
  return first_fields_of(type).followed_by(FieldList{Field{"parts", &Example::parts, ""}});
}

struct Longer {
  int size = 0;
  int omitted = 0;
};

constexpr auto fields_of(const Longer* /*type*/) {
  return FieldList{Field{"size", &Longer::size, ""}};
}

static_assert(has_num_members<Example, 3>());
static_assert(!has_num_members<Example, 2>());
static_assert(!has_num_members<Example, 4>());
static_assert(lists_every_member<Example>());
static_assert(!lists_every_member<Longer>());
static_assert(lists_every_member<Longer, 1>());

BOOST_AUTO_TEST_SUITE(fields)

BOOST_AUTO_TEST_CASE(a_list_is_visited_in_order) {
  std::string names;
  fields_of(static_cast<const Example*>(nullptr)).apply([&](const auto&... field) {
    ((names += field.name, names += ' '), ...);
  });
  BOOST_TEST(names == "size name parts ");
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::fields_test
