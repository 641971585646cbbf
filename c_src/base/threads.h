#ifndef DLX_THREADS_H_
#define DLX_THREADS_H_

/* Helpers for free-threaded CPython, and functions that older versions lack. docs/design.md says
 * which objects threads share, and how they are protected. The caller must hold the GIL. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>

/* Like Py_BEGIN_CRITICAL_SECTION, which 3.11 and 3.12 lack. */
#ifdef Py_GIL_DISABLED
#define PY_LOCKED(object) Py_BEGIN_CRITICAL_SECTION(object);
#define PY_UNLOCKED() Py_END_CRITICAL_SECTION()
#define PY_THREAD_LOCAL _Thread_local
#else
#define PY_LOCKED(object) {
#define PY_UNLOCKED() }
#define PY_THREAD_LOCAL
#endif

/* Return 1 if an object has another reference; without the GIL, only for this thread's objects. */
static inline int py_is_held(PyObject* object) {
#ifdef Py_GIL_DISABLED
  return _Py_IsOwnedByCurrentThread(object) &&
         atomic_load_explicit((_Atomic(uint32_t)*)&object->ob_ref_local, memory_order_relaxed) > 1;
#else
  return Py_REFCNT(object) > 1;
#endif
}

/* dict[key] of an exact dict, and list[i]; other threads may change them. Owns: new reference.
 * Errors: NULL; without an exception if the key or index is missing. */
static inline PyObject* py_dict_get(PyObject* dict, PyObject* key) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found;
  PyDict_GetItemRef(dict, key, &found);
  return found;
#else
  return Py_XNewRef(PyDict_GetItemWithError(dict, key));
#endif
}

static inline PyObject* py_list_get(PyObject* list, Py_ssize_t i) {
#ifdef Py_GIL_DISABLED
  PyObject* found = PyList_GetItemRef(list, i);
  if (found == NULL) PyErr_Clear();
  return found;
#else
  return i < PyList_GET_SIZE(list) ? Py_NewRef(PyList_GET_ITEM(list, i)) : NULL;
#endif
}

/* Get an attribute, NULL if missing. Owns: new reference. Errors: -1 with an exception. */
static inline int py_get_optional(PyObject* obj, PyObject* name, PyObject** out) {
#if PY_VERSION_HEX >= 0x030D0000
  return PyObject_GetOptionalAttr(obj, name, out);
#else
  return _PyObject_LookupAttr(obj, name, out);
#endif
}

/* Return the object of a weak reference. Owns: new reference. Errors: NULL = it is gone. */
static inline PyObject* py_weak_get(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found;
  PyWeakref_GetRef(reference, &found);
  return found;
#else
  PyObject* found = PyWeakref_GET_OBJECT(reference);
  return found == Py_None ? NULL : Py_NewRef(found);
#endif
}

/* Declare that a module needs no GIL. Owns: returns the module that it takes. Errors: NULL. */
static inline PyObject* py_allow_no_gil(PyObject* module) {
#ifdef Py_GIL_DISABLED
  if (module && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED) < 0) Py_CLEAR(module);
#endif
  return module;
}

#endif
