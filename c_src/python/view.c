/* The base type of lazy views: a source, and a cache of converted elements by index or key. Only
 * the cache lookup is in C; everything else is in dlx/_views/base.py. */

#include "route.h"

#include <stddef.h>
#include <structmember.h>

typedef struct {
  PyObject_HEAD PyObject* source; /* the container being viewed */
  PyObject* slots;                /* {index or key: (the source's element, its result)} */
} PlacesObject;

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
static PyObject* places_get(PyObject* self, PyObject* key) {
  PlacesObject* places = (PlacesObject*)self;
  if (!PySlice_Check(key) && places->source && places->slots && PyDict_CheckExact(places->slots)) {
    PyObject* slots = Py_NewRef(places->slots); /* a key's hash may run any Python code */
    PyObject* slot = PyDict_GetItemWithError(slots, key);
    if (slot && PyTuple_CheckExact(slot) && PyTuple_GET_SIZE(slot) == 2) {
      Py_INCREF(slot); /* the source may run Python as well */
      PyObject* source = Py_NewRef(places->source);
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
static PyObject* places_item(PyObject* self, Py_ssize_t i) {
  PyObject* key = PyLong_FromSsize_t(i);
  PyObject* result = key ? places_get(self, key) : NULL;
  Py_XDECREF(key);
  return result;
}

static int places_traverse(PyObject* object, visitproc visit, void* arg) {
  PlacesObject* self = (PlacesObject*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->source);
  Py_VISIT(self->slots);
  return 0;
}

static int places_clear(PyObject* object) {
  PlacesObject* self = (PlacesObject*)object;
  Py_CLEAR(self->source);
  Py_CLEAR(self->slots);
  return 0;
}

static void places_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  places_clear(object);
  type->tp_free(object);
  Py_DECREF(type);
}

static PyMemberDef places_members[] = {
    {"_source", T_OBJECT_EX, offsetof(PlacesObject, source), 0, NULL},
    {"_slots", T_OBJECT_EX, offsetof(PlacesObject, slots), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(places_doc,
             "Places()\n--\n\n"
             "A source, and what was converted of it by place; see dlx._views.base.View.");

static PyType_Slot places_slots[] = {
    {Py_tp_dealloc, places_dealloc}, {Py_tp_traverse, places_traverse},
    {Py_tp_clear, places_clear},     {Py_mp_subscript, places_get},
    {Py_sq_item, places_item},       {Py_tp_members, places_members},
    {Py_tp_doc, (void*)places_doc},  {0, NULL},
};

static PyType_Spec places_spec = {
    .name = "dlx._core.native.Places",
    .basicsize = sizeof(PlacesObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = places_slots,
};

int py_view_init(PyObject* module) {
  missed_name = PyUnicode_InternFromString("_missed");
  PyObject* type = PyType_FromSpec(&places_spec);
  if (missed_name == NULL || type == NULL) return -1;
  int failed = PyModule_AddObjectRef(module, "Places", type);
  Py_DECREF(type);
  return failed;
}
