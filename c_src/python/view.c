/* The base type of lazy views: a source, and a cache of converted elements by index or key. Only
 * the cache lookup is in C; everything else is in dlx/_views/base.py. */

#include "dlx_python.h"

#include <stddef.h>
#include <structmember.h>

typedef struct {
  PyObject_HEAD PyObject* source; /* the container being viewed */
  PyObject* slots;                /* {index or key: (the source's element, its result)} */
} SlotsObject;

static PyObject* missed_name;

/* The source's element at an index or key. Owns: new. Errors: NULL with an exception. */
static PyObject* element_at(PyObject* source, PyObject* key) {
  if (PyList_CheckExact(source) && PyLong_CheckExact(key)) {
    Py_ssize_t i = PyNumber_AsSsize_t(key, NULL), n = PyList_GET_SIZE(source); /* clipped */
    if (i < 0) i += n;
    if (i >= 0 && i < n) return Py_NewRef(PyList_GET_ITEM(source, i));
  }
  if (PyDict_CheckExact(source)) {
    PyObject* element = PyDict_GetItemWithError(source, key);
    if (element || PyErr_Occurred()) return Py_XNewRef(element);
  }
  return PyObject_GetItem(source, key);
}

/* self[key]: what was converted before, if the source still has the same element there; else
 * self._missed(key). GIL: needed; may run Python. Errors: NULL with an exception. */
static PyObject* slots_get(PyObject* self, PyObject* key) {
  SlotsObject* view = (SlotsObject*)self;
  if (!PySlice_Check(key) && view->source && view->slots && PyDict_CheckExact(view->slots)) {
    PyObject* slots = Py_NewRef(view->slots); /* a key's hash may run any Python code */
    PyObject* slot = PyDict_GetItemWithError(slots, key);
    if (slot && PyTuple_CheckExact(slot) && PyTuple_GET_SIZE(slot) == 2) {
      Py_INCREF(slot); /* the source may run Python as well */
      PyObject* source = Py_NewRef(view->source);
      PyObject *element = element_at(source, key), *result = NULL;
      if (element == PyTuple_GET_ITEM(slot, 0)) result = Py_NewRef(PyTuple_GET_ITEM(slot, 1));
      Py_DECREF(source);
      Py_DECREF(slot);
      if (element) {
        Py_DECREF(element);
        if (result) {
          Py_DECREF(slots);
          return result;
        }
      }
    }
    Py_DECREF(slots);
    if (PyErr_Occurred()) {
      if (!PyErr_ExceptionMatches(PyExc_LookupError) && !PyErr_ExceptionMatches(PyExc_TypeError))
        return NULL;
      PyErr_Clear(); /* handled or raised again below */
    }
  }
  return PyObject_CallMethodOneArg(self, missed_name, key);
}

/* The same by number, so that C takes a view for a sequence. */
static PyObject* slots_item(PyObject* self, Py_ssize_t i) {
  PyObject* key = PyLong_FromSsize_t(i);
  PyObject* result = key ? slots_get(self, key) : NULL;
  Py_XDECREF(key);
  return result;
}

static int slots_traverse(PyObject* object, visitproc visit, void* arg) {
  SlotsObject* self = (SlotsObject*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->source);
  Py_VISIT(self->slots);
  return 0;
}

static int slots_clear(PyObject* object) {
  SlotsObject* self = (SlotsObject*)object;
  Py_CLEAR(self->source);
  Py_CLEAR(self->slots);
  return 0;
}

static void slots_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  slots_clear(object);
  type->tp_free(object);
  Py_DECREF(type);
}

static PyMemberDef slots_members[] = {
    {"_source", T_OBJECT_EX, offsetof(SlotsObject, source), 0, NULL},
    {"_slots", T_OBJECT_EX, offsetof(SlotsObject, slots), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(slots_doc,
             "Slots()\n--\n\n"
             "A source, and what was converted of it by key; see dlx._views.base.View.");

static PyType_Slot slots_slots[] = {
    {Py_tp_dealloc, slots_dealloc}, {Py_tp_traverse, slots_traverse},
    {Py_tp_clear, slots_clear},     {Py_mp_subscript, slots_get},
    {Py_sq_item, slots_item},       {Py_tp_members, slots_members},
    {Py_tp_doc, (void*)slots_doc},  {0, NULL},
};

static PyType_Spec slots_spec = {
    .name = "dlx._core.native.Slots",
    .basicsize = sizeof(SlotsObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = slots_slots,
};

int py_view_init(PyObject* module) {
  missed_name = PyUnicode_InternFromString("_missed");
  PyObject* type = PyType_FromSpec(&slots_spec);
  if (missed_name == NULL || type == NULL) return -1;
  int failed = PyModule_AddObjectRef(module, "Slots", type);
  Py_DECREF(type);
  return failed;
}
