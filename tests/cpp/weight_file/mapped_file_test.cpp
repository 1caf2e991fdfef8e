#include "adaptrt/weight_file/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "files.h"

namespace adaptrt::testing::mapped_file_test {
namespace {

const auto kPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

/// A file of four pages, mapped.
class Mapping {
 public:
  Mapping() : file_(4 * kPage) {
    const int descriptor = open(file_.path().c_str(), O_RDONLY | O_CLOEXEC);
    data_ = static_cast<const std::byte*>(mmap(nullptr, 4 * kPage, PROT_READ, MAP_PRIVATE, descriptor, 0));
    close(descriptor);
  }
  ~Mapping() { munmap(const_cast<std::byte*>(data_), 4 * kPage); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  Mapping(Mapping&&) = delete;
  Mapping& operator=(Mapping&&) = delete;

  [[nodiscard]] const TestFile& file() const { return file_; }
  [[nodiscard]] std::span<const std::byte> pages() const { return {data_, 4 * kPage}; }
  [[nodiscard]] std::byte read(std::size_t at) const {
    return static_cast<const volatile std::byte*>(data_)[at];
  }

 private:
  TestFile file_;
  const std::byte* data_;
};

auto says(const std::string& text) {
  return
      [text](const EngineError& error) { return std::string(error.what()).find(text) != std::string::npos; };
}

constexpr auto kLong = std::chrono::hours(1);

}  // namespace

BOOST_AUTO_TEST_SUITE(mapped_file)

BOOST_AUTO_TEST_CASE(lost_pages_are_zero_and_are_told) {
  const Mapping mapping;
  const Mapping other;
  MappedFile mapped(mapping.pages(), mapping.file().path(), kLong);
  MappedFile of_other(other.pages(), other.file().path(), kLong);
  mapped.check();
  mapping.file().cut(kPage + 10);
  for (const std::size_t at : {3 * kPage + 5, 2 * kPage, 4 * kPage - 1}) {
    BOOST_TEST((mapping.read(at) == std::byte{0}));
  }
  BOOST_TEST((mapping.read(7) == TestFile::byte_at(7)));
  BOOST_CHECK_EXCEPTION(mapped.check(), EngineError, says("was cut while it was in use"));
  BOOST_CHECK_EXCEPTION(mapped.check(), EngineError, says(mapping.file().path()));
  of_other.check();
  BOOST_TEST((other.read(4 * kPage - 1) == TestFile::byte_at(4 * kPage - 1)));
}

BOOST_AUTO_TEST_CASE(a_place_is_used_again) {
  const Mapping first;
  const Mapping second;
  for (const Mapping* mapping : {&first, &second}) {
    MappedFile mapped(mapping->pages(), mapping->file().path(), kLong);
    mapped.check();
    mapping->file().cut(0);
    BOOST_TEST((mapping->read(0) == std::byte{0}));
    BOOST_CHECK_THROW(mapped.check(), EngineError);
  }
}

BOOST_AUTO_TEST_CASE(a_file_that_is_written_is_told_once_in_an_interval) {
  const Mapping mapping;
  MappedFile seldom(mapping.pages(), mapping.file().path(), kLong);
  MappedFile always(mapping.pages(), mapping.file().path(), std::chrono::nanoseconds(0));
  seldom.check();
  always.check();
  std::filesystem::last_write_time(mapping.file().path(),
                                   std::filesystem::file_time_type::clock::now() + std::chrono::seconds(5));
  seldom.check();
  BOOST_CHECK_EXCEPTION(always.check(), EngineError, says("was written while it was in use"));
}

BOOST_AUTO_TEST_CASE(a_file_that_is_longer_was_written) {
  const Mapping mapping;
  MappedFile mapped(mapping.pages(), mapping.file().path(), std::chrono::nanoseconds(0));
  const auto time = std::filesystem::last_write_time(mapping.file().path());
  mapping.file().cut(5 * kPage);
  std::filesystem::last_write_time(mapping.file().path(), time);
  BOOST_CHECK_EXCEPTION(mapped.check(), EngineError, says("was written while it was in use"));
}

BOOST_AUTO_TEST_CASE(a_file_that_is_replaced_stays_as_it_was) {
  const Mapping mapping;
  MappedFile mapped(mapping.pages(), mapping.file().path(), std::chrono::nanoseconds(0));
  const TestFile new_file(10);
  std::filesystem::rename(new_file.path(), mapping.file().path());
  mapped.check();
  BOOST_TEST((mapping.read(3 * kPage) == TestFile::byte_at(3 * kPage)));
}

BOOST_AUTO_TEST_CASE(a_file_that_is_not_there_is_an_error_that_names_it) {
  const Mapping mapping;
  BOOST_CHECK_EXCEPTION(MappedFile(mapping.pages(), "/nowhere/rank0.engine"), EngineError,
                        says("/nowhere/rank0.engine"));
}

BOOST_AUTO_TEST_CASE(there_is_a_limit_of_mappings) {
  const Mapping mapping;
  std::vector<std::unique_ptr<MappedFile>> mapped;
  const auto add = [&] {
    mapped.push_back(std::make_unique<MappedFile>(mapping.pages(), mapping.file().path()));
  };
  BOOST_CHECK_THROW(while (mapped.size() < 2000) add(), AdaptrtError);
  mapped.pop_back();
  add();
}

BOOST_AUTO_TEST_CASE(other_faults_end_the_process_as_before) {
  const Mapping guarded;
  const Mapping mapping;
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGBUS, SIG_DFL);  // the handlers of the test framework and of sanitizers do not end the
                                   // process
    const MappedFile mapped(guarded.pages(), guarded.file().path(), kLong);
    mapping.file().cut(0);
    _exit(static_cast<int>(mapping.read(0)));
  }
  int status = 0;
  waitpid(child, &status, 0);
  BOOST_TEST(WIFSIGNALED(status));
  BOOST_TEST(WTERMSIG(status) == SIGBUS);
}

std::atomic<int> num_passed_on = 0;

BOOST_AUTO_TEST_CASE(other_faults_go_to_the_handler_before) {
  const Mapping guarded;
  const Mapping mapping;
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGBUS, [](int) { _exit(++num_passed_on); });
    const MappedFile mapped(guarded.pages(), guarded.file().path(), kLong);
    mapping.file().cut(0);
    _exit(static_cast<int>(mapping.read(0)) + 7);
  }
  int status = 0;
  waitpid(child, &status, 0);
  BOOST_TEST(WIFEXITED(status));
  BOOST_TEST(WEXITSTATUS(status) == 1);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace adaptrt::testing::mapped_file_test
