// Evicted cells whose elements take two values stay as a bit each (Gist's Binarize, Jain et al., ISCA 2018): a dropout
// mask takes 1/32 of its bytes, and is not drawn again (25 MB: 33 ms; packed 0.8, unpacked 1.4 into fresh pages). Only
// on the CPU.
//
// The bits are malloc's, and count against the budget as bytes from elsewhere. Their cell owns them (`Cell::bits`,
// guarded by `g.mu`) from its eviction until it is present again, or nobody wants it.
//
// Known limitation: while one cell is packed its bits, 1/64 to 1/8 of it, are there beside it and not counted yet.
#include "shim.h"

namespace memmgr {

// Packing takes 0.04 ns a byte and unpacking 0.04 to 0.1, with the pages of a fresh block (tests/core/test_bits.py says
// what comes back, benchmarks/bits_speed.py how fast).
constexpr double kBitsSecondsPerByte = 0.15e-9;
constexpr int64_t kLeastBytes = 256;

double bits_seconds(int64_t nbytes) { return kBitsSecondsPerByte * static_cast<double>(nbytes); }

// Worth looking at: making the bytes again takes longer. Drawing numbers always does, whatever was measured.
bool worth_bits(const Cell* c) {
  if (g.device || !c->recipe || c->nbytes < kLeastBytes) return false;
  return is_drawn(c->recipe) || seconds_to_remake(c->recipe) > bits_seconds(c->nbytes);
}

// Null: they are not two values. Without the lock; the bytes do not change meanwhile.
Bits* pack_bits(const void* from, int64_t nbytes) {
  mm_bits packed{};
  const uint64_t size = mm_bits_pack(from, static_cast<uint64_t>(nbytes), &packed);
  return size ? new Bits{packed, size} : nullptr;
}

// They are there, beside what the arena has, and would not be without us.
static void add_bits(int64_t size) {
  g.bits_bytes += static_cast<uint64_t>(size);
  if (!g.arena) return;
  mm_arena_add_outside(g.arena, size);
  mm_arena_note_virtual(g.arena, -size);
}

void count_bits(const Bits* bits) { add_bits(static_cast<int64_t>(bits->size)); }

void end_bits(Bits* bits, bool counted) {
  if (!bits) return;
  if (counted) add_bits(-static_cast<int64_t>(bits->size));
  mm_bits_free(&bits->packed);
  delete bits;
}

// as_bits(tensor) -> bytes that its cell, drawn at random, would leave behind as bits when evicted; 0: it would not.
// What is worth it by time alone is left out: two measured passes have to say the same.
static PyObject* py_as_bits(PyObject*, PyObject* o) {
  // Asked for what an op has just written, whose counter has not moved yet: neither settle() nor find_cell().
  c10::TensorImpl* t = impl_of(o);
  if (!t || !is_plain(t)) return PyLong_FromLong(0);
  auto* s = t->unsafe_storage().unsafeGetStorageImpl();
  auto it = g.table.find(s);
  const Cell* c = it == g.table.end() ? nullptr : it->second;
  const Recipe* r = c ? c->recipe : nullptr;
  // A kind that is not proven yet will be.
  const bool runs = r && r->ok && (!r->kind || r->kind->trust.load() != TRUST_NO) && !c->exposed;
  if (!runs || !is_drawn(r) || !worth_bits(c) || !data_present(s)) return PyLong_FromLong(0);
  Bits* bits = pack_bits(s->_mutable_data_ptr_no_checks().get(), c->nbytes);
  const uint64_t size = bits ? bits->size : 0;
  end_bits(bits, false);
  return PyLong_FromUnsignedLongLong(size);
}

static PyObject* py_bits_seconds(PyObject*, PyObject* o) {
  const long long nbytes = PyLong_AsLongLong(o);
  if (nbytes == -1 && PyErr_Occurred()) return nullptr;
  return PyFloat_FromDouble(bits_seconds(nbytes));
}

PyMethodDef bits_functions[] = {
    {"as_bits", py_as_bits, METH_O,
     "as_bits(tensor) -> bytes that its cell would leave behind as bits; 0: it would not"},
    {"bits_seconds", py_bits_seconds, METH_O, "bits_seconds(nbytes) -> what packing and unpacking so many bytes take"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace memmgr
