#include "dispatch/the_session.h"

namespace memmgr::pager {

Session the_session;

}  // namespace memmgr::pager
