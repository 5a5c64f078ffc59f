#include "guards/gc_scan.h"

#include <torch/csrc/utils/object_ptr.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "guards/extension_ops.h"

namespace memmgr::pager {

namespace {

struct Search {
  PyObject* types;
  std::optional<Libraries> libraries;
  std::vector<THPObjectPtr> found;
  // A cache of types that are not searched for; most objects have one of a few dozen types
  std::array<PyTypeObject*, 256> others{};

  void look_at(PyObject* o) {
    if (libraries && PyCFunction_CheckExact(o)) {
      if (libraries->have_bound(o)) found.emplace_back(Py_NewRef(o));
      return;
    }
    PyTypeObject*& other = others[reinterpret_cast<uintptr_t>(Py_TYPE(o)) / 64 % 256];
    if (other == Py_TYPE(o)) return;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); ++i)
      if (PyType_IsSubtype(Py_TYPE(o), reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(types, i)))) {
        found.emplace_back(Py_NewRef(o));
        return;
      }
    other = Py_TYPE(o);
  }
};

#if PY_VERSION_HEX < 0x030C0000
// Python 3.11's lists of the objects that its collector tracks, one for each generation (pycore_gc.h). Python's own
// function makes a list of all objects, which takes as long again as looking at them.
struct CollectorLink {
  CollectorLink* next;
  uintptr_t previous_and_flags;

  CollectorLink* previous() const { return reinterpret_cast<CollectorLink*>(previous_and_flags & ~uintptr_t{3}); }
  PyObject* object() { return reinterpret_cast<PyObject*>(this + 1); }
};

struct Generation {
  CollectorLink head;
  int threshold, count;
};
constexpr int kGenerations = 3;

// Visits a list from both ends. Each object is a wait for memory, and two waits at a time take half as long.
void visit_list(const CollectorLink* head, Search& search) {
  CollectorLink *front = head->next, *back = head->previous();
  while (front != head) {
    search.look_at(front->object());
    if (front == back) return;
    search.look_at(back->object());
    front = front->next;
    if (front == back) return;
    back = back->previous();
  }
}

bool visit_objects(Search& search) {
  // A new object is the last of the first list, and its successor is the list's head
  THPObjectPtr youngest(PyList_New(0));
  if (!youngest) return false;
  const auto* first = reinterpret_cast<const Generation*>((reinterpret_cast<CollectorLink*>(youngest.get()) - 1)->next);
  for (int i = 0; i < kGenerations; ++i) visit_list(&first[i].head, search);
  return true;
}
#else
bool visit_objects(Search& search) {
  PyUnstable_GC_VisitObjects(
      [](PyObject* o, void* found) {
        static_cast<Search*>(found)->look_at(o);
        return 1;  // go on
      },
      &search);
  return true;
}
#endif

}  // namespace

PyObject* objects_of(PyObject* types, PyObject* libraries) {
  Search search{types, {}, {}};
  if (libraries) search.libraries.emplace(libraries);
  if (!visit_objects(search)) return nullptr;
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(search.found.size()));
  for (size_t i = 0; list && i < search.found.size(); ++i)
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), search.found[i].release());
  return list;
}

}  // namespace memmgr::pager
