/* Generic producers in the fast path: objects of types that no adapter lists, with `__dlpack__`.
 * What the Python path asks is asked here, in the same order: the dtype by name, the device, the
 * capsule. A producer is called once: where the capsule is not taken, or the producer raised, what
 * it answered is kept for the Python path of the same call (producer_answer), which then goes on as
 * after a call of its own. */

#include "core/thread_state.h"
#include "route.h"
#include "threads.h"

static PyObject *dtype_name, *device_name, *dlpack_name; /* interned, by py_producer_init */
static PyObject* modules; /* sys.modules; held, since an interpreter that ends gives it up before it
                             has freed all that may convert */

int py_producer_init(void) {
  modules = Py_NewRef(PyImport_GetModuleDict());
  dtype_name = PyUnicode_InternFromString("dtype");
  device_name = PyUnicode_InternFromString("__dlpack_device__");
  dlpack_name = PyUnicode_InternFromString("__dlpack__");
  return dtype_name && device_name && dlpack_name ? 0 : -1;
}

/* {address: (object, what its method gave or None, what it raised or None)}: what the fast path
 * leaves to the Python path, and what the conversion that runs now was left. */
static FEW_WORDS PyObject *left, *present;

/* 1 = no framework was imported, and no class registered, since no adapter listed the type. Errors:
 * 0 = ask Python. */
static int is_unclaimed(py_route* r) {
  const py_producer* p = &r->producer;
  int same = PyDict_GET_SIZE(modules) == p->n_modules;
  PyObject* token = same ? PyObject_CallNoArgs(p->token_of) : NULL;
  same = token == NULL ? 0
                       : token == p->token || PyObject_RichCompareBool(token, p->token, Py_EQ) == 1;
  Py_XDECREF(token);
  if (same) return 1;
  py_route_stale(r);
  py_error_forget();
  return 0;
}

/* Whether its elements may be numbers, by its dtype; one that was found so is remembered. GIL:
 * needed; runs Python. Errors: 0 = ask Python. */
static int may_be_numbers(py_producer* p, PyObject* obj) {
  PyObject* dtype;
  if (py_optional(obj, dtype_name, &dtype) < 0) return py_error_forget() == 0;
  if (dtype == NULL) return 1;
  int is_known = dtype == atomic_load_explicit(&p->dtype, memory_order_relaxed);
  PyObject* why = is_known ? NULL : PyObject_CallOneArg(p->no_numbers, dtype);
  if (why) {
    is_known = PyUnicode_Check(why) && PyUnicode_GET_LENGTH(why) == 0;
    if (is_known) Py_XDECREF(atomic_exchange(&p->dtype, Py_NewRef(dtype)));
  }
  Py_XDECREF(why);
  Py_DECREF(dtype);
  if (PyErr_Occurred()) py_error_forget();
  return is_known;
}

static int is_number(PyObject* obj, long wanted) {
  return PyLong_Check(obj) && !PyBool_Check(obj) && PyLong_AsLong(obj) == wanted;
}

/* Whether it says that it is on the host, or nothing. GIL: needed; runs Python. Errors: 0 = ask
 * Python. */
static int may_be_on_host(PyObject* obj) {
  PyTypeObject* type = Py_TYPE(obj);
  PyObject* ask = NULL;
#ifndef Py_GIL_DISABLED /* the look-up borrows */
  if (Py_IS_TYPE((PyObject*)type, &PyType_Type)) ask = _PyType_Lookup(type, device_name);
#endif
  if (ask && PyFunction_Check(ask)) { /* no descriptor makes anything else of it */
    Py_INCREF(ask);
  } else if (py_optional((PyObject*)type, device_name, &ask) < 0) {
    return py_error_forget(), 0;
  }
  if (ask == NULL) return 1;
  PyObject* answer = PyObject_CallOneArg(ask, obj);
  Py_DECREF(ask);
  int is_host = answer && PyTuple_CheckExact(answer) && PyTuple_GET_SIZE(answer) == 2 &&
                is_number(PyTuple_GET_ITEM(answer, 0), kDLCPU) &&
                is_number(PyTuple_GET_ITEM(answer, 1), 0);
  Py_XDECREF(answer);
  if (PyErr_Occurred()) py_error_forget();
  return is_host;
}

/* What __dlpack__ gives, or the Exception that it raises. Owns: new reference in one of the two.
 * Errors: both NULL, with what may not be forgotten. */
static void call(const py_producer* p, PyObject* obj, PyObject** given, PyObject** raised) {
  PyObject* arguments[1 + DLX_MAX_KEYWORDS] = {obj};
  *given = *raised = NULL;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(p->values); i++)
    arguments[1 + i] = PyTuple_GET_ITEM(p->values, i);
  *given = PyObject_VectorcallMethod(dlpack_name, arguments, 1, p->names);
  if (*given == NULL) *raised = py_error_take();
}

/* Whether the Python path that runs now was left an answer of an object. Errors: 1 with an
 * exception. */
static int is_answered(PyObject* obj) {
  PyObject* address = PyLong_FromVoidPtr(obj);
  int found = address ? PyDict_Contains(present, address) : -1;
  Py_XDECREF(address);
  return found != 0;
}

PyObject* py_producer_aside(void) {
  PyObject* answers = left;
  left = NULL;
  return answers;
}

void py_producer_back(PyObject* answers) {
  Py_XSETREF(left, answers);
}

void py_producer_leave(PyObject* obj, PyObject* given, PyObject* raised) {
  PyObject* answers = py_producer_aside(); /* the collector may run */
  if (answers == NULL) answers = PyDict_New();
  PyObject* address = answers ? PyLong_FromVoidPtr(obj) : NULL;
  PyObject* answer =
      address ? PyTuple_Pack(3, obj, given ? given : Py_None, raised ? raised : Py_None) : NULL;
  if (answer == NULL || PyDict_SetItem(answers, address, answer) < 0) {
    py_pending pending = py_pending_save(); /* capsules may be freed */
    Py_CLEAR(answers);
    py_pending_restore(pending);
  }
  Py_XDECREF(answer);
  Py_XDECREF(address);
  py_producer_back(answers);
}

DLManagedTensorVersioned* py_producer_borrow(py_route* r, PyObject* obj, unsigned options,
                                             uint32_t* resolvable, PyObject** capsule) {
  PyObject* raised;
  DLManagedTensorVersioned* made = NULL;
  *capsule = NULL;
  if (present && is_answered(obj)) return NULL; /* a call inside the one that was left it */
  if (!py_fast_path_holds(r) || !is_unclaimed(r)) return NULL;
  if (!may_be_numbers(&r->producer, obj) || !may_be_on_host(obj)) return NULL;
  call(&r->producer, obj, capsule, &raised);
  if (*capsule && (made = py_capsule_take(*capsule)) != NULL) {
    if (made->dl_tensor.device.device_id == 0 && py_fast_path_takes(r, made, options, resolvable))
      return made;
    py_capsule_give_back(*capsule, made);
  }
  if (*capsule || raised) py_producer_leave(obj, *capsule, raised);
  Py_CLEAR(*capsule);
  Py_XDECREF(raised);
  return NULL;
}

PyObject* py_producer_run(PyObject* callable, py_route* r, PyObject* obj, PyObject* to,
                          unsigned options) {
  if (options & r->leaves) return NULL;
  uint32_t resolvable = 0;
  PyObject* capsule;
  py_route_enter(r);
  DLManagedTensorVersioned* made = py_producer_borrow(r, obj, options, &resolvable, &capsule);
  if (made && (resolvable || options & DLX_COPIES))
    made = py_fast_path_resolve(r, made, options, resolvable);
  PyObject* result =
      made ? py_fast_path_hand_over(callable, r, made, obj, to, NULL, options) : NULL;
  PyObject* answers = py_producer_aside();
  if (result) {
    Py_DECREF(capsule);
  } else {
    py_pending pending = py_pending_save(); /* the capsule's destructor may run Python */
    Py_XDECREF(capsule);
    py_pending_restore(pending);
  }
  py_route_leave(r);
  py_producer_back(answers);
  return result;
}

PyObject* py_producer_python(PyObject* function, PyObject* const* args, size_t nargsf,
                             PyObject* names) {
  if (left == NULL) return PyObject_Vectorcall(function, args, nargsf, names);
  PyObject *before = present, *answers = py_producer_aside();
  present = Py_NewRef(answers);
  PyObject* result = PyObject_Vectorcall(function, args, nargsf, names);
  py_pending pending = py_pending_save();
  /* Of two greenlets the one that began first may end first, and leave here what the other one
   * began with: so each takes away what it was left itself. */
  PyObject* last = present;
  present = before; /* first: what is released may run Python, which converts */
  PyDict_Clear(answers);
  Py_DECREF(answers);
  Py_XDECREF(last);
  py_pending_restore(pending);
  return result;
}

PyDoc_STRVAR(producer_answer_doc,
             "producer_answer(obj, /)\n--\n\n"
             "Return (obj, what its `__dlpack__` or Arrow's method gave, what it raised) where the "
             "fast path "
             "called it for\nthe conversion that runs now; else None. It is given once.");

static PyObject* producer_answer(PyObject* module, PyObject* obj) {
  if (present == NULL) Py_RETURN_NONE;
  PyObject* address = PyLong_FromVoidPtr(obj);
  if (address == NULL) return NULL;
  PyObject* answer = Py_XNewRef(PyDict_GetItemWithError(present, address));
  if (answer && PyDict_DelItem(present, address) < 0) Py_CLEAR(answer);
  Py_DECREF(address);
  if (answer || PyErr_Occurred()) return answer;
  Py_RETURN_NONE;
}

PyMethodDef py_producer_functions[] = {
    {"producer_answer", producer_answer, METH_O, producer_answer_doc},
    {NULL, NULL, 0, NULL},
};
