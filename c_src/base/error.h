#ifndef DLX_ERROR_H_
#define DLX_ERROR_H_

/* Raising dlx's exceptions from C. The caller must hold the GIL. */

#include "extension.h"
#include "hooks.h"
#include "names.h"

#include "dlx_cuda.h"

/* Raise the exception class that native.py registered for a status, with a PyErr_Format text (NULL:
 * the text of the status); a last sentence that ends with a full stop is the fix. Errors: always
 * returns NULL with an exception. */
PyObject* py_raise(int status, const char* format, ...);

/* Raise the exception of a status. Errors: -1; 0 for DLX_OK. */
int py_check(int status);

/* Take the current exception if py_error_may_go allows it. Errors: NULL; it is still set. */
PyObject* py_error_take(void);

#endif
