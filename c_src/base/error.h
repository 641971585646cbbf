#ifndef DLX_ERROR_H_
#define DLX_ERROR_H_

/* How C raises the errors of dlx. Everything here wants the GIL. */

#include "extension.h"
#include "hooks.h"
#include "names.h"

#include "dlx_cuda.h"

/* Raise the class that native.py registered for a status, with a PyErr_Format text; a NULL text
 * means the status's own sentence. Errors: always returns NULL with an exception set. */
PyObject* py_raise(int status, const char* format, ...);

/* 0 for DLX_OK. Errors: -1 with the exception of the status. */
int py_check(int status);

/* Take the exception that is set, if py_error_may_go. Errors: NULL with the exception still set. */
PyObject* py_error_take(void);

#endif
