#include "pools/pool.h"

namespace memmgr::pager {

RoomMaker room_maker;

}  // namespace memmgr::pager
