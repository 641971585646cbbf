/* torch's guards in C, and its exchange table with two slots replaced: one that borrows faster, and
 * one that makes constants of tensors that enter a graph. Through Python, guards take more time
 * than the rest of a conversion: is_neg() alone releases the GIL and acquires it again.
 *
 * This file needs no torch headers: it finds exported functions of torch's libraries by name at run
 * time. A C++ reference is passed as an address. The only thing read directly is the pointer in a
 * Python tensor. dlx_torch.py compares it with `_cdata`, and each function with torch's Python API,
 * before dlx uses this file. If a torch lacks one of them, dlx asks it through Python. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#include "dlx.h"
#include "base/extension.h"
#include "base/threads.h"
#include "platform/platform.h"

/* The head of a Python tensor: an at::Tensor, which is a pointer to a TensorImpl. */
typedef struct {
  PyObject_HEAD void* tensor;
} tensor_head;

/* Functions of at::native that take const Tensor&, a method of c10::TensorImpl, whose `this` comes
 * first, and torch's stable C interface: storage_size is in bytes, storage_offset in elements. */
#define TORCH_CALLS(CALL, STABLE)                                                                \
  CALL(is_neg, (const void*), "torch_cpu", "_ZN2at6native6is_negERKNS_6TensorE")                 \
  CALL(is_conj, (const void*), "torch_cpu", "_ZN2at6native7is_conjERKNS_6TensorE")               \
  CALL(is_zerotensor, (const void*), "torch_cpu", "_ZN2at6native14_is_zerotensorERKNS_6TensorE") \
  CALL(requires_grad, (const void*), "c10", "_ZNK3c1010TensorImpl13requires_gradEv")             \
  STABLE(storage_size, (void*, int64_t*))                                                        \
  STABLE(storage_offset, (void*, int64_t*))                                                      \
  STABLE(device_type, (void*, int32_t*))                                                         \
  STABLE(dtype, (void*, int32_t*))                                                               \
  STABLE(dim, (void*, int64_t*))                                                                 \
  STABLE(sizes, (void*, int64_t**))                                                              \
  STABLE(strides, (void*, int64_t**))                                                            \
  STABLE(data_ptr, (void*, void**))

#define CALL_MEMBER(name, parameters, library, symbol) _Bool(*name) parameters;
#define STABLE_MEMBER(name, parameters) int32_t(*name) parameters;
static struct {
  TORCH_CALLS(CALL_MEMBER, STABLE_MEMBER)
  void** base_class; /* the virtual table of c10::TensorImpl */
} torch;

#define CALL_SYMBOL(name, parameters, library, symbol) {library, symbol, (void**)&torch.name},
#define STABLE_SYMBOL(name, parameters) {"torch_cpu", "aoti_torch_get_" #name, (void**)&torch.name},
static const struct {
  const char *library, *name;
  void** function;
} symbols[] = {TORCH_CALLS(CALL_SYMBOL, STABLE_SYMBOL){"c10", "_ZTVN3c1010TensorImplE",
                                                       (void**)&torch.base_class}};

/* An object of exactly this class begins with the address of the first function in its virtual
 * table. Sparse, nested and functorch's tensors have other classes. */
static int is_base_class(void* const* handle) {
  return *(void***)*handle == torch.base_class + 2;
}

/* Whether a tensor lies inside its storage. torch has no negative strides. `borrowed` is validated,
 * so nothing overflows; without an address it has no elements. */
static int lies_in_storage(void** handle, const DLTensor* borrowed) {
  int64_t bytes, offset, item = borrowed->dtype.bits * borrowed->dtype.lanes / 8, last = 0;
  if (borrowed->data == NULL) return is_base_class(handle) && !torch.is_zerotensor(handle);
  if (torch.storage_size(handle, &bytes) != 0 || torch.storage_offset(handle, &offset) != 0)
    return 0;
  for (int32_t i = 0; i < borrowed->ndim; i++) {
    if (borrowed->shape[i] == 0) return 1;
    last += (borrowed->shape[i] - 1) * borrowed->strides[i];
  }
  /* A part of a zero tensor: torch adds the offset to NULL. */
  if ((int64_t)(uintptr_t)borrowed->data == offset * item) return 0;
  return offset <= INT64_MAX / 32 && last <= INT64_MAX / 64 && (offset + last + 1) * item <= bytes;
}

/* A dlx_guard_function. GIL: held. Errors: none. */
static int is_shareable(void* array, const DLTensor* borrowed) {
  void** slot = &((tensor_head*)array)->tensor;
  if (*slot == NULL) return 0;
  if (borrowed) return lies_in_storage(slot, borrowed);
  return !torch.requires_grad(*slot) && !torch.is_neg(slot) && !torch.is_conj(slot);
}

PyDoc_STRVAR(
    guard_function_doc,
    "guard_function()\n--\n\n"
    "Return a capsule with the guard, or None if the loaded torch lacks a function for it.");

static PyObject* guard_function(PyObject* module, PyObject* unused) {
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
    void* found = dlx_find_loaded_symbol(symbols[i].library, symbols[i].name);
    PY_LOCKED(module)
    if (*symbols[i].function != found)
      *symbols[i].function = found; /* once: other threads read it */
    PY_UNLOCKED();
    if (found == NULL) Py_RETURN_NONE;
  }
  return PyCapsule_New((void*)is_shareable, "dlx_guard_function", NULL);
}

/* ---- borrowing ------------------------------------------------------------------------------- */

static const DLPackExchangeAPI* torch_table; /* torch's; NULL = `table` is not ready */
static DLPackExchangeAPI table;              /* with the slot that borrows faster */
static DLDataType dtypes[64];                /* by torch's number; bits 0 = use torch's slot */

/* Read a tensor like torch's slot, if it is of the base class. GIL: held. Errors: 0 = use torch's
 * slot. */
static int read_tensor(void* array, DLTensor* out) {
  void** slot = &((tensor_head*)array)->tensor;
  int32_t number = -1, device = -1;
  int64_t ndim = -1;
  if (*slot == NULL || !is_base_class(slot)) return 0;
  if (torch.device_type(slot, &device) != 0 || device != 0 /* the host */) return 0;
  if (torch.dtype(slot, &number) != 0 || number < 0 || number >= 64 || dtypes[number].bits == 0)
    return 0;
  if (torch.dim(slot, &ndim) != 0 || torch.sizes(slot, &out->shape) != 0 ||
      torch.strides(slot, &out->strides) != 0 || torch.data_ptr(slot, &out->data) != 0)
    return 0;
  out->device = (DLDevice){kDLCPU, 0};
  out->ndim = (int32_t)ndim;
  out->dtype = dtypes[number];
  out->byte_offset = 0;
  return 1;
}

/* Owns, GIL, Errors: as torch's slot. */
static int borrow(void* array, DLTensor* out) {
  return read_tensor(array, out) ? 0 : torch_table->dltensor_from_py_object_no_sync(array, out);
}

/* Learn the dtype of a sample. torch's slot may reject that. Errors: 0 = the slots disagree. */
static int learn_sample(const DLPackExchangeAPI* theirs, PyObject* sample) {
  DLTensor expected = {.ndim = -1}, found = expected;
  int32_t number = -1;
  if (theirs->dltensor_from_py_object_no_sync(sample, &expected) != 0 || PyErr_Occurred())
    return PyErr_Clear(), 1;
  if (torch.dtype(&((tensor_head*)sample)->tensor, &number) != 0 || number < 0 || number >= 64)
    return 0;
  dtypes[number] = expected.dtype;
  size_t bytes = (size_t)expected.ndim * sizeof(int64_t);
  if (expected.ndim && (expected.shape == NULL || expected.strides == NULL)) return 0;
  return read_tensor(sample, &found) && found.data == expected.data &&
         found.ndim == expected.ndim && found.byte_offset == expected.byte_offset &&
         expected.device.device_type == kDLCPU && expected.device.device_id == 0 &&
         memcmp(found.shape, expected.shape, bytes) == 0 &&
         memcmp(found.strides, expected.strides, bytes) == 0;
}

PyDoc_STRVAR(exchange_table_doc,
             "exchange_table(own, samples, /)\n--\n\n"
             "Return torch's exchange table with a faster slot for borrowing.\n\n"
             "The first call compares both slots for all samples. Return `own` if they disagree, "
             "or if `own` "
             "is another table\nthan then.");

static PyObject* exchange_table(PyObject* module, PyObject* args) {
  PyObject *capsule, *samples;
  int is_made;
  if (!PyArg_ParseTuple(args, "OO!", &capsule, &PyList_Type, &samples)) return NULL;
  const DLPackExchangeAPI* theirs = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (theirs == NULL) return NULL;
  theirs = py_find_exchange(&theirs->header);
  if (theirs == NULL) return Py_NewRef(capsule);
  PY_LOCKED(module)
  Py_ssize_t i = 0, n = PyList_GET_SIZE(samples);
  if (torch_table == NULL && n && torch.base_class && theirs->dltensor_from_py_object_no_sync) {
    memset(dtypes, 0, sizeof dtypes);
    while (i < n && learn_sample(theirs, PyList_GET_ITEM(samples, i))) i++;
    table = *theirs;
    table.dltensor_from_py_object_no_sync = borrow;
    if (i == n) torch_table = theirs;
  }
  is_made = torch_table == theirs;
  PY_UNLOCKED();
  return is_made ? PyCapsule_New(&table, "dlpack_exchange_api", NULL) : Py_NewRef(capsule);
}

/* ---- graphs ---------------------------------------------------------------------------------- */

static _Bool (*any_modes_set)(_Bool);      /* c10::impl::TorchDispatchModeTLS, of this thread */
static _Bool (*is_key_included)(uint16_t); /* c10::impl, of this thread */
static uint16_t functorch; /* the dispatch key that all transforms of torch.func include */
static PyObject *lift_tensor, *ask_python;     /* arguments of `bind`; strong */
static _Thread_local const uint64_t* included; /* a word of torch's; NULL = not found yet */
static int (*import_own)(DLManagedTensorVersioned*, void**); /* torch's slot */
static DLPackExchangeAPI lifting[2]; /* copies of torch's table, and of `table` */

/* Whether torch traces or transforms new tensors of this thread. GIL: held; may run Python. Errors:
 * -1 with an exception. */
static int check_tracing(void) {
  if (any_modes_set && is_key_included) {
    static const uint64_t unknown = 1;
    if (included == NULL) { /* each mode and transform sets a bit in it: c10/core/impl */
      void* word = dlx_find_loaded_symbol("c10", "_ZN3c104impl26raw_local_dispatch_key_setE");
      included = word ? word : &unknown;
    }
    return *included && (any_modes_set(0) || is_key_included(functorch));
  }
  if (ask_python == NULL) return 1;
  PyObject* answer = PyObject_CallNoArgs(ask_python);
  int is_true = answer ? PyObject_IsTrue(answer) : -1;
  Py_XDECREF(answer);
  return is_true;
}

/* Make a constant of the new tensor if there is a graph, like torch.from_numpy. Owns, GIL, Errors:
 * as torch's slot. */
static int import_and_lift(DLManagedTensorVersioned* made, void** out) {
  int failed = import_own(made, out), lifts;
  if (failed || *out == NULL || (lifts = check_tracing()) == 0) return failed;
  PyObject* tensor = *out;
  *out = lifts > 0 ? PyObject_CallOneArg(lift_tensor, tensor) : NULL;
  Py_DECREF(tensor);
  return *out ? 0 : -1;
}

PyDoc_STRVAR(
    bind_doc,
    "bind(lift, ask, key, /)\n--\n\n"
    "Set `lift(tensor)`, which makes a tensor a constant of the graph; `ask()`, which returns "
    "whether there\nis a graph, for a torch without the functions for this; and `key`, the "
    "dispatch "
    "key of torch.func, or 0.");

static PyObject* bind(PyObject* module, PyObject* args) {
  PyObject *lifts, *asks;
  unsigned short key;
  if (!PyArg_ParseTuple(args, "OOH:bind", &lifts, &asks, &key)) return NULL;
  PY_LOCKED(module)
  if (any_modes_set == NULL) { /* once, as other threads read it; again if torch was missing */
    if (key) {
      void* modes =
          dlx_find_loaded_symbol("c10", "_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb");
      void* keys = dlx_find_loaded_symbol(
          "c10", "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE");
      functorch = key;
      memcpy(&is_key_included, &keys, sizeof keys);
      memcpy(&any_modes_set, &modes, sizeof modes);
    }
    Py_XSETREF(ask_python, Py_NewRef(asks));
    Py_XSETREF(lift_tensor, Py_NewRef(lifts));
  }
  PY_UNLOCKED();
  Py_RETURN_NONE;
}

PyDoc_STRVAR(is_tracing_doc,
             "is_tracing()\n--\n\n"
             "Return whether torch traces or transforms new tensors of this thread.");

static PyObject* is_tracing(PyObject* module, PyObject* unused) {
  int is_true = check_tracing();
  return is_true < 0 ? NULL : PyBool_FromLong(is_true);
}

PyDoc_STRVAR(lifting_table_doc,
             "lifting_table(table, /)\n--\n\n"
             "Return torch's exchange table, or the result of `exchange_table`, with a slot that "
             "lifts new tensors\nwhile torch traces. Call `bind` first.");

static PyObject* lifting_table(PyObject* module, PyObject* capsule) {
  const DLPackExchangeAPI* base = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (base == NULL) return NULL;
  base = py_find_exchange(&base->header);
  if (base == NULL || base->managed_tensor_to_py_object_no_sync == NULL) return Py_NewRef(capsule);
  DLPackExchangeAPI* made = &lifting[base == &table];
  PY_LOCKED(module)
  if (made->managed_tensor_to_py_object_no_sync == NULL) {
    import_own = base->managed_tensor_to_py_object_no_sync;
    *made = *base;
    made->managed_tensor_to_py_object_no_sync = import_and_lift;
  }
  PY_UNLOCKED();
  return PyCapsule_New(made, "dlpack_exchange_api", NULL);
}

PyDoc_STRVAR(handle_doc,
             "handle(tensor, /)\n--\n\n"
             "Return the address of the tensor's implementation, torch's _cdata.");

static PyObject* handle(PyObject* module, PyObject* tensor) {
  if (Py_TYPE(tensor)->tp_basicsize < (Py_ssize_t)sizeof(tensor_head)) return PyLong_FromLong(0);
  return PyLong_FromVoidPtr(((tensor_head*)tensor)->tensor);
}

PyDoc_STRVAR(
    read_facts_doc,
    "read_facts(tensor, /)\n--\n\n"
    "Return (requires_grad, is_neg, is_conj, bytes of the storage, storage_offset) of a tensor "
    "with a storage.\nCheck its `handle` first.");

static PyObject* read_facts(PyObject* module, PyObject* tensor) {
  void** slot = &((tensor_head*)tensor)->tensor;
  int64_t bytes = -1, offset = -1;
  torch.storage_size(slot, &bytes);
  torch.storage_offset(slot, &offset);
  return Py_BuildValue("(NNNLL)", PyBool_FromLong(torch.requires_grad(*slot)),
                       PyBool_FromLong(torch.is_neg(slot)), PyBool_FromLong(torch.is_conj(slot)),
                       (long long)bytes, (long long)offset);
}

static PyMethodDef functions[] = {
    PY_NOARGS(guard_function), PY_VARARGS(exchange_table),
    PY_VARARGS(bind),          PY_NOARGS(is_tracing),
    PY_ONE(lifting_table),     PY_ONE(handle),
    PY_ONE(read_facts),        PY_END,
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_dlx_torch",
    .m_doc = "torch's guards and exchange table in C.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__dlx_torch(void) {
  return py_allow_no_gil(PyModule_Create(&definition));
}
