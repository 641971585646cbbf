/* The fast lane: a callable around the Python function `convert`, in the manner of
 * functools.lru_cache's wrapper. A call with nothing but an object and a target, both on a known
 * route, with every guard answered false and nothing found by the check, never enters Python.
 * Anything else is given to the Python function with the same arguments. */

#include "py_route.h"

#include <structmember.h>

typedef struct {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* wrapped; /* the Python function: complete on its own */
  PyObject* learn;   /* learn(type, to): adds a route, if there is one */
  PyObject* failed;  /* failed(obj, to, cause, tree=None): the error for a consumer that failed */
  PyObject* dict;    /* __name__, __doc__, __wrapped__, ... */
  PyObject* weakrefs;
} LaneObject;

static PyObject *to_name, *pass; /* the keyword "to"; a unique answer that means "ask Python" */

/* 1 = the question is answered false; 2 = it was made so; 0 = ask Python. GIL: needed. Errors: none
 * left set. */
static int is_clear(const py_guard* guard, PyObject* obj, PyObject* owner) {
  PyObject* answer = py_ask(&guard->ask, guard->of_owner ? owner : obj);
  if (answer == NULL) {
    PyErr_Clear();
    return 0;
  }
  if (answer == Py_False) { /* as nearly always */
    Py_DECREF(answer);
    return 1;
  }
  int clear = answer != Py_True && PyObject_IsTrue(answer) == 0;
  Py_DECREF(answer);
  if (clear || guard->amend.name == NULL) {
    PyErr_Clear();
    return clear;
  }
  PyObject* amended = py_ask(&guard->amend, obj);
  if (amended == NULL) {
    PyErr_Clear();
    return 0;
  }
  Py_DECREF(amended);
  return 2;
}

/* The guards that hold for every dtype, before anything is borrowed. Returns 1 = every guard is
 * clear; 0 = ask Python. */
static int early_clear(const py_route* r, PyObject* obj) {
  for (int i = 0; i < r->n_early; i++) {
    if (!is_clear(&r->guards[i], obj, obj)) return 0;
  }
  return r->quick == NULL || r->quick(obj, NULL);
}

/* The others, of the array or of its owner. Returns 1 = every guard is clear; 2 = one of them was
 * amended; 0 = ask Python. */
static int late_clear(const py_route* r, int of_owner, int code, PyObject* obj, PyObject* owner) {
  int worst = 1;
  if (r->n_early == r->n_guards) return worst;
  for (int i = r->n_early; i < r->n_guards; i++) {
    const py_guard* guard = &r->guards[i];
    if (guard->of_owner != of_owner || !(guard->codes >> code & 1)) continue;
    int clear = is_clear(guard, obj, owner);
    if (clear == 0) return 0;
    if (clear == 2) worst = 2;
  }
  return worst;
}

/* A number that an object answers with; 0 where it does not. GIL: needed. Errors: none left set. */
static int64_t number_of(const py_question* question, PyObject* obj) {
  PyObject* answer = question->name ? py_ask(question, obj) : NULL;
  int64_t number = answer ? PyLong_AsLongLong(answer) : 0;
  Py_XDECREF(answer);
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return 0;
  }
  return number;
}

/* Whether a tensor lies inside the bytes that its owner has: an owner that could be resized may
 * have been. */
static int inside(const py_route* r, const DLTensor* t, PyObject* owner) {
  if (r->nbytes.name == NULL) return 1;
  int64_t low, high, start = number_of(&r->start, owner), nbytes = number_of(&r->nbytes, owner);
  dlx_extent(t, 0, &low, &high);
  int64_t first = (int64_t)(uintptr_t)t->data - start;
  return high == 0 || (start && first + low >= 0 && first + high <= nbytes);
}

/* Whether the array's own word for its dtype is the one that the tensor's dtype stands for; asked
 * where a framework has several words for one DLPack dtype. */
static int dtype_confirmed(const py_route* r, PyObject* obj, DLDataType dtype) {
  if (r->confirmed == NULL || dtype.bits != 8) return 1;
  PyObject* key = PyLong_FromLong(dtype.code | dtype.bits << 8);
  PyObject* wanted = key ? PyDict_GetItemWithError(r->confirmed, key) : NULL;
  Py_XDECREF(key);
  if (wanted == NULL) {
    int nothing_asked = !PyErr_Occurred();
    PyErr_Clear();
    return nothing_asked;
  }
  PyObject* found = py_ask(&r->dtype, obj);
  if (found == NULL) PyErr_Clear();
  Py_XDECREF(found);
  return found == wanted;
}

static int switches_off(const py_route* r) {
  for (int i = 0; i < r->n_switches; i++) {
    const py_switch* s = &r->switches[i];
    if (PyDict_GetItemWithError(s->dict, s->name) != s->value) {
      PyErr_Clear();
      return 0;
    }
  }
  return 1;
}

/* Whether the consumer takes a tensor that was looked at before: row-major, of the dtype it took
 * last. */
static int is_plain(const py_route* r, const DLTensor* t) {
  return dlx_dtype_word(t->dtype) == r->plain_dtype && t->ndim <= r->accepts.max_ndim &&
         dlx_is_plain(t, r->plain_alignment);
}

/* The whole check; what the consumer takes is remembered. */
static int is_accepted(py_route* r, const DLTensor* t, uint64_t flags) {
  if (dlx_check(t, flags, &r->accepts) != 0) return 0;
  if (t->device.device_type == kDLCPU && flags == 0) {
    r->plain_dtype = dlx_dtype_word(t->dtype);
    r->plain_alignment = (uint32_t)dlx_wanted_alignment(t->dtype, &r->accepts);
  }
  return 1;
}

DLManagedTensorVersioned* py_lane_lend(py_route* r, PyObject* obj, int brief) {
  DLManagedTensorVersioned* made = NULL;
  DLTensor t;
  if (r->type == py_tensor_type) { /* our own: flags are known, nothing is asked */
    DLManagedTensorVersioned* base = ((TensorObject*)obj)->managed;
    if (base == NULL || base->flags & ~(uint64_t)DLPACK_FLAG_BITMASK_READ_ONLY) return NULL;
    const DLTensor* own = &base->dl_tensor;
    if (py_cuda_is_ours(own->device)) return NULL; /* streams are Python's to look at */
    if (!(base->flags == 0 && is_plain(r, own)) && !is_accepted(r, own, base->flags)) return NULL;
    return dlx_managed_lend(base, own->device, base->flags, &made) == DLX_OK ? made : NULL;
  }
  if (!switches_off(r) || !early_clear(r, obj)) return NULL;
  if (r->give->dltensor_from_py_object_no_sync(obj, &t) != 0) {
    PyErr_Clear(); /* the slow road says why */
    return NULL;
  }
  if (t.device.device_type != kDLCPU || t.dtype.code > 31) return NULL;
  /* Copied before anything is asked: what the table lent may be overwritten by the next call. */
  int plain = is_plain(r, &t);
  int status = plain ? dlx_managed_trust(&t, 0, NULL, NULL, &made)
                     : dlx_managed_new(&t, 0, NULL, NULL, &made);
  if (status != DLX_OK) return NULL;
  /* Where there are guards, a tensor without memory may pretend to be empty: it is Python's to look
   * at. */
  int guarded = r->n_guards || r->quick;
  if (!plain &&
      ((guarded && made->dl_tensor.data == NULL) || !is_accepted(r, &made->dl_tensor, 0))) {
    dlx_managed_release(made);
    return NULL;
  }
  int code = t.dtype.code;
  if ((r->quick == NULL || r->quick(obj, &made->dl_tensor)) && late_clear(r, 0, code, obj, obj) &&
      dtype_confirmed(r, obj, t.dtype)) {
    PyObject* owner = r->owner.name ? py_ask(&r->owner, obj) : Py_NewRef(obj);
    int clear = owner == NULL ? 0 : brief ? 2 : late_clear(r, 1, code, obj, owner);
    if (clear == 1 || (clear == 2 && inside(r, &made->dl_tensor, owner))) {
      dlx_managed_own(made, owner, py_release_object);
      return made;
    }
    PyErr_Clear();
    Py_XDECREF(owner);
  }
  dlx_managed_release(made);
  return NULL;
}

PyObject* py_lane_hand_over(PyObject* lane, const py_route* r, DLManagedTensorVersioned* made,
                            PyObject* obj, PyObject* to, PyObject* tree) {
  if (r->take == NULL) return py_tensor_wrap(made);
  void* result = NULL;
  if (!r->take_keeps) dlx_managed_hold(made);
  if (r->take->managed_tensor_to_py_object_no_sync(made, &result) == 0 && result != NULL) {
    if (!r->take_keeps) dlx_managed_release(made);
    PyTypeObject* found = Py_TYPE((PyObject*)result);
    /* The table of a base makes arrays of the base: see Adapter.lane_imports. */
    if (found == r->take_type || !PyType_IsSubtype(r->take_type, found)) return result;
    PyErr_Format(PyExc_TypeError, "its exchange table made a %s", found->tp_name);
    Py_DECREF((PyObject*)result);
    made = NULL;
  }
  py_pending cause = py_pending_save();
  if (made && r->take_keeps) {
    dlx_managed_release(made);
  } else if (made) {
    dlx_managed_abandon(made);
  }
  if (cause.type && (!PyErr_GivenExceptionMatches(cause.type, PyExc_Exception) ||
                     PyErr_GivenExceptionMatches(cause.type, PyExc_MemoryError))) {
    py_pending_restore(cause); /* no refusal: it goes on as it is */
    return NULL;
  }
  PyErr_NormalizeException(&cause.type, &cause.value, &cause.traceback);
  PyObject* error = PyObject_CallFunctionObjArgs(((LaneObject*)lane)->failed, obj, to,
                                                 cause.value ? cause.value : Py_None, tree, NULL);
  Py_XDECREF(cause.type);
  Py_XDECREF(cause.value);
  Py_XDECREF(cause.traceback);
  if (error) {
    PyErr_SetObject((PyObject*)Py_TYPE(error), error);
    Py_DECREF(error);
  }
  return NULL;
}

/* Run a route. Errors: NULL with an exception, or `pass` (borrowed). */
static PyObject* run(PyObject* lane, py_route* r, PyObject* obj, PyObject* to) {
  if (r->is_same) return Py_NewRef(obj);
  py_route_enter(r);
  DLManagedTensorVersioned* made = py_lane_lend(r, obj, 0);
  PyObject* result = made ? py_lane_hand_over(lane, r, made, obj, to, NULL) : pass;
  py_route_leave(r);
  return result;
}

py_route* py_lane_route(PyObject* lane, PyTypeObject* type, PyObject* to) {
  py_route* r = py_route_find(type, to);
  if (r) return r;
  /* Strings that are equal but not the same object share one route; literals are interned already.
   */
  if (PyUnicode_CheckExact(to) && !PyUnicode_CHECK_INTERNED(to)) return NULL;
  PyObject* done =
      PyObject_CallFunctionObjArgs(((LaneObject*)lane)->learn, (PyObject*)type, to, NULL);
  if (done == NULL) PyErr_Clear(); /* the Python function will find the same, and say it */
  Py_XDECREF(done);
  return py_route_find(type, to);
}

static PyObject* try_lane(PyObject* lane, PyObject* obj, PyObject* to) {
  py_route* r = py_route_find(Py_TYPE(obj), to);
  if (r == NULL && py_tree_takes(Py_TYPE(obj))) {
    PyObject* result = py_tree_run(lane, obj, to);
    return result || PyErr_Occurred() ? result : pass;
  }
  if (r == NULL) r = py_lane_route(lane, Py_TYPE(obj), to);
  return r && r->is_lane ? run(lane, r, obj, to) : pass;
}

static PyObject* lane_call(PyObject* callable, PyObject* const* args, size_t nargsf,
                           PyObject* names) {
  const LaneObject* self = (LaneObject*)callable;
  Py_ssize_t n = PyVectorcall_NARGS(nargsf);
  PyObject* to = NULL;
  if (n == 1 && names && PyTuple_GET_SIZE(names) == 1) {
    PyObject* name = PyTuple_GET_ITEM(names, 0);
    if (name == to_name || PyUnicode_Compare(name, to_name) == 0) to = args[1];
  } else if (n == 2 && names == NULL) {
    to = args[1];
  }
  if (to) {
    PyObject* result = try_lane(callable, args[0], to);
    if (result != pass) return result;
  }
  return PyObject_Vectorcall(self->wrapped, args, nargsf, names);
}

/* ---- the type ---------------------------------------------------------------------------------
 */

static PyObject* lane_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  static char* names[] = {"wrapped", "learn", "failed", NULL};
  PyObject *wrapped, *learn, *failed;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOO:Lane", names, &wrapped, &learn, &failed))
    return NULL;
  LaneObject* self = (LaneObject*)type->tp_alloc(type, 0);
  if (self == NULL) return NULL;
  self->vectorcall = lane_call;
  self->wrapped = Py_NewRef(wrapped);
  self->learn = Py_NewRef(learn);
  self->failed = Py_NewRef(failed);
  return (PyObject*)self;
}

static int lane_traverse(PyObject* object, visitproc visit, void* arg) {
  LaneObject* self = (LaneObject*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->wrapped);
  Py_VISIT(self->learn);
  Py_VISIT(self->failed);
  Py_VISIT(self->dict);
  return 0;
}

static int lane_clear(PyObject* object) {
  LaneObject* self = (LaneObject*)object;
  Py_CLEAR(self->wrapped);
  Py_CLEAR(self->learn);
  Py_CLEAR(self->failed);
  Py_CLEAR(self->dict);
  return 0;
}

static void lane_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  if (((LaneObject*)object)->weakrefs) PyObject_ClearWeakRefs(object);
  lane_clear(object);
  type->tp_free(object);
  Py_DECREF(type);
}

static PyObject* lane_get(PyObject* self, PyObject* obj, PyObject* type) {
  if (obj == NULL || obj == Py_None) return Py_NewRef(self);
  return PyMethod_New(self, obj);
}

static PyObject* lane_reduce(PyObject* self, PyObject* unused) {
  return PyObject_GetAttrString(self, "__qualname__"); /* pickled by name, as functions are */
}

static PyObject* lane_copy(PyObject* self, PyObject* unused) {
  return Py_NewRef(self);
}

PyDoc_STRVAR(
    lane_lend_doc,
    "_lend(obj, to, /)\n--\n\n"
    "Examine, export and check an array by its route: a dlx.Tensor for _load; `obj` itself "
    "where that is the\nresult; None where Python must be asked.");

static PyObject* lane_lend(PyObject* lane, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 2 && nargs != 3) {
    PyErr_SetString(PyExc_TypeError, "_lend takes an array and a target");
    return NULL;
  }
  int brief = nargs == 3 && args[2] == Py_True;
  py_route* r = py_lane_route(lane, Py_TYPE(args[0]), args[1]);
  if (r == NULL || !r->is_lane) Py_RETURN_NONE;
  if (r->is_same) return Py_NewRef(args[0]);
  py_route_enter(r);
  DLManagedTensorVersioned* made = py_lane_lend(r, args[0], brief);
  py_route_leave(r);
  if (made == NULL) Py_RETURN_NONE;
  return py_tensor_wrap(made);
}

PyDoc_STRVAR(lane_load_doc,
             "_load(tensor, obj, to, /)\n--\n\n"
             "Hand over what _lend gave, which is used up. NotImplemented where the route has gone "
             "since; then it is not.");

static PyObject* lane_load(PyObject* lane, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 3 || !Py_IS_TYPE(args[0], py_tensor_type)) {
    PyErr_SetString(PyExc_TypeError, "_load takes what _lend gave, the array and the target");
    return NULL;
  }
  if (py_tensor_managed(args[0]) == NULL) return NULL;
  py_route* r = py_route_find(Py_TYPE(args[1]), args[2]);
  if (r == NULL || !r->is_lane || r->is_same) Py_RETURN_NOTIMPLEMENTED;
  DLManagedTensorVersioned* made = ((TensorObject*)args[0])->managed;
  ((TensorObject*)args[0])->managed = NULL;
  py_route_enter(r);
  PyObject* result = py_lane_hand_over(lane, r, made, args[1], args[2], NULL);
  py_route_leave(r);
  return result;
}

static PyMethodDef lane_methods[] = {
    {"_lend", (PyCFunction)(void (*)(void))lane_lend, METH_FASTCALL, lane_lend_doc},
    {"_load", (PyCFunction)(void (*)(void))lane_load, METH_FASTCALL, lane_load_doc},
    {"__reduce__", lane_reduce, METH_NOARGS, NULL},
    {"__copy__", lane_copy, METH_NOARGS, NULL},
    {"__deepcopy__", lane_copy, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef lane_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(LaneObject, vectorcall), 1, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(LaneObject, dict), 1, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(LaneObject, weakrefs), 1, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef lane_attributes[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(lane_doc,
             "Lane(wrapped, learn, failed)\n--\n\n"
             "A function with a fast lane in C; see dlx.convert.");

static PyType_Slot lane_slots[] = {
    {Py_tp_new, lane_new},
    {Py_tp_dealloc, lane_dealloc},
    {Py_tp_traverse, lane_traverse},
    {Py_tp_clear, lane_clear},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_descr_get, lane_get},
    {Py_tp_methods, lane_methods},
    {Py_tp_getset, lane_attributes},
    {Py_tp_members, lane_members},
    {Py_tp_doc, (void*)lane_doc},
    {0, NULL},
};

static PyType_Spec lane_spec = {
    .name = "dlx.native.Lane",
    .basicsize = sizeof(LaneObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_METHOD_DESCRIPTOR,
    .slots = lane_slots,
};

int py_lane_init(PyObject* module) {
  to_name = PyUnicode_InternFromString("to");
  pass = PyUnicode_FromString("pass");
  PyObject* type = PyType_FromSpec(&lane_spec);
  if (to_name == NULL || pass == NULL || type == NULL) return -1;
  int failed = PyModule_AddObjectRef(module, "Lane", type);
  Py_DECREF(type);
  return failed;
}
