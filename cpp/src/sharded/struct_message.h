#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "adaptrt/core/fields.h"
#include "message.h"

// Structs as messages, by the tables of their fields. Both processes run the same build, so values without
// pointers are sent as they are in memory: first the numbers of the struct and of the structs in it, then its
// texts and lists.

namespace adaptrt {

template <class Value>
concept HasFields = requires { fields_of(static_cast<const Value*>(nullptr)); };

template <class Value>
concept IsNumber = std::is_arithmetic_v<Value> || std::is_enum_v<Value>;

/// Calls visit(member of `value`) for each member that is sent: those of sent_fields_of() if the struct has
/// it, otherwise all of fields_of().
template <class Struct, class Visit>
void for_each_sent(Struct& value, const Visit& visit) {
  constexpr const std::remove_const_t<Struct>* kType = nullptr;
  const auto visit_all = [&](const auto&... fields) { (visit(value.*(fields.member)), ...); };
  if constexpr (requires { sent_fields_of(kType); }) {
    sent_fields_of(kType).apply(visit_all);
  } else {
    fields_of(kType).apply(visit_all);
  }
}

template <class Struct>
void add_numbers(const Struct& value, MessageWriter* message) {
  for_each_sent(value, [&]<class Member>(const Member& member) {
    if constexpr (IsNumber<Member>) {
      message->add(member);
    } else if constexpr (HasFields<Member>) {
      add_numbers(member, message);
    }
  });
}

template <class Struct>
void add_struct(const Struct& value, MessageWriter* message);

inline void add_list(const std::string& text, MessageWriter* message) {
  message->add_list(std::span<const char>(text));
}

template <class Item>
void add_list(const std::vector<Item>& items, MessageWriter* message) {
  if constexpr (std::is_trivially_copyable_v<Item>) {
    message->add_list(std::span<const Item>(items));
  } else {
    message->add(static_cast<std::uint64_t>(items.size()));
    for (const Item& item : items) add_struct(item, message);
  }
}

template <class Struct>
void add_lists(const Struct& value, MessageWriter* message) {
  for_each_sent(value, [&]<class Member>(const Member& member) {
    if constexpr (HasFields<Member>) {
      add_lists(member, message);
    } else if constexpr (!IsNumber<Member>) {
      add_list(member, message);
    }
  });
}

/// Adds a struct that has a table of fields.
template <class Struct>
void add_struct(const Struct& value, MessageWriter* message) {
  add_numbers(value, message);
  add_lists(value, message);
}

template <class Struct>
void read_numbers(MessageReader* message, Struct& value) {
  for_each_sent(value, [&]<class Member>(Member& member) {
    if constexpr (IsNumber<Member>) {
      member = message->number<Member>();
    } else if constexpr (HasFields<Member>) {
      read_numbers(message, member);
    }
  });
}

template <class Struct>
[[nodiscard]] Struct read_struct(MessageReader* message);

inline void read_list(MessageReader* message, std::string& text) {
  const std::vector<char> characters = message->list<char>();
  text.assign(characters.begin(), characters.end());
}

template <class Item>
void read_list(MessageReader* message, std::vector<Item>& items) {
  if constexpr (std::is_trivially_copyable_v<Item>) {
    items = message->list<Item>();
  } else {
    const auto count = message->number<std::uint64_t>();
    items.clear();
    for (std::uint64_t i = 0; i < count; ++i) items.push_back(read_struct<Item>(message));
  }
}

template <class Struct>
void read_lists(MessageReader* message, Struct& value) {
  for_each_sent(value, [&]<class Member>(Member& member) {
    if constexpr (HasFields<Member>) {
      read_lists(message, member);
    } else if constexpr (!IsNumber<Member>) {
      read_list(message, member);
    }
  });
}

/// Reads a struct that add_struct() has added. Members that are not sent have their defaults. Throws
/// EngineError at the end of the bytes.
template <class Struct>
[[nodiscard]] Struct read_struct(MessageReader* message) {
  Struct value;
  read_numbers(message, value);
  read_lists(message, value);
  return value;
}

}  // namespace adaptrt
