// How functions of C++ become functions of the module. Arguments come by position or by name and are converted by their
// C++ types, and results are returned by value: a struct is a dict with a key for each field. The same types write the
// stub (memmgr/native/_pager.pyi).
//
// pybind11 is not used for it. Its functions take 42 ns with one argument and 122 ns with three by name, these 16
// and 33. Its signatures change with its release, which torch's headers choose, and the stub must not. Both compile in
// 0.04 s.
#pragma once

#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include <limits>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/constants.h"
#include "base/errors.h"
#include "base/tensors.h"

namespace memmgr::pager {

// Raises an error of Python's.
template <class... A>
[[noreturn]] void raise_error(PyObject* type, const char* format, A... values) {
  PyErr_Format(type, format, values...);
  throw python_error();
}
// Returns a new object; throws if Python's error is set instead.
inline PyObject* checked(PyObject* object) {
  if (!object) throw python_error();
  return object;
}

// ---- types ----

// `from` converts an argument, `to` a result (null: Python's error is set), `hint` is the stub's type.
template <class T, class = void>
struct Cast;

// A Python object as it is: borrowed as an argument, a new reference as a result. Subclasses have a hint of their own.
struct Object {
  PyObject* object = nullptr;
  static constexpr const char* kHint = "Any";
  static constexpr const char* kNeeds = nullptr;
  static bool fits(PyObject*) { return true; }
};
struct List : Object {
  static constexpr const char* kHint = "list[Any]";
  static constexpr const char* kNeeds = "a list";
  static bool fits(PyObject* o) { return PyList_Check(o); }
};
struct TensorList : List {
  static constexpr const char* kHint = "list[torch.Tensor]";
};
struct TextList : List {
  static constexpr const char* kHint = "list[str]";
};
struct TensorLists : List {
  static constexpr const char* kHint = "list[list[Any]]";
};
struct Types : Object {
  static constexpr const char* kHint = "tuple[type, ...]";
  static constexpr const char* kNeeds = "a tuple";
  static bool fits(PyObject* o) { return PyTuple_Check(o); }
};
struct TextTuple : Types {
  static constexpr const char* kHint = "tuple[str, ...]";
};
struct Arguments : Types {
  static constexpr const char* kHint = "tuple[Any, ...]";
};
struct Keywords : Object {
  static constexpr const char* kHint = "dict[str, Any]";
  static constexpr const char* kNeeds = "a dict";
  static bool fits(PyObject* o) { return PyDict_Check(o); }
};
struct Bytes : Object {
  static constexpr const char* kHint = "bytes";
  static constexpr const char* kNeeds = "bytes";
  static bool fits(PyObject* o) { return PyBytes_Check(o); }
  const char* data() const { return PyBytes_AS_STRING(object); }
  size_t size() const { return static_cast<size_t>(PyBytes_GET_SIZE(object)); }
};
struct Callable : Object {
  static constexpr const char* kHint = "Callable[..., Any]";
};
struct ExceptionType : Object {
  static constexpr const char* kHint = "type[BaseException]";
};
struct Tensor : Object {
  static constexpr const char* kHint = "torch.Tensor";
};
// A tensor, or the address of a storage.
struct Addressed : Object {
  static constexpr const char* kHint = "Addressed";
};
struct AddressedSequence : Object {
  static constexpr const char* kHint = "Sequence[Addressed]";
};
struct PathLike : Object {
  static constexpr const char* kHint = "str | os.PathLike[str]";
};
struct Pin : Object {  // as a result
  static constexpr const char* kHint = "Pin";
};

template <class T>
struct Cast<T, std::enable_if_t<std::is_base_of_v<Object, T>>> {
  static std::string hint() { return T::kHint; }
  static T from(PyObject* o) {
    if (!T::fits(o)) raise_error(PyExc_TypeError, "%s is needed, not %.100s", T::kNeeds, Py_TYPE(o)->tp_name);
    T value;
    value.object = o;
    return value;
  }
  static PyObject* to(const T& value) { return value.object; }
};

template <>
struct Cast<bool> {
  static std::string hint() { return "bool"; }
  static bool from(PyObject* o);
  static PyObject* to(bool value) { return PyBool_FromLong(value); }
};

template <>
struct Cast<double> {
  static std::string hint() { return "float"; }
  static double from(PyObject* o);
  static PyObject* to(double value) { return PyFloat_FromDouble(value); }
};

long long signed_of(PyObject* o, long long least, long long most);
unsigned long long unsigned_of(PyObject* o, unsigned long long most);
template <class T>
struct Cast<T, std::enable_if_t<std::is_integral_v<T>>> {
  static std::string hint() { return "int"; }
  static T from(PyObject* o) {
    constexpr T least = std::numeric_limits<T>::min(), most = std::numeric_limits<T>::max();
    if constexpr (std::is_signed_v<T>) return static_cast<T>(signed_of(o, least, most));
    if constexpr (!std::is_signed_v<T>) return static_cast<T>(unsigned_of(o, most));
  }
  static PyObject* to(T value) {
    if constexpr (std::is_signed_v<T>) return PyLong_FromLongLong(value);
    if constexpr (!std::is_signed_v<T>) return PyLong_FromUnsignedLongLong(value);
  }
};

template <>
struct Cast<std::string> {
  static std::string hint() { return "str"; }
  static std::string from(PyObject* o);
  static PyObject* to(const std::string& value);
};

// An enum of constants.def: a number as an argument, its word as a result.
template <class E>
struct Cast<E, std::enable_if_t<std::is_enum_v<E>>> {
  static std::string hint() { return Words<E>::python; }
  static E from(PyObject* o) {
    const int value = Cast<int>::from(o);
    if (value < 0 || value >= static_cast<int>(kValues<E>))
      raise_error(PyExc_ValueError, "no %s %d", Words<E>::python, value);
    return static_cast<E>(value);
  }
};
template <class E>
std::string word(E value) {
  return word_of(value);
}

template <class T>
struct Cast<std::optional<T>> {
  static std::string hint() { return Cast<T>::hint() + " | None"; }
  static std::optional<T> from(PyObject* o) {
    if (o == Py_None) return std::nullopt;
    return Cast<T>::from(o);
  }
  static PyObject* to(const std::optional<T>& value) { return value ? Cast<T>::to(*value) : Py_NewRef(Py_None); }
};

template <class T>
struct Cast<std::vector<T>> {
  static std::string hint() { return "list[" + Cast<T>::hint() + "]"; }
  static PyObject* to(const std::vector<T>& values) {
    THPObjectPtr list(PyList_New(static_cast<Py_ssize_t>(values.size())));
    for (size_t i = 0; list && i < values.size(); ++i) {
      PyObject* item = Cast<T>::to(values[i]);
      if (!item) return nullptr;
      PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), item);
    }
    return list.release();
  }
};

template <class K, class T>
struct Cast<std::map<K, T>> {
  static std::string hint() { return "dict[" + Cast<K>::hint() + ", " + Cast<T>::hint() + "]"; }
  static PyObject* to(const std::map<K, T>& values) {
    THPObjectPtr dict(PyDict_New());
    for (const auto& [key, value] : values) {
      THPObjectPtr k(dict ? Cast<K>::to(key) : nullptr), v(k ? Cast<T>::to(value) : nullptr);
      if (!v || PyDict_SetItem(dict.get(), k.get(), v.get()) != 0) return nullptr;
    }
    return dict.release();
  }
};

// Numbers as the bytes of an array.
template <class T>
struct Column : std::vector<T> {
  Column() = default;
  Column(std::vector<T> values) : std::vector<T>(std::move(values)) {}
};
template <class T>
struct Cast<Column<T>> {
  static std::string hint() { return "bytes"; }
  static PyObject* to(const Column<T>& values) {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(values.data()),
                                     static_cast<Py_ssize_t>(values.size() * sizeof(T)));
  }
};

// Figures by name.
class Figures {
 public:
  Figures() : dict_(checked(PyDict_New())) {}
  void put(const char* name, uint64_t value);
  PyObject* release() { return dict_.release(); }

 private:
  THPObjectPtr dict_;
};
template <>
struct Cast<Figures> {
  static std::string hint() { return "dict[str, int]"; }
  static PyObject* to(Figures&& figures) { return figures.release(); }
};

// ---- structs ----

// FIELDS(struct, meaning, field, ...): a result of this type is a dict with these keys.
// `each(visit)` calls `visit(key, pointer to member)`.
template <class T>
struct Fields;

#define EXPAND(...) EXPAND4(EXPAND4(EXPAND4(EXPAND4(__VA_ARGS__))))
#define EXPAND4(...) EXPAND1(EXPAND1(EXPAND1(EXPAND1(__VA_ARGS__))))
#define EXPAND1(...) __VA_ARGS__
#define PARENTHESES ()
#define VISIT_EACH(struct_name, field, ...) \
  visit(#field, &struct_name::field);       \
  __VA_OPT__(VISIT_MORE PARENTHESES(struct_name, __VA_ARGS__))
#define VISIT_MORE() VISIT_EACH
#define FIELDS(struct_name, meaning, ...)              \
  template <>                                          \
  struct Fields<struct_name> {                         \
    static constexpr const char* kName = #struct_name; \
    static constexpr const char* kMeaning = meaning;   \
    template <class V>                                 \
    static void each(V&& visit) {                      \
      EXPAND(VISIT_EACH(struct_name, __VA_ARGS__))     \
    }                                                  \
  };

struct DescribedType {
  std::string name, meaning;
  std::vector<std::pair<std::string, std::string>> fields;  // key, hint
};
struct DescribedFunction {
  std::string name, parameters, result, doc;
};
// For the stub. With the GIL.
struct Descriptions {
  std::vector<DescribedType> types;
  std::vector<DescribedFunction> functions;
};
Descriptions& descriptions();
bool is_described(const char* name);
bool set_item(PyObject* dict, const char* key, PyObject* new_value);

template <class T>
struct Cast<T, std::void_t<decltype(Fields<T>::kName)>> {
  static std::string hint() {
    if (!is_described(Fields<T>::kName)) {
      DescribedType type{Fields<T>::kName, Fields<T>::kMeaning, {}};
      Fields<T>::each([&](const char* key, auto member) {
        using Member = std::remove_reference_t<decltype(std::declval<T&>().*member)>;
        type.fields.emplace_back(key, Cast<Member>::hint());
      });
      descriptions().types.push_back(std::move(type));
    }
    return Fields<T>::kName;
  }
  static PyObject* to(const T& value) {
    THPObjectPtr dict(PyDict_New());
    bool done = dict.get() != nullptr;
    Fields<T>::each([&](const char* key, auto member) {
      using Member = std::remove_reference_t<decltype(std::declval<T&>().*member)>;
      done = done && set_item(dict.get(), key, Cast<Member>::to(value.*member));
    });
    return done ? dict.release() : nullptr;
  }
};

// ---- functions ----

// The parameters of a function, as text: "tensors, *, written=False". Defaults are expressions of Python.
struct Parameters {
  const char* function;
  std::vector<PyObject*> names, defaults;  // a default may be null
  size_t by_position = 0;                  // the others come by name only

  Parameters(const char* function, const char* text);
  // Puts borrowed arguments into `in`, in the order of the parameters. Throws a TypeError as Python's own functions do.
  void arrange(PyObject* const* args, Py_ssize_t n, PyObject* keywords, PyObject** in) const;
};

class Module {
 public:
  explicit Module(PyObject* module) : module_(module) {}
  template <auto f>
  void def(const char* name, const char* parameters, const char* doc);
  PyObject* object() const { return module_; }

 private:
  void add(const char* name, PyCFunction function, int flags, const char* doc);

  PyObject* module_;
};

std::string described(const Parameters& parameters, const std::vector<std::string>& hints, bool only_by_position);

template <auto f>
struct Bound;

template <class R, class... A, R (*f)(A...)>
struct Bound<f> {
  static inline const Parameters* parameters;
  static constexpr size_t kArguments = sizeof...(A);

  template <size_t... i>
  static PyObject* call(PyObject* const* in, std::index_sequence<i...>) {
    return guarded([&]() -> PyObject* {
      if constexpr (std::is_void_v<R>) {
        f(Cast<std::decay_t<A>>::from(in[i])...);
        Py_RETURN_NONE;
      } else {
        return Cast<R>::to(f(Cast<std::decay_t<A>>::from(in[i])...));
      }
    });
  }
  static PyObject* call_without(PyObject*, PyObject*) { return call(nullptr, std::index_sequence_for<A...>()); }
  static PyObject* call_with_one(PyObject*, PyObject* o) { return call(&o, std::index_sequence_for<A...>()); }
  static PyObject* call_with(PyObject*, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    return guarded([&]() -> PyObject* {
      PyObject* in[kArguments + 1];
      parameters->arrange(args, n, keywords, in);
      return call(in, std::index_sequence_for<A...>());
    });
  }
  static std::string hints(bool only_by_position) {
    return described(*parameters, {Cast<std::decay_t<A>>::hint()...}, only_by_position);
  }
  static std::string result() {
    if constexpr (std::is_void_v<R>) return "None";
    if constexpr (!std::is_void_v<R>) return Cast<R>::hint();
  }
};

template <auto f>
void Module::def(const char* name, const char* text, const char* doc) {
  using B = Bound<f>;
  B::parameters = new Parameters(name, text);
  const bool one = B::kArguments == 1 && !B::parameters->defaults[0];
  PyCFunction function = &B::call_without;
  int flags = METH_NOARGS;
  if constexpr (B::kArguments > 0) {
    function = one ? &B::call_with_one : reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&B::call_with));
    flags = one ? METH_O : METH_FASTCALL | METH_KEYWORDS;
  }
  add(name, function, flags, doc);
  descriptions().functions.push_back({name, B::hints(one), B::result(), doc});
}

// Adds the descriptions of functions, dicts and constants. tools/house/make_stub.py writes two files from them.
void bind_descriptions(Module& module);

}  // namespace memmgr::pager
