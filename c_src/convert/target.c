/* The type Target: whether a consumer accepts a tensor, and how its array is created. */

#include "target.h"

#include <string.h>
#include <structmember.h>

PyTypeObject* py_target_type;

/* ---- checks ---------------------------------------------------------------------------------- */

int py_target_checks(py_target* t, const DLTensor* tensor, uint64_t flags, unsigned options,
                     py_offer* out) {
  out->state = PY_TAKEN;
  return (flags == 0 && py_is_trivial(t, tensor)) ||
         py_target_examines(t, tensor, flags, options, out);
}

int py_target_examines(py_target* t, const DLTensor* tensor, uint64_t flags, unsigned options,
                       py_offer* out) {
  uint32_t found = dlx_check(tensor, flags, &t->accepts), allowed = DLX_COPY_RESOLVES;
  int on_host = tensor->device.device_type == kDLCPU;
  if (found) {
    if (found == DLX_INCOMPATIBLE_READONLY && (options & DLX_UNMARKS)) options &= ~DLX_SHARES;
    if ((options & (DLX_COPIES | DLX_KEEPS_READONLY)) == DLX_KEEPS_READONLY)
      allowed &= ~(uint32_t)DLX_INCOMPATIBLE_READONLY;
    int is_resolved = !(options & DLX_SHARES) && !t->is_narrow && on_host && !(found & ~allowed) &&
                      dlx_itemsize(tensor->dtype, 0) > 0;
    out->state = is_resolved ? PY_NEEDS_COPY : PY_ASK;
    out->incompatible = found;
    return is_resolved;
  }
  out->state = on_host ? PY_TAKEN : PY_ON_DEVICE;
  if (on_host && flags == 0 && t->accepts.min_ndim == 0) {
    py_trivial known = {tensor->dtype, (uint32_t)dlx_wanted_alignment(tensor->dtype, &t->accepts)};
    py_trivial old = atomic_load_explicit(&t->trivial, memory_order_relaxed);
    if (memcmp(&known.dtype, &old.dtype, sizeof old.dtype) != 0)
      atomic_store_explicit(&t->trivial, known, memory_order_relaxed);
  }
  return 1;
}

DLManagedTensorVersioned* py_target_copy(const py_target* t, DLManagedTensorVersioned* made,
                                         unsigned options, uint32_t incompatible) {
  if ((options & (DLX_UNMARKS | DLX_COPIES)) == DLX_UNMARKS &&
      incompatible == DLX_INCOMPATIBLE_READONLY) {
    made->flags &= ~(uint64_t)DLPACK_FLAG_BITMASK_READ_ONLY;
    return made;
  }
  int is_committed = options & DLX_NAMES_DEVICE && !(options & DLX_MOVABLE);
  int is_kept = t->place == NULL || is_committed; /* stays on its device */
  DLManagedTensorVersioned* copy =
      py_managed_copy(made, NULL, is_kept && (t->accepts.layouts & DLX_LAYOUT_PERMUTED), 0);
  dlx_managed_release(made);
  if (copy == NULL) py_error_forget();
  return copy;
}

/* ---- hand-over ------------------------------------------------------------------------------- */

/* Owns: takes the extra count of `made`; NULL = the consumer has it, or never saw it. Errors: NULL
 * with the error that `failed` returns. */
static PyObject* raise_refused(const py_call* call, DLManagedTensorVersioned* made, PyObject* obj) {
  py_pending cause = py_pending_save();
  if (made) dlx_managed_abandon(made);
  if (cause.type && !py_error_may_go(cause.type)) { /* not a rejection: propagate it unchanged */
    py_pending_restore(cause);
    return NULL;
  }
  PyErr_NormalizeException(&cause.type, &cause.value, &cause.traceback);
  /* Before 3.12, a fetched exception does not contain its traceback. */
  if (cause.value && cause.traceback) PyException_SetTraceback(cause.value, cause.traceback);
  PyObject* error = PyObject_CallFunctionObjArgs(
      call->function->failed, obj, call->to, cause.value ? cause.value : Py_None, call->tree, NULL);
  Py_XDECREF(cause.type);
  Py_XDECREF(cause.value);
  Py_XDECREF(cause.traceback);
  if (error) {
    PyErr_SetObject((PyObject*)Py_TYPE(error), error);
    Py_DECREF(error);
  }
  return NULL;
}

static PyObject* return_tensor(const py_call* call, py_target* t, DLManagedTensorVersioned* made,
                               PyObject* obj) {
  return py_tensor_wrap(made);
}

static PyObject* load_by_adapter(const py_call* call, py_target* t, DLManagedTensorVersioned* made,
                                 PyObject* obj) {
  PyObject *tensor = py_tensor_wrap(made), *result;
  if (tensor == NULL) return NULL;
  ((TensorObject*)tensor)->is_ordered = 1; /* device memory: the streams are already synchronized */
  if (call->options & DLX_NAMES_DEVICE && t->place) {
    PyObject* args[] = {tensor, call->options & DLX_MOVABLE ? Py_False : Py_True};
    result = PyObject_Vectorcall(t->place, args, 2, NULL);
  } else {
    result = PyObject_CallOneArg(t->load, tensor);
  }
  Py_DECREF(tensor);
  return result ? result : raise_refused(call, NULL, obj);
}

/* For tensors with other holders, such as a buffer of the original dlx.Tensor: return a tensor of
 * the same memory that the caller holds twice. Owns: takes `made`. Errors: NULL without memory, no
 * exception. */
static DLManagedTensorVersioned* wrap_single_holder(DLManagedTensorVersioned* made) {
  DLManagedTensorVersioned* alone = NULL;
  if (dlx_managed_share(made, NULL, made->flags, &alone) == DLX_OK) dlx_managed_hold(alone);
  dlx_managed_release(made);
  return alone;
}

static PyObject* import_by_table(const py_call* call, py_target* t, DLManagedTensorVersioned* made,
                                 PyObject* obj) {
  void* result = NULL;
  /* Whatever the protocol says, a failed consumer may have released the tensor: torch does so if it
   * cannot wrap its new tensor. */
  if (!dlx_managed_hold_sole(made) && (made = wrap_single_holder(made)) == NULL)
    return PyErr_NoMemory();
  if (t->table->managed_tensor_to_py_object_no_sync(made, &result) != 0 || result == NULL)
    return raise_refused(call, made, obj);
  dlx_managed_release(made);
  PyTypeObject* found = Py_TYPE((PyObject*)result);
  if (!PyErr_Occurred()) { /* with an exception, it failed in spite of the result */
    /* The table of a base class creates arrays of the base class: see FastPath.imports. */
    if (found == t->kind.type || !PyType_IsSubtype(t->kind.type, found)) return result;
    PyErr_Format(PyExc_TypeError, "its exchange table returned a %s", found->tp_name);
  }
  py_pending pending = py_pending_save(); /* runs a foreign deleter */
  Py_DECREF((PyObject*)result);
  py_pending_restore(pending);
  return raise_refused(call, NULL, obj);
}

/* Find the function that gives an array its real dtype, and set the tensor's storage dtype. Owns:
 * borrowed. Errors: NULL = import it unchanged, or an exception is set. */
static PyObject* find_storage(py_target* t, DLTensor* tensor) {
  PyObject* key = PyLong_FromLong(tensor->dtype.code | tensor->dtype.bits << 8);
  PyObject* found = key ? PyDict_GetItemWithError(t->storage, key) : NULL;
  Py_XDECREF(key);
  if (found == NULL) {
    if (!PyErr_Occurred()) atomic_store_explicit(&t->direct, tensor->dtype, memory_order_relaxed);
    return NULL;
  }
  long code = PyLong_AsLong(PyTuple_GET_ITEM(found, 0));
  tensor->dtype = (DLDataType){(uint8_t)code, (uint8_t)(code >> 8), 1};
  return PyTuple_GET_ITEM(found, 1);
}

/* For targets with storage dtypes. */
static PyObject* import_storage(const py_call* call, py_target* t, DLManagedTensorVersioned* made,
                                PyObject* obj) {
  DLDataType direct = atomic_load_explicit(&t->direct, memory_order_relaxed);
  if (memcmp(&made->dl_tensor.dtype, &direct, sizeof direct) == 0)
    return t->hand_over_direct(call, t, made, obj);
  PyObject* view = find_storage(t, &made->dl_tensor);
  if (view == NULL && PyErr_Occurred()) { /* no consumer has seen it, so release it directly */
    py_pending pending = py_pending_save();
    dlx_managed_release(made);
    py_pending_restore(pending);
    return raise_refused(call, NULL, obj);
  }
  PyObject* result = t->hand_over_direct(call, t, made, obj);
  if (view == NULL || result == NULL) return result;
  PyObject* real = PyObject_CallOneArg(view, result);
  Py_DECREF(result);
  return real ? real : raise_refused(call, NULL, obj);
}

/* ---- the type -------------------------------------------------------------------------------- */

#define TARGET(name) ((py_target*)(name))

static int read_arrays(PyObject* value, void* where, void* self) {
  if (!PyType_Check(value))
    return PyErr_SetString(PyExc_TypeError, "expected the type of arrays"), -1;
  *(PyObject**)where = value;
  return 0;
}

static int read_table(PyObject* value, void* where, void* self) {
  *(const DLPackExchangeAPI**)where = py_exchange_read(value, 0);
  return 0;
}

static int read_states(PyObject* value, void* where, void* self) {
  return py_switches_read(value, &PyBaseObject_Type, where);
}

static int read_accepts(PyObject* value, void* where, void* self) {
  const dlx_capabilities* stated = PyLong_AsVoidPtr(value);
  if (stated) *(dlx_capabilities*)where = *stated;
  return PyErr_Occurred() ? -1 : 0;
}

static int read_always_copies(PyObject* value, void* where, void* self) {
  if (value == Py_True) *(unsigned*)where = DLX_COPIES | DLX_SHARES;
  return 0;
}

#define AT(member) offsetof(py_target, member)

/* target.h describes the members; _target in dlx/_engine/fast_path.py supplies them. */
static const py_member members[] = {
    {"consumer", py_read_object, AT(consumer)},
    {"stated", py_read_object, AT(stated)},
    {"arrays", read_arrays, AT(kind.type)},
    {"depends_on", py_read_object, AT(kind.names)},
    {"table", read_table, AT(table)},
    {"load", py_read_object, AT(load)},
    {"place", py_read_object, AT(place)},
    {"where", py_read_object, AT(where)},
    {"allocate", py_read_object, AT(allocate)},
    {"stack", py_read_object, AT(stack)},
    {"storage", py_read_object, AT(storage)},
    {"accepts", read_accepts, AT(accepts)},
    {"is_narrow", py_read_flag, AT(is_narrow)},
    {"always_copies", read_always_copies, AT(unsupported)},
    {"states", read_states, AT(states)},
    {"streams", py_read_streams, AT(streams)},
    {NULL, NULL, 0},
};

static void choose_functions(py_target* t) {
  if (t->table && t->table->managed_tensor_to_py_object_no_sync == NULL) t->table = NULL;
  t->hand_over_direct = t->table              ? import_by_table
                        : t->load             ? load_by_adapter
                        : t->kind.type        ? NULL
                        : t->accepts.max_ndim ? return_tensor
                                              : NULL;
  t->hand_over = t->hand_over_direct && t->storage ? import_storage : t->hand_over_direct;
  if (t->is_narrow) t->unsupported |= DLX_COPIES;
  if (t->streams.is_by_table && t->table) t->streams.table = t->table->current_work_stream;
}

static PyObject* target_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  if (!PyArg_ParseTuple(args, ":Target")) return NULL;
  py_target* t = (py_target*)type->tp_alloc(type, 0);
  if (t == NULL) return NULL;
  t->kind.n_modules = -1;
  t->values = py_members_read(members, keywords, t);
  if (t->values == NULL) goto failed;
  if (t->kind.type) {
    if (py_kind_note(&t->kind, t->kind.type) < 0) goto failed;
    if (t->table == NULL && t->kind.names) t->table = py_exchange_find(t->kind.type);
    if (PyErr_Occurred()) goto failed;
  }
  choose_functions(t);
  return (PyObject*)t;

failed:
  Py_DECREF(t);
  return NULL;
}

static int target_traverse(PyObject* self, visitproc visit, void* arg) {
  py_target* t = TARGET(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(t->values);
  Py_VISIT(t->key);
  int stop = py_map_visit(&t->pairs, visit, arg);
  return stop ? stop : py_kind_visit(&t->kind, visit, arg);
}

/* The collector clears only unused targets: the map holds the others. */
static int target_clear(PyObject* self) {
  py_target* t = TARGET(self);
  py_map_clear(&t->pairs);
  py_switches_free(&t->states);
  py_kind_clear(&t->kind);
  Py_CLEAR(t->key);
  Py_CLEAR(t->values);
  return 0;
}

static PyMemberDef target_members[] = {
    {"consumer", T_OBJECT, AT(consumer), READONLY, NULL},
    {"stated", T_OBJECT, AT(stated), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(target_doc,
             "Target(**members)\n--\n\n"
             "The capabilities of a consumer on the fast path; see c_src/convert/target.h.");

static PyType_Slot target_slots[] = {
    {Py_tp_new, target_new},
    {Py_tp_dealloc, py_members_dealloc},
    {Py_tp_traverse, target_traverse},
    {Py_tp_clear, target_clear},
    {Py_tp_members, target_members},
    {Py_tp_doc, (void*)target_doc},
    {0, NULL},
};

static PyType_Spec target_spec = {
    .name = "dlx._ffi.Target",
    .basicsize = sizeof(py_target),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = target_slots,
};

int py_target_init(PyObject* module) {
  py_target_type = (PyTypeObject*)PyType_FromSpec(&target_spec);
  if (py_target_type == NULL) return -1;
  return PyModule_AddObjectRef(module, "Target", (PyObject*)py_target_type);
}
