// Access to private members of torch's classes that have no accessor. An explicit instantiation may name them
// ([temp.explicit]), whichever type they have. If a release of torch renames one, the build fails, as it should.
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
