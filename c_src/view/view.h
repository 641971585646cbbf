#ifndef DLX_VIEW_H_
#define DLX_VIEW_H_

/* Lazy views. cffi never reads this. */

#include "base/extension.h"

/* ---- view/view.c ---------------------------------------------------------------------------- */

extern PyMethodDef py_view_functions[];

/* Add the type Slots, the base of lazy views, to a module. GIL: needed. Errors: -1 with an
 * exception. */
int py_view_init(PyObject* module);

#endif
