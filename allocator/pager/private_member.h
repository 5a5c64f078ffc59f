// Access to private members of torch's classes that have no accessor. Explicit instantiation may name them
// ([temp.explicit]); a release that renames one fails to compile, which is what we want.
#pragma once

namespace memmgr::pager {

template <class Tag, typename Tag::type member>
struct PrivateMember {
  friend constexpr typename Tag::type private_member(Tag) { return member; }
};

}  // namespace memmgr::pager

#define MEMMGR_PRIVATE_MEMBER(tag, owner, name, kind) \
  struct tag {                                        \
    using type = kind owner::*;                       \
    friend constexpr type private_member(tag);        \
  };                                                  \
  template struct PrivateMember<tag, &owner::name>;
