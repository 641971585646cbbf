#ifndef DLX_VIEW_H_
#define DLX_VIEW_H_

/* Lazy views. cffi never reads this. */

#include "base/extension.h"

/* ---- view/view.c ---------------------------------------------------------------------------- */

extern PyMethodDef py_view_functions[];

/* Add the type Slots, the base of lazy views, to a module. GIL: needed. Errors: -1 with an
 * exception. */
int py_view_init(PyObject* module);

/* What an element is known by in the scope of a view: its address, or what `identity` says, if that
 * is not None. Owns: new reference. GIL: needed; may run Python. Errors: NULL with an exception. */
PyObject* py_view_name(PyObject* element, PyObject* identity);

#endif
