#ifndef DLX_ARROW_H_
#define DLX_ARROW_H_

/* Arrow's C data, stream and device interfaces: import columns of numbers, export tensors. No
 * function needs the GIL. Results in `out` are borrowed, unless Owns says otherwise. */

#include "dlx.h"

/* ---- structs and guards of Arrow's format documentation -------------------------------------- */

#ifndef ARROW_C_DATA_INTERFACE
#define ARROW_C_DATA_INTERFACE

#define ARROW_FLAG_DICTIONARY_ORDERED 1
#define ARROW_FLAG_NULLABLE 2
#define ARROW_FLAG_MAP_KEYS_SORTED 4

/* A type. Its holder calls release once, a parent releases its children; NULL = released. */
struct ArrowSchema {
  const char* format;
  const char* name;
  const char* metadata; /* keys and values, each after its length; may be NULL */
  int64_t flags;
  int64_t n_children;
  struct ArrowSchema** children;
  struct ArrowSchema* dictionary; /* type of the dictionary's values, or NULL */
  void (*release)(struct ArrowSchema*);
  void* private_data;
};

/* Data of a type: `length` values, starting at index `offset` of the buffers. */
struct ArrowArray {
  int64_t length;
  int64_t null_count; /* -1 = unknown */
  int64_t offset;
  int64_t n_buffers;
  int64_t n_children;
  const void** buffers; /* validity bitmap (NULL: no nulls), then the type's buffers */
  struct ArrowArray** children;
  struct ArrowArray* dictionary;
  void (*release)(struct ArrowArray*);
  void* private_data;
};

#endif

#ifndef ARROW_C_DEVICE_DATA_INTERFACE
#define ARROW_C_DEVICE_DATA_INTERFACE

/* The same on a device; device types have DLPack's numbers. */
struct ArrowDeviceArray {
  struct ArrowArray array;
  int64_t device_id;
  int32_t device_type;
  void* sync_event; /* wait for it before reading; may be NULL */
  int64_t reserved[3];
};

#endif

#ifndef ARROW_C_STREAM_INTERFACE
#define ARROW_C_STREAM_INTERFACE

/* Consecutive arrays of one type; a released array is the end. Functions return 0 or an error. */
struct ArrowArrayStream {
  int (*get_schema)(struct ArrowArrayStream*, struct ArrowSchema* out);
  int (*get_next)(struct ArrowArrayStream*, struct ArrowArray* out);
  const char* (*get_last_error)(struct ArrowArrayStream*); /* valid until the next call */
  void (*release)(struct ArrowArrayStream*);
  void* private_data;
};

#endif

#ifndef ARROW_C_DEVICE_STREAM_INTERFACE
#define ARROW_C_DEVICE_STREAM_INTERFACE

struct ArrowDeviceArrayStream {
  int32_t device_type;
  int (*get_schema)(struct ArrowDeviceArrayStream*, struct ArrowSchema* out);
  int (*get_next)(struct ArrowDeviceArrayStream*, struct ArrowDeviceArray* out);
  const char* (*get_last_error)(struct ArrowDeviceArrayStream*);
  void (*release)(struct ArrowDeviceArrayStream*);
  void* private_data;
};

#endif

/* ---- imported data --------------------------------------------------------------------------- */

/* A type and all its batches; reference-counted. */
typedef struct dlx_arrow dlx_arrow;

typedef struct {
  const char* what;
  int64_t found;
} dlx_arrow_fault;

/* A column of all batches. */
typedef struct {
  int is_numbers; /* 0: only `values` is set */
  int is_packed;
  int is_offsets; /* of lists */
  DLDataType dtype;
  int32_t ndim; /* 1 + levels of fixed-size lists */
  int64_t shape[DLX_MAX_NDIM];
  DLDevice device;
  int64_t n_nulls;                  /* at the outermost level with nulls */
  int64_t n_chunks;                 /* batches with elements */
  void* data;                       /* first chunk: the byte of its first element */
  const struct ArrowSchema* values; /* the innermost type */
} dlx_arrow_column;

enum { DLX_ARROW_WHOLE = -1 /* the column of data that is not a struct */ };

/* Create data without type and batches; add a holder; remove one. The last one calls all releases.
 * Errors: NULL = no memory. */
dlx_arrow* dlx_arrow_new(void);
void dlx_arrow_hold(dlx_arrow* data);
void dlx_arrow_drop(void* data);

/* Move a type or a batch out of its struct, and mark that as released. With `is_on_device` the
 * array is part of a struct ArrowDeviceArray. Owns: `data` releases it. Errors: DLX_E_CONSUMED =
 * already moved or released; DLX_E_MEMORY. */
int dlx_arrow_move_schema(dlx_arrow* data, struct ArrowSchema* schema);
int dlx_arrow_move_array(dlx_arrow* data, struct ArrowArray* array, int is_on_device);

typedef struct {
  int is_host;
  union {
    struct ArrowArrayStream host;
    struct ArrowDeviceArrayStream device;
  } of;
} dlx_arrow_stream;

/* Read all batches of a stream into an empty `data`, and release it, unless it releases itself.
 * GIL: must not be held; a producer may wait for threads that need it. Errors: DLX_E_CONSUMED,
 * DLX_E_MEMORY; DLX_E_ARROW = the stream failed, and `message` is its text, or empty. */
int dlx_arrow_read(dlx_arrow* data, dlx_arrow_stream* stream, char* message, size_t room);

/* The type; the first event of a batch with elements, or NULL; 1 = a struct with columns. */
const struct ArrowSchema* dlx_arrow_schema(const dlx_arrow* data);
void* dlx_arrow_event(const dlx_arrow* data);
int dlx_arrow_is_table(const dlx_arrow* data);

/* Return 1 for an extension type, or if its metadata is inconsistent. */
int dlx_arrow_is_extension(const struct ArrowSchema* schema);

/* Check and describe a column; memory behind pointers cannot be checked. Errors: DLX_E_ARROW. */
int dlx_arrow_describe(const dlx_arrow* data, int64_t column, dlx_arrow_column* out,
                       dlx_arrow_fault* fault);

/* Create a read-only managed tensor over a column with at most one chunk, and without nulls and
 * bools. Owns: the result holds `data`. Errors: as dlx_managed_new. */
int dlx_arrow_share(dlx_arrow* data, const dlx_arrow_column* column,
                    DLManagedTensorVersioned** out);

/* Set the addresses of a batch's values of a column from dlx_arrow_describe, of the first byte and
 * after the last (both NULL without values), and its event or NULL. Return 0 if there is no such
 * batch. */
int dlx_arrow_chunk(const dlx_arrow* data, int64_t number, const dlx_arrow_column* column,
                    int64_t batch, const char** start, const char** end, void** event);

/* Copy a host column without nulls; offsets become int64, from 0. Errors: as dlx_managed_empty,
 * DLX_E_DEVICE. */
int dlx_arrow_gather(const dlx_arrow* data, int64_t number, const dlx_arrow_column* column,
                     DLManagedTensorVersioned** out);

typedef struct {
  dlx_arrow* values;        /* of all rows, in order */
  dlx_arrow_column offsets; /* rows + 1 integers; with several chunks, each has its own */
  int64_t null_row;         /* first row that is null, or -1 */
} dlx_arrow_lists;

/* Describe a column of lists of varying length ("+l", "+L") in host memory, whose offsets are
 * checked. Owns: the caller drops `values`, which holds `data`; NULL after a failure. Errors:
 * DLX_E_ARROW, DLX_E_MEMORY; DLX_E_DEVICE = not on the host. */
int dlx_arrow_split(dlx_arrow* data, int64_t column, dlx_arrow_lists* out, dlx_arrow_fault* fault);

/* ---- exported tensors ------------------------------------------------------------------------ */

/* Return the format of a dtype; '\0' = not in Arrow. */
char dlx_arrow_letter(DLDataType dtype);

/* Export a tensor's type: its dtype, in a fixed-size list for each dimension except the first.
 * Owns: the caller calls release. Errors: DLX_E_NDIM, DLX_E_DTYPE (not in Arrow), DLX_E_MEMORY. */
int dlx_arrow_export_schema(const DLTensor* tensor, struct ArrowSchema* out);

/* Export the data of a tensor of dlx, sharing its memory; bools are packed into a copy. Owns,
 * Errors: as above; DLX_E_DEVICE = not host memory; DLX_E_COPY = not row-major. */
int dlx_arrow_export_array(DLManagedTensorVersioned* made, struct ArrowArray* out);

#endif
