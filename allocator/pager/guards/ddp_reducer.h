// Memory that DDP's reducer reads outside of ops: its buckets, and the gradients that were accumulated last (rule 3).
#pragma once

#include <Python.h>

#include "base/tensors.h"
#include "guards/touched_cells.h"

namespace memmgr::pager {

// Returns the storages that the reducer reads in this backward; none if it waits for no gradient. `gradients`: also the
// gradients that its parameters have already. The Python object is a c10d Reducer.
std::vector<StoragePtr> storages_of_reducer(PyObject* reducer, bool gradients);

// Returns true if the reducer is about to rebuild its buckets and to copy present gradients into them.
bool moves_gradients(PyObject* reducer);

// A backward whose reducers wait for gradients begins or ends.
void reducers_listen(bool begin);
extern std::atomic<int> reducers_listening;

// Called after an op while reducers listen. Cells that AccumulateGrad has touched stay pinned until it touches the next
// gradient, since the reducer's hook runs in between.
void keep_accumulated(const Frame& frame);
void keep_accumulated(const c10::IValue& view);

}  // namespace memmgr::pager
