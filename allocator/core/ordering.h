// Every call that orders work (a stream that waits, memory that counts as touched) has a name and goes through Order:
// tests leave one out by its name and show that something then goes wrong (mm_test_leave_out). Without the option
// MEMMGR_MUTATIONS a name does nothing.
//
//   const int error = Order<"offload.touched">([&] { return device->WaitForTouched(stream, block); });
//
// A name may be used at several places, which then are left out together.
#pragma once

#include <cstddef>

namespace memmgr {

template <size_t kLength>
struct OrderingName {
  char text[kLength];
  // Implicit, so that a literal can be the argument.
  constexpr OrderingName(const char (&literal)[kLength]) {
    for (size_t i = 0; i < kLength; ++i) text[i] = literal[i];
  }
};

#ifdef MEMMGR_MUTATIONS

bool OrderingLeftOut(const char* name);
bool RegisterOrdering(const char* name);

template <OrderingName kName>
struct RegisteredOrdering {
  // Set when the library is loaded, so that the list of names is whole before the first call.
  static inline const bool registered = RegisterOrdering(kName.text);
};

// Returns the result of the call; 0 when it is left out.
template <OrderingName kName, typename Call>
auto Order(Call call) -> decltype(call()) {
  if (RegisteredOrdering<kName>::registered && OrderingLeftOut(kName.text)) return decltype(call())();
  return call();
}

#else

template <OrderingName kName, typename Call>
inline auto Order(Call call) -> decltype(call()) {
  return call();
}

#endif

}  // namespace memmgr
