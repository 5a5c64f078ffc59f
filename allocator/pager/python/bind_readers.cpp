#include "python/bind_readers.h"

// Functions for readers (rule 9): pins, escapes, threads, functions of extensions, captures.
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/gil.h"
#include "base/seen_threads.h"
#include "base/tensors.h"
#include "base/thread_state.h"
#include "cells/adoption.h"
#include "cells/cell.h"
#include "cells/mapped_range.h"
#include "cells/names.h"
#include "cells/types.h"
#include "concurrency/deferred_steps.h"
#include "dispatch/graph_functions.h"
#include "dispatch/launch.h"
#include "dispatch/the_session.h"
#include "guards/argument_pins.h"
#include "guards/captures.h"
#include "guards/ddp_reducer.h"
#include "guards/escape.h"
#include "guards/extension_ops.h"
#include "guards/gc_scan.h"
#include "guards/mapped_files.h"
#include "guards/room.h"
#include "guards/stream_guard.h"
#include "python/bind.h"
#include "python/heartbeat.h"
#include "remat/replay.h"

namespace memmgr::pager {

namespace {

bool py_see_this_thread(bool on) {
  const bool before = thread_is_seen();
  see_this_thread(on);
  return before;
}

void py_making_states(bool on) { tl_making_states = on; }

// Returns the storages of the tensors and addresses in a list or tuple. Items without a storage are left out.
std::vector<StoragePtr> storages_of(PyObject* items) {
  std::vector<StoragePtr> storages;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); ++i)
    if (StoragePtr s = storage_of(PySequence_Fast_GET_ITEM(items, i))) storages.push_back(std::move(s));
  return storages;
}

bool py_add_pending(Callable run, TensorList tensors) {
  return the_session.open && add_pending(the_session, run.object, storages_of(tensors.object));
}

void py_finish_pending(bool quietly) { finish_all_pending(the_session, quietly); }

bool py_any_away(TensorList tensors) {
  for (const StoragePtr& s : storages_of(tensors.object)) {
    const Cell* c = cell_of(s.get());
    if (c && (c->state.load() & kAbsent)) return true;
  }
  return false;
}

std::optional<uint64_t> py_name(Addressed o) {
  const StoragePtr s = storage_of(o.object);
  uint64_t name = s ? name_of(s.get()) : 0;
  if (!name) return std::nullopt;
  if (THPVariable_Check(o.object)) {
    const at::Tensor& t = THPVariable_Unpack(o.object);
    name = t.numel() == 0 ? 0 : name + static_cast<uint64_t>(t.storage_offset()) * t.itemsize();
  }
  return name;
}

bool py_escape(Addressed o, Escape why) {
  const StoragePtr s = storage_of(o.object);
  if (!s || !the_session.open) return false;
  finish_pending_of(the_session, s.get());
  const WithoutGil released;
  Cell* c = cell_of(s.get());
  // The slices of a mapped file become cells. The storage over the whole file becomes one only if an op touches it.
  const bool whole_file = why == Escape::kSlice && is_mapped(s.get());
  if (!c && !whole_file && adoptable(the_session, s.get())) c = adopt_in_budget(the_session, s.get(), tl_depth == 0);
  if (c) escape(c, why);
  return true;
}

Pin pin_one(PyObject* addressed, bool one_element) {
  std::vector<StoragePtr> storages;
  if (StoragePtr s = storage_of(addressed)) storages.push_back(std::move(s));
  return {{new_pin(the_session, std::move(storages), PinLife::kCall, false, one_element)}};
}

Pin py_pin(AddressedSequence sequence, bool written, bool region, bool held) {
  THPObjectPtr items(
      checked(PySequence_Fast(sequence.object, "a sequence of tensors or storages' addresses is needed")));
  const PinLife life = held ? PinLife::kHeld : region ? PinLife::kRegion : PinLife::kCall;
  return {{new_pin(the_session, storages_of(items.get()), life, written)}};
}

// Most numbers are small tensors.
std::optional<Pin> py_pin_number(Tensor o) {
  if (!THPVariable_Check(o.object)) return std::nullopt;
  const c10::TensorImpl* t = THPVariable_Unpack(o.object).unsafeGetTensorImpl();
  if (C10_LIKELY(pending_slices.load(std::memory_order_relaxed) == 0) && t->has_storage() &&
      !cell_of(t->unsafe_storage().unsafeGetStorageImpl()))
    return std::nullopt;
  return pin_one(o.object, false);
}

Pin py_pin_item(Addressed storage) { return pin_one(storage.object, true); }

bool py_beat(Object store, const std::string& key, double seconds) {
  end_beat();
  return store.object != Py_None && begin_beat(store.object, key, seconds);
}

std::optional<Pin> py_pin_reducer(Object reducer, bool gradients) {
  std::vector<StoragePtr> storages = storages_of_reducer(reducer.object, gradients);
  if (storages.empty()) return std::nullopt;
  return Pin{{new_pin(the_session, std::move(storages), PinLife::kHeld, false)}};
}

std::vector<uint64_t> py_reducer_storages(Object reducer) {
  std::vector<uint64_t> addresses;
  for (const StoragePtr& s : storages_of_reducer(reducer.object, true))
    addresses.push_back(reinterpret_cast<uintptr_t>(s.get()));
  return addresses;
}

bool py_moves_gradients(Object reducer) { return moves_gradients(reducer.object); }

Object py_call_foreign(Callable function, Arguments args, Keywords kwargs) {
  return {call_foreign(the_session, function.object, args.object, kwargs.object)};
}

void py_note_profiler(bool on) {
  const WithoutGil released;
  if (the_session.open) note_profiler(on);
}

uint64_t py_guard(List functions, TextList libraries) {
  Libraries theirs(libraries.object);
  uint64_t found = 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(functions.object); ++i)
    found += guard_function(the_session, PyList_GET_ITEM(functions.object, i), &theirs);
  return found;
}

void py_watch_foreign_calls() { watch_foreign_calls(the_session); }

void py_unguard_all() {
  unguard_functions();
  forget_foreign_calls();
}

TextList py_libraries() {
  THPObjectPtr list(checked(PyList_New(0)));
  for (const std::string& path : libraries_that_use_torch()) {
    THPObjectPtr name(checked(PyUnicode_DecodeFSDefault(path.c_str())));
    if (PyList_Append(list.get(), name.get()) != 0) throw python_error();
  }
  return {{{list.release()}}};
}

void py_reducers_listen(bool begin) {
  const WithoutGil released;
  reducers_listen(begin);
}

void py_forsake_file(PathLike path) {
  PyObject* converted = nullptr;
  if (!PyUnicode_FSConverter(path.object, &converted)) throw python_error();
  THPObjectPtr bytes(converted);
  if (!the_session.open) return;
  const WithoutGil released;
  forsake_file(PyBytes_AS_STRING(converted));
}

void py_begin_capture() {
  const WithoutGil released;
  if (the_session.open) begin_capture(the_session);
}

void py_end_capture() {
  const WithoutGil released;
  end_capture();
}

bool py_page_kernel(Object function, const std::string& key, const std::string& name, const std::string& args,
                    bool repeats) {
  return page_kernel(function.object, key, name, args, repeats);
}

Callable py_paged_run(Callable run, const std::string& key, const std::string& name, const std::string& args,
                      bool repeats) {
  return {{paged_run(run.object, key, name, args, repeats)}};
}

bool py_page_buffers(Object function) { return page_buffers(function.object); }

bool py_in_launch(Addressed o) { return in_launch(storage_of(o.object).get()); }

bool py_page_alignment_check(Object function) { return page_alignment_check(function.object); }

void py_unpage_kernels() {
  unpage_kernels();
  unpage_graph_functions();
}

Object py_call_graph(Callable function, Arguments args, Keywords kwargs, bool forward) {
  return {call_graph(function.object, args.object, kwargs.object, forward)};
}

List py_objects_of(Types types, std::optional<TextList> libraries) {
  return {{objects_of(types.object, libraries ? libraries->object : nullptr)}};
}

void bind_compiled_graphs(Module& m) {
  m.def<&py_page_kernel>("page_kernel", "function, *, key, name, args, repeats",
                         "Makes the launches of a compiled graph's kernel ops. `args` has a letter for each argument "
                         "(ARGUMENT_READ, ...). `repeats`: the same arguments make the same bytes, and its numbers are "
                         "integers. False: the function is not from Inductor's binding.");
  m.def<&py_paged_run>("paged_run", "run, *, key, name, args, repeats",
                       "A function that launches a Triton kernel by `run`, each launch as an op. `args` has a letter "
                       "for each leading argument (ARGUMENT_READ, ...); later tensors are written. `repeats`: as of "
                       "page_kernel, and the key is this kernel's alone.");
  m.def<&py_page_buffers>("page_buffers", "function",
                          "Makes the buffers that compiled graphs allocate by this function cells. False: it is no "
                          "function of C with positional arguments.");
  m.def<&py_in_launch>(
      "in_launch", "tensor",
      "Whether this thread launches a Triton kernel, or runs one again. The tensor then stays where it is "
      "until the launch ends.");
  m.def<&py_page_alignment_check>("page_alignment_check", "function",
                                  "The function that copies inputs whose address is not aligned reads no address of "
                                  "an absent tensor. False: it is no function of C with one argument.");
  m.def<&py_unpage_kernels>("unpage_kernels", "",
                            "All kernels and functions of compiled graphs run as they did before.");
  m.def<&py_call_graph>("call_graph", "function, args, kwargs, forward",
                        "Calls a compiled graph that is paged launch by launch. `forward`: it is that of a training.");
}

}  // namespace

void bind_readers(Module& m) {
  m.def<&py_see_this_thread>("see_this_thread", "on",
                             "Whether the ops of this thread are seen (rule 12). The result is what was before.");
  m.def<&py_making_states>("making_states", "on", "An optimizer makes its states in this thread, or has made them.");
  m.def<&py_add_pending>("add_pending", "run, tensors",
                         "True: `run` waits. It is called without arguments before a thread reads or writes one of "
                         "the tensors. Only `run` may hold these under the names that are passed here.");
  m.def<&let_slices_wait>("let_slices_wait", "on", "Whether slices may wait. Waiting ones go on to wait.");
  m.def<&py_any_away>("any_away", "tensors", "True: one of the tensors is absent.");
  m.def<&py_forsake_file>("forsake_file", "path",
                          "Reads the cells that are mapped from this file. Called before the file is overwritten.");
  m.def<&py_finish_pending>("finish_pending", "quietly=False",
                            "Runs all waiting slices. quietly: an error is raised where the result is used.");
  m.def<&py_name>("name", "tensor",
                  "The number that replaces the address in comparisons; None: that is the address, which any holder of "
                  "the tensor may take.");
  m.def<&names_differ>("names_differ", "", "True: a living storage has another name than its address.");
  m.def<&py_escape>("escape", "tensor, why", "The address was handed out for good (rule 9).");
  m.def<&py_pin>("pin", "tensors, *, written=False, region=False, held=False",
                 "Restores the storages and keeps them there. held: the pin outlives this call. region: of a compiled "
                 "graph that runs in this thread.");
  m.def<&py_pin_number>("pin_number", "tensor", "None: the tensor is no cell.");
  m.def<&py_pin_item>("pin_item", "storage", "For a read of one element of the storage.");
  m.def<&py_beat>("beat", "store=None, key='', seconds=0.0",
                  "True: a thread that needs no GIL now reports to the store that this process runs. Without "
                  "arguments: it ends.");
  m.def<&beats_answered>("beats", "", "How many reports the store has confirmed.");
  m.def<&py_pin_reducer>("pin_reducer", "reducer, gradients",
                         "Pins the storages that DDP's reducer reads outside of ops; None: it waits for no gradient.");
  m.def<&py_reducer_storages>("reducer_storages", "reducer",
                              "The storages of the reducer's buckets, and of the gradients of its parameters.");
  m.def<&py_moves_gradients>("moves_gradients", "reducer",
                             "True: it is about to make its buckets anew and to copy gradients into them.");
  m.def<&py_call_foreign>("call_foreign", "function, args, kwargs",
                          "Calls a function in C++ that is not torch's and is not bound by pybind11.");
  m.def<&py_note_profiler>("note_profiler", "on", "A profiler begins or ends to ask for addresses.");
  m.def<&py_guard>("guard", "functions, libraries",
                   "Guards the functions that pybind11 has bound in these libraries. The result is how many are newly "
                   "guarded.");
  m.def<&py_unguard_all>("unguard_all", "", "Functions of extensions are as they were, and none is watched.");
  m.def<&py_watch_foreign_calls>("watch_foreign_calls", "", "Watches ops and autograd functions of extensions.");
  m.def<&py_libraries>("libraries_that_use_torch", "", "Paths of the loaded libraries that name c10's symbols.");
  m.def<&py_reducers_listen>("reducers_listen", "begin", "A backward with reducers that wait begins or ends.");
  m.def<&py_begin_capture>("begin_capture", "", "A graph is about to be captured.");
  m.def<&py_end_capture>("end_capture", "", "Its capture has ended.");
  bind_compiled_graphs(m);
  m.def<&py_objects_of>("objects_of", "types, libraries=None",
                        "The objects of these types that the garbage collector tracks, and the functions that pybind11 "
                        "has bound in these libraries.");
}

}  // namespace memmgr::pager
