/* An exchange table for tvm_ffi.Tensor, which has none of its own (tvm-ffi 0.1.15), and a look into
 * tvm-ffi's containers. They belong to the adapter, not to dlx, as that of numpy does.
 *
 * tvm-ffi's headers are not needed: what an object holds is told by its `__chandle__`, and read
 * where that says that it is; exports and look-ups are functions of tvm-ffi's public C interface,
 * which dlx_tvm_ffi.py finds in the library that is loaded. An export owns a count of tvm-ffi's
 * own, so the handle may be moved away later; a borrowed tensor is good until then. What makes a
 * tvm_ffi.Tensor is a slot of the one table that tvm-ffi publishes, that of a wrapper. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "dlpack_abi.h"
#include "base/extension.h"
#include "base/threads.h"

static int (*to_managed)(void* handle, DLManagedTensorVersioned** out); /* of tvm-ffi */
static PyObject* handle_of;           /* tvm_ffi.Tensor.__chandle__; never freed */
static _Atomic(Py_ssize_t) handle_at; /* where a tensor keeps what that tells; 0 = it is called */

/* As in that interface: TVMFFIObject, TVMFFIAny, and some of TVMFFITypeIndex. */
typedef struct {
  uint64_t counts;
  int32_t type_index;
  uint32_t padding;
  void* deleter;
} object;

enum { TVM_INT = 1, TVM_RAW_STRING = 8, TVM_OBJECT = 64, TVM_TENSOR = 70 };

/* Errors: NULL with BufferError, or what the call raises. */
static object* object_of(PyObject* tensor) {
  void* found = NULL;
  Py_ssize_t at = atomic_load_explicit(&handle_at, memory_order_relaxed);
  if (at) {
    memcpy(&found, (char*)tensor + at, sizeof found);
  } else {
    PyObject* number = PyObject_CallOneArg(handle_of, tensor);
    found = number ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    if (PyErr_Occurred()) return NULL;
  }
  /* It may answer no question without one. */
  if (found == NULL) PyErr_SetString(PyExc_BufferError, "tvm_ffi has no tensor to give out");
  return found;
}

/* Export. Owns: the caller owns *out, which keeps the memory alive by itself. GIL: needed. Errors:
 * -1 with an exception. */
static int export(void* tensor, DLManagedTensorVersioned** out) {
  object* found = object_of(tensor);
  if (found == NULL || to_managed(found, out) == 0) return found ? 0 : -1;
  PyErr_SetString(PyExc_BufferError, "tvm_ffi has no tensor to give out");
  return -1;
}

/* Borrow: the tensor lies behind the head of its object. Owns: nothing. GIL: needed. Errors: -1
 * with an exception. */
static int borrow(void* tensor, DLTensor* out) {
  const object* found = object_of(tensor);
  if (found == NULL) return -1;
  if (found->type_index != TVM_TENSOR) {
    PyErr_SetString(PyExc_BufferError, "it holds no tensor of tvm_ffi");
    return -1;
  }
  memcpy(out, found + 1, sizeof *out);
  return 0;
}

static DLPackExchangeAPI table = {
    .header = {.version = {DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR}},
    .managed_tensor_from_py_object_no_sync = export,
};

PyDoc_STRVAR(exchange_api_doc,
             "exchange_api(chandle, address, maker, borrows, /)\n--\n\n"
             "Return the table in a capsule, given tvm_ffi.Tensor.__chandle__, the address of "
             "tvm-ffi's\nTVMFFITensorToDLPackVersioned, and a table in a capsule that makes "
             "tvm_ffi.Tensor objects, or None. `borrows`: whether tensors may be read in place.");

static PyObject* exchange_api(PyObject* module, PyObject* args) {
  static const char name[] = "dlpack_exchange_api";
  PyObject *chandle, *address, *maker;
  int borrows;
  if (!PyArg_ParseTuple(args, "OO!Op:exchange_api", &chandle, &PyLong_Type, &address, &maker,
                        &borrows))
    return NULL;
  void* function = PyLong_AsVoidPtr(address);
  if (function == NULL) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "there is no function at address 0");
    return NULL;
  }
  const DLPackExchangeAPI* makes = maker == Py_None ? NULL : PyCapsule_GetPointer(maker, name);
  if (PyErr_Occurred()) return NULL;
  int is_ours = makes && makes->header.version.major == DLX_DLPACK_MAJOR;
  PY_LOCKED(module)
  DLPackExchangeAPI filled = table;
  filled.managed_tensor_to_py_object_no_sync =
      is_ours ? makes->managed_tensor_to_py_object_no_sync : NULL;
  filled.dltensor_from_py_object_no_sync = borrows ? borrow : NULL;
  filled.current_work_stream = is_ours ? makes->current_work_stream : NULL;
  if (handle_of != chandle || memcmp(&filled, &table, sizeof table) != 0 ||
      memcmp(&to_managed, &function, sizeof function) != 0) { /* once: threads read it */
    table = filled;
    memcpy(&to_managed, &function, sizeof function);
    Py_XSETREF(handle_of, Py_NewRef(chandle));
  }
  PY_UNLOCKED();
  return PyCapsule_New(&table, name, NULL);
}

/* ---- containers ------------------------------------------------------------------------------ */

typedef struct {
  int32_t type_index;
  uint32_t zero_padding;
  union {
    int64_t number;
    const char* text;
    void* object;
  } value;
} any;

static int (*call)(void* function, any* args, int32_t n, any* result);
static int (*release)(void* object);
static void (*take_error)(void** error);
static PyObject* chandle_name; /* interned */

PyDoc_STRVAR(bind_doc,
             "bind(call, release, take_error, /)\n--\n\n"
             "Give the addresses of tvm-ffi's TVMFFIFunctionCall, TVMFFIObjectDecRef and "
             "TVMFFIErrorMoveFromRaised.");

static PyObject* bind(PyObject* module, PyObject* args) {
  unsigned long long given[3];
  if (!PyArg_ParseTuple(args, "KKK:bind", &given[0], &given[1], &given[2])) return NULL;
  PY_LOCKED(module)
  if ((uintptr_t)call != given[0]) { /* once: threads read it */
    call = (int (*)(void*, any*, int32_t, any*))(uintptr_t)given[0];
    release = (int (*)(void*))(uintptr_t)given[1];
    take_error = (void (*)(void**))(uintptr_t)given[2];
  }
  PY_UNLOCKED();
  Py_RETURN_NONE;
}

PyDoc_STRVAR(handle_doc,
             "handle(obj, /)\n--\n\n"
             "Return what an object of tvm_ffi wraps, as a number; None of any other object.");

/* Owns: new. GIL: needed. Errors: NULL with an exception. */
static PyObject* handle(PyObject* module, PyObject* obj) {
  PyObject* number = PyObject_CallMethodNoArgs(obj, chandle_name);
  if (number || !PyErr_ExceptionMatches(PyExc_AttributeError)) return number;
  PyErr_Clear();
  Py_RETURN_NONE;
}

/* What an object wraps. Errors: NULL; an exception may be set. */
static void* wrapped(PyObject* obj) {
  PyObject* number = handle(NULL, obj);
  void* found = number && PyLong_CheckExact(number) ? PyLong_AsVoidPtr(number) : NULL;
  Py_XDECREF(number);
  return found;
}

/* The object that a container has at a key: an address to compare, of what the container holds.
 * GIL: needed, no Python runs. Errors: NULL, none set: it is no object, or there is none. */
static void* child_at(void* get, void* container, PyObject* key) {
  any result = {0}, args[2] = {{.type_index = ((object*)container)->type_index}};
  args[0].value.object = container;
  if (PyLong_CheckExact(key)) {
    args[1] = (any){.type_index = TVM_INT, .value.number = PyLong_AsLongLong(key)};
  } else {
    Py_ssize_t length;
    const char* text = PyUnicode_CheckExact(key) ? PyUnicode_AsUTF8AndSize(key, &length) : NULL;
    if (text == NULL || (size_t)length != strlen(text)) return py_error_forget(), NULL;
    args[1] = (any){.type_index = TVM_RAW_STRING, .value.text = text};
  }
  if (PyErr_Occurred()) return py_error_forget(), NULL; /* a number without end */
  if (call(get, args, 2, &result) != 0) {
    void* error = NULL;
    py_error_forget();
    take_error(&error);
    if (error) release(error);
    return NULL;
  }
  if (result.type_index < TVM_OBJECT || result.value.object == NULL) return NULL;
  release(result.value.object); /* the container has it still */
  return result.value.object;
}

/* `self` is (container, its address, getter, its address): a container keeps its handle here. Owns:
 * new. GIL: needed. Errors: NULL with an exception. */
static PyObject* has_still(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  if (!py_args("unchanged", nargs, 2, 2)) return NULL;
  void* container = PyLong_AsVoidPtr(PyTuple_GET_ITEM(self, 1));
  void *get = PyLong_AsVoidPtr(PyTuple_GET_ITEM(self, 3)), *child = wrapped(args[1]);
  int is_same = container && get && child && child_at(get, container, args[0]) == child;
  return PyErr_Occurred() ? NULL : PyBool_FromLong(is_same);
}

PyDoc_STRVAR(
    find_handles_doc,
    "find_handles(tensors, /)\n--\n\n"
    "Find where tensors keep their handles: one place where each of a list of one type has "
    "what its\n`__chandle__` tells. Return whether there is one; it is read from then on.");

/* That offset in bytes, 0 = there is none. GIL: needed. Errors: 0 with an exception. */
static Py_ssize_t offset_of_handles(PyObject* tensors) {
  PyTypeObject* type = Py_TYPE(PyList_GET_ITEM(tensors, 0));
  Py_ssize_t places = 0, place = 0;
  for (Py_ssize_t at = sizeof(PyObject); at + (Py_ssize_t)sizeof(void*) <= type->tp_basicsize;
       at += sizeof(void*)) {
    Py_ssize_t i = 0;
    for (; i < PyList_GET_SIZE(tensors); i++) {
      PyObject* tensor = PyList_GET_ITEM(tensors, i);
      if (!Py_IS_TYPE(tensor, type)) return 0;
      void *told = wrapped(tensor), *kept;
      if (PyErr_Occurred()) return 0;
      memcpy(&kept, (char*)tensor + at, sizeof kept);
      if (kept != told) break;
    }
    if (i == PyList_GET_SIZE(tensors)) {
      places++;
      place = at;
    }
  }
  return places == 1 ? place : 0;
}

/* Owns: new. GIL: needed. Errors: NULL with an exception. */
static PyObject* find_handles(PyObject* module, PyObject* tensors) {
  if (!PyList_CheckExact(tensors) || PyList_GET_SIZE(tensors) == 0)
    return PyErr_Format(PyExc_TypeError, "find_handles takes a list of tensors");
  Py_ssize_t place = offset_of_handles(tensors);
  atomic_store(&handle_at, place);
  return PyErr_Occurred() ? NULL : PyBool_FromLong(place != 0);
}

PyDoc_STRVAR(facts_doc,
             "facts(tensor, /)\n--\n\n"
             "Return (address, shape, strides, dtype, device) as the table borrows them, to be "
             "compared with what tvm_ffi says.");

/* Owns: new. GIL: needed. Errors: NULL with an exception. */
static PyObject* facts(PyObject* module, PyObject* tensor) {
  DLTensor t;
  if (borrow(tensor, &t) < 0) return NULL;
  return Py_BuildValue("(NNN(iii)(ii))", PyLong_FromVoidPtr((char*)t.data + t.byte_offset),
                       py_tuple_of(t.shape, t.ndim), py_tuple_of(t.strides, t.strides ? t.ndim : 0),
                       t.dtype.code, t.dtype.bits, t.dtype.lanes, t.device.device_type,
                       t.device.device_id);
}

PyDoc_STRVAR(has_still_doc,
             "unchanged(key, child, /)\n--\n\n"
             "Return whether the container has this very child there.");

static PyMethodDef has_still_method = PY_FASTCALL(has_still);

PyDoc_STRVAR(
    unchanged_doc,
    "unchanged(container, getter, /)\n--\n\n"
    "Return a function of a key and a child: whether the container, whose handle must stay, "
    "still has that child there.\n`getter`: tvm_ffi's function of a container and a key.");

static PyObject* unchanged(PyObject* module, PyObject* args) {
  PyObject *container, *getter;
  if (!PyArg_ParseTuple(args, "OO:unchanged", &container, &getter)) return NULL;
  if (call == NULL || wrapped(container) == NULL || wrapped(getter) == NULL) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "tvm_ffi has no such objects");
    return NULL;
  }
  PyObject* self =
      Py_BuildValue("ONON", container, handle(NULL, container), getter, handle(NULL, getter));
  PyObject* made = self ? PyCFunction_New(&has_still_method, self) : NULL;
  Py_XDECREF(self);
  return made;
}

static PyMethodDef functions[] = {
    PY_VARARGS(exchange_api), PY_VARARGS(bind), PY_ONE(handle), PY_VARARGS(unchanged),
    PY_ONE(find_handles),     PY_ONE(facts),    PY_END,
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_dlx_tvm_ffi",
    .m_doc = "An exchange table for tvm_ffi.Tensor, and a look into its containers.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__dlx_tvm_ffi(void) {
  chandle_name = PyUnicode_InternFromString("__chandle__");
  return chandle_name ? py_without_gil(PyModule_Create(&definition)) : NULL;
}
