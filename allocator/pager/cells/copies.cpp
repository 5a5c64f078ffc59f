#include "cells/copies.h"

#include <algorithm>

#include "base/link.h"
#include "base/no_destructor.h"
#include "base/session.h"
#include "pools/pool.h"

namespace memmgr::pager {

std::atomic<int> copies_under_way{0};

NoDestructor<std::vector<Cell*>> writes OF_GRAPH;

std::vector<Cell*>& writes_under_way() { return *writes; }

void note_write_locked(Cell* c, mm_slot slot) {
  c->writing = slot;
  writes_under_way().push_back(c);
  copies_under_way++;
}

void forget_write_locked(Cell* c) {
  auto& writes = writes_under_way();
  writes.erase(std::remove(writes.begin(), writes.end(), c), writes.end());
  c->writing = -1;
  copies_under_way--;
}

void cancel_write_locked(Cell* c, Trash* trash) {
  if (c->writing < 0) return;
  trash->add_slot(c, c->writing);
  forget_write_locked(c);
}

void note_moved_locked(Cell* c, bool write) {
  Session& session = c->pool->session;
  note_link_locked(session.tier);
  (write ? session.counters.offloads : session.counters.reloads)++;
  (write ? session.counters.offload_bytes : session.counters.reload_bytes) += c->nbytes;
  c->moved_bytes += c->nbytes;
}

}  // namespace memmgr::pager
