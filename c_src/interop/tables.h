#ifndef DLX_EXCHANGE_H_
#define DLX_EXCHANGE_H_

/* What every extension of ours that reads an exchange table must know of its versions. */

#include "dlx.h"

#include <stddef.h>

/* Newer tables keep older ones behind them; the layout is only known for our major version. GIL:
 * not needed. Errors: NULL, there is none of it. */
static inline const DLPackExchangeAPI* py_exchange_known(const DLPackExchangeAPIHeader* header) {
  for (int steps = 0; header && steps < 32; steps++, header = header->prev_api) {
    if (header->version.major == DLX_DLPACK_MAJOR) return (const DLPackExchangeAPI*)header;
  }
  return NULL;
}

#endif
