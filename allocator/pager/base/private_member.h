// Access to private members of torch's classes that have no accessor. Explicit instantiation may name them
// ([temp.explicit]), whatever their type; a release that renames one fails to compile, which is what we want.
#pragma once

#define MEMMGR_PRIVATE_MEMBER(tag, owner, name)                  \
  struct tag {                                                   \
    friend constexpr auto private_member(tag);                   \
  };                                                             \
  template <auto member>                                         \
  struct tag##Is {                                               \
    friend constexpr auto private_member(tag) { return member; } \
  };                                                             \
  template struct tag##Is<&owner::name>;
