#ifndef DLX_ARROW_H_
#define DLX_ARROW_H_

/* Arrow's C data, C stream and C device interfaces, as far as dlx speaks them: columns of numbers
 * out of them, and tensors into them. cffi never reads this. */

#include "dlx.h"

/* ---- the structs, as Arrow's format documentation has them; so have the guards --------------- */

#ifndef ARROW_C_DATA_INTERFACE
#define ARROW_C_DATA_INTERFACE

#define ARROW_FLAG_DICTIONARY_ORDERED 1
#define ARROW_FLAG_NULLABLE 2
#define ARROW_FLAG_MAP_KEYS_SORTED 4

/* A type. Whoever holds it calls release(itself) once; release == NULL: it was released, or moved
 * to another place. Children are released by their parent only. */
struct ArrowSchema {
  const char* format;   /* the type, as text */
  const char* name;     /* of a child; may be NULL */
  const char* metadata; /* pairs of texts, each with its length before it; may be NULL */
  int64_t flags;
  int64_t n_children;
  struct ArrowSchema** children;
  struct ArrowSchema* dictionary; /* the type of what the values index; else NULL */
  void (*release)(struct ArrowSchema*);
  void* private_data; /* of the producer */
};

/* Data of such a type: `length` values, the first of them at number `offset` of the buffers. */
struct ArrowArray {
  int64_t length;
  int64_t null_count; /* -1: it was not counted */
  int64_t offset;
  int64_t n_buffers;
  int64_t n_children;
  const void** buffers; /* bitmap of what is not null (NULL: all), then what the type has */
  struct ArrowArray** children;
  struct ArrowArray* dictionary;
  void (*release)(struct ArrowArray*);
  void* private_data;
};

#endif

#ifndef ARROW_C_DEVICE_DATA_INTERFACE
#define ARROW_C_DEVICE_DATA_INTERFACE

/* The same on a device; types of devices have DLPack's numbers. */
struct ArrowDeviceArray {
  struct ArrowArray array;
  int64_t device_id;
  int32_t device_type;
  void* sync_event; /* where to wait before the buffers are read; NULL: nowhere */
  int64_t reserved[3];
};

#endif

#ifndef ARROW_C_STREAM_INTERFACE
#define ARROW_C_STREAM_INTERFACE

/* Arrays of one type, one after another; a released array ends it. Not 0: an error. */
struct ArrowArrayStream {
  int (*get_schema)(struct ArrowArrayStream*, struct ArrowSchema* out);
  int (*get_next)(struct ArrowArrayStream*, struct ArrowArray* out);
  const char* (*get_last_error)(struct ArrowArrayStream*); /* the text lives until the next call */
  void (*release)(struct ArrowArrayStream*);
  void* private_data;
};

#endif

#ifndef ARROW_C_DEVICE_STREAM_INTERFACE
#define ARROW_C_DEVICE_STREAM_INTERFACE

/* The same of arrays on devices of one type. */
struct ArrowDeviceArrayStream {
  int32_t device_type;
  int (*get_schema)(struct ArrowDeviceArrayStream*, struct ArrowSchema* out);
  int (*get_next)(struct ArrowDeviceArrayStream*, struct ArrowDeviceArray* out);
  const char* (*get_last_error)(struct ArrowDeviceArrayStream*);
  void (*release)(struct ArrowDeviceArrayStream*);
  void* private_data;
};

#endif

/* ---- what an object gave out ----------------------------------------------------------------- */

/* A type and all batches of data that came with it; reference-counted. */
typedef struct dlx_arrow dlx_arrow;

/* What contradicts itself, for an error. */
typedef struct {
  const char* what;
  int64_t found;
} dlx_arrow_fault;

/* One column of them, understood. */
typedef struct {
  int is_numbers; /* else nothing below is set but `values` */
  int is_packed;  /* bools, eight to a byte */
  DLDataType dtype;
  int32_t ndim;                     /* 1, and one for each level of fixed-size lists */
  int64_t shape[DLX_MAX_NDIM];      /* of all batches together */
  DLDevice device;                  /* of all batches */
  int64_t n_nulls;                  /* at the outermost level that has any */
  int64_t n_chunks;                 /* batches with elements */
  void* data;                       /* of the first chunk: the byte in which its elements begin */
  const struct ArrowSchema* values; /* the innermost type */
} dlx_arrow_column;

enum { DLX_ARROW_WHOLE = -1 /* in place of the number of a column: what is no struct */ };

/* One without type and data. Owns: the caller has the only count. GIL: not needed. Errors: NULL =
 * no memory. */
dlx_arrow* dlx_arrow_new(void);

/* Take one count more. GIL: not needed. */
void dlx_arrow_hold(dlx_arrow* data);

/* Give up one count; the last one calls every release that is owed. GIL: not needed. */
void dlx_arrow_drop(void* data);

/* Move a type and a batch out of the structs that hold them, which are marked as released. With
 * `is_on_device` the array is the head of a struct ArrowDeviceArray. Owns: on success `data` owes
 * what was moved its release; on failure nothing was moved. GIL: not needed. Errors:
 * DLX_E_CONSUMED = it was moved or released before; DLX_E_MEMORY. */
int dlx_arrow_move_schema(dlx_arrow* data, struct ArrowSchema* schema);
int dlx_arrow_move_array(dlx_arrow* data, struct ArrowArray* array, int is_on_device);

/* A stream, moved out of the struct that held it. */
typedef struct {
  int is_host;
  union {
    struct ArrowArrayStream host;
    struct ArrowDeviceArrayStream device;
  } of;
} dlx_arrow_stream;

/* Read a stream to its end, into a `data` that is empty. Owns: the stream stays the caller's. GIL:
 * not needed, and not to be held: a producer may wait for threads that want it. Errors:
 * DLX_E_CONSUMED, DLX_E_MEMORY; DLX_E_ARROW = the stream failed. */
int dlx_arrow_read(dlx_arrow* data, dlx_arrow_stream* stream);

/* Release a stream, unless it did so itself; before, if reading it ended with DLX_E_ARROW, write
 * what it says of that. Owns: takes what the stream holds. GIL: as above. */
void dlx_arrow_end(dlx_arrow_stream* stream, int status, char* why, size_t room);

/* The type. Owns: borrowed. GIL: not needed. */
const struct ArrowSchema* dlx_arrow_schema(const dlx_arrow* data);

/* The event to wait for, of the first batch with elements that has one; NULL where none has. GIL:
 * not needed. */
void* dlx_arrow_event(const dlx_arrow* data);

/* Whether it is a struct, the columns of which are asked for by their numbers. GIL: not needed. */
int dlx_arrow_is_table(const dlx_arrow* data);

/* Whether a type is an extension type, whose values mean something else. GIL: not needed. Errors: 1
 * = its metadata contradict themselves. */
int dlx_arrow_is_extension(const struct ArrowSchema* schema);

/* Understand and check a column, in all that can be seen: what lies behind a pointer is believed.
 * Owns: what `out` points to is borrowed. GIL: not needed. Errors: DLX_E_ARROW = it contradicts
 * itself, `fault` says where. */
int dlx_arrow_look(const dlx_arrow* data, int64_t column, dlx_arrow_column* out,
                   dlx_arrow_fault* fault);

/* A managed tensor, read-only, over a column that has one chunk or none, no nulls, no bools. Owns:
 * the result takes a count of its own on `data`. GIL: not needed. Errors: as dlx_managed_new. */
int dlx_arrow_share(dlx_arrow* data, const dlx_arrow_column* column,
                    DLManagedTensorVersioned** out);

/* How many batches there are; and the numbers of a column in one of them, as a tensor of one
 * dimension whose extent is returned (`out->shape` is not set), with the event to wait for, or
 * NULL. Owns: what `out` points to is borrowed. GIL: not needed. Errors: none, of a column that
 * dlx_arrow_look has understood. */
int64_t dlx_arrow_batches(const dlx_arrow* data);
int64_t dlx_arrow_chunk(const dlx_arrow* data, int64_t number, const dlx_arrow_column* column,
                        int64_t batch, DLTensor* out, void** event);

/* A copy of a column of the host without nulls: chunks joined, bools in a byte each. Owns: the
 * caller owns the result. GIL: not needed. Errors: as dlx_managed_empty, DLX_E_DEVICE. */
int dlx_arrow_gather(const dlx_arrow* data, int64_t number, const dlx_arrow_column* column,
                     DLManagedTensorVersioned** out);

/* ---- tensors given out ----------------------------------------------------------------------- */

/* The type of a tensor: its numbers, in a fixed-size list for every dimension but the first. Owns:
 * the caller, who calls release. GIL: not needed. Errors: DLX_E_NDIM, DLX_E_DTYPE = Arrow has no
 * such type; DLX_E_MEMORY. */
int dlx_arrow_give_schema(const DLTensor* tensor, struct ArrowSchema* out);

/* The data of a tensor (one of ours) of such a type. Owns: the caller, who calls release; the
 * memory is held by a count; bools are packed into a copy. GIL: not needed. Errors: as
 * dlx_arrow_give_schema; DLX_E_DEVICE = it is not host memory; DLX_E_COPY = it is not row-major. */
int dlx_arrow_give_array(DLManagedTensorVersioned* made, struct ArrowArray* out);

#endif
