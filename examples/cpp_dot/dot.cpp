// dot(x, y) of vectors of any framework: a Python extension that knows CPython and DLPack, but no
// framework. dlx's exchange table accepts any array.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "dlpack_abi.h"

namespace {

const DLPackExchangeAPI* table;

// An argument, for the duration of a call.
class Vector {
 public:
  Vector() = default;
  Vector(const Vector&) = delete;
  ~Vector() {
    if (managed_ != nullptr && managed_->deleter != nullptr) managed_->deleter(managed_);
  }

  // Returns false with a Python exception set.
  bool take(PyObject* object) {
    DLTensor tensor;
    if (table->dltensor_from_py_object_no_sync(object, &tensor) != 0) {
      // Read-only, or needs a conversion: import it with ownership.
      if (!PyErr_ExceptionMatches(PyExc_BufferError)) return false;
      PyErr_Clear();
      if (table->managed_tensor_from_py_object_no_sync(object, &managed_) != 0) return false;
      tensor = managed_->dl_tensor;
    }
    if (tensor.device.device_type != kDLCPU || tensor.ndim != 1 || tensor.dtype.lanes != 1 ||
        tensor.dtype.code != kDLFloat || (tensor.dtype.bits != 32 && tensor.dtype.bits != 64)) {
      PyErr_SetString(PyExc_TypeError, "dot takes vectors of float32 or float64 on the host");
      return false;
    }
    // The borrowed shape and strides are valid until the next argument is taken: copy them.
    is_double_ = tensor.dtype.bits == 64;
    size_ = tensor.shape[0];
    stride_ = tensor.strides[0];
    data_ = static_cast<const char*>(tensor.data) + tensor.byte_offset;
    return true;
  }

  int64_t size() const {
    return size_;
  }

  double operator[](int64_t i) const {
    return is_double_ ? reinterpret_cast<const double*>(data_)[i * stride_]
                      : reinterpret_cast<const float*>(data_)[i * stride_];
  }

 private:
  DLManagedTensorVersioned* managed_ = nullptr;
  const char* data_ = nullptr;
  int64_t size_ = 0, stride_ = 0;
  bool is_double_ = false;
};

PyObject* dot(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Vector x, y;
  if (n != 2) {
    PyErr_SetString(PyExc_TypeError, "dot takes two vectors");
    return nullptr;
  }
  if (!x.take(args[0]) || !y.take(args[1])) return nullptr;
  if (x.size() != y.size()) {
    PyErr_Format(PyExc_ValueError, "dot takes vectors of one length, found %lld and %lld",
                 static_cast<long long>(x.size()), static_cast<long long>(y.size()));
    return nullptr;
  }
  double sum = 0;
  for (int64_t i = 0; i < x.size(); i++) sum += x[i] * y[i];
  return PyFloat_FromDouble(sum);
}

// The slot of a framework's own table for each argument, without guards, for timing.py.
PyObject* own_slot(PyObject*, PyObject* const* args, Py_ssize_t n) {
  thread_local PyTypeObject* type = nullptr;
  thread_local const DLPackExchangeAPI* own = nullptr;
  for (Py_ssize_t i = 0; i < n; i++) {
    if (Py_TYPE(args[i]) != type) {
      PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(args[i])),
                                                 "__dlpack_c_exchange_api__");
      if (capsule == nullptr) return nullptr;
      own = static_cast<const DLPackExchangeAPI*>(
          PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
      Py_DECREF(capsule);
      if (own == nullptr) return nullptr;
      type = Py_TYPE(args[i]);
    }
    DLTensor tensor;
    if (own->dltensor_from_py_object_no_sync(args[i], &tensor) != 0) return nullptr;
  }
  return PyFloat_FromDouble(0);
}

// The same call without its arguments, for timing.py.
PyObject* nothing(PyObject*, PyObject* const*, Py_ssize_t) {
  return PyFloat_FromDouble(0);
}

PyMethodDef functions[] = {
    {"dot", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(dot)), METH_FASTCALL,
     "dot(x, y, /)\n--\n\nReturn the dot product of two vectors of any framework."},
    {"own_slot", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(own_slot)),
     METH_FASTCALL, "own_slot(*args)\n--\n\nBorrow by the table of their own type; return 0.0."},
    {"nothing", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(nothing)), METH_FASTCALL,
     "nothing(*args)\n--\n\nReturn 0.0."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "dot", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_dot() {
  PyObject* dlx = PyImport_ImportModule("dlx");
  PyObject* capsule = dlx != nullptr ? PyObject_GetAttrString(dlx, "exchange_api") : nullptr;
  Py_XDECREF(dlx);
  if (capsule == nullptr) return nullptr;
  table =
      static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);  // the table lives as long as the process
  PyObject* module = table != nullptr ? PyModule_Create(&definition) : nullptr;
#ifdef Py_GIL_DISABLED
  if (module != nullptr && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED) < 0)
    Py_CLEAR(module);
#endif
  return module;
}
