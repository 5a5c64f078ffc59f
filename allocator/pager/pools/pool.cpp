#include "pools/pool.h"

#include <c10/util/Exception.h>

namespace memmgr::pager {

RoomMaker room_maker;

void Pool::throw_if_broken() const {
  const std::string why = broken();
  TORCH_CHECK(why.empty(), "memmgr: ", device.str(), " answers nothing any more: ", why, ".");
}

}  // namespace memmgr::pager
