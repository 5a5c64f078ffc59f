// The constants that C++ and Python share, from constants.def.
#pragma once

#include <c10/core/DispatchKey.h>

#include <cstddef>
#include <cstdint>

namespace memmgr::pager {

#define ENUM(name, type, meaning) enum class name : type {
#define VALUE(name, word) name,
#define END \
  }         \
  ;
#define NUMBER(type, name, python, value) constexpr type name = value;
#define KEY(name, python, key) constexpr c10::DispatchKey name = c10::DispatchKey::key;
#include "base/constants.def"

// The words of an enum, by value.
template <class E>
struct Words;

#define ENUM(name, type, meaning)                \
  template <>                                    \
  struct Words<name> {                           \
    static constexpr const char* python = #name; \
    static constexpr const char* all[] = {
#define VALUE(name, word) #word,
#define END \
  }         \
  ;         \
  }         \
  ;
#include "base/constants.def"

template <class E>
constexpr size_t kValues = sizeof(Words<E>::all) / sizeof(const char*);
template <class E>
const char* word_of(E value) {
  return Words<E>::all[static_cast<size_t>(value)];
}

}  // namespace memmgr::pager
