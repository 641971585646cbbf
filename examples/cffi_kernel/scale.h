#ifndef SCALE_H_
#define SCALE_H_

#include "dlpack_abi.h"

int scale(DLTensor* tensor, double factor);

#endif
