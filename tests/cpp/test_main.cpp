// The one translation unit that compiles Boost.Test itself; tests include <boost/test/unit_test.hpp>.
#define BOOST_TEST_MODULE adaptrt
#include <boost/test/included/unit_test.hpp>
