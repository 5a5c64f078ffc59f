// What DDP's reducer looks at outside of ops: its buckets, and the gradients that were accumulated last (rule 3).
#pragma once

#include <Python.h>

#include "base/tensors.h"
#include "guards/touched_cells.h"

namespace memmgr::pager {

// The storages that the reducer reads in this backward; none if it waits for no gradient. `gradients`: those that its
// parameters have already, too. The Python object is a c10d Reducer.
std::vector<StoragePtr> storages_of_reducer(PyObject* reducer, bool gradients);

// Is it about to make its buckets anew, and to copy gradients that are there into them?
bool moves_gradients(PyObject* reducer);

// A backward with reducers that wait begins or ends.
void reducers_listen(bool begin);
extern std::atomic<int> reducers_listening;

// After an op, while reducers listen: what AccumulateGrad has touched stays until it touches the next gradient, since
// the reducer's hook runs in between.
void keep_accumulated(const Frame& frame);
void keep_accumulated(const c10::IValue& view);

}  // namespace memmgr::pager
