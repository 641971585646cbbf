/* The fast lane: a callable around the Python function `convert`, in the manner of
 * functools.lru_cache's wrapper. A call for an object and a target on a known route, with every
 * guard answered false, nothing found by the check but what a copy cures, and no option beyond the
 * plainest, never enters Python. Anything else is given to the Python function with the same
 * arguments. */

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

/* What a call says beyond the object and the target, as far as the lane understands it. */
typedef struct {
  int copies;    /* copy=True */
  int shares;    /* copy=False */
  int is_strict; /* readonly= is not "copy" */
  int any;       /* detach=True, or a device: what is in the target already may not stay as it is */
} wish;

static PyObject* pass; /* a unique answer that means "ask Python" */
static PyObject *to_name, *copy_name, *readonly_name, *detach_name, *device_name, *cpu_name,
    *error_name, *share_name; /* interned, as the words of a call are */
static const wish nothing;

PyObject* py_lane_hand_over(PyObject* lane, const py_route* r, DLManagedTensorVersioned* made,
                            PyObject* obj, PyObject* to, PyObject* tree) {
  if (r->take == NULL) return py_tensor_wrap(made);
  void* result = NULL;
  if (!r->take_keeps) dlx_managed_hold(made);
  if (r->take->managed_tensor_to_py_object_no_sync(made, &result) == 0 && result != NULL) {
    if (!r->take_keeps) dlx_managed_release(made);
    return result;
  }
  py_pending cause = py_pending_save();
  if (r->take_keeps) {
    dlx_managed_release(made);
  } else {
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

DLManagedTensorVersioned* py_lane_copy(const py_route* r, DLManagedTensorVersioned* made) {
  DLManagedTensorVersioned* copy =
      py_managed_copy(made, (r->accepts.layouts & DLX_LAYOUT_PERMUTED) != 0);
  dlx_managed_release(made);
  if (copy == NULL) PyErr_Clear();
  return copy;
}

/* Run a route. Errors: NULL with an exception, or `pass` (borrowed). */
static PyObject* run(PyObject* lane, py_route* r, PyObject* obj, PyObject* to, const wish* wish) {
  if (r->is_same) return wish->copies || wish->any ? pass : Py_NewRef(obj);
  uint32_t cures = 0;
  py_route_enter(r);
  DLManagedTensorVersioned* made = py_lane_lend(r, obj, wish->copies, wish->shares ? NULL : &cures);
  if (made && (cures & DLX_OBSTACLE_READONLY) && !wish->copies && wish->is_strict) {
    dlx_managed_release(made);
    made = NULL;
  }
  if (made && (cures || wish->copies)) made = py_lane_copy(r, made);
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

/* One option of a call. Returns 0 where only Python understands it. */
static int take_option(wish* wish, PyObject* name, PyObject* value) {
  if (name == copy_name) {
    wish->copies = value == Py_True;
    wish->shares = value == Py_False;
    return wish->copies || wish->shares || value == Py_None;
  }
  if (name == readonly_name) { /* Python looks at the word, should it matter */
    wish->is_strict = value != copy_name;
    return value == copy_name || value == error_name || value == share_name;
  }
  if (name == detach_name) { /* what would have to be detached is not the lane's */
    wish->any |= value == Py_True;
    return value == Py_True || value == Py_False;
  }
  if (name == device_name) { /* the lane knows host memory only */
    wish->any |= value == cpu_name;
    return value == cpu_name || value == Py_None;
  }
  return 0;
}

static PyObject* try_lane(PyObject* lane, PyObject* obj, PyObject* to, const wish* wish) {
  py_route* r = py_route_find(Py_TYPE(obj), to);
  if (r == NULL && py_tree_takes(Py_TYPE(obj))) {
    if (wish != &nothing) return pass;
    PyObject* result = py_tree_run(lane, obj, to);
    return result || PyErr_Occurred() ? result : pass;
  }
  if (r == NULL) r = py_lane_route(lane, Py_TYPE(obj), to);
  return r && r->is_lane ? run(lane, r, obj, to, wish) : pass;
}

static PyObject* lane_call(PyObject* callable, PyObject* const* args, size_t nargsf,
                           PyObject* names) {
  const LaneObject* self = (LaneObject*)callable;
  Py_ssize_t n = PyVectorcall_NARGS(nargsf);
  PyObject* to = n == 2 ? args[1] : NULL;
  wish said = nothing;
  if ((n == 1 || n == 2) && names) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
      PyObject* name = PyTuple_GET_ITEM(names, i);
      if (name == to_name && n == 1) {
        to = args[1 + i];
      } else if (!take_option(&said, name, args[n + i])) {
        to = NULL;
        break;
      }
    }
  }
  if (to) {
    int has_options = names && PyTuple_GET_SIZE(names) > 2 - n;
    PyObject* result = try_lane(callable, args[0], to, has_options ? &said : &nothing);
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
  DLManagedTensorVersioned* made = py_lane_lend(r, args[0], brief, NULL);
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

PyDoc_STRVAR(
    lane_place_doc,
    "_place(element, to, slots, known, moved, key, place, /)\n--\n\n"
    "Convert an element of a lazy view and note it: slots[key] = (element, result), and under the "
    "element's address\nknown[address] = place. Returns the result; None where Python must do it: "
    "the address is noted already, the\nelement has no route, or another thread was here.");

/* Owns: all borrowed; the result is new. GIL: needed; may run Python. Errors: NULL with an
 * exception, nothing noted. */
static PyObject* lane_place(PyObject* lane, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 7 || !PyDict_CheckExact(args[2]) || !PyDict_CheckExact(args[3]) ||
      !PyDict_CheckExact(args[4])) {
    PyErr_SetString(PyExc_TypeError, "_place takes an element, a target, three dicts, two keys");
    return NULL;
  }
  PyObject *element = args[0], *to = args[1], *slots = args[2], *known = args[3], *key = args[5];
  py_route* r = py_route_find(Py_TYPE(element), to);
  if (r == NULL || !r->is_lane || r->is_same) Py_RETURN_NONE;
  PyObject *name = PyLong_FromVoidPtr(element), *result = NULL, *slot = NULL;
  if (name == NULL) return NULL;
  int met = PyDict_Contains(known, name);
  if (met == 0) met = PyDict_Contains(args[4], name);
  if (met == 0 && (result = run(lane, r, element, to, &nothing)) == pass) met = 1;
  if (met == 0 && result && (slot = PyTuple_Pack(2, element, result))) {
    PyObject* there = PyDict_SetDefault(slots, key, slot);
    if (there == NULL || (there == slot && PyDict_SetItem(known, name, args[6]) < 0)) {
      met = -1;
    } else if (there != slot) {
      met = 1;
    }
  }
  Py_DECREF(name);
  if (met == 0 && slot) {
    Py_DECREF(slot);
    return result;
  }
  if (result != pass) Py_XDECREF(result);
  Py_XDECREF(slot);
  if (met == 1) Py_RETURN_NONE;
  return NULL;
}

static PyMethodDef lane_methods[] = {
    {"_place", (PyCFunction)(void (*)(void))lane_place, METH_FASTCALL, lane_place_doc},
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
  struct {
    PyObject** where;
    const char* word;
  } words[] = {{&to_name, "to"},         {&copy_name, "copy"},     {&readonly_name, "readonly"},
               {&detach_name, "detach"}, {&device_name, "device"}, {&cpu_name, "cpu"},
               {&error_name, "error"},   {&share_name, "share"}};
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    if ((*words[i].where = PyUnicode_InternFromString(words[i].word)) == NULL) return -1;
  }
  pass = PyUnicode_FromString("pass");
  PyObject* type = PyType_FromSpec(&lane_spec);
  if (pass == NULL || type == NULL) return -1;
  int failed = PyModule_AddObjectRef(module, "Lane", type);
  Py_DECREF(type);
  return failed;
}
