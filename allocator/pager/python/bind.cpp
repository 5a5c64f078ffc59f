#include "python/bind.h"

#include <algorithm>

#include "memmgr/core.h"
#include "memmgr/device.h"

namespace memmgr::pager {

// ---- types ----

bool Cast<bool>::from(PyObject* o) {
  const int value = PyObject_IsTrue(o);
  if (value < 0) throw python_error();
  return value != 0;
}

double Cast<double>::from(PyObject* o) {
  const double value = PyFloat_AsDouble(o);
  if (value == -1 && PyErr_Occurred()) throw python_error();
  return value;
}

long long signed_of(PyObject* o, long long least, long long most) {
  THPObjectPtr number(checked(PyNumber_Index(o)));
  const long long value = PyLong_AsLongLong(number.get());
  if (value == -1 && PyErr_Occurred()) throw python_error();
  if (value < least || value > most) raise_error(PyExc_OverflowError, "%lld is out of range", value);
  return value;
}

unsigned long long unsigned_of(PyObject* o, unsigned long long most) {
  THPObjectPtr number(checked(PyNumber_Index(o)));
  const unsigned long long value = PyLong_AsUnsignedLongLong(number.get());
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred()) throw python_error();
  if (value > most) raise_error(PyExc_OverflowError, "%llu is out of range", value);
  return value;
}

std::string Cast<std::string>::from(PyObject* o) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(o, &size);
  if (!text) throw python_error();
  return {text, static_cast<size_t>(size)};
}

PyObject* Cast<std::string>::to(const std::string& value) {
  return PyUnicode_FromStringAndSize(value.data(), static_cast<Py_ssize_t>(value.size()));
}

bool set_item(PyObject* dict, const char* key, PyObject* new_value) {
  THPObjectPtr value(new_value);
  return value && PyDict_SetItemString(dict, key, value.get()) == 0;
}

void Figures::put(const char* name, uint64_t value) {
  if (!set_item(dict_.get(), name, PyLong_FromUnsignedLongLong(value))) throw python_error();
}

// ---- functions ----

Parameters::Parameters(const char* name, const char* text) : function(name) {
  THPObjectPtr builtins(checked(PyDict_New()));
  const std::string all(text);
  bool by_name = false;
  for (size_t at = 0; at < all.size();) {
    const size_t end = std::min(all.find(", ", at), all.size());
    const std::string one = all.substr(at, end - at);
    at = end + 2;
    if (one == "*") {
      by_name = true;
      continue;
    }
    const size_t equals = one.find('=');
    names.push_back(checked(PyUnicode_InternFromString(one.substr(0, equals).c_str())));
    const std::string value = equals == std::string::npos ? "" : one.substr(equals + 1);
    defaults.push_back(
        value.empty() ? nullptr : checked(PyRun_String(value.c_str(), Py_eval_input, builtins.get(), builtins.get())));
    by_position += !by_name;
  }
}

void Parameters::arrange(PyObject* const* args, Py_ssize_t n, PyObject* keywords, PyObject** in) const {
  const size_t given = static_cast<size_t>(n), all = names.size();
  if (given > by_position)
    raise_error(PyExc_TypeError, "%s() takes at most %zu positional arguments (%zu given)", function, by_position,
                given);
  std::copy(args, args + given, in);
  std::fill(in + given, in + all, nullptr);
  for (Py_ssize_t k = 0; keywords && k < PyTuple_GET_SIZE(keywords); ++k) {
    PyObject* key = PyTuple_GET_ITEM(keywords, k);
    size_t i = std::find(names.begin(), names.end(), key) - names.begin();
    if (i == all)
      i = std::find_if(names.begin(), names.end(), [&](PyObject* o) { return PyUnicode_Compare(o, key) == 0; }) -
          names.begin();
    if (i == all) raise_error(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", function, key);
    if (in[i]) raise_error(PyExc_TypeError, "%s() got multiple values for argument '%U'", function, key);
    in[i] = args[n + k];
  }
  for (size_t i = 0; i < all; ++i) {
    if (!in[i]) in[i] = defaults[i];
    if (!in[i]) raise_error(PyExc_TypeError, "%s() missing required argument '%U'", function, names[i]);
  }
}

void Module::add(const char* name, PyCFunction function, int flags, const char* doc) {
  auto* definition = new PyMethodDef[2]{{name, function, flags, doc}, {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module_, definition) != 0) throw python_error();
}

// ---- the stub ----

NoDestructor<Descriptions> all_descriptions;

Descriptions& descriptions() { return *all_descriptions; }

bool is_described(const char* name) {
  const auto& all = descriptions().types;
  return std::any_of(all.begin(), all.end(), [&](const DescribedType& type) { return type.name == name; });
}

std::string described(const Parameters& parameters, const std::vector<std::string>& hints, bool only_by_position) {
  std::string text;
  if (hints.size() != parameters.names.size())
    raise_error(PyExc_SystemError, "%s() has %zu parameters and %zu names", parameters.function, hints.size(),
                parameters.names.size());
  for (size_t i = 0; i < hints.size(); ++i) {
    if (i == parameters.by_position) text += ", *";
    text += ", " + Cast<std::string>::from(parameters.names[i]) + ": " + hints[i];
    if (parameters.defaults[i]) {
      THPObjectPtr value(checked(PyObject_Repr(parameters.defaults[i])));
      text += " = " + Cast<std::string>::from(value.get());
    }
  }
  return only_by_position ? text + ", /" : text;
}

FIELDS(DescribedFunction, "A function of the module.", name, parameters, result, doc)

namespace {

using Texts = std::vector<std::vector<std::string>>;

std::vector<DescribedFunction> functions() { return descriptions().functions; }

// A row for each struct: its name, its meaning, and a key and a hint for each field.
Texts types() {
  Texts rows;
  for (const DescribedType& type : descriptions().types) {
    rows.push_back({type.name, type.meaning});
    for (const auto& [key, hint] : type.fields) rows.back().insert(rows.back().end(), {key, hint});
  }
  return rows;
}

// A row for each enum: its name, its meaning, and its words.
Texts enums() {
  return {
#define ENUM(name, type, meaning) {#name, meaning,
#define VALUE(name, word) #word,
#define END \
  }         \
  ,
#include "base/constants.def"
  };
}

template <class T>
PyObject* number(T value) {
  if constexpr (std::is_same_v<T, char>) return PyUnicode_FromStringAndSize(&value, 1);
  if constexpr (!std::is_same_v<T, char>) return Cast<T>::to(value);
}

// The numbers by their names.
Keywords numbers() {
  THPObjectPtr dict(checked(PyDict_New()));
#define NUMBER(type, name, python, value) \
  if (!set_item(dict.get(), #python, number<type>(name))) throw python_error();
#define KEY(name, python, key) \
  if (!set_item(dict.get(), #python, PyUnicode_FromString(#key))) throw python_error();
#define SHARED(python, constant) \
  if (!set_item(dict.get(), #python, number<int>(constant))) throw python_error();
#include "base/constants.def"
#include "base/no_destructor.h"
  Keywords all;
  all.object = dict.release();
  return all;
}

}  // namespace

void bind_descriptions(Module& m) {
  m.def<&functions>("_functions", "", "The functions of this module.");
  m.def<&types>("_types", "", "The dicts that they return: name, meaning, key, type, key, type, ...");
  m.def<&enums>("_enums", "", "The enums that C++ and Python share: name, meaning, word, word, ...");
  m.def<&numbers>("_numbers", "", "The numbers that C++ and Python share, by name.");
}

}  // namespace memmgr::pager
