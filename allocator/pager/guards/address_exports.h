// Functions of torch that hand out an address for good and that modules import by name: to_dlpack. A wrapper on torch's
// attribute would miss such a name. While a budget is open these functions escape their argument before they run (rule
// 9).
#pragma once

namespace memmgr::pager {

struct Session;

void watch_exports(Session& session, bool on);  // with the GIL

}  // namespace memmgr::pager
