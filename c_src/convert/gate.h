#ifndef DLX_GATE_H_
#define DLX_GATE_H_

/* What an array, its owner and its framework are asked before memory may leave. References are
 * borrowed from the source that these belong to. */

#include "interop/interop.h"

/* An attribute or method without arguments, with the C function behind it where there is one. */
typedef struct {
  PyObject* name;     /* NULL = no question */
  PyTypeObject* type; /* the C functions below are for this exact type only; compared, not held */
  getter get;
  void* closure;
  PyCFunction call; /* METH_NOARGS */
  int is_method;
} py_question;

/* A question that must be answered false. */
typedef struct {
  py_question ask;
  uint32_t codes;      /* bit n = asked where the dtype code is n */
  py_question resolve; /* asked of the array when the answer was true, to make it false for good */
} py_guard;

/* A value in a dict that must be this very object (a switch of a framework that is off), or an
 * attribute of another object that must equal it (what a target takes depends on it). */
typedef struct {
  PyObject *owner, *name, *value;
  uint64_t version; /* of the dict when the switch was last found off; before Python 3.12 */
} py_switch;

typedef struct {
  int n;
  py_switch* at;
} py_switches;

typedef struct {
  py_switches switches;
  py_guard* guards; /* early ones first: they are asked before anything is borrowed, since borrowing
                       may change the array; then those of the array, then those of its owner */
  int n_early, n_of_array, n;
  dlx_guard_function in_c; /* answers further guards; NULL = there is none */
} py_gate;

/* Answer a question. Owns: new reference. GIL: needed. Errors: NULL with an exception. */
PyObject* py_ask(const py_question* question, PyObject* obj);

/* Whether no switch is on and no early guard holds of an array. GIL: needed; may run Python.
 * Errors: 0 = ask Python, unless an exception is set, see py_error_forget. */
int py_gate_is_open(py_gate* gate, PyObject* obj);

/* 1 = the question is answered false, or was made so; 0 = ask Python. */
int py_guard_is_false(const py_guard* guard, PyObject* obj, PyObject* asked);

/* Whether no guard between two numbers holds that is asked for a dtype code; `asked` is the array
 * or its owner. GIL: needed; may run Python. Errors: as py_gate_is_open. */
static inline int py_gate_is_clear(const py_gate* gate, int first, int end, int code, PyObject* obj,
                                   PyObject* asked) {
  for (int i = first; i < end; i++) {
    if (gate->guards[i].codes >> code & 1 && !py_guard_is_false(&gate->guards[i], obj, asked))
      return 0;
  }
  return 1;
}

/* Whether a guard of the array is asked for a dtype code. */
int py_gate_asks(const py_gate* gate, int code);

/* Whether objects have the values that switches want. GIL: needed; may run Python. Errors: 1 = they
 * have; 0 = one differs; -1 = ask Python, or an exception is set. */
int py_switches_hold(const py_switches* states);

/* Read what dlx/_engine/fast_path.py gives: a Question, of a source's own type unless it names
 * another; a tuple of Guard; a tuple of Switch. Owns: memory, which the free functions give up.
 * Errors: -1 with an exception. */
int py_question_read(PyObject* given, PyTypeObject* type, py_question* out);
int py_guards_read(PyObject* given, PyTypeObject* type, py_gate* out);
int py_switches_read(PyObject* given, PyTypeObject* owners, py_switches* out);
void py_gate_free(py_gate* gate);
void py_switches_free(py_switches* switches);

#endif
