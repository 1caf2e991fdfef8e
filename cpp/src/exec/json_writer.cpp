#include "json_writer.h"

#include <array>
#include <charconv>
#include <cmath>

namespace adaptrt::json {

std::string camel_case(std::string_view name) {
  constexpr std::string_view kMilliseconds = "_ms";
  const bool in_milliseconds = name.ends_with(kMilliseconds);
  if (in_milliseconds) name.remove_suffix(kMilliseconds.size());
  std::string result;
  bool upper = false;
  for (const char c : name) {
    if (c == '_') {
      upper = true;
    } else {
      result += upper && c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
      upper = false;
    }
  }
  if (in_milliseconds) result += "MS";
  return result;
}

void write(std::string& out, std::string_view value) {
  constexpr std::string_view kHex = "0123456789abcdef";
  out += '"';
  for (const char c : value) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20) {
      out += "\\u00";
      out += kHex[byte >> 4];
      out += kHex[byte & 0xf];
    } else {
      out += c;
    }
  }
  out += '"';
}

void write(std::string& out, bool value) {
  out += value ? "true" : "false";
}

void write(std::string& out, double value) {
  // JSON has no infinities and no NaN.
  if (!std::isfinite(value)) {
    out += "null";
    return;
  }
  std::array<char, 32> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  out.append(text.data(), end);
}

void write(std::string& out, RequestStage value) {
  write(out, name_of(value));
}

}  // namespace adaptrt::json
