#pragma once

#include <concepts>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "adaptrt/exec/stats.h"

namespace adaptrt::json {

/// iter_latency_ms -> iterLatencyMS, num_gen_requests -> numGenRequests.
[[nodiscard]] std::string camel_case(std::string_view name);

void write(std::string& out, std::string_view value);
void write(std::string& out, bool value);
void write(std::string& out, double value);
void write(std::string& out, RequestStage value);

template <std::integral Integer>
void write(std::string& out, Integer value) {
  out += std::to_string(value);
}

inline void write(std::string& out, const std::string& value) {
  write(out, std::string_view(value));
}

template <class Struct>
  requires requires { fields_of(static_cast<const Struct*>(nullptr)); }
void write(std::string& out, const Struct& value);

template <class Value>
void write(std::string& out, const std::optional<Value>& value) {
  if (value) {
    write(out, *value);
  } else {
    out += "null";
  }
}

template <class Value>
void write(std::string& out, const std::vector<Value>& values) {
  out += '[';
  const char* separator = "";
  for (const auto& value : values) {
    out += separator;
    write(out, value);
    separator = ",";
  }
  out += ']';
}

template <class Struct>
  requires requires { fields_of(static_cast<const Struct*>(nullptr)); }
void write(std::string& out, const Struct& value) {
  out += '{';
  const char* separator = "";
  fields_of(static_cast<const Struct*>(nullptr)).apply([&](const auto&... fields) {
    ((out += separator, write(out, std::string_view(camel_case(fields.name))), out += ':',
      write(out, value.*(fields.member)), separator = ","),
     ...);
  });
  out += '}';
}

}  // namespace adaptrt::json
