// Functions of torch that hand an address out for good and that modules import by name, where a wrapper on torch's own
// attribute is not met: to_dlpack. While a budget is open they escape what they are given before they run (rule 9).
#pragma once

namespace memmgr::pager {

void watch_exports(bool on);  // with the GIL

}  // namespace memmgr::pager
